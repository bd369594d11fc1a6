"""Tokenizers and chat templates."""

from .special_texts import ChatPrompt
from .token_texts import TokenTexts, spelled
from .tokenizer import Stream, Tokenizer

__all__ = ["ChatPrompt", "Stream", "TokenTexts", "Tokenizer", "spelled"]
