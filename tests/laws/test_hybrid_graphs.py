"""Hybrid models on a device that captures graphs: multi-step runs, replays, drafts and snapshots change no bit.

`reference` runs over a device that pretends to capture; with a GPU, its own graphs run too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import tiny_heads
from backends import backends, settings
from fake_device import FakeDevice
from laws.mix import BASE, PROMPT, visible, with_options
from laws.test_multi_step_runs import watch_runs
from outrider import LLM, Output

PARAMS = [
    replace(BASE, max_tokens=21),
    replace(BASE, max_tokens=9, temperature=3.0),
    replace(BASE, max_tokens=13, temperature=1.2, top_k=9),
    replace(BASE, max_tokens=16, temperature=2.0, n=2),
]
PROMPTS = [PROMPT, PROMPT[:33], [*PROMPT, *PROMPT[4:9]], PROMPT[:35]]
METHODS = ("none", "ngram", "eagle3", "mtp", "dflash", "draft_model", "tree")


@pytest.fixture(scope="module", params=backends("reference"))
def llm_of(request: pytest.FixtureRequest, tiny_folder, tmp_path_factory) -> Iterator[Callable[..., LLM]]:
    def make(model: str, method: str = "none", **options: object) -> LLM:
        return LLM(
            str(tiny_folder(model)),
            speculate=speculate(method, tmp_path_factory.mktemp(method)),
            **{**settings(request.param), "page_size": 8, **options},
        )

    with pytest.MonkeyPatch.context() as patch:
        if request.param == "reference":
            patch.setattr("outrider.engine.open_device", lambda backend: FakeDevice())
        yield make


def speculate(method: str, folder: Path) -> str:
    if method == "none":
        return method
    name = "eagle3" if method == "tree" else method
    options: dict[str, object] = {"width": 5, "branches": 2} if method == "tree" else {"width": 3}
    return with_options(name, adaptive="no", **{**tiny_heads.make(name, folder), **options})


def talk(llm: LLM) -> list[Output]:
    """Return the answers to a few prompts, and to the next turn of each."""
    first = llm.generate(PROMPTS, PARAMS)
    following = [
        [*prompt, *output.completions[0].token_ids, *PROMPT[:7]] for prompt, output in zip(PROMPTS, first, strict=True)
    ]
    outputs = first + llm.generate(following, PARAMS) + llm.generate(following[:1], PARAMS[:1])
    llm.engine.scheduler.check()
    return outputs


@pytest.fixture(scope="module")
def expected(llm_of: Callable[..., LLM]) -> dict[str, list[object]]:
    """The answers of plain steps without graphs and without a cache."""
    options = {"prefix_cache": False, "decode_steps": 1, "cudagraph_mode": "NONE"}
    return {model: list(map(visible, talk(llm_of(model, **options)))) for model in ("qwen3-next", "granite4-moe")}


@pytest.mark.parametrize("mode", ["FULL", "FULL_DECODE_ONLY"])
@pytest.mark.parametrize("method", METHODS)
def test_graphs_and_multi_step_runs_change_no_bit(llm_of, expected, method: str, mode: str) -> None:
    model = "granite4-moe" if method == "ngram" or (method, mode) == ("none", "FULL") else "qwen3-next"
    llm = llm_of(model, method, decode_steps=4, cudagraph_mode=mode)
    runs = watch_runs(llm)
    outputs = talk(llm)
    assert list(map(visible, outputs)) == expected[model]
    assert llm.engine.runner.graphs.captured
    assert method == "tree" or max(runs) > 1
    assert outputs[-1].stats.cached_tokens >= len(PROMPT), "the second turn was not cached"
    drafted, accepted = (
        sum(getattr(output.stats.speculation, name) for output in outputs) for name in ("drafted", "accepted")
    )
    assert method == "none" or drafted > accepted
    assert method != "ngram" or accepted > 0
