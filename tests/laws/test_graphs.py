"""A replay gives what running gives: tokens, texts, log-probabilities, and what was drafted and kept.

On a device that records, batches are padded, and all that a record reads stays in place. So whatever its owner does not
fill anew is poisoned between any two uses. `reference` runs over a device that pretends to record; where there is a
GPU, its own graphs run too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny_heads
from backends import backends, settings
from fake_device import FakeDevice
from laws.mix import BASE, PROMPT, visible, with_options
from laws.test_multi_step_runs import count, watch_runs
from laws.test_variants import VARIANTS
from outrider import LLM, SamplingParams
from outrider.multi_step import drafting
from outrider.multi_step.loop import RunBuffers
from outrider.speculation.drafters.chain_builder import StateChains
from outrider.speculation.drafters.pass_graphs import PassGraphs
from outrider.warm_up import drafters_of

LARGE = 1 << 30  # an index that no tensor has
PROMPTS = [PROMPT[:12], PROMPT[:5], PROMPT[3:12], PROMPT[7:], PROMPT[:1]]
PARAMS = [
    replace(BASE, max_tokens=7),
    replace(BASE, max_tokens=4, temperature=3.0),
    replace(BASE, max_tokens=5, temperature=1.2, top_k=9, top_p=0.9, min_p=0.05),
    replace(BASE, max_tokens=8, temperature=2.0),
    replace(BASE, max_tokens=4, temperature=2.5, ignore_eos=False),
]
HEADS = ("eagle", "eagle3", "peagle", "mtp", "dflash", "dspark", "medusa", "draft_model")
LOOKUPS = ("ngram", "suffix", "prediction")
TREES = {"tree": "eagle3", "block tree": "dspark"}
COMBINED = "combined drafters"
DRAWN = {"verify": "rejection", "draft": "probabilistic"}


def speculate(name: str, folder: Path) -> str:
    """How an engine is told to use the method of this name, over a tiny drafter in `folder`."""
    if name in ("none", *LOOKUPS):
        return name if name == "none" else f"{name}:adaptive=no,width=2"
    options: dict[str, Any] = {"width": 2}
    if name == "modules":
        name, options = VARIANTS["a module for each token"](folder)
    elif name == COMBINED:
        head = {f"eagle3.{key}": value for key, value in tiny_heads.make("eagle3", folder).items()}
        name, options = "ngram+eagle3", {**head, "eagle3.width": 3}
    elif name in TREES:
        name, options = TREES[name], {**tiny_heads.make(TREES[name], folder), "width": 5, "branches": 2}
    elif name == "rejection":
        name, options = "eagle3", {**tiny_heads.make("eagle3", folder), **DRAWN, "width": 3}
    else:
        options |= tiny_heads.make(name, folder)
    return with_options(name, adaptive="no", **options)


@dataclass
class Stage:
    """Engines over one model on a device that captures graphs."""

    backend: str
    model: str
    heads: Path
    eager: dict[tuple[str, int], list[object]] = field(default_factory=dict)

    def llm(self, method: str, mode: str, decode_steps: int = 2) -> LLM:
        options = {**settings(self.backend), "decode_steps": decode_steps, "prefix_cache": False}
        given = speculate(method, self.heads / method)
        return LLM(self.model, speculate=given, cudagraph_mode=mode, **options)

    def expected(self, method: str, decode_steps: int = 2) -> list[object]:
        """Return the answers without captured graphs."""
        key = (method, decode_steps)
        if key not in self.eager:
            llm = self.llm(method, "NONE", decode_steps)
            self.eager[key] = answers(llm, asked(method, decode_steps))
            assert not llm.engine.runner.graphs.captured
        return self.eager[key]


@pytest.fixture(scope="module", params=backends("reference"))
def stage(request: pytest.FixtureRequest, tiny_folder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "reference":
            patch.setattr("outrider.engine.open_device", lambda backend: FakeDevice())
        yield Stage(request.param, str(tiny_folder()), tmp_path_factory.mktemp("heads"))


def asked(method: str, decode_steps: int) -> list[SamplingParams]:
    if decode_steps == 1:  # longer texts, so that a batch of four rows is captured with trees too
        return [replace(own, logprobs=3, max_tokens=own.max_tokens + 5) for own in PARAMS]
    if method == "prediction":
        return [replace(own, prediction=tuple(range(3, 40))) for own in PARAMS]
    if method == "rejection":  # at this temperature drafts are accepted at every depth, but not always
        return [replace(own, temperature=own.temperature or 2.0) for own in PARAMS]
    return PARAMS


def answers(llm: LLM, params: list[SamplingParams]) -> list[object]:
    """Run five rows that end one after another, then three. No step may fail: its rows would run alone."""
    failures = []
    step = llm.engine.runner.step

    def watched(planned):  # type: ignore[no-untyped-def]
        try:
            return step(planned)
        except Exception as failure:
            failures.append(failure)
            raise

    llm.engine.runner.step = watched  # type: ignore[method-assign]
    outputs = llm.generate(PROMPTS, params) + llm.generate(PROMPTS[:3], params[:3])
    assert not failures
    llm.engine.scheduler.check()
    return [(visible(output), count(output)) for output in outputs]


def captured(llm: LLM, kind: str) -> list[Any]:
    """Return the keys of the captured graphs of one kind, without the kind."""
    return [key[1:] for key in llm.engine.runner.graphs.captured if key[0] == kind]


# ---- poison ----

# Written once, when the DecodeState is built. The rest is filled for each multi-step run or decode step.
CONSTANT = {"ids", "starts", "query_starts", "parents", "num_drafted", "unsampled", "depths", "sampled"}
HOLDERS = {
    "state",
    "drafter",
    "sampling",
    "batch",
    "verify_inputs",
    "chains",
    "integers",
    "floats",
    "seeds",
    "tables",
    "copies",
}


def spoil(tensor: Tensor) -> None:
    tensor.fill_(math.nan if tensor.is_floating_point() else min(LARGE, torch.iinfo(tensor.dtype).max))


def changing(thing: object) -> Iterator[Tensor]:
    for name, value in vars(thing).items():
        if isinstance(value, Tensor):
            if name not in CONSTANT:
                yield value
        elif name in HOLDERS and value is not None:
            yield from changing(value)


def poison(buffers: RunBuffers) -> None:
    """Poison all buffers before a multi-step run."""
    buffers.requests = []  # their temperatures and seeds are gone as well
    for tensor in changing(buffers):
        spoil(tensor)
    buffers.verify_inputs.tokens.view(buffers.state.rows, -1)[:, 0] = -1  # the newest token of a row is no draft, ever


def poison_results(buffers: RunBuffers, kind: str) -> None:
    """Poison the results that one part of a decode step must fill completely."""
    state, drafter, batch = buffers.state, buffers.drafter, buffers.state.batch
    filled: dict[str, list[Tensor | None]] = {
        "target": [
            buffers.output,
            state.ran_positions,
            state.last_accepted,
            state.hidden,
            batch.tokens,
            batch.positions,
            batch.slots,
        ],
        "extend": [getattr(drafter, "states", None), getattr(drafter, "latest", None)],
        "decode": [state.drafts, state.estimates, getattr(drafter, "logits", None)],
    }
    for tensor in filled[kind]:
        if tensor is not None:
            spoil(tensor)


def all_passes(llm: LLM) -> list[PassGraphs]:
    """Return what runs the passes of all drafters in steps with the host."""
    drafters = [each for proposer in llm.engine.spec_manager.methods.values() for each in drafters_of(proposer)]
    return [value for drafter in drafters for value in vars(drafter).values() if isinstance(value, PassGraphs)]


def poison_steps(llm: LLM) -> None:
    """Poison what the graphs of steps with the host read and write."""
    runner = llm.engine.runner
    for tensor in [inputs.tensor for inputs, _ in runner.batches.values()] + list(runner.graph_outputs.values()):
        spoil(tensor)
    for passes in all_passes(llm):
        for buffers in passes.buffers.values():
            spoil(buffers.inputs.tensor)
        for tensor in [*passes.features.values(), *passes.states.values()]:
            spoil(tensor)


def poisoned(llm: LLM) -> LLM:
    """Poison every buffer that a captured graph reads before each step, multi-step run or decode step fills it."""
    runner, multi_step = llm.engine.runner, llm.engine.runner.multi_step
    gather, fill, run, gather_run = runner.gather, multi_step.fill, runner.graphs.run, runner.gather_run

    def gather_anew(rows):  # type: ignore[no-untyped-def]
        poison_steps(llm)
        return gather(rows)

    def gather_run_anew(rows, count, width):  # type: ignore[no-untyped-def]
        poison_steps(llm)
        return gather_run(rows, count, width)

    def fill_anew(buffers, rows):  # type: ignore[no-untyped-def]
        poison(buffers)
        fill(buffers, rows)

    def run_anew(key, part):  # type: ignore[no-untyped-def]
        if key[0] == "pass":
            for passes in all_passes(llm):
                for tensor in passes.states.values():
                    spoil(tensor)
        elif key[0] != "forward":  # a part of a decode step
            poison_results(multi_step.buffers[key[1:]], key[0])
        return run(key, part)

    runner.gather, multi_step.fill, runner.graphs.run = gather_anew, fill_anew, run_anew  # type: ignore[method-assign]
    runner.gather_run = gather_run_anew  # type: ignore[method-assign]
    return llm


# ---- the tests ----


def check_multi_step_runs(stage: Stage, method: str, llm: LLM) -> None:
    assert answers(llm, asked(method, 2)) == stage.expected(method)
    on_host = method in ("none", "suffix", "prediction")
    for kind in ("target",) if on_host else ("target", "extend", "decode"):
        assert {key[1] for key in captured(llm, kind)} >= {8, 4}, kind  # five rows, and three


@pytest.mark.parametrize("method", ["none", *LOOKUPS, *HEADS, "modules", "rejection"])
def test_multi_step_runs_read_nothing_stale(stage: Stage, method: str) -> None:
    check_multi_step_runs(stage, method, poisoned(stage.llm(method, "FULL")))


def test_the_host_looks_up_after_prompts_of_any_length(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Lookups on the device use graphs after long prompts; those of `suffix` have none."""
    monkeypatch.setattr(drafting, "HOST_TOKENS", 0)
    check_multi_step_runs(stage, "suffix", stage.llm("suffix", "FULL"))
    assert not caplog.records  # no drafter failed


