"""Training data: prompts, the answers of the target, their store, and packs of documents."""
