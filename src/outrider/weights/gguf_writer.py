"""Write GGUF files, version 3, from a Hugging Face config and weights."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from ..kernels import Weight
from .gguf import ARCHITECTURES, NAMES
from .gguf_header import ARRAY, DEFAULT_ALIGNMENT, MAGIC, SCALARS, STRING, TENSOR_TYPES
from .hf_folder import classic_rope

VERSION = 3
ARCHITECTURE_NAMES = ("llama", "qwen2", "qwen3")  # model types with the same name in GGUF and no further metadata
NUMBERS = {kind: number for number, kind in TENSOR_TYPES.items()}
TYPES = {form: number for number, form in SCALARS.items()}
BOOLEAN, REAL = TYPES["?"], TYPES["<f4"]
WHOLE = ((TYPES["<u4"], "<I", 0, 1 << 32), (TYPES["<i4"], "<i", -(1 << 31), 1 << 31))  # type, form, range
LONG = ((TYPES["<u8"], "<Q", 0, 1 << 64), (TYPES["<i8"], "<q", -(1 << 63), 1 << 63))
FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7, "q5_1": 9, "bf16": 32}  # by the format of most matrices
QUANTIZATION_VERSION = 2  # of the layout of quantized blocks


def encode(metadata: Mapping[str, Any], tensors: Mapping[str, Weight]) -> Iterator[bytes]:
    """Yield the file in pieces. Metadata values are strings, booleans, numbers, or lists of one of these types."""
    head = MAGIC + struct.pack("<IQQ", VERSION, len(tensors), len(metadata))
    head += b"".join(text(key) + value(item) for key, item in metadata.items())
    offset = 0
    for name, weight in tensors.items():
        head += tensor_info(name, weight.shape, NUMBERS[weight.kind], offset)
        offset += _padded(weight.data.nbytes)
    yield head + bytes(_padded(len(head)) - len(head))
    for weight in tensors.values():
        yield raw(weight.data)
        yield bytes(_padded(weight.data.nbytes) - weight.data.nbytes)


def text(content: str | bytes) -> bytes:
    encoded = content.encode() if isinstance(content, str) else content
    return struct.pack("<Q", len(encoded)) + encoded


def value(item: Any) -> bytes:
    """Encode a metadata value with its type. Integers take 32 bits if they fit; floats always do."""
    if isinstance(item, list | tuple):
        return struct.pack("<I", ARRAY) + _array(item)
    kind, form = _kind([item], signed=False)
    return struct.pack("<I", kind) + _packed([item], form)


def _array(items: Sequence[Any]) -> bytes:
    kind, form = _kind(items, signed=True)
    return struct.pack("<IQ", kind, len(items)) + _packed(items, form)


def _kind(items: Sequence[Any], signed: bool) -> tuple[int, str]:
    """Return the type that holds all items and its struct format. Lists of integers are signed, as elsewhere."""
    kinds = {type(item) for item in items}
    if kinds == {str}:
        return STRING, ""
    if kinds == {bool}:
        return BOOLEAN, "<?"
    if kinds in ({float}, {float, int}):
        return REAL, "<f"
    if not kinds <= {int}:
        raise ValueError(f"GGUF metadata cannot hold {[kind.__name__ for kind in kinds]} in one value")
    for number, form, least, beyond in (*WHOLE[:: -1 if signed else 1], *LONG[:: -1 if signed else 1]):
        if all(least <= item < beyond for item in items):
            return number, form
    raise ValueError("GGUF metadata cannot hold integers of more than 64 bits")


def _packed(items: Sequence[Any], form: str) -> bytes:
    if not form:
        return b"".join(map(text, items))
    return struct.pack(f"<{len(items)}{form[1]}", *items)


def tensor_info(name: str, shape: Sequence[int], kind: int, offset: int) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return text(name) + dimensions + struct.pack("<IQ", kind, offset)


def raw(data: Tensor) -> bytes:
    return data.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _padded(size: int) -> int:
    return -(-size // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def architecture_of(config: Mapping[str, Any]) -> str:
    kind = str(config.get("model_type"))
    if kind not in ARCHITECTURE_NAMES or config.get("sliding_window"):
        raise UserError(f"a model of the type `{kind}` cannot be written as GGUF: give the target as a folder instead")
    return kind


def describe(config: Mapping[str, Any], name: str, stored: str) -> dict[str, Any]:
    """Translate a config.json to metadata. `stored` is the format of most matrices."""
    architecture = architecture_of(config)
    config = {**config, **classic_rope(dict(config))}
    heads, width = config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim") or width // heads
    fields: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": width,
        "feed_forward_length": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config.get("num_key_value_heads") or heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(config.get("rope_theta") or 10_000.0),
    }
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type", "default") == "linear":
        fields |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling["factor"])}
    metadata: dict[str, Any] = {"general.architecture": architecture, "general.type": "model", "general.name": name}
    metadata |= {"general.file_type": FILE_TYPES[stored], "general.quantization_version": QUANTIZATION_VERSION}
    return metadata | {f"{architecture}.{key}": item for key, item in fields.items()}


def rename(config: Mapping[str, Any], tensors: Mapping[str, Weight]) -> dict[str, Weight]:
    """Rename weights from Hugging Face to GGUF, and interleave rotary pairs where GGUF does."""
    architecture = ARCHITECTURES[architecture_of(config)]
    heads = config["num_attention_heads"]
    rotary_heads = (
        {"attn_q": heads, "attn_k": config.get("num_key_value_heads") or heads} if architecture.interleaved else {}
    )
    renamed: dict[str, Weight] = {}
    for name, weight in tensors.items():
        new = gguf_name(name, architecture.names)
        count = next((count for part, count in rotary_heads.items() if f".{part}." in new), 0)
        renamed[new] = interleave(weight, count) if count else weight
    return renamed


def gguf_name(name: str, layer_names: Mapping[str, str]) -> str:
    stem, _, leaf = name.rpartition(".")
    for theirs, ours in NAMES.items():
        if stem == ours:
            return f"{theirs}.{leaf}"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    found = next((theirs for theirs, ours in layer_names.items() if part == ours), None)
    if not layer.isdigit() or found is None:
        raise ValueError(f"GGUF has no name for the tensor `{name}`")
    return f"blk.{layer}.{found}.{leaf}"


def interleave(weight: Weight, heads: int) -> Weight:
    """Move rotary pairs, which are half a head apart, to adjacent rows."""
    rows = torch.arange(weight.shape[0]).view(heads, 2, -1).transpose(1, 2).flatten()  # [N]
    return Weight(weight.kind, weight.shape, weight.data[rows])
