"""Structured output: grammars as masks over the vocabulary, along the drafted path. No torch here.

The backend is llguidance. `compiler` compiles and caches grammars, `matcher` follows them token by token. Grammars come
from clients and may crash or exhaust the backend, so `checker` compiles them in a child process (`worker`) first.
"""
