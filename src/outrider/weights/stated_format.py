"""vLLM's `quantization` beside ours: it may name the format that a checkpoint already has."""

from __future__ import annotations

from pathlib import Path

from ..config import QUANTIZE, STORED_FORMATS
from ..errors import UserError
from .checkpoint import read_json


def resolve_quantize(name: str | None, path: Path) -> str | None:
    """Return how float weights are quantized while loading; refuse a format that the checkpoint does not have."""
    if name is None:
        return None
    found = stated_format(path)
    if STORED_FORMATS.get(name) == found:
        return None
    if name in QUANTIZE:
        return name
    stored = f"quantized as `{found}`" if found else "not quantized"
    raise UserError(
        f"`quantization` is `{name}`, but `{path}` is {stored}: leave it out, or pass {' or '.join(QUANTIZE)} to "
        "quantize float weights while loading"
    )


def stated_format(path: Path) -> str:
    """Return `quant_method` of a folder, or `gguf`; empty if the checkpoint is not quantized."""
    if path.is_file():
        return "gguf"
    if not (path / "config.json").is_file():
        return "gguf" if any(path.glob("*.gguf")) else ""
    config = read_json(path / "config.json")
    stated = config.get("quantization_config") or config.get("compression_config")
    return str(stated.get("quant_method", "")) if isinstance(stated, dict) else ""
