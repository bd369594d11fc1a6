"""A case: an operation, how to make its inputs, and the tolerance against the reference.

`Case.build(ops, seed)` prepares an operation on a backend and returns `run(items)`, which runs it for these items
(tokens, or rows of logits; None: all) and returns one entry per item. So a test can check that an item's result does
not depend on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..protocol import Kernels
from ..quantization import FORMATS

Run = Callable[[Sequence[int] | None], tuple[Tensor, ...]]


class Tolerance(float):
    """Largest error relative to the root mean square of the result, with fp32 activations.

    `loose`: if activations are rounded to the compute dtype, as on CUDA. `coarse`: if they are rounded to 12 bits with
    a scale per 32 inputs, as with AMX.
    """

    loose: float
    coarse: float

    def __new__(cls, exact: float, loose: float, coarse: float | None = None) -> Tolerance:
        found = super().__new__(cls, exact)
        found.loose, found.coarse = loose, exact if coarse is None else coarse
        return found

    def __rmul__(self, layers: float) -> Tolerance:
        return Tolerance(layers * float(self), layers * self.loose, layers * self.coarse)


LOOSE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 3e-2}
LOOSE |= {torch.int8: LOOSE[torch.float16], torch.float8_e4m3fn: LOOSE[torch.float16]}  # KV pages, read as halves
# A stored number may be rounded either way: its largest step, beside values whose largest is three times their mean.
STEPS = {torch.int8: 3 / 127, torch.float8_e4m3fn: 3 * 32 / 448}


def _tolerance(kind: str) -> Tolerance:
    """Return the tolerance of a format: quantized kernels round activations to 14 bits; k formats have fp16 scales."""
    if (dtype := FORMATS[kind].dtype) is not None:
        return Tolerance(1e-5, LOOSE[dtype])
    exact, coarse = (3e-3, 6e-3) if kind.endswith("_k") else (1e-3, 4e-3)
    return Tolerance(exact, LOOSE[torch.bfloat16], coarse)


TOLERANCE = {kind: _tolerance(kind) for kind in FORMATS}
TOLERANCE["fp8"] = Tolerance(1e-5, LOOSE[torch.bfloat16])
TOLERANCE["bf16"] = Tolerance(5e-5, LOOSE[torch.bfloat16])  # AMX multiplies rows of 16 bits


def beside(kind: str, pages: torch.dtype, stores: bool = False) -> Tolerance:
    """Return the tolerance for weights of this kind with KV pages of this dtype. stores: results are stored there."""
    step = STEPS.get(pages, 0.0) if stores else 0.0
    exact, loose, coarse = TOLERANCE[kind], max(TOLERANCE[kind].loose, LOOSE[pages]), TOLERANCE[kind].coarse
    return Tolerance(max(exact, step), max(loose, step), max(coarse, step))


@dataclass(frozen=True)
class Case:
    op: str
    name: str
    items: int  # tokens, or rows of logits
    tolerance: float  # see TOLERANCE; ids are always equal
    build: Callable[[Kernels, int], Run]
    bytes: int = 0  # weights, keys and values that one run reads, if memory bound
    timed: bool = False  # large enough to benchmark

    @property
    def loose(self) -> float:
        """Return the tolerance of a backend that rounds activations: see Tolerance."""
        return self.tolerance.loose if isinstance(self.tolerance, Tolerance) else self.tolerance

    def at(self, level: str) -> float:
        """Return the tolerance at an instruction-set level of the native kernels."""
        return self.tolerance.coarse if level == "amx" and isinstance(self.tolerance, Tolerance) else self.tolerance


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest error relative to the root mean square of `expected`; infinite if ids or shapes differ.

    Stored 16-bit floats may be rounded either way, so one unit in the last place is no error.
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
    """Return the items to run: these, or all."""
    return list(range(count)) if items is None else list(items)


def pick(x: Tensor, items: Sequence[int] | None) -> Tensor:
    """Return a copy of the chosen rows: some operations work in place."""
    return x.clone() if items is None else x[list(items)]
