"""N-gram lookups on CUDA agree with the reference, and padding rows draft nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from carried import Carried
from outrider.kernels import NgramLookup, TokenHistory, cpu, reference
from outrider.kernels.cases import CASES
from outrider.kernels.cases.case import Case, difference
from outrider.kernels.cuda import lookup
from outrider.kernels.cuda.device import DEVICE

OPS: Any = Carried(lookup, DEVICE)
pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("case", [case for case in CASES if case.op == "ngram_drafts"], ids=lambda case: case.name)
def test_cases(case: Case) -> None:
    found, meant = case.build(OPS, 1), case.build(reference, 1)
    for items in (None, [case.items - 1, 0]):
        for part, expected in zip(found(items), meant(items), strict=True):
            assert difference(part, expected) == 0.0


def test_rows_that_pad_draft_nothing() -> None:
    tables = torch.full((3, 40), -1, dtype=torch.int32)
    history = TokenHistory(torch.zeros(640, dtype=torch.int32), tables, 16)
    newest, positions = torch.zeros(3, dtype=torch.int32), torch.tensor([0, 5, 700], dtype=torch.int32)
    options = NgramLookup(1, 3, 32, torch.full((25,), 4, dtype=torch.int32))
    for ops in (OPS, cpu, reference):
        copies = torch.full((3, 3), -1, dtype=torch.int32)
        found = ops.ngram_drafts(history, options, newest, positions, positions, copies, 4)
        assert (found == -1).all() and (copies == -1).all()
