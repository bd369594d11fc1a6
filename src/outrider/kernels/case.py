"""What a case is: an operation, how to make its inputs, and how close to the reference is equal. See cases.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import Kernels
from .blocks import FORMATS

Run = Callable[[Sequence[int] | None], tuple[Tensor, ...]]


class Tolerance(float):
    """Largest error, relative to the root mean square of the result, where activations are fp32.

    `loose`: where they are rounded to the dtype of what they are multiplied with, as on CUDA.
    """

    loose: float

    def __new__(cls, exact: float, loose: float) -> Tolerance:
        found = super().__new__(cls, exact)
        found.loose = loose
        return found

    def __rmul__(self, layers: float) -> Tolerance:
        return Tolerance(layers * float(self), layers * self.loose)


LOOSE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 3e-2}
# Quantised kernels round activations to 15 bits a row, to 12 bits with a scale per 32 inputs, or to bf16; the k formats
# keep the scales of groups as halves.
ROUNDED = 4e-3
TOLERANCE = {
    kind: Tolerance(
        1e-5 if form.dtype else ROUNDED + 2e-3 if kind.endswith("_k") else ROUNDED,
        LOOSE[form.dtype or torch.bfloat16],
    )
    for kind, form in FORMATS.items()
}
TOLERANCE["bf16"] = Tolerance(5e-5, LOOSE[torch.bfloat16])  # AMX multiplies rows of 16 bits


def beside(kind: str, pages: torch.dtype) -> Tolerance:
    """With weights of this kind, and keys and values of this dtype."""
    return Tolerance(TOLERANCE[kind], max(TOLERANCE[kind].loose, LOOSE[pages]))


@dataclass(frozen=True)
class Case:
    op: str
    name: str
    items: int  # tokens, or rows of logits
    tolerance: float  # see TOLERANCE; ids are always equal
    build: Callable[[Kernels, int], Run]
    bytes: int = 0  # of weights, keys and values that one run reads, where that is the cost
    timed: bool = False  # of a size that is worth timing

    @property
    def loose(self) -> float:
        """The tolerance of a backend that rounds activations, see Tolerance."""
        return self.tolerance.loose if isinstance(self.tolerance, Tolerance) else self.tolerance


def difference(found: Tensor, expected: Tensor) -> float:
    """Largest error relative to the root mean square of `expected`; infinite when ids or shapes differ.

    Stored halves may fall on either side of a rounding, so one unit in their last place is no error.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return torch.inf
    if not expected.dtype.is_floating_point or expected.numel() == 0:
        return 0.0 if torch.equal(found, expected) else torch.inf
    finite = expected.isfinite()
    if not torch.equal(found[~finite], expected[~finite]):
        return torch.inf
    last = 0.0 if expected.dtype == torch.float32 else torch.finfo(expected.dtype).eps
    found, expected = found[finite].double(), expected[finite].double()
    excess = ((found - expected).abs() - last * expected.abs()).clamp(min=0)
    size = expected.square().mean().sqrt()
    return float(excess.max() / size) if expected.numel() else 0.0


def listed(items: Sequence[int] | None, count: int) -> list[int]:
    """The items that are run: these, or all."""
    return list(range(count)) if items is None else list(items)


def pick(x: Tensor, items: Sequence[int] | None) -> Tensor:
    """The chosen rows, always in memory of their own: some operations work in place."""
    return x.clone() if items is None else x[list(items)]
