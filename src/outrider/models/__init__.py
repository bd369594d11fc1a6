"""Models: one decoder for all architectures of architectures.ARCHITECTURES, and the networks of draft heads."""

from .config import ModelConfig, read_config
from .decoder import Model, build
from .layers import ModelCheckpoint

__all__ = ["Model", "ModelCheckpoint", "ModelConfig", "build", "read_config"]
