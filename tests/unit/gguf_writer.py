"""Small GGUF files in memory, right ones and hostile ones: their parts are ours, how they are put together is not."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from outrider.weights.gguf_writer import tensor_info, text, value

F32, F16, Q4_0, Q8_0, IQ2_XXS = 0, 1, 2, 8, 16
string = text


@dataclass
class Tensor:
    name: str
    shape: tuple[int, ...]  # outermost first
    data: bytes
    kind: int = F32
    offset: int | None = None  # None: behind the one before


def gguf(metadata: dict[str, Any], tensors: list[Tensor] | None = None, alignment: int = 32) -> bytes:
    entries = b"".join(text(key) + value(item) for key, item in metadata.items())
    infos, data = b"", b""
    for tensor in tensors or []:
        data += b"\0" * (-len(data) % alignment)
        offset = len(data) if tensor.offset is None else tensor.offset
        infos += tensor_info(tensor.name, tensor.shape, tensor.kind, offset)
        data += tensor.data
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors or []), len(metadata)) + entries + infos
    return head + b"\0" * (-len(head) % alignment) + data