# Each beside the others, and beside a row without any.
PROCESSED = [
    replace(PARAMS[0], max_tokens=12, repetition_penalty=1.4, logprobs=2),
    replace(PARAMS[1], presence_penalty=0.6, frequency_penalty=0.3, logit_bias={5: 1.5}),
    replace(PARAMS[2], max_tokens=10),
    replace(PARAMS[3], logprobs=0, allowed_token_ids=range(3, 60), bad_words=["!#", "%"]),
    replace(PARAMS[4], min_tokens=3, logit_bias={2: 4.0}, banned_token_ids=[9]),
]


@pytest.mark.parametrize("method", ["none", "ngram", "eagle3", "dspark", "rejection"])
def test_runs_with_processors_and_logprobs_read_nothing_stale(stage: Stage, method: str) -> None:
    params = [replace(own, temperature=own.temperature or 2.0) for own in PROCESSED]
    params = params if method == "rejection" else PROCESSED
    stepwise = answers(stage.llm(method, "NONE", 1), params)
    assert answers(stage.llm(method, "NONE"), params) == stepwise
    llm = poisoned(stage.llm(method, "FULL"))
    runs = watch_runs(llm)
    assert answers(llm, params) == stepwise
    assert len(runs) > 4 and captured(llm, "forward")
    for kind in () if method == "none" else ("extend", "decode"):
        assert captured(llm, kind), kind


