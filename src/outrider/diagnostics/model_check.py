"""`outrider doctor --model`: what a checkpoint is, whether it runs here, the memory it takes, the heads that fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Any

import torch

from .. import catalog
from ..config import DeviceFacts, EngineConfig, resolve
from ..device import Device, choose_backend, open_device
from ..errors import UserError
from ..kernels import Weight
from ..kernels.quantization import FORMATS
from ..models import Model, read_config
from ..models.architectures import ARCHITECTURES
from ..speculation.checkpoints import open_head
from ..weights import Checkpoint
from ..weights.checkpoint import map_file, read_json
from ..weights.gguf_header import read_header
from ..weights.loader import existing, open_path
from .model_facts import TOKENS, describe_model


class NoKernels:
    """Kernels that only pass on what they get, to build a model without its weights."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda value, *_, **__: value


class ShapesOnly:
    """A checkpoint whose matrices are not read. Vectors are: they are small, and some must be floats."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.config, self.norms_are_offset = checkpoint.config, checkpoint.norms_are_offset

    def names(self) -> list[str]:
        return self.checkpoint.names()

    def weight(self, name: str) -> Weight:
        stored = self.checkpoint.tensors[name]
        if len(stored.shape) < 2:
            return self.checkpoint.weight(name)
        kind = stored.kind if stored.kind in FORMATS else "bf16"
        return Weight(kind, stored.shape, torch.empty(stored.shape, dtype=torch.bfloat16, device="meta"))

    def release(self) -> None:
        return


def examine_model(name: str) -> dict[str, Any]:
    """Describe a model, also one that cannot run: `problem` is the reason, or None. Nothing is downloaded."""
    path = catalog.find(name) or (None if name in catalog.CATALOG else existing(name))
    if path is None:
        return {**describe_model(name), "problem": None, "machine": _machine({}, 0)}
    try:
        facts, problem = describe_model(name), None
        check_tensors(path)
    except UserError as error:
        if path.is_dir() and not (path / "config.json").is_file():
            raise
        facts, problem = _stated(name, path), _head_alone(path) or str(error)
    return {**facts, "problem": problem, "machine": _machine(facts.get("memory", {}), facts.get("context", 0))}


def check_tensors(path: Path) -> None:
    """Refuse a checkpoint whose tensors are not those that its configuration asks for."""
    checkpoint = open_path(path)
    Model(read_config(checkpoint.config), ShapesOnly(checkpoint), NoKernels(), max_context=1)


def _head_alone(path: Path) -> str:
    """Say that a checkpoint is a draft head, if it is one without the layers of a model; else return nothing."""
    try:
        kind = open_head(str(path)).shape.kind
    except UserError:
        return ""
    with suppress(UserError):  # heads have tensors that no model has
        if any(name.startswith("model.layers.0.") for name in open_path(path).names()):
            return ""
    source = quote(f"{kind}:model={path}")
    return f"it is a draft head, not a model: pass a model, and this with `--speculate {source}`"


def _stated(name: str, path: Path) -> dict[str, Any]:
    """Return what a checkpoint that cannot run says of itself."""
    if path.is_dir():
        config = read_json(path / "config.json")
        names = config.get("architectures") or [None]
        kind = config.get("model_type") or (names[0] if isinstance(names, list) else names)
        text = config.get("text_config")
        layers = (text if isinstance(text, dict) else config).get("num_hidden_layers")
        return {"name": name, "path": str(path), "format": "safetensors", "architecture": kind, "layers": layers}
    header = read_header(path, map_file(path))
    kind = header.metadata.get("general.architecture")
    return {
        "name": name,
        "path": str(path),
        "format": "GGUF",
        "architecture": kind,
        "layers": header.metadata.get(f"{kind}.block_count"),
        "parameters": sum(math.prod(tensor.shape) for tensor in header.tensors),
    }


def _machine(memory: dict[str, Any], context: int) -> dict[str, Any]:
    """Return the backend that `auto` selects, its free memory, and the tokens that fit beside the weights."""
    backend = choose_backend("auto")
    device = open_device(backend)
    free = device.free_bytes()
    found: dict[str, Any] = {"backend": backend, "free_bytes": free}
    if "kv_bytes_per_1k_tokens" in memory:
        found["tokens_that_fit"] = _tokens_that_fit(memory, context, device, free, "")
        found["tokens_that_fit_int8"] = _tokens_that_fit(memory, context, device, free, "_int8")
    return found


def _tokens_that_fit(memory: dict[str, Any], context: int, device: Device, free: int, suffix: str) -> int:
    """Return the tokens that an engine with default options keeps beside the weights. suffix: of the keys to read."""
    per_token, in_window = (memory[f"{name}_bytes_per_1k_tokens{suffix}"] // TOKENS for name in ("kv", "window"))
    facts = DeviceFacts(
        backend="",
        trained_context=context,
        kv_dtype="",
        cache_bytes_per_token=per_token - in_window,
        free_bytes=max(free - memory["weights_bytes"], 0),
        cache_share=device.defaults.cache_share,
        step_tokens=device.defaults.step_tokens,
        decode_steps=device.defaults.decode_steps,
        window=memory["window"],
        window_bytes_per_token=in_window,
    )
    try:
        resolved = resolve(EngineConfig(), facts)
    except UserError:
        return 0  # not even a page
    return resolved.pages * resolved.page_size


def title(architecture: object) -> str:
    """Return the name of an architecture as its makers call it; as it is if it is unknown."""
    known = ARCHITECTURES.get(str(architecture))
    return known.label if known is not None else str(architecture or "unnamed")
