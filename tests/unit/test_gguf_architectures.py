"""GGUF files of every architecture, as llama.cpp names their tensors and metadata, give the logits of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
import tiny_gguf
from backends import every_kernels
from outrider import kernels
from outrider.models import build
from outrider.weights import open_checkpoint

TOKENS = tiny.prompt(23)


@pytest.fixture(params=every_kernels())
def ops(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize("name", tiny_gguf.ARCHITECTURES)
@torch.no_grad()
def test_gguf_files_give_the_logits_of_transformers(name: str, ops: kernels.Kernels, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(tiny_gguf.write(name, tmp_path / "m.gguf")))
    logits, _ = tiny.run(build(checkpoint, ops), TOKENS, 7)
    wanted = tiny.original(name)(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)
