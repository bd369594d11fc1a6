"""After start-up nothing is captured, compiled or run without its graph in the path of a request."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

import tiny_heads
from backends import backends, settings
from fake_device import FakeDevice
from laws.mix import visible, with_options
from outrider import LLM, SamplingParams
from outrider.bench.speed import WIDTHS, SpeedConfig, time_widths
from outrider.device import DeviceDefaults
from outrider.device.cuda import Cuda
from outrider.device.graphs import MAX_TOKENS, padded_pages, padded_rows, padded_tokens, pages_sizes, step_sizes
from outrider.kernels.compilations import COMPILATIONS
from outrider.speculation.drafters.pass_graphs import PassGraphs
from outrider.speculation.methods.ngram import NgramDrafter
from outrider.types import StructuredOutput
from outrider.warm_up import LateWork, drafters_of

BASE = SamplingParams(temperature=0.0, ignore_eos=True)
KINDS = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 1},
    "truncated": {"temperature": 1.0, "top_p": 0.9, "top_k": 7, "min_p": 0.05, "seed": 2},
    "penalties": {"frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "bias": {"logit_bias": {5: 1.0}, "banned_token_ids": [6]},
    "least length": {"min_tokens": 3},
    "log-probabilities": {"logprobs": 3, "prompt_logprobs": 2},
    "structured": {"structured": StructuredOutput("regex", "[a-f]{2,9}"), "ignore_eos": False},
    "structured, biased": {
        "structured": StructuredOutput("regex", "[a-f]{20,30}"),
        "ignore_eos": False,
        "logit_bias": {5: 1.0},
    },
}
METHODS = ("none", "ngram", "suffix", "eagle3", "dspark", "tree", "combined")


class WarmDevice(FakeDevice):
    defaults = DeviceDefaults(cache_share=0.4, step_tokens=512, decode_steps=16, warms_up=True)


@pytest.fixture(scope="module", params=backends("reference"))
def start(request: pytest.FixtureRequest, tiny_folder, tmp_path_factory) -> Iterator[object]:
    """Start engines on a device that captures everything before the first request."""

    def make(method: str, adaptive: str = "no", **options: object) -> LLM:
        given = method
        if method == "combined":
            head = tiny_heads.make("eagle3", tmp_path_factory.mktemp("head"))
            chosen = {f"eagle3.{key}": value for key, value in head.items()}
            given = with_options("ngram+eagle3", **{"adaptive": adaptive, "eagle3.width": 2, **chosen})
        elif method == "tree":
            head = tiny_heads.make("eagle3", tmp_path_factory.mktemp("head"))
            given = with_options("eagle3", **{"width": 5, "branches": 2, "adaptive": adaptive, **head})
        elif method.partition(":")[0] not in ("none", "ngram", "suffix"):
            head = tiny_heads.make(method, tmp_path_factory.mktemp("head"))
            given = with_options(method, **{"width": 2, "adaptive": adaptive, **head})
        chosen = {**settings(request.param), "max_requests": 8, "decode_steps": 16, "prefix_cache": False, **options}
        return LLM(str(tiny_folder()), speculate=given, **chosen)

    with pytest.MonkeyPatch.context() as patch:
        if request.param == "reference":
            patch.setattr("outrider.engine.open_device", lambda backend: WarmDevice())
        else:
            patch.setattr(Cuda, "defaults", replace(Cuda.defaults, warms_up=True))
        yield make


def mix(llm: LLM, batches: tuple[int, ...], lengths: tuple[int, ...]) -> list[object]:
    """Answer prompts of several lengths in batches of several sizes, with every kind of sampling."""
    texts = []
    for number, given in enumerate(KINDS.values()):
        batch, tokens = batches[number % len(batches)], lengths[number % len(lengths)]
        prompts = [
            [3 + (7 * index + offset) % 60 for offset in range(1 + 9 * index + number)] for index in range(batch)
        ]
        params = replace(BASE, max_tokens=tokens, **given)
        texts += [visible(output) for output in llm.generate(prompts, params)]
    return texts


@pytest.mark.parametrize("method", METHODS)
def test_no_request_waits_for_a_capture(start, method: str) -> None:
    llm = start(method)
    assert llm.engine.runner.graphs.frozen and llm.engine.late_work.read() == LateWork()
    texts = mix(llm, (1, 3, 8), (11, 5))
    assert llm.engine.late_work.read() == LateWork()
    assert texts == mix(start(method, cudagraph_mode="NONE"), (1, 3, 8), (11, 5))


@pytest.mark.parametrize("method", ["none", "ngram", "eagle3", "tree"])
def test_texts_outgrow_their_page_tables(
    start, method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Tables of 2, 4 and 16 pages: a text takes all three, and one of a batch may need a wider one than the others."""
    caplog.set_level(logging.DEBUG, "outrider.engine")
    monkeypatch.setattr("outrider.device.graphs.MIN_PAGES", 2)
    monkeypatch.setattr("outrider.device.graphs.WIDE_PAGES", 4)
    prompts = [[5, 6, 7], [3 + index % 50 for index in range(50)], [9] * 20]
    texts = []
    for options in ({}, {"cudagraph_mode": "NONE"}):
        llm = start(method, max_context=128, **options)
        outputs = [llm.generate(prompts[:count], replace(BASE, max_tokens=70)) for count in (1, 3)]
        texts.append([visible(output) for batch in outputs for output in batch])
        assert options or llm.engine.late_work.read() == LateWork()
    assert texts[0] == texts[1]
    assert "runs again" not in caplog.text  # no step failed


