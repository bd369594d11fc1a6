"""Draft heads of one's own: a target writes answers, and students learn to guess them."""
