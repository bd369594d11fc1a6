"""The laws over models with sliding windows in some or all layers: window pages that are given back change no bit.

The expected answers come from engines that keep all pages in all layers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import tiny_heads
from backends import backends, settings
from fake_device import FakeDevice
from laws import oracle
from laws.mix import BASE, MIX, PROMPT, check, interrupted, plain, visible, with_options
from laws.test_multi_step_runs import watch_runs
from outrider import LLM, Output
from outrider.cache.window_pages import WindowPages
from outrider.config import most_window_pages
from outrider.engine import Engine

# One full layer of three with soft caps around; one of two with sinks; the first of three; none.
MODELS = ("gemma3", "gpt-oss", "qwen2", "mistral")
WINDOWS = {"gemma3": 5, "gpt-oss": 6, "qwen2": 6, "mistral": 5}
NAMES = ("greedy", "warm", "penalties", "stops", "two", "narrow", "beside", "predicted")
LONG = random.Random(3).choices(range(3, 101), k=70)
SAMPLED = replace(BASE, temperature=0.8, logprobs=100, max_tokens=20)
SMALL = {"page_size": 4, "max_step_tokens": 9}
DRAFTS = {
    "chain": {"wrong": 3, "width": 5},
    "tree": {"wrong": 4, "width": 8, "branches": 2},
    "wide tree": {"wrong": 5, "width": 24, "branches": 3},
}


def keeping(make: Callable[..., LLM], *args: object, **options: object) -> LLM:
    """Return an engine whose layers keep all pages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "_window", lambda self, config: 0)
        llm = make(*args, prefix_cache=False, **options)
    assert llm.engine.scheduler.windows is None
    return llm


def windows_of(llm: LLM) -> WindowPages:
    windows = llm.engine.scheduler.windows
    assert windows is not None, "no layer has window pages"
    return windows


def watch_windows(llm: LLM) -> list[tuple[int, int]]:
    """Return a list that records, after each step, how many pages and window pages requests hold."""
    used: list[tuple[int, int]] = []
    commit, cache = llm.engine.scheduler.commit, llm.engine.scheduler.cache

    def watched(step, results):  # type: ignore[no-untyped-def]
        advanced = commit(step, results)
        llm.engine.scheduler.check()
        used.append((cache.pages - cache.available, windows_of(llm).count - windows_of(llm).available))
        return advanced

    llm.engine.scheduler.commit = watched  # type: ignore[method-assign]
    return used


@pytest.fixture(scope="module")
def expected(tiny_llm) -> dict[str, object]:
    outputs = keeping(tiny_llm, "gemma3").generate([PROMPT] * len(NAMES), [plain(MIX[name]) for name in NAMES])
    return dict(zip(NAMES, map(visible, outputs), strict=True))


@pytest.mark.pairwise
@pytest.mark.parametrize("options", [SMALL, {"max_step_tokens": 7, "cache_tokens": 16 * 9}], ids=["small", "few"])
def test_no_method_changes_a_text(tiny_llm, method: str, expected, options: dict[str, int]) -> None:
    llm = tiny_llm("gemma3", speculate=method, **options)
    outputs = check(llm, expected, NAMES)
    assert any(output.stats.speculation.drafted for output in outputs if output.stats)
    check(llm, expected, NAMES)  # with the prompt in the prefix cache
    assert windows_of(llm).available == windows_of(llm).count


@pytest.mark.pairwise
def test_interrupted_requests_keep_their_text(tiny_llm, method: str, expected) -> None:
    llm = tiny_llm("gemma3", speculate=method, **SMALL)
    assert visible(interrupted(llm, MIX["warm"], {2, 3, 6})) == expected["warm"]


@pytest.mark.pairwise
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("shape", [None, *DRAFTS])
def test_window_pages_are_given_back_and_no_bit_changes(tiny_llm, model: str, shape: str | None) -> None:
    """A text of 22 pages has 22 pages at its end, but the window pages of its window and of one step."""
    wanted = keeping(tiny_llm, model, page_size=4).generate(LONG, SAMPLED)[0]
    oracle.TEXTS[tuple(LONG)] = wanted.completions[0].token_ids
    speculate = "none" if shape is None else with_options("laws.oracle", adaptive="false", **DRAFTS[shape])
    llm = tiny_llm(model, speculate=speculate, prefix_cache=False, **{**SMALL, "max_step_tokens": 32})
    used = watch_windows(llm)
    output = llm.generate(LONG, SAMPLED)[0]
    assert visible(output) == visible(wanted)
    assert shape is None or 0 < output.stats.speculation.accepted < output.stats.speculation.drafted
    drafted = 0 if shape is None else DRAFTS[shape]["width"]
    assert max(pages for pages, _ in used) >= 22
    # After a step: the window, the rest of a page at both ends, and the pages that the draft has reserved.
    assert max(windows for _, windows in used) <= most_window_pages(WINDOWS[model], 1 + drafted, 4)
    assert windows_of(llm).available == windows_of(llm).count


