"""Read the quantisation that a GGUF file states, without the reader of whole files, which needs torch."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

KEY = "general.file_type"
MAGIC = b"GGUF"
MAX_ENTRIES = 64  # metadata entries that are looked at; the general ones come first
MAX_TEXT = 1 << 20  # bytes of a key or text; longer ones are not general metadata
WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of the numeric value types
UINT32, TEXT = 4, 8
FILE_TYPES = {  # as llama.cpp numbers them
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    25: "IQ4_NL",
    32: "BF16",
    38: "MXFP4_MOE",
}


def stated_quantization(path: Path) -> str:
    """Return the quantisation in a file's metadata; empty if it states none, or cannot be read."""
    try:
        with path.open("rb") as file:
            return FILE_TYPES.get(_file_type(file), "")
    except (OSError, ValueError, struct.error):
        return ""


def _file_type(file: BinaryIO) -> int:
    if file.read(4) != MAGIC:
        return -1
    _, _, entries = struct.unpack("<IQQ", file.read(20))
    for _ in range(min(entries, MAX_ENTRIES)):
        key, (kind,) = _text(file), struct.unpack("<I", file.read(4))
        if key == KEY.encode() and kind == UINT32:
            return int(struct.unpack("<I", file.read(4))[0])
        if kind == TEXT:
            _text(file)
        elif kind in WIDTHS:
            file.read(WIDTHS[kind])
        else:
            return -1  # a list: the tokenizer's part begins
    return -1


def _text(file: BinaryIO) -> bytes:
    (size,) = struct.unpack("<Q", file.read(8))
    if size > MAX_TEXT:
        raise ValueError("the text is too long")
    return file.read(size)
