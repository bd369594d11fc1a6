"""Write trained heads: in Outrider's layout, in one that vLLM loads, and draft models as models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ...catalog.shipped import CARD
from ...kernels import Weight
from ...kernels.cpu import quantize_weight
from ...kernels.quantization import BLOCK
from ...models import read_config
from ...models.rope import Rope, rope_frequencies
from ...speculation.vocabulary import TARGET_IDS, UNKNOWN
from ...weights import gguf_writer, locate, open_checkpoint
from ...weights.gguf import OUTRIDER_PREFIX
from ...weights.random import is_random
from ..heads.base import HeadExport
from ..target import TargetInfo
from .disk import CONFIG, WEIGHTS, as_json, as_safetensors, write_folder
from .vllm_export import read_back, translate, with_d2t

StorageFormat = Literal["q8_0", "q5_1", "bf16", "f32"]

BLOCKS = {"q8_0": "int8", "q5_1": "int5"}
DTYPES = {"q8_0": torch.bfloat16, "q5_1": torch.bfloat16, "bf16": torch.bfloat16, "f32": torch.float32}
NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
GGUF = "model.gguf"
# Files of the target that define its tokens, which a draft model must share.
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


def write_head(export: HeadExport, folder: Path, storage: StorageFormat, card: Mapping[str, Any]) -> None:
    """Write config.json, model.safetensors and card.json in Outrider's layout, replacing an older export.

    storage: of the matrices. q8_0 takes about 1 byte per number, q5_1 about 0.75; matrices whose rows are not whole
    blocks stay bf16. Vectors stay f32.
    """
    tensors = with_d2t(export)
    read_back(export.config, tensors)  # refuses a head that Outrider could not read
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if storage in BLOCKS and _is_packable(name, tensor):
            stored[f"{name}.{storage}"] = _weight(tensor, storage).data
        elif tensor.dim() > 1:
            stored[name] = tensor.to(DTYPES[storage])
        else:
            stored[name] = tensor
    _write_files(folder, export.config | {"dtype": NAMES[DTYPES[storage]]}, stored, card)


def write_speculators(
    export: HeadExport,
    folder: Path,
    target_info: TargetInfo,
    tokens: int,
    card: Mapping[str, Any],
    storage: Literal["bf16", "f32"] = "bf16",
) -> None:
    """Write the head as vLLM loads it, with the target's embedding and lm_head. tokens: to draft per step."""
    config, tensors = translate(export, target_info, tokens)
    dtype = DTYPES[storage]
    stored = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    _write_files(folder, config | {"dtype": NAMES[dtype]}, stored, card)


def write_model(
    export: HeadExport, folder: Path, target_info: TargetInfo, storage: StorageFormat, card: Mapping[str, Any]
) -> Path:
    """Write a draft model and return its path: a GGUF file in `folder` if the target is one, else the folder.

    It gets the target's tokenizer, or, if it knows only some of the target's tokens, the list of these. Folders cannot
    store blocks: they get bf16.
    """
    if export.draft_ids is not None:
        export = replace(export, config=export.config | {TARGET_IDS: export.draft_ids.tolist()})
    read_config(export.config)
    source = None if is_random(target_info.model) else locate(target_info.model)
    if source is not None and source.is_file():
        write_folder(folder, {GGUF: _gguf(export, source, folder.name, storage), CARD: as_json(card)})
        return folder / GGUF
    listed = TARGET_IDS in export.config
    there = {} if source is None or listed else {name: source / name for name in TOKENIZER_FILES}
    dtype = DTYPES[storage]
    stored = {name: tensor.to(dtype) for name, tensor in export.tensors.items()}
    more = {name: file.read_bytes() for name, file in there.items() if file.is_file()}
    _write_files(folder, export.config | {"dtype": NAMES[dtype]}, stored, card, more)
    return folder


def _write_files(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    card: Mapping[str, Any],
    more: Mapping[str, bytes] | None = None,
) -> None:
    files = {CONFIG: as_json(config), WEIGHTS: as_safetensors(tensors), CARD: as_json(card)}
    write_folder(folder, files | dict(more or {}))


def _is_packable(name: str, tensor: Tensor) -> bool:
    """Return whether a tensor is stored in blocks: matrices with rows of whole blocks and more than one row."""
    return name.endswith(".weight") and tensor.dim() == 2 and tensor.shape[0] > 1 and not tensor.shape[1] % BLOCK


def _weight(tensor: Tensor, storage: StorageFormat) -> Weight:
    plain = Weight("f32", tuple(tensor.shape), tensor.detach().float().cpu())
    if storage in BLOCKS and tensor.dim() == 2 and not tensor.shape[1] % BLOCK:
        return quantize_weight(plain, BLOCKS[storage])
    if storage == "bf16" and tensor.dim() == 2:
        return Weight("bf16", plain.shape, plain.data.to(torch.bfloat16))
    return plain


def _gguf(export: HeadExport, target: Path, name: str, storage: StorageFormat) -> list[bytes]:
    """Encode the model as one GGUF file, with the target's tokenizer."""
    config = export.config
    weights = {each: _weight(tensor, storage) for each, tensor in export.tensors.items()}
    tensors = gguf_writer.rename(config, weights) | _rope_factors(config)
    metadata = gguf_writer.describe(config, name, storage)
    if TARGET_IDS in config:
        metadata |= {f"{OUTRIDER_PREFIX}{key}": config[key] for key in (TARGET_IDS, UNKNOWN)}
    else:
        tokenizer = open_checkpoint(target).tokenizer_source
        assert isinstance(tokenizer, Mapping)
        metadata |= {key: value for key, value in tokenizer.items() if key.startswith("tokenizer.")}
    return list(gguf_writer.encode(metadata, tensors))


def _rope_factors(config: Mapping[str, Any]) -> dict[str, Weight]:
    """Return the tensor with the rope scaling of Llama 3, for which GGUF has no keys: divisors of the frequencies."""
    shape = read_config(config)
    rope = shape.ropes[0]
    if rope is None or rope.kind != "llama3":
        return {}
    factors = rope_frequencies(Rope(rope.theta), shape.head_dim) / rope_frequencies(rope, shape.head_dim)  # [D / 2]
    return {"rope_freqs.weight": Weight("f32", tuple(factors.shape), factors)}