@pytest.mark.parametrize("method", ["none", "ngram"])
def test_runs_with_processors_keep_the_states_of_recurrent_layers(stage: Stage, tiny_folder, method: str) -> None:
    hybrid = replace(stage, model=str(tiny_folder("qwen3-next")))
    stepwise = answers(hybrid.llm(method, "NONE", 1), PROCESSED)
    llm = poisoned(hybrid.llm(method, "FULL"))
    runs = watch_runs(llm)
    assert answers(llm, PROCESSED) == stepwise
    assert len(runs) > 4 and captured(llm, "forward")


@pytest.mark.parametrize("method", ["none", "eagle3", "rejection"])
def test_multi_step_runs_without_poison(stage: Stage, method: str) -> None:
    check_multi_step_runs(stage, method, stage.llm(method, "FULL_DECODE_ONLY"))


def check_steps(stage: Stage, method: str, llm: LLM) -> None:
    assert answers(llm, asked(method, 1)) == stage.expected(method, 1)
    for kind in ("extend", "decode") if method in (*HEADS, COMBINED) else ():  # the drafter runs as in multi-step runs
        assert {key[1] for key in captured(llm, kind)} >= {8, 4}, kind
    shapes = [shape for (shape,) in captured(llm, "forward")]
    assert {shape.rows for shape in shapes} >= {16, 4}  # five rows, and three
    assert any(shape.is_tree for shape in shapes) == (method in (*TREES, COMBINED))
    assert captured(llm, "pass") or method not in (*TREES, COMBINED)


@pytest.mark.parametrize(
    ("method", "mode"),
    [
        ("none", "FULL"),
        ("none", "FULL_DECODE_ONLY"),
        *[(name, "FULL") for name in ("ngram", *TREES, COMBINED, *HEADS, "rejection")],
    ],
)
def test_steps_of_the_host_read_nothing_stale(stage: Stage, method: str, mode: str) -> None:
    check_steps(stage, method, poisoned(stage.llm(method, mode, decode_steps=1)))


@pytest.mark.parametrize("mode", ["FULL", "FULL_DECODE_ONLY"])
def test_prompts_are_captured_only_in_full_mode(stage: Stage, mode: str) -> None:
    llm = stage.llm("none", mode)
    texts = [visible(output) for _ in range(3) for output in llm.generate(PROMPTS, replace(BASE, max_tokens=1))]
    assert texts[: len(PROMPTS)] == texts[len(PROMPTS) : 2 * len(PROMPTS)] == texts[2 * len(PROMPTS) :]
    assert bool(captured(llm, "forward")) == (mode == "FULL")


