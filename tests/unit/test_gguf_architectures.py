"""GGUF files of every architecture, as llama.cpp names their tensors and metadata, give the logits of transformers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
import tiny_gguf
from backends import every_kernels
from outrider import kernels
from outrider.errors import UserError
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


# Keys of a file, and what transformers has to know for the same rope. `tiny.YARN` has the factor 4.
YARN: dict[str, tuple[dict[str, float], dict[str, float]]] = {
    "betas": ({"yarn_beta_fast": 8.0, "yarn_beta_slow": 2.0}, {"beta_fast": 8.0, "beta_slow": 2.0}),
    "a whole factor": ({"yarn_attn_factor": 1.5}, {"attention_factor": 1.5}),
    "no factor": ({"yarn_attn_factor": 1.0}, {"attention_factor": 1.0}),
    "a multiplier": ({"yarn_attn_factor": 0.8782488562869419}, {"attention_factor": 1.0}),  # 1 / (0.1 ln 4 + 1)
    "a logarithm": ({"yarn_log_multiplier": 0.5}, {"mscale": 1.0, "mscale_all_dim": 0.5}),
    "all of it": ({"yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}, {}),
    "unset": ({"yarn_ext_factor": -1.0}, {}),
}


@pytest.mark.parametrize("case", YARN)
@torch.no_grad()
def test_yarn_of_a_gguf_file_is_that_of_transformers(case: str, tmp_path: Path) -> None:
    stated, known = YARN[case]
    original = tiny.original("qwen2-yarn")
    config = copy.deepcopy(original.config)
    config.rope_parameters = {**tiny.YARN, **known}
    wanted_model = type(original)(config).eval()
    wanted_model.load_state_dict(original.state_dict())
    wanted = wanted_model(torch.tensor([TOKENS])).logits[0]
    checkpoint = open_checkpoint(str(tiny_gguf.write("qwen2-yarn", tmp_path / "m.gguf", rope=stated)))
    logits, _ = tiny.run(build(checkpoint, kernels.load("cpu")), TOKENS, 7)
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)
    assert not known or (wanted - original(torch.tensor([TOKENS])).logits[0]).abs().max() > 1e-2


def test_yarn_that_extrapolates_in_part_is_refused(tmp_path: Path) -> None:
    path = tiny_gguf.write("qwen2-yarn", tmp_path / "m.gguf", rope={"yarn_ext_factor": 0.5})
    with pytest.raises(UserError, match=r"`qwen2.rope.scaling.yarn_ext_factor` is `0.5`"):
        open_checkpoint(str(path))