@pytest.mark.pairwise
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kv_dtype", ["float32", "int8", "fp8"])
def test_neighbours_chunks_and_preemption_change_no_bit(tiny_llm, model: str, kv_dtype: str) -> None:
    source = random.Random(2)
    lengths = 33, 58, 17, 40, 2, 3, 1, 2, 3, 2
    prompts = [LONG, *([source.randrange(3, 101) for _ in range(length)] for length in lengths)]
    params = [replace(SAMPLED, seed=n, max_tokens=20 + n) for n in range(len(prompts))]
    wanted = list(map(visible, keeping(tiny_llm, model, kv_dtype=kv_dtype).generate(prompts, params)))
    for step_tokens in (1, 9, 64):
        llm = tiny_llm(model, kv_dtype=kv_dtype, page_size=4, max_step_tokens=step_tokens)
        assert list(map(visible, llm.generate(prompts, params))) == wanted
    # A cache that holds little more than the longest text, and few windows: requests wait and are preempted.
    llm = tiny_llm(
        model, kv_dtype=kv_dtype, page_size=4, max_step_tokens=16, cache_tokens=128 if model != "mistral" else 40
    )
    outputs = llm.generate(prompts, params)
    assert list(map(visible, outputs)) == wanted
    assert any(output.stats.preemptions for output in outputs)
    llm.engine.scheduler.check()


@pytest.mark.pairwise
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("shape", [None, "chain", "tree"])
def test_cached_prefixes_change_no_bit(tiny_llm, model: str, shape: str | None) -> None:
    """The same prompt, the next turn, a branch behind a window that is still stored, and one that is not."""
    cold = keeping(tiny_llm, model, page_size=4)
    answer = cold.generate(LONG, SAMPLED)[0].completions[0].token_ids
    other = random.Random(4).choices(range(3, 101), k=70)
    prompts = [LONG, LONG, [*LONG, *answer, *LONG[:8]], [*LONG[:50], *LONG[:9]], other, LONG, LONG]
    expected = [cold.generate(prompt, SAMPLED)[0] for prompt in prompts]
    for prompt, output in zip(prompts, expected, strict=True):
        oracle.TEXTS[tuple(prompt)] = output.completions[0].token_ids
    speculate = "none" if shape is None else with_options("laws.oracle", adaptive="false", **DRAFTS[shape])
    llm = tiny_llm(model, speculate=speculate, **SMALL)
    outputs = [llm.generate(prompt, SAMPLED)[0] for prompt in prompts]
    assert list(map(visible, outputs)) == list(map(visible, expected))
    assert [cached(output) for output in outputs] == [0, 68, 88, 48, 0, 68, 68]
    few = tiny_llm(
        model, speculate=speculate, page_size=2, max_step_tokens=9, cache_tokens=130 if model != "mistral" else 24
    )
    evicted = []
    for _ in range(2):
        outputs = [few.generate(prompt, SAMPLED)[0] for prompt in prompts]
        assert list(map(visible, outputs)) == list(map(visible, expected))
        evicted.append(cached(outputs[5]))
        few.engine.scheduler.check()
    assert min(evicted) < 68


def cached(output: Output) -> int:
    assert output.stats is not None
    return output.stats.cached_tokens


# ---- on a device that captures graphs: `reference` over one that pretends to; with a GPU, its own graphs run too ----

METHODS = ("none", "ngram", "eagle3", "dflash", "draft_model", "tree")
PARAMS = [replace(BASE, max_tokens=21 - 4 * n, temperature=float(n)) for n in range(4)]
PROMPTS = [PROMPT, PROMPT[:33], [*PROMPT, *PROMPT[4:9]], PROMPT[:35]]


@pytest.fixture(scope="module", params=backends("reference"))
def captured_llm(request: pytest.FixtureRequest, tiny_folder, tmp_path_factory) -> Iterator[Callable[..., LLM]]:
    def make(method: str = "none", **options: object) -> LLM:
        speculate, name = "none", "eagle3" if method == "tree" else method
        if method != "none":
            own: dict[str, object] = {"width": 5, "branches": 2} if method == "tree" else {"width": 3}
            own = {**tiny_heads.make(name, tmp_path_factory.mktemp(method)), **own}
            speculate = with_options(name, adaptive="no", **own)
        folder: Path = tiny_folder("gemma3")
        return LLM(str(folder), speculate=speculate, **{**settings(request.param), "page_size": 4, **options})

    with pytest.MonkeyPatch.context() as patch:
        if request.param == "reference":
            patch.setattr("outrider.engine.open_device", lambda backend: FakeDevice())
        yield make


def talk(llm: LLM) -> list[Output]:
    """Return the answers to a few prompts, and to the next turn of each."""
    first = llm.generate(PROMPTS, PARAMS)
    following = [
        [*prompt, *output.completions[0].token_ids, *PROMPT[:7]] for prompt, output in zip(PROMPTS, first, strict=True)
    ]
    outputs = first + llm.generate(following, PARAMS)
    llm.engine.scheduler.check()
    return outputs


@pytest.fixture(scope="module")
def without_graphs(captured_llm: Callable[..., LLM]) -> list[object]:
    return list(map(visible, talk(keeping(captured_llm, cudagraph_mode="NONE"))))


@pytest.mark.parametrize("method", METHODS)
def test_graphs_and_multi_step_runs_change_no_bit(captured_llm, without_graphs, method: str) -> None:
    llm = captured_llm(method, decode_steps=4, cudagraph_mode="FULL")
    runs, used = watch_runs(llm), watch_windows(llm)
    outputs = talk(llm)
    assert list(map(visible, outputs)) == without_graphs
    assert llm.engine.runner.graphs.captured
    assert method == "tree" or max(runs) > 1
    assert outputs[-1].stats.cached_tokens >= 32, "the second turn was not cached"
    assert max(windows for _, windows in used) < max(pages for pages, _ in used)
