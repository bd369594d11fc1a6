"""GGUF files: a checked header, the metadata as a Hugging Face config, the tensors under Hugging Face names.

A header is: magic, version, two counts, the metadata (key, type, value), the tensors (name, dimensions, type, offset).
Every count is checked against the bytes that are left in the file before memory is allocated for it.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from ..kernels.quantization import FORMATS
from .checkpoint import Checkpoint, Stored, listed_ids, map_file, view

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32

# Numeric value types by their number in the file, as NumPy dtypes.
SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
STRING, ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")

# Tensor types by their number in the file. Unsupported ones are listed so that the error can name them.
TENSOR_TYPES = {
    0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 9: "q8_1", 10: "q2_k", 11: "q3_k",
    12: "q4_k", 13: "q5_k", 14: "q6_k", 15: "q8_k", 16: "iq2_xxs", 17: "iq2_xs", 18: "iq3_xxs", 19: "iq1_s",
    20: "iq4_nl", 21: "iq3_s", 22: "iq2_s", 23: "iq4_xs", 24: "i8", 25: "i16", 26: "i32", 27: "i64", 28: "f64",
    29: "iq1_m", 30: "bf16", 34: "tq1_0", 35: "tq2_0", 39: "mxfp4",
}  # fmt: skip

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "rope_freqs": "rope_freqs",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SANDWICH_NAMES = LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True)
class GgufArchitecture:
    model_type: str
    class_name: str
    interleaved: bool = False  # rotary pairs are adjacent rows of q and k
    names: Mapping[str, str] = field(default_factory=lambda: LAYER_NAMES)


ARCHITECTURES = {
    "llama": GgufArchitecture("llama", "LlamaForCausalLM", interleaved=True),
    "smollm3": GgufArchitecture("smollm3", "SmolLM3ForCausalLM", interleaved=True),
    "qwen2": GgufArchitecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": GgufArchitecture("qwen3", "Qwen3ForCausalLM"),
    "gemma3": GgufArchitecture("gemma3_text", "Gemma3ForCausalLM", names=SANDWICH_NAMES),
}
MISTRAL = GgufArchitecture("mistral", "MistralForCausalLM", interleaved=True)
GEMMA_LOCAL_BASE = 10_000.0  # rope base of the sliding layers, which most files leave out
GEMMA_PATTERN = 6  # every sixth layer has full attention
GEMMA_27B_LAYERS = 62  # the only size whose attention scale does not follow from head_dim
OUTRIDER_PREFIX = "outrider."  # metadata keys with this prefix are keys of config.json
SMOLLM3_PATTERN = 4  # every fourth layer has no rotary embedding


def open_gguf(path: Path) -> Checkpoint:
    mapped = map_file(path)
    header = read_header(path, mapped)
    fields = GgufFields(path, header)
    config = translate(fields)
    tensors: dict[str, Stored] = {}
    for tensor in header.tensors:
        tensors[hugging_face_name(tensor.name, fields.architecture.names)] = Stored(
            tensor.kind,
            tensor.shape,
            view(mapped, tensor.offset, tensor.size, tensor.kind, tensor.shape),
            interleaved_heads(path, tensor, config) if fields.architecture.interleaved else 0,
        )
    tokenizer = {key: value for key, value in header.metadata.items() if key.startswith("tokenizer.")}
    ids = [header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    bos = header.metadata.get("tokenizer.ggml.bos_token_id")
    return Checkpoint(
        path=path,
        config=config,
        tensors=tensors,
        tokenizer_source={"path": str(path), "general.architecture": fields.name, **tokenizer},
        generation={"bos_token_id": bos, "eos_token_id": listed_ids(*ids)},
        mappings=(mapped,),
    )


def hugging_face_name(name: str, layer_names: Mapping[str, str]) -> str:
    """Translate a tensor name; unknown names stay as they are."""
    match = LAYER.fullmatch(name)
    if match and match[2] in layer_names:
        return f"model.layers.{match[1]}.{layer_names[match[2]]}.{match[3]}"
    stem, _, leaf = name.rpartition(".")
    return f"{NAMES[stem]}.{leaf}" if stem in NAMES else name


def interleaved_heads(path: Path, tensor: TensorInfo, config: dict[str, Any]) -> int:
    match = LAYER.fullmatch(tensor.name)
    # A quantized vector is a single row and is refused where it is read.
    is_vector = len(tensor.shape) == 1 and FORMATS[tensor.kind].quantized
    if is_vector or not match or match[2] not in ("attn_q", "attn_k"):
        return 0
    key = "num_attention_heads" if match[2] == "attn_q" else "num_key_value_heads"
    heads = config[key]
    if type(heads) is not int or heads < 1:
        given = str(heads)[:40]
        raise UserError(f"`{path}`: the metadata `{OUTRIDER_PREFIX}{key}` is `{given}`, expected a positive number")
    if tensor.shape[0] % (2 * heads):
        raise UserError(f"`{path}`: the {tensor.shape[0]} rows of `{tensor.name}` do not fit {heads} heads")
    return heads


class GgufFields:
    """Checked access to the metadata of one architecture."""

    def __init__(self, path: Path, header: GgufHeader) -> None:
        self.path = path
        self.header = header
        self.tensors = {tensor.name: tensor for tensor in header.tensors}
        name = header.metadata.get("general.architecture")
        if not isinstance(name, str) or name not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise UserError(f"`{path}` has the architecture `{name}`, which Outrider cannot run: pick one of {known}")
        self.name = name
        parts = self.get("split.count", absolute=True)
        if isinstance(parts, int) and parts > 1:
            raise UserError(f"`{path}` is one of {parts} parts: merge them with `llama-gguf-split --merge` first")
        windowed = self.name == "llama" and bool(self.get("attention.sliding_window"))
        self.architecture = MISTRAL if windowed else ARCHITECTURES[self.name]

    def get(self, key: str, absolute: bool = False) -> Any:
        return self.header.metadata.get(key if absolute else f"{self.name}.{key}")

    def count(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if isinstance(value, list) and len(set(value)) == 1:  # one entry per layer
            value = value[0]
        if value is None and default is not None:
            return default
        if type(value) is not int or not 0 < value < 2**31:
            given = "is missing" if value is None else f"is `{str(value)[:40]}`"
            raise UserError(f"`{self.path}`: the metadata `{self.name}.{key}` {given}, expected a positive number")
        return value

    def real(self, key: str, default: float) -> float:
        value = self.get(key)
        if value is None:
            return default
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise UserError(f"`{self.path}`: the metadata `{self.name}.{key}` is `{value}`, expected a positive number")
        return float(str(np.float32(value)))  # 1e-05 rather than the digits of the nearest float32

    @property
    def config_keys(self) -> dict[str, Any]:
        """Return the keys of config.json that Outrider wrote into the file."""
        metadata = self.header.metadata.items()
        return {key.removeprefix(OUTRIDER_PREFIX): value for key, value in metadata if key.startswith(OUTRIDER_PREFIX)}

    def layers(self) -> int:
        layers = self.count("block_count")
        if layers > len(self.tensors):
            raise UserError(f"`{self.path}` claims {layers} layers, but has only {len(self.tensors)} tensors")
        return layers


def translate(fields: GgufFields) -> dict[str, Any]:
    """Translate the metadata to the keys of config.json."""
    heads = fields.count("attention.head_count")
    width = fields.count("embedding_length")
    head_dim = fields.count("attention.key_length", default=max(width // heads, 1))
    embedding = fields.tensors.get("token_embd.weight")
    if embedding is None:
        raise UserError(f"`{fields.path}` has no tensor `token_embd.weight`: it is not a complete language model")
    window = fields.count("attention.sliding_window", default=0) if fields.get("attention.sliding_window") else None
    config: dict[str, Any] = {
        "model_type": fields.architecture.model_type,
        "architectures": [fields.architecture.class_name],
        "vocab_size": embedding.shape[0],
        "hidden_size": width,
        "intermediate_size": fields.count("feed_forward_length"),
        "num_hidden_layers": fields.layers(),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.count("attention.head_count_kv", default=heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": fields.real("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_theta": fields.real("rope.freq_base", 10_000.0),
        "rope_scaling": rope_scaling(fields),
        "max_position_embeddings": fields.count("context_length"),
        "tie_word_embeddings": "output.weight" not in fields.tensors,
        "sliding_window": window,
        "attention_bias": "blk.0.attn_q.bias" in fields.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in fields.tensors,
    }
    rotary = fields.count("rope.dimension_count", default=head_dim)
    if rotary != head_dim:
        config["partial_rotary_factor"] = rotary / head_dim
    if fields.name == "gemma3":
        config |= gemma3(fields, config)
    if fields.name == "smollm3":
        layers = range(1, config["num_hidden_layers"] + 1)
        config["no_rope_layers"] = [int(layer % SMOLLM3_PATTERN != 0) for layer in layers]
    return config | fields.config_keys


def rope_scaling(fields: GgufFields) -> dict[str, Any] | None:
    kind = fields.get("rope.scaling.type") or "none"
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": fields.real("rope.scaling.factor", 1.0)}
    original = fields.get("rope.scaling.original_context_length")
    if original:
        scaling["original_max_position_embeddings"] = original
    return scaling


def gemma3(fields: GgufFields, config: dict[str, Any]) -> dict[str, Any]:
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    stated = fields.get("attention.sliding_window_pattern")
    if isinstance(stated, list) and len(stated) == layers:
        sliding = [bool(flag) for flag in stated]
    else:
        pattern = fields.count("attention.sliding_window_pattern", default=GEMMA_PATTERN)
        sliding = [(layer + 1) % pattern != 0 for layer in range(layers)]
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config["hidden_size"] // heads if layers == GEMMA_27B_LAYERS else config["head_dim"],
        "rope_local_base_freq": fields.real("rope.freq_base_swa", GEMMA_LOCAL_BASE),
        "layer_types": ["sliding_attention" if flag else "full_attention" for flag in sliding],
    }


# ---- the header ----


@dataclass(frozen=True)
class TensorInfo:
    name: str
    kind: str  # a key of quantization.FORMATS
    shape: tuple[int, ...]  # outermost first, as torch has it
    offset: int  # from the start of the file
    size: int  # bytes


@dataclass(frozen=True)
class GgufHeader:
    metadata: dict[str, Any]  # numbers, strings, booleans and lists of them
    tensors: list[TensorInfo]


class _HeaderReader:
    """Reads values in order; refuses to read beyond the end of the file."""

    def __init__(self, path: Path, data: memoryview, mapped: mmap.mmap | bytes) -> None:
        self.path = path
        self.data = data
        self.mapped = mapped  # the same bytes: decoding a slice of it takes half the time of decoding a view
        self.position = 0

    def refuse(self, problem: str) -> UserError:
        return UserError(f"`{self.path}` is not a usable GGUF file: {problem}")

    def left(self) -> int:
        return len(self.data) - self.position

    def take(self, size: int, what: str) -> memoryview:
        if size > self.left():
            raise self.refuse(f"it ends inside {what}, so it is damaged or cut short")
        self.position += size
        return self.data[self.position - size : self.position]

    def number(self, form: str, what: str) -> int:
        value: int = struct.unpack(form, self.take(struct.calcsize(form), what))[0]
        return value

    def count(self, form: str, smallest: int, what: str) -> int:
        """Read a count of items, each of at least `smallest` bytes."""
        value = self.number(form, f"the number of {what}")
        if value * smallest > self.left():
            raise self.refuse(f"it claims {value} {what}, more than the file can hold")
        return value

    def string(self, what: str) -> str:
        size = self.number("<Q", what)
        if size > self.left():
            raise self.refuse(f"{what} claims {size} bytes, more than the file has")
        try:
            return str(self.take(size, what), "utf-8")
        except UnicodeDecodeError:
            raise self.refuse(f"{what} is not UTF-8 text") from None

    def strings(self, count: int, what: str) -> list[str]:
        """Read strings as `string` does, in one loop: vocabularies have hundreds of thousands of entries."""
        items: list[bytes] = []
        mapped, length, position, end = self.mapped, _LENGTH.unpack_from, self.position, len(self.mapped)
        last = end - _LENGTH.size
        for _ in range(count):
            start = position + _LENGTH.size
            position = start + length(mapped, position)[0] if position <= last else end + 1
            if position > end:
                raise self.refuse(f"{what} ends beyond the file, which is damaged or cut short")
            items.append(mapped[start:position])
        self.position = position
        try:
            return [item.decode() for item in items]
        except UnicodeDecodeError:
            raise self.refuse(f"an item of {what} is not UTF-8 text") from None

    def value(self, kind: int, what: str) -> Any:
        if kind in SCALARS:
            dtype = np.dtype(SCALARS[kind])
            return np.frombuffer(self.take(dtype.itemsize, what), dtype)[0].item()
        if kind == STRING:
            return self.string(what)
        if kind == ARRAY:
            return self.array(what)
        raise self.refuse(f"{what} has the unknown type {kind}")

    def array(self, what: str) -> list[Any]:
        kind = self.number("<I", what)
        if kind in SCALARS:
            dtype = np.dtype(SCALARS[kind])
            count = self.count("<Q", dtype.itemsize, f"items in {what}")
            items: list[Any] = np.frombuffer(self.take(count * dtype.itemsize, what), dtype).tolist()
            return items
        if kind == STRING:
            return self.strings(self.count("<Q", 8, f"items in {what}"), what)
        raise self.refuse(f"{what} is a list of items of the unsupported type {kind}")


def read_header(path: Path, mapped: mmap.mmap | bytes) -> GgufHeader:
    with memoryview(mapped) as data, data.toreadonly() as readonly:
        reader = _HeaderReader(path, readonly, mapped)
        _read_preamble(reader)
        tensor_count = reader.count("<Q", 8 + 4 + 8 + 4 + 8, "tensors")
        metadata = _read_metadata(reader)
        return GgufHeader(metadata, _read_tensors(reader, tensor_count, metadata))


def _read_preamble(reader: _HeaderReader) -> None:
    if bytes(reader.data[:4]) != MAGIC:
        raise UserError(f"`{reader.path}` is not a model: expected a GGUF file or a Hugging Face folder")
    reader.position = len(MAGIC)
    version = reader.number("<I", "its version")
    if version.to_bytes(4, "little")[::-1] in [known.to_bytes(4, "little") for known in VERSIONS]:
        raise reader.refuse("it is big-endian, convert it to little-endian")
    if version not in VERSIONS:
        raise reader.refuse(f"it has version {version}, expected 2 or 3")


def _read_metadata(reader: _HeaderReader) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(reader.count("<Q", 8 + 4 + 1, "metadata entries")):
        key = reader.string("a metadata key")
        if key in metadata:
            raise reader.refuse(f"the metadata key `{_short(key)}` occurs twice")
        what = f"the metadata `{_short(key)}`"
        metadata[key] = reader.value(reader.number("<I", what), what)
    return metadata


def _read_tensors(reader: _HeaderReader, count: int, metadata: dict[str, Any]) -> list[TensorInfo]:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
        raise reader.refuse(f"`general.alignment` is {_short(alignment)}, expected a power of two from 8 on")
    tensors = [_read_tensor(reader, alignment) for _ in range(count)]
    start = -(-reader.position // alignment) * alignment
    end, last, names = 0, "the header", set[str]()
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.name in names:
            raise reader.refuse(f"the tensor `{_short(tensor.name)}` occurs twice")
        if tensor.offset < end:
            raise reader.refuse(f"the tensor `{_short(tensor.name)}` overlaps {last}")
        names.add(tensor.name)
        end, last = tensor.offset + tensor.size, f"`{_short(tensor.name)}`"
        if start + end > len(reader.data):
            raise reader.refuse(f"{last} lies beyond the end of the file, which is damaged or cut short")
    return [TensorInfo(each.name, each.kind, each.shape, start + each.offset, each.size) for each in tensors]


def _read_tensor(reader: _HeaderReader, alignment: int) -> TensorInfo:
    """Read the description of a tensor, with its offset relative to the start of the data."""
    name = reader.string("a tensor's name")
    what = f"the tensor `{_short(name)}`"
    dimensions = reader.number("<I", what)
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise reader.refuse(f"{what} has {dimensions} dimensions, expected 1 to {MAX_DIMENSIONS}")
    # The file lists the innermost dimension first.
    shape = tuple(reader.number("<Q", what) for _ in range(dimensions))[::-1]
    number = reader.number("<I", what)
    kind = TENSOR_TYPES.get(number, f"type {number}")
    if kind not in FORMATS:
        known = ", ".join(FORMATS)
        raise UserError(f"`{reader.path}` stores {what} as `{kind}`, which Outrider cannot read: pick one of {known}")
    offset = reader.number("<Q", what)
    if offset % alignment:
        raise reader.refuse(f"{what} lies at {offset}, no multiple of the alignment {alignment}")
    return TensorInfo(name, kind, shape, offset, _size(reader, what, kind, shape))


def _size(reader: _HeaderReader, what: str, kind: str, shape: tuple[int, ...]) -> int:
    block = FORMATS[kind]
    if 0 in shape:
        raise reader.refuse(f"{what} is empty")
    if shape[-1] % block.elements:
        raise reader.refuse(f"{what} has rows of {shape[-1]} numbers, no multiple of `{kind}`'s {block.elements}")
    size = math.prod(shape) // block.elements * block.bytes  # integers of any size: no overflow
    if size > len(reader.data):
        raise reader.refuse(f"{what} of {'x'.join(map(str, shape))} is larger than the file")
    return size


def _short(value: object) -> str:
    """Return printable text of at most 64 characters: the file may be hostile."""
    text = str(value)
    printable = "".join(character if character.isprintable() else "?" for character in text[:64])
    return printable if len(text) <= 64 else printable + "..."
