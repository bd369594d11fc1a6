"""Tokenizers and chat templates."""

from .token_texts import TokenTexts, spelled
from .tokenizer import Stream, Tokenizer

__all__ = ["Stream", "TokenTexts", "Tokenizer", "spelled"]
