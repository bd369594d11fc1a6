"""A memory-mapped model: its configuration, and its weights under Hugging Face names."""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError
from ..kernels import Weight
from ..kernels.quantization import FORMATS
from .quantized import QuantizedMatrix


@dataclass(frozen=True)
class Stored:
    """A tensor as a view of its mapped file. Nothing is copied before `load`."""

    kind: str  # a key of quantization.FORMATS
    shape: tuple[int, ...]
    data: Tensor  # floats of `shape`, or uint8 [N, bytes per row]
    interleaved_heads: int = 0  # heads whose rotary pairs are adjacent rows; 0: pairs are half a head apart
    rows: np.ndarray | None = None  # [N]: the stored row of each row; None: in order
    columns: np.ndarray | None = None  # [K]: the stored column of each column; None: in order

    def load(self) -> Weight:
        rows = self.rows
        if self.interleaved_heads:
            rows = np.arange(self.shape[0]).reshape(self.interleaved_heads, -1, 2).swapaxes(1, 2).ravel()  # [N]
        if rows is not None:
            # Whole rows move, so quantized rows work like floats. NumPy moves them on this thread: waking torch's
            # threads would take ten times as long.
            permuted = self.data.view(torch.uint8).view(len(rows), -1).numpy().take(rows, axis=0)  # [N, bytes per row]
            data = torch.from_numpy(permuted).view(self.data.dtype).view(self.data.shape)
            return Weight(self.kind, self.shape, data)
        if self.columns is not None:
            return self._with_columns(self.columns)
        return Weight(self.kind, self.shape, self.data)

    def _with_columns(self, columns: np.ndarray) -> Weight:
        """Move the columns in whole blocks if they allow it; else state the input of each stored column."""
        block = FORMATS[self.kind]
        firsts = columns.reshape(-1, block.elements)[:, 0] if len(columns) % block.elements == 0 else columns[:0]
        blocks = (firsts // block.elements).repeat(block.elements) * block.elements
        if not np.array_equal(blocks + np.arange(len(blocks)) % block.elements, columns):
            return Weight(self.kind, self.shape, self.data, torch.from_numpy(np.argsort(columns).astype(np.int32)))
        units = self.data.view(torch.uint8).view(self.shape[0], len(firsts), block.bytes).numpy()
        moved = torch.from_numpy(units.take(firsts // block.elements, axis=1))
        return Weight(self.kind, self.shape, moved.view(self.shape[0], -1).view(self.data.dtype).view(self.data.shape))

    @property
    def bytes(self) -> int:
        return self.data.numel() * self.data.element_size()


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    config: dict[str, Any]  # keys of a Hugging Face config.json, for GGUF files too
    tensors: Mapping[str, Stored | QuantizedMatrix]  # by Hugging Face name
    tokenizer_source: Path | Mapping[str, Any]  # for Tokenizer.open: a folder, or GGUF metadata
    generation: dict[str, Any] = field(default_factory=dict)  # bos_token_id: int | None, eos_token_id: list[int], ...
    norms_are_offset: bool = False  # norm weights are stored minus 1
    mappings: tuple[mmap.mmap, ...] = ()  # mapped files that `tensors` view

    def names(self) -> list[str]:
        return list(self.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def weight(self, name: str) -> Weight:
        if name not in self.tensors:
            raise UserError(f"`{self.path}` has no tensor `{name}`: the checkpoint is incomplete, fetch it again")
        return self.tensors[name].load()

    def release(self) -> None:
        """Return the memory of the pages read so far. The files stay mapped and are read again if needed."""
        for mapped in self.mappings:
            mapped.madvise(mmap.MADV_DONTNEED)

    @property
    def end_ids(self) -> list[int]:
        """Return the end-of-text tokens."""
        return list(self.generation.get("eos_token_id", []))

    @cached_property
    def bytes(self) -> int:
        return sum(stored.bytes for stored in self.tensors.values())

    @cached_property
    def float32(self) -> bool:
        """Return True if every matrix is float32."""
        matrices = [stored for stored in self.tensors.values() if len(stored.shape) > 1]
        return bool(matrices) and all(stored.kind == "f32" for stored in matrices)


def map_file(path: Path) -> mmap.mmap:
    """Map a file: pages are read on first access, and writes stay private."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except ValueError:
        raise UserError(f"`{path}` is empty: fetch it again") from None
    except OSError as error:
        raise UserError(f"cannot read `{path}`: {error.strerror}") from None


def view(mapped: mmap.mmap, offset: int, size: int, dtype: torch.dtype | None, shape: tuple[int, ...]) -> Tensor:
    """View `size` bytes of a mapped file: as numbers of `shape`, or, without a dtype, as uint8 [N, bytes per row]."""
    if size == 0:
        return torch.empty(shape, dtype=dtype or torch.uint8)
    raw = torch.frombuffer(mapped, dtype=torch.uint8, count=size, offset=offset)
    if dtype is None:
        return raw.view(math.prod(shape[:-1]), -1)
    return raw.view(dtype).view(shape)


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read `{path}`: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"`{path}` is not valid JSON ({error}): fetch it again") from None
    if not isinstance(value, dict):
        raise UserError(f"`{path}` is not a JSON object: fetch it again")
    return value


def listed_ids(*values: Any) -> list[int]:
    """Return the token ids in `eos_token_id` fields, each of which holds one, several or none."""
    tokens: list[int] = []
    for value in values:
        ids = value if isinstance(value, list) else [value]
        tokens += [token for token in ids if type(token) is int and token >= 0 and token not in tokens]
    return tokens
