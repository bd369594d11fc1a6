"""The weights as each peer reads them: the file itself, or its numbers in a safetensors folder, written once."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from ...errors import UserError
from ...kernels.blocks import dequantise
from ...tokenizer import loading
from ...weights import Checkpoint, open_checkpoint
from ...weights.catalog import cache_folder
from ...weights.random import is_random

SHARD = 2_000_000_000  # bytes of one file, about
DONE = "outrider.json"  # written last: a folder without it is begun again
FACTORS = "rope_freqs.weight"


class UnsuitableError(Exception):
    """Why a peer cannot read the model, in words for the table."""


def checked(model: str) -> Checkpoint:
    if is_random(model):
        raise UserError(f"`{model}` is a shape with random weights, which no peer can read: pass a model with weights")
    return open_checkpoint(model)


def gguf(checkpoint: Checkpoint) -> Path:
    if checkpoint.path.is_dir():
        raise UnsuitableError(f"it reads GGUF files, and `{checkpoint.path}` is a folder")
    return checkpoint.path


def folder(checkpoint: Checkpoint, note: Callable[[str], None]) -> Path:
    """The model's own folder, or one with the numbers of its file in fp32: what was quantised is expanded exactly."""
    if checkpoint.path.is_dir():
        return checkpoint.path
    if FACTORS in checkpoint:
        raise UnsuitableError(f"it reads folders, whose config.json has no place for the rotary factors of `{FACTORS}`")
    place = home(checkpoint) / "float32"
    if not (place / DONE).is_file():
        note(f"writing the weights in fp32 to {place}")
        begin(place)
        write(checkpoint, place)
        finish(place)
    return place


def home(checkpoint: Checkpoint) -> Path:
    """What is written for a model lies in a folder of its own; another file of the same name has another."""
    path = checkpoint.path.resolve()
    facts = path.stat()
    key = hashlib.sha256(f"{path} {facts.st_size} {facts.st_mtime_ns}".encode()).hexdigest()[:12]
    return cache_folder() / "peers" / "models" / f"{path.stem}-{key}"


def begin(place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
    try:
        place.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"cannot write `{place}`: {(error.strerror or str(error)).lower()}") from error


def finish(place: Path) -> None:
    (place / DONE).write_text("{}")


def write(checkpoint: Checkpoint, place: Path) -> None:
    config = {**checkpoint.config, "dtype": "float32", **_ids(checkpoint)}
    _json(place / "config.json", config)
    _json(place / "generation_config.json", _ids(checkpoint))
    assert isinstance(checkpoint.tokenizer_source, Mapping)
    words = loading.read_gguf(checkpoint.tokenizer_source)
    words.backend.save(str(place / "tokenizer.json"))
    told = {"bos_token": words.bos, "eos_token": words.eos, "chat_template": words.chat_template}
    _json(
        place / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", **{key: value for key, value in told.items() if value}},
    )
    where: dict[str, str] = {}
    for number, shard in enumerate(_shards(checkpoint)):
        name = f"model-{number:05}.safetensors"
        save_file(shard, place / name, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, name)
    _json(place / "model.safetensors.index.json", {"metadata": {}, "weight_map": where})


def _ids(checkpoint: Checkpoint) -> dict[str, Any]:
    return {"bos_token_id": checkpoint.generation.get("bos_token_id"), "eos_token_id": checkpoint.end_ids}


def _json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")


def _shards(checkpoint: Checkpoint) -> Iterator[dict[str, Tensor]]:
    """The numbers of all weights, in pieces that fit into memory."""
    # Folders of this family store what a norm adds to 1.
    raised = checkpoint.config["model_type"].startswith("gemma") and not checkpoint.norms_are_offset
    held: dict[str, Tensor] = {}
    for name in checkpoint.names():
        numbers = dequantise(checkpoint.weight(name))  # fp32, in the model's own shape
        held[name] = numbers - 1 if raised and name.endswith("norm.weight") else numbers.clone()
        if sum(tensor.nbytes for tensor in held.values()) >= SHARD:
            yield held
            held = {}
    if held:
        yield held
