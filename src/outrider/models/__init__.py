"""Decoders: a configuration that is data, one forward pass for every architecture."""

from .config import ModelConfig, read_config
from .layers import Checkpoint
from .llama import Model, build

__all__ = ["Checkpoint", "Model", "ModelConfig", "build", "read_config"]
