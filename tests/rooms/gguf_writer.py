"""Writes small GGUF files byte by byte, right ones and hostile ones."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

F32, F16, Q4_0, Q8_0, IQ2_XXS = 0, 1, 2, 8, 16


@dataclass
class Tensor:
    name: str
    shape: tuple[int, ...]  # outermost first
    data: bytes
    kind: int = F32
    offset: int | None = None  # None: behind the one before


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value(item: Any) -> bytes:
    """Type number and content."""
    if isinstance(item, bool):
        return struct.pack("<I?", 7, item)
    if isinstance(item, int):
        return struct.pack("<II", 4, item)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    if isinstance(item, str):
        return struct.pack("<I", 8) + string(item)
    kind, form = (8, "") if isinstance(item[0], str) else (6, "f") if isinstance(item[0], float) else (5, "i")
    body = b"".join(map(string, item)) if kind == 8 else struct.pack(f"<{len(item)}{form}", *item)
    return struct.pack("<IIQ", 9, kind, len(item)) + body


def tensor_info(tensor: Tensor, offset: int) -> bytes:
    dimensions = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape[::-1])
    return string(tensor.name) + dimensions + struct.pack("<IQ", tensor.kind, offset)


def gguf(metadata: dict[str, Any], tensors: list[Tensor] | None = None, alignment: int = 32) -> bytes:
    entries = b"".join(string(key) + value(item) for key, item in metadata.items())
    infos, data = b"", b""
    for tensor in tensors or []:
        data += b"\0" * (-len(data) % alignment)
        infos += tensor_info(tensor, len(data) if tensor.offset is None else tensor.offset)
        data += tensor.data
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors or []), len(metadata)) + entries + infos
    return head + b"\0" * (-len(head) % alignment) + data
