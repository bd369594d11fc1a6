"""What a student learned, as files: a head in our layout or in one that vLLM loads, a draft model as a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ...kernels import Weight
from ...kernels.quantize import BLOCK, quantize_weight
from ...models import read_config
from ...models.rope import Rope, frequencies
from ...speculation.vocabulary import TARGET_IDS, UNKNOWN
from ...weights import gguf_writer, locate, open_checkpoint
from ...weights.gguf import OUTRIDER_PREFIX
from ...weights.random import is_random
from ...weights.shipped import CARD
from ..heads.base import Exported
from ..target import Subject
from .disk import CONFIG, WEIGHTS, as_json, as_safetensors, write_folder
from .vllm_export import translate, understood, with_map

Storage = Literal["q8_0", "q5_1", "bf16", "f32"]

BLOCKS = {"q8_0": "int8", "q5_1": "int5"}
DTYPES = {"q8_0": torch.bfloat16, "q5_1": torch.bfloat16, "bf16": torch.bfloat16, "f32": torch.float32}
NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
GGUF = "model.gguf"
# What a folder says of its texts, and whoever drafts for it must read alike.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


def write_head(exported: Exported, folder: Path, storage: Storage, card: Mapping[str, Any]) -> None:
    """config.json, model.safetensors and card.json in our layout; an older export is replaced once this one is whole.

    storage: of the matrices. q8_0 takes about a byte a number, q5_1 three quarters of one; what has no whole blocks
    stays bf16. Vectors stay f32.
    """
    tensors = with_map(exported)
    understood(exported.config, tensors)  # what we could not read is not written
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if storage in BLOCKS and _packs(name, tensor):
            stored[f"{name}.{storage}"] = _weight(tensor, storage).data
        elif tensor.dim() > 1:
            stored[name] = tensor.to(DTYPES[storage])
        else:
            stored[name] = tensor
    _write(folder, exported.config | {"dtype": NAMES[DTYPES[storage]]}, stored, card)


def write_speculators(
    exported: Exported,
    folder: Path,
    subject: Subject,
    tokens: int,
    card: Mapping[str, Any],
    storage: Literal["bf16", "f32"] = "bf16",
) -> None:
    """The head as vLLM loads it, with the target's embedding and head matrix. tokens: to be drafted at a time."""
    config, tensors = translate(exported, subject, tokens)
    dtype = DTYPES[storage]
    stored = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    _write(folder, config | {"dtype": NAMES[dtype]}, stored, card)


def write_model(exported: Exported, folder: Path, subject: Subject, storage: Storage, card: Mapping[str, Any]) -> Path:
    """A draft model, and where it is then: a GGUF file in `folder` if the target is one, else the folder itself.

    It has the target's tokenizer, or, where it knows some of the target's tokens alone, says which these are. Folders
    have no blocks: they get bf16.
    """
    if exported.draft_ids is not None:
        exported = replace(exported, config=exported.config | {TARGET_IDS: exported.draft_ids.tolist()})
    read_config(exported.config)
    source = None if is_random(subject.model) else locate(subject.model)
    if source is not None and source.is_file():
        write_folder(folder, {GGUF: _gguf(exported, source, folder.name, storage), CARD: as_json(card)})
        return folder / GGUF
    listed = TARGET_IDS in exported.config
    there = {} if source is None or listed else {name: source / name for name in TOKENIZER_FILES}
    dtype = DTYPES[storage]
    stored = {name: tensor.to(dtype) for name, tensor in exported.tensors.items()}
    more = {name: file.read_bytes() for name, file in there.items() if file.is_file()}
    _write(folder, exported.config | {"dtype": NAMES[dtype]}, stored, card, more)
    return folder


def _write(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    card: Mapping[str, Any],
    more: Mapping[str, bytes] | None = None,
) -> None:
    files = {CONFIG: as_json(config), WEIGHTS: as_safetensors(tensors), CARD: as_json(card)}
    write_folder(folder, files | dict(more or {}))


def _packs(name: str, tensor: Tensor) -> bool:
    """Matrices with rows of whole blocks; a single row is not worth it."""
    return name.endswith(".weight") and tensor.dim() == 2 and tensor.shape[0] > 1 and not tensor.shape[1] % BLOCK


def _weight(tensor: Tensor, storage: Storage) -> Weight:
    plain = Weight("f32", tuple(tensor.shape), tensor.detach().float().cpu())
    if storage in BLOCKS and tensor.dim() == 2 and not tensor.shape[1] % BLOCK:
        return quantize_weight(plain, BLOCKS[storage])
    if storage == "bf16" and tensor.dim() == 2:
        return Weight("bf16", plain.shape, plain.data.to(torch.bfloat16))
    return plain


def _gguf(exported: Exported, target: Path, name: str, storage: Storage) -> list[bytes]:
    """The model in one file, with the words of the target's."""
    config = exported.config
    weights = {each: _weight(tensor, storage) for each, tensor in exported.tensors.items()}
    tensors = gguf_writer.rename(config, weights) | _rope_factors(config)
    metadata = gguf_writer.describe(config, name, storage)
    if TARGET_IDS in config:
        metadata |= {f"{OUTRIDER_PREFIX}{key}": config[key] for key in (TARGET_IDS, UNKNOWN)}
    else:
        words = open_checkpoint(target).tokenizer_source
        assert isinstance(words, Mapping)
        metadata |= {key: value for key, value in words.items() if key.startswith("tokenizer.")}
    return list(gguf_writer.encode(metadata, tensors))


def _rope_factors(config: Mapping[str, Any]) -> dict[str, Weight]:
    """GGUF has no keys for the scaling of Llama 3: it stores what divides each frequency."""
    shape = read_config(config)
    rope = shape.ropes[0]
    if rope is None or rope.kind != "llama3":
        return {}
    factors = frequencies(Rope(rope.theta), shape.head_dim) / frequencies(rope, shape.head_dim)  # [D / 2]
    return {"rope_freqs.weight": Weight("f32", tuple(factors.shape), factors)}
