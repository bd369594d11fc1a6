"""Heads that draft some of the target's tokens read those rows of its matrix alone, and get the same logits."""

from __future__ import annotations

import pytest
import torch

import tiny
from outrider import kernels
from outrider.models import build

IDS = torch.tensor([0, 3, 4, 17, 40, 41, 90])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("dtype", "quantize"), [(torch.float32, None), (torch.bfloat16, None), (torch.float32, "int8")]
)
def test_rows_of_a_head_give_its_logits(backend: str, name: str, dtype: torch.dtype, quantize: str | None) -> None:
    model = build(tiny.checkpoint(name, dtype), kernels.load(backend), quantize)
    hidden = torch.randn(5, model.config.width, generator=torch.Generator().manual_seed(0))
    wanted = model.logits(hidden)[:, IDS]  # [5, U]
    found = model.ops.norm_linear(hidden, model.norm, model.config.eps, model.head_rows(IDS))
    assert wanted.std() > 0.1
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
