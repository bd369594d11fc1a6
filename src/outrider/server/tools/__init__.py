"""Tool calls: prompts and grammars for tools, and the parsing of calls in generated text."""