def test_lookups_after_long_prompts_are_the_same_by_graphs(start, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[3 + index % 9 for index in range(length)] for length in (50, 41, 12)]
    seen: dict[int, list[object]] = {}
    read: dict[int, int] = {}  # the most tokens of a step that the host read for a draft
    propose = NgramDrafter.propose
    for host_tokens in (30, 512):

        def watch(self, contexts, *rest, key=host_tokens):  # type: ignore[no-untyped-def]
            read[key] = max(read.get(key, 0), *[context.computed - context.start for context in contexts])
            return propose(self, contexts, *rest)

        monkeypatch.setattr(NgramDrafter, "propose", watch)
        monkeypatch.setattr("outrider.multi_step.drafting.HOST_TOKENS", host_tokens)
        llm = start("ngram:adaptive=no")
        outputs = [llm.generate([prompt], replace(BASE, max_tokens=20))[0] for prompt in prompts]
        outputs += llm.generate(prompts, replace(BASE, max_tokens=20))
        assert llm.engine.late_work.read() == LateWork()
        seen[host_tokens] = [(visible(output), output.stats.speculation) for output in outputs]
    assert seen[30] == seen[512]
    assert read[30] <= 30 and read[512] > 30


def test_measured_steps_are_replayed_and_not_counted_as_late(start) -> None:
    llm = start("eagle3")
    before = set(llm.engine.runner.graphs.captured)
    steps = time_widths(llm, SpeedConfig(prompt_tokens=5), random.Random(0))
    assert set(steps) == set(WIDTHS)
    captured = set(llm.engine.runner.graphs.captured) - before
    assert len(captured) >= len(WIDTHS) - 1  # one graph a width, but that of plain decoding was there
    with llm.engine.late_work.suspended():
        COMPILATIONS.add("kernel", is_loaded=False)
    assert llm.engine.runner.graphs.frozen and llm.engine.late_work.read() == LateWork()


@pytest.mark.parametrize("method", ["eagle3", "dspark", "tree", "combined"])
def test_prompts_and_trees_of_drafters_run_by_graphs(start, method: str) -> None:
    llm = start(method)
    device = llm.engine.device
    if not isinstance(device, FakeDevice):
        pytest.skip("only the fake device tells a replay")
    replayed: list[bool] = []

    def watched(run):  # type: ignore[no-untyped-def]
        def watch(*arguments):  # type: ignore[no-untyped-def]
            replayed.append(device.replaying)
            return run(*arguments)

        return watch

    for drafter in drafters_of(llm.engine.spec_manager.methods[llm.engine.spec_manager.plan.method]):
        for passes in vars(drafter).values():
            if isinstance(passes, PassGraphs):
                passes._run = watched(passes._run)
    mix(llm, (1, 3), (11, 5))  # prompts of at most MAX_TOKENS
    assert replayed and all(replayed)


@pytest.mark.parametrize("adaptive", ["no", "yes"])
def test_no_batch_size_or_length_waits_for_a_capture(start, adaptive: str) -> None:
    llm = start("eagle3", adaptive)
    for batch, tokens in ((1, 96), (2, 32), (3, 9), (5, 9), (6, 32), (7, 5), (8, 17)):
        llm.generate([[5, 6, 7 + index] for index in range(batch)], replace(BASE, max_tokens=tokens))
    assert llm.engine.late_work.read() == LateWork()


def test_batch_sizes_are_measured_before_the_first_request(start) -> None:
    llm = start("eagle3", "yes")
    controller = llm.engine.spec_manager.controller
    assert all(controller.latency.covers(batch) for batch in range(1, 9))  # else a whole run would draft nothing


def test_a_shape_that_was_not_captured_is_counted(start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.warm_up.WarmUp._capture_runs", lambda self: None)
    llm = start("none")
    llm.generate([[5, 6, 7]], replace(BASE, max_tokens=8))
    late = llm.engine.late_work.read()
    assert (late.captures, late.eager_runs) == (0, 7)


def test_every_batch_has_a_captured_shape() -> None:
    sizes, pages = set(step_sizes(64, 4)), pages_sizes(100_000)
    for rows in range(1, 65):
        for tokens in {rows, rows + 1, 2 * rows, 5 * rows, 100, MAX_TOKENS}:
            if rows <= tokens <= max(MAX_TOKENS, 5 * rows):
                padded = padded_rows(rows)
                assert (padded_tokens(tokens, padded), padded) in sizes
                assert padded_tokens(tokens, padded) >= tokens and padded >= rows
    assert {padded_pages(count) for count in range(1, 100_001)} == set(pages) == {32, 8192, 32768, 131072}
    assert len(sizes) * len(pages) < 100
