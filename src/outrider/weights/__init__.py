"""Checkpoints: a catalog name, a hub name, a Hugging Face folder, a GGUF file or random weights, read the same way."""

from .checkpoint import Checkpoint
from .loader import locate, open_checkpoint

__all__ = ["Checkpoint", "locate", "open_checkpoint"]
