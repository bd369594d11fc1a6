"""Matrices of a head that are stored in quantized blocks, as bytes: `NAME.q8_0` or `NAME.q5_1`.

A Packed has the shape of the matrix and can be indexed by rows, as a tensor can, until a backend takes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ...errors import UserError
from ...kernels import Weight
from ...kernels.quantization import FORMATS

KINDS = ("q8_0", "q5_1")


@dataclass(frozen=True)
class Packed:
    """A quantized matrix."""

    kind: str
    data: Tensor  # [N, bytes per row] uint8

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of the matrix (N, K)."""
        block = FORMATS[self.kind]
        return self.data.shape[0], self.data.shape[1] // block.bytes * block.elements

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return prod(self.shape)

    def __getitem__(self, rows: Tensor | slice) -> Packed:
        return Packed(self.kind, self.data[rows])

    def weight(self) -> Weight:
        return Weight(self.kind, self.shape, self.data)


Held = Tensor | Packed


def unpack(found: dict[str, Tensor], path: object) -> dict[str, Held]:
    """Return the tensors of a file by the names of their matrices, without the suffix of the format."""
    held: dict[str, Held] = {}
    for name, tensor in found.items():
        plain, _, kind = name.rpartition(".")
        if kind not in KINDS or not plain.endswith(".weight"):
            held[name] = tensor
            continue
        if tensor.dtype != torch.uint8 or tensor.dim() != 2 or tensor.shape[1] % FORMATS[kind].bytes:
            raise UserError(
                f"`{path}` stores the tensor `{name}` as {tensor.dtype} of shape {list(tensor.shape)}, which are no "
                f"rows of {kind} blocks: fetch it again"
            )
        held[plain] = Packed(kind, tensor)
    return held
