"""Tokenizers and chat templates."""

from .tokenizer import Stream, Tokenizer

__all__ = ["Stream", "Tokenizer"]
