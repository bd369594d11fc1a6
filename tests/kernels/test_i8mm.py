"""Level i8mm has the bits of level neon. `make test-i8mm` runs this in an emulator."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from outrider.kernels import cpu
from outrider.kernels.cases import inputs
from outrider.kernels.cpu import _native, fast_activations
from outrider.kernels.quantization import FORMATS

OUTPUTS, INPUTS = 52, 2304  # an incomplete tile of outputs; more inputs than are multiplied at once
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17)  # one to three panels, even and odd
pytestmark = pytest.mark.skipif(
    "i8mm" not in cpu.facts()["levels"], reason="this processor has no int8 matrix instructions: run `make test-i8mm`"
)


@pytest.fixture(autouse=True)
def level() -> Iterator[None]:
    before = cpu.facts()["level"]
    yield
    _native.choose_level(before)


@pytest.mark.parametrize("kernels", [cpu, fast_activations], ids=["i8mm-high", "i8mm-fast"])
@pytest.mark.parametrize("kind", [kind for kind, block in FORMATS.items() if block.dtype is None])
def test_results_are_those_of_neon(kind: str, kernels: ModuleType) -> None:
    matrix = kernels.matrix(inputs.random_weight(inputs.generator(7), kind, OUTPUTS, INPUTS))
    x = inputs.normal(inputs.generator(8), max(ROWS), INPUTS)
    x[::3, 64:96] *= 10  # low parts in some rows of a panel
    for rows in ROWS:
        found = {}
        for level in ("neon", "i8mm"):
            _native.choose_level(level)
            found[level] = kernels.linear(x[:rows].contiguous(), matrix)
        assert torch.equal(found["i8mm"], found["neon"]), rows
