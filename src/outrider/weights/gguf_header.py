"""The header of a GGUF file: magic, version, two counts, the metadata (key, type, value), the tensors (name,
dimensions, type, offset).

Every count is checked against the bytes that are left in the file before memory is allocated for it.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from ..kernels.quantization import FORMATS

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
        known = ", ".join(kind for kind in TENSOR_TYPES.values() if kind in FORMATS)
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