def test_an_eager_drafter_is_not_captured(stage: Stage) -> None:
    given = speculate("eagle3", stage.heads / "eager") + ",eager=yes"
    options = {**settings(stage.backend), "decode_steps": 2, "prefix_cache": False}
    llm = LLM(stage.model, speculate=given, **options)
    assert answers(llm, PARAMS) == stage.expected("eagle3")
    assert captured(llm, "target") and not any(captured(llm, kind) for kind in ("extend", "decode", "pass"))


# ---- the laws can be broken ----


def leave_starts(llm: LLM, patch: pytest.MonkeyPatch) -> None:
    gather = llm.engine.runner.gather

    def careless(rows):  # type: ignore[no-untyped-def]
        batch = gather(rows)
        batch.query_starts[len(rows) + 1 :] = 1 << 16  # more tokens than there are, but few enough to be allocated
        return batch

    patch.setattr(llm.engine.runner, "gather", careless)


def leave_slots(llm: LLM, patch: pytest.MonkeyPatch) -> None:
    gather = llm.engine.runner.gather

    def careless(rows):  # type: ignore[no-untyped-def]
        batch = gather(rows)
        batch.slots[sum(row.size for row in rows) :] = LARGE
        return batch

    patch.setattr(llm.engine.runner, "gather", careless)


def leave_tables(llm: LLM, patch: pytest.MonkeyPatch) -> None:
    fill = llm.engine.runner.multi_step.fill

    def careless(buffers, rows):  # type: ignore[no-untyped-def]
        fill(buffers, rows)
        buffers.state.batch.page_tables[len(rows) :] = LARGE

    patch.setattr(llm.engine.runner.multi_step, "fill", careless)


def leave_shares(llm: LLM, patch: pytest.MonkeyPatch) -> None:
    """Requests that are still the same get none: right without poison, and so it has to show under it."""
    fill = llm.engine.runner.multi_step.fill

    def careless(buffers, rows):  # type: ignore[no-untyped-def]
        buffers.requests = [row.request for row in rows]
        fill(buffers, rows)

    patch.setattr(llm.engine.runner.multi_step, "fill", careless)


def forget_first_logits(llm: LLM, patch: pytest.MonkeyPatch) -> None:
    """What the drafts of the last flight were drawn from does not come along."""
    fill = llm.engine.runner.multi_step.fill

    def careless(buffers, rows):  # type: ignore[no-untyped-def]
        fill(
            buffers, [row if row.draft is None else replace(row, draft=replace(row.draft, logits=None)) for row in rows]
        )

    patch.setattr(llm.engine.runner.multi_step, "fill", careless)


def forget_deep_logits(llm: LLM, patch: pytest.MonkeyPatch) -> None:
    """Only the first draft step leaves what it drew from."""
    put = StateChains.put

    def careless(self, depth, logits, sure=None):  # type: ignore[no-untyped-def]
        kept = self.logits.clone()
        drawn = put(self, depth, logits, sure)
        if depth:
            self.logits.copy_(kept)
        return drawn

    patch.setattr(StateChains, "put", careless)


Sabotage = Callable[[LLM, pytest.MonkeyPatch], None]
OTHER_TEXTS = r"^assert \[\(\(\[\(\["  # two lists of answers differ; a step that fails gives another message


# Not on a GPU: an index that is out of bounds there may end the process.
@pytest.mark.parametrize("stage", ["reference"], indirect=True)
@pytest.mark.parametrize(
    ("method", "decode_steps", "sabotage", "reason"),
    [
        ("none", 1, leave_starts, r"^assert not \[IndexError"),
        ("none", 1, leave_slots, rf"^assert not \[ValueError\('slot {LARGE} lies outside"),
        ("none", 2, leave_tables, rf"^assert not \[ValueError\('page {LARGE} of row"),
        ("none", 2, leave_shares, OTHER_TEXTS),
        ("rejection", 2, forget_first_logits, OTHER_TEXTS),
        ("rejection", 2, forget_deep_logits, OTHER_TEXTS),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_buffer_left_unfilled_is_detected(
    stage: Stage, method: str, decode_steps: int, sabotage: Sabotage, reason: str, monkeypatch
) -> None:
    stage.expected(method, decode_steps)
    llm = stage.llm(method, "FULL", decode_steps)
    sabotage(llm, monkeypatch)
    with pytest.raises(AssertionError, match=reason):
        (check_steps if decode_steps == 1 else check_multi_step_runs)(stage, method, poisoned(llm))
