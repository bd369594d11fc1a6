"""Provide the weights in the format each peer reads: the GGUF file, or a safetensors folder written once from it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from ...catalog import cache_folder
from ...errors import UserError
from ...kernels.quantization import dequantize
from ...speculation.checkpoints import find_folder
from ...tokenizer import loading
from ...weights import Checkpoint, open_checkpoint
from ...weights.random import head_config, is_random

SHARD = 2_000_000_000  # approximate bytes of one file
DONE = "outrider.json"  # written last: a folder without it is incomplete and written again


class UnsuitableError(Exception):
    """A peer cannot read the model; the message goes into the table."""


def checked(model: str, backend: str = "cpu") -> Checkpoint:
    if is_random(model) and backend == "cpu":
        raise UserError(
            f"`{model}` is a shape with random weights, which no peer can read on the CPU: pass a model with weights"
        )
    return open_checkpoint(model)


def gguf(checkpoint: Checkpoint) -> Path:
    if checkpoint.path.is_dir():
        raise UnsuitableError(f"it reads GGUF files, and `{checkpoint.path}` is a folder")
    return checkpoint.path


def folder(checkpoint: Checkpoint, note: Callable[[str], None]) -> Path:
    """Return the model's own folder, or one with its weights in fp32, which represents quantized values exactly."""
    if is_random(str(checkpoint.path)):
        return shape_folder(str(checkpoint.path), checkpoint.config)
    if checkpoint.path.is_dir():
        return checkpoint.path
    path = home(checkpoint) / "float32"
    if not (path / DONE).is_file():
        note(f"writing the weights in fp32 to {path}")
        begin(path)
        write(checkpoint, path)
        finish(path)
    return path


def shape_folder(source: str, config: Mapping[str, Any]) -> Path:
    """Write the config.json of a model or head with random weights, which a peer fills with its own."""
    path = cache_folder() / "peers" / "models" / source.strip("/").replace("/", "-")
    begin(path)
    _json(path / "config.json", {**config, "dtype": "bfloat16", "torch_dtype": "bfloat16"})
    return path


def head_folder(source: str) -> Path:
    """Return the folder of a draft head for vLLM; for `random/eagle3-NAME`, one with its shape."""
    if not is_random(source):
        return find_folder(source)
    return shape_folder(source, {**head_config(source), "architectures": ["LlamaForCausalLMEagle3"]})


def home(checkpoint: Checkpoint) -> Path:
    """Return the cache folder of a model; another file of the same name has another folder."""
    path = checkpoint.path.resolve()
    facts = path.stat()
    key = hashlib.sha256(f"{path} {facts.st_size} {facts.st_mtime_ns}".encode()).hexdigest()[:12]
    return cache_folder() / "peers" / "models" / f"{path.stem}-{key}"


def begin(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    try:
        path.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"cannot write `{path}`: {(error.strerror or str(error)).lower()}") from error


def finish(path: Path) -> None:
    (path / DONE).write_text("{}")


def write(checkpoint: Checkpoint, path: Path) -> None:
    config = {**checkpoint.config, "dtype": "float32", **_ids(checkpoint)}
    _json(path / "config.json", config)
    _json(path / "generation_config.json", _ids(checkpoint))
    assert isinstance(checkpoint.tokenizer_source, Mapping)
    vocab = loading.read_gguf(checkpoint.tokenizer_source)
    vocab.backend.save(str(path / "tokenizer.json"))
    special = {"bos_token": vocab.bos, "eos_token": vocab.eos, "chat_template": vocab.chat_template}
    _json(
        path / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", **{key: value for key, value in special.items() if value}},
    )
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(_shards(checkpoint)):
        name = f"model-{number:05}.safetensors"
        save_file(shard, path / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
    _json(path / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def _ids(checkpoint: Checkpoint) -> dict[str, Any]:
    return {"bos_token_id": checkpoint.generation.get("bos_token_id"), "eos_token_id": checkpoint.end_ids}


def _json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")


def _shards(checkpoint: Checkpoint) -> Iterator[dict[str, Tensor]]:
    """Yield all weights in fp32, in shards that fit into memory."""
    # Gemma folders store norm weights minus 1.
    shifted = checkpoint.config["model_type"].startswith("gemma") and not checkpoint.norms_are_offset
    held: dict[str, Tensor] = {}
    for name in checkpoint.names():
        values = dequantize(checkpoint.weight(name))  # fp32 in the checkpoint's shape
        held[name] = values - 1 if shifted and name.endswith("norm.weight") else values.clone()
        if sum(tensor.nbytes for tensor in held.values()) >= SHARD:
            yield held
            held = {}
    if held:
        yield held
