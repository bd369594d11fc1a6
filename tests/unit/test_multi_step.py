"""Multi-step runs, piece by piece: how many steps there are pages for, what they return, how long they last."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_runner import make

import tiny_heads
from backends import settings
from fake_device import FakeDevice
from outrider import LLM, SamplingParams
from outrider.device import Cpu
from outrider.multi_step.loop import read_results
from outrider.multi_step.planner import MAX_READ, MAX_SECONDS, MIN_STEPS, RunLength, best_length
from outrider.multi_step.progress import (
    ENDED_ROWS,
    LOOKUPS,
    MIN_QUEUED,
    QUEUED_SECONDS,
    RowProgress,
    RunOutputs,
    UnverifiedDrafts,
    as_draft,
    queued_steps,
)
from outrider.request import Request, Row, RowResult, Step
from outrider.scheduler import Scheduler
from outrider.types import DecodeStep, Draft, FinishReason, StructuredOutput

PARAMS = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
PROMPT = [5, 6, 7, 8, 9]


# ---- how many rounds a step has ----


def steady(name: str, prompt: list[int], max_tokens: int = 40, **options: Any) -> Request:
    request = make(name, prompt, max_tokens, max_length=len(prompt) + max_tokens, **options)
    request.multi_step = True
    return request


def make_scheduler(*requests: Request, rounds: int = 4, pages: int = 50, step_tokens: int = 16) -> Scheduler:
    """After the step that ran the prompts. Pages of two tokens."""
    scheduler = Scheduler(pages, 2, 8, step_tokens, decode_steps=rounds)
    for request in requests:
        scheduler.add(request)
    step = scheduler.next()
    assert step is not None and step.decode_steps == 1  # a prompt needs the host
    scheduler.commit(step, [RowResult([1]) for _ in step.rows])
    return scheduler


def following(scheduler: Scheduler) -> Step:
    step = scheduler.next()
    assert step is not None
    scheduler.check()
    return step


def test_steady_requests_get_all_rounds_and_pages_for_them() -> None:
    one, other = steady("a", [0, 1, 2]), steady("b", [4])
    step = following(make_scheduler(one, other, rounds=6))
    assert step.decode_steps == 6
    assert [len(request.pages) * 2 - request.computed for request in (one, other)] == [7, 7]  # at least 6


def test_a_drafter_needs_pages_for_all_that_may_be_kept_and_drafted() -> None:
    request = steady("a", [0, 1, 2], lookahead=3)
    request.width = 3
    assert following(make_scheduler(request, rounds=5)).decode_steps == 5
    assert len(request.pages) * 2 >= request.computed + 5 * 4 + 3


@pytest.mark.parametrize(("pages", "reserved"), [(50, 4), (3, 2)])
def test_a_prompt_that_fills_its_pages_leaves_slots_for_the_first_draft(pages: int, reserved: int) -> None:
    request = steady("a", [0, 1, 2, 3], max_tokens=2, lookahead=3)
    request.max_length = 20
    scheduler = Scheduler(pages, 2, 8, 16)
    scheduler.add(request)
    scheduler.next()
    assert len(request.pages) == reserved  # four tokens, the newest one and three drafted ones, if there are pages
    scheduler.check()


def test_no_page_lies_beyond_the_end_of_a_text() -> None:
    request = steady("a", [0, 1, 2], max_tokens=8, lookahead=3)
    request.width = 3
    following(make_scheduler(request, rounds=5))
    assert len(request.pages) * 2 == 12  # 11 tokens


def test_no_more_rounds_than_the_longest_text_has_tokens_left() -> None:
    one, other = steady("a", [0, 1], max_tokens=4), steady("b", [2, 3], max_tokens=3)
    assert following(make_scheduler(one, other, rounds=9)).decode_steps == 3  # each has a token already
    assert following(make_scheduler(steady("a", [0, 1], max_tokens=2), rounds=9)).decode_steps == 1


@pytest.mark.parametrize("restless", ["unsteady", "reading", "one round"])
def test_the_host_stays_where_it_is_needed(restless: str) -> None:
    one, other = steady("a", [0, 1, 2]), steady("b", list(range(20)) if restless == "reading" else [4])
    other.multi_step = restless != "unsteady"
    scheduler = make_scheduler(one, other, rounds=1 if restless == "one round" else 4)
    assert following(scheduler).decode_steps == 1


def test_a_prompt_that_arrives_ends_the_rounds() -> None:
    one = steady("a", [0, 1, 2])
    scheduler = make_scheduler(one)
    assert following(scheduler).decode_steps == 4
    scheduler.add(steady("b", [4, 5]))
    assert following(scheduler).decode_steps == 1


def test_rounds_take_no_page_from_anyone() -> None:
    one, other = steady("a", [0, 1, 2], max_tokens=12), steady("b", [4, 1, 3], max_tokens=12)
    scheduler = make_scheduler(one, other, rounds=8, pages=8)
    assert following(scheduler).decode_steps == 1
    assert one.preemptions == other.preemptions == 0


def test_a_run_may_last_until_the_end_of_the_text_without_any_accepted_token() -> None:
    request = steady("a", [0, 1, 2], max_tokens=10)
    scheduler = make_scheduler(request, rounds=12)
    request.spec_stats.count(Draft([1, 2]), [1, 2])  # with the prompt's own step: two tokens a step
    assert request.spec_stats.tokens_per_step == 2.0
    assert following(scheduler).decode_steps == 9


# ---- where requests sit ----


def test_every_row_and_padding_row_is_filled(tiny_folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("outrider.engine.open_device", lambda backend: FakeDevice())
    head = tiny_heads.make("medusa", tmp_path)["model"]
    options = "verify=rejection,draft=probabilistic,adaptive=no"
    llm = LLM(str(tiny_folder()), backend="reference", speculate=f"medusa:model={head},width=2,{options}")
    words = llm.engine.model.config.vocabulary
    drawn = torch.arange(2.0 * words).view(2, words)
    warm = SamplingParams(temperature=0.5, top_k=3, top_p=0.25, min_p=0.125)
    riders = [
        Row(
            Request("a", [0], warm, 11, max_length=40, pages=[4, 2]),
            20,
            [7],
            True,
            Draft([8, 9], None, drawn, [1, 0.5]),
        ),
        Row(Request("b", [0], PARAMS, 12, max_length=50, pages=[3]), 5, [6], True, Draft([1], None, drawn[:1], [0.25])),
        Row(Request("c", [0], PARAMS, 13, max_length=60, pages=[]), 0, [5], True),
    ]
    rounds = llm.engine.runner.multi_step
    key, filled = rounds.buffers_for("medusa", riders, 2)
    assert key == ("medusa", 4, 2, 32, True, False)
    rounds.fill(filled, riders)
    state, sampling, tables = filled.state, filled.state.sampling, filled.state.batch.page_tables
    assert state.newest.tolist() == [7, 6, 5, 0] and state.positions.tolist() == [20, 5, 0, 0]
    assert state.max_lengths.tolist() == [40, 50, 60, 0]
    assert state.drafts.tolist() == [[8, 9], [1, -1], [-1, -1], [-1, -1]]
    assert sampling.temperature.tolist() == [0.5, 0, 0, 0] and sampling.top_k.tolist() == [3, 0, 0, 0]
    assert sampling.top_p.tolist() == [0.25, 1, 1, 1] and sampling.min_p.tolist() == [0.125, 0, 0, 0]
    assert sampling.seeds.tolist() == [11, 12, 13, 0]
    assert tables[:, :2].tolist() == [[4, 2], [3, -1], [-1, -1], [-1, -1]] and bool((tables[:, 2:] == -1).all())
    logits = filled.verify_inputs.logits.view(4, 3, words)
    assert torch.equal(logits[0, 1:], drawn) and torch.equal(logits[1, 1], drawn[0])
    rounds.fill(filled, riders[1:2] + riders[:1])  # other requests in the same rows
    assert sampling.seeds.tolist() == [12, 11, 0, 0] and sampling.temperature.tolist() == [0, 0.5, 0, 0]
    assert state.drafts.tolist() == [[1, -1], [8, 9], [-1, -1], [-1, -1]] and state.max_lengths.tolist() == [
        50,
        40,
        0,
        0,
    ]


# ---- what rounds bring home ----


def land(request: Request, scheduler: Scheduler, result: RowResult) -> None:
    step = following(scheduler)
    assert step.decode_steps == result.passes
    scheduler.commit(step, [result])
    scheduler.check()


def test_plain_rounds_are_appended_at_once() -> None:
    request = steady("a", [0, 1, 2])
    scheduler = make_scheduler(request, rounds=3)
    land(request, scheduler, RowResult([2, 3, 4], passes=3))
    assert request.output == [1, 2, 3, 4] and request.computed == 6
    assert (request.spec_stats.steps, request.spec_stats.widths) == (4, {0: 4})


@pytest.mark.parametrize(
    ("options", "kept", "reason"),
    [
        ({"max_tokens": 3}, [1, 2, 3], (FinishReason.LENGTH, None)),
        ({"end_tokens": frozenset({2})}, [1, 2], (FinishReason.STOP, None)),
        ({"stop_token_ids": [3]}, [1, 2, 3], (FinishReason.STOP, 3)),
        ({"stop_token_ids": [2], "min_tokens": 4}, [1, 2, 3, 2], None),
    ],
)
def test_a_text_ends_within_rounds(options: dict[str, Any], kept: list[int], reason: object) -> None:
    one, other = steady("a", [0, 1, 2], **options), steady("b", [4])
    scheduler = make_scheduler(one, other, rounds=3)
    step = following(scheduler)
    assert step.decode_steps == 3
    scheduler.commit(step, [RowResult([2, 3, 2], passes=3), RowResult([2, 2, 2], passes=3)])
    scheduler.check()
    assert one.output == kept and other.output == [1, 2, 2, 2]
    assert one.spec_stats.steps == len(kept)
    assert (None if one.finish_reason is None else (one.finish_reason, one.stop_reason)) == reason


def test_rounds_with_drafts_are_counted_one_by_one_up_to_the_end() -> None:
    request = steady("a", [0, 1, 2], max_tokens=5)
    request.width = 2
    scheduler = make_scheduler(request, rounds=3)
    rounds = [
        DecodeStep(Draft([7, 8]), [7, 2]),  # one of two kept
        DecodeStep(None, [3]),
        DecodeStep(Draft([4, 9]), [4, 9, 6]),  # all kept, but the text ends at the first
    ]
    land(request, scheduler, RowResult([7, 2, 3, 4, 9, 6], decode_steps=rounds, passes=3, draft=Draft([1])))
    assert request.output == [1, 7, 2, 3, 4] and request.finish_reason is FinishReason.LENGTH
    assert (request.spec_stats.steps, request.spec_stats.drafted, request.spec_stats.accepted) == (4, 4, 1)
    assert request.spec_stats.widths == {0: 2, 2: 2} and not request.pages


def test_a_row_is_read_back() -> None:
    assert as_draft([7, 8]) == Draft([7, 8])
    assert as_draft([7, -1]) == Draft([7])
    assert as_draft([-1, -1]) is None


class Parted:
    """Record what a drafter receives at the end."""

    def finish(self, requests: list[Request], computed: list[int]) -> None:
        self.received = [request.id for request in requests], computed


def buffers(width: int, logits: torch.Tensor | None = None) -> Any:
    return SimpleNamespace(
        state=SimpleNamespace(width=width), drafter=Parted(), verify_inputs=SimpleNamespace(logits=logits)
    )


def rows(*starts: int) -> list[Row]:
    return [Row(steady(name, [0]), start, [0], sample=True) for name, start in zip("abcd", starts, strict=False)]


def read(rows: list[Row], listed: list[list[list[int]]], learn: Any = None) -> RunOutputs:
    """Return the outputs of a run with these steps."""
    found = torch.tensor(listed, dtype=torch.int32)  # [steps, B, 1 + (W + 1) + W]
    outputs = RunOutputs(Queue(), rows, len(listed), found[0], 2, learn)
    for output in found:
        outputs.put(output)
    outputs.read()
    return outputs


def test_landing_gives_each_row_its_rounds_and_what_it_would_verify_next() -> None:
    logits = torch.arange(12.0).view(6, 2)  # [B * (W + 1), V]
    here = buffers(2, logits)
    listed = [
        [[2, 5, 6, -1, 5, 9], [1, 3, -1, -1, -1, -1]],
        [[1, 4, -1, -1, 8, 8], [3, 1, 2, 3, 1, 2]],
    ]
    both = rows(10, 20)
    first, second = read_results(here, both, read(both, listed), [[7, 6], [4, -1]])
    assert first.tokens == [5, 6, 4] and second.tokens == [3, 1, 2, 3]
    assert first.passes == second.passes == 2
    assert [part.tokens for part in second.decode_steps] == [[3], [1, 2, 3]]
    assert [part.draft for part in second.decode_steps] == [None, Draft([1, 2])]
    assert first.draft is not None and first.draft.tokens == [7, 6]
    assert first.draft.logits.tolist() == [[2, 3], [4, 5]]
    assert second.draft is not None and second.draft.logits.tolist() == [[8, 9]]
    logits.zero_()  # the next multi-step run writes there
    assert first.draft.logits.tolist() == [[2, 3], [4, 5]]
    assert here.drafter.received == (["a", "b"], [13, 24])


def test_landing_without_drafts() -> None:
    here = buffers(0)
    three = rows(10, 20, 30)
    found = read_results(here, three, read(three, [[[1, 5], [1, 6], [1, 7]], [[1, 8], [1, 9], [1, 2]]]), [])
    assert found == [RowResult(tokens, passes=2) for tokens in ([5, 8], [6, 9], [7, 2])]
    assert here.drafter.received == (["a", "b", "c"], [12, 22, 32])


def test_drafts_are_learned_up_to_the_end_of_their_text() -> None:
    """The first text ends in its second step, of three. The second has no draft in its first step."""
    learned: list[tuple[str, DecodeStep, int]] = []
    short, long = steady("short", [0], max_tokens=3), steady("long", [0])
    both = [Row(request, 1, [0], sample=True) for request in (short, long)]
    steps = [  # a count, three tokens, two drafted ones
        [[2, 5, 6, -1, 5, 9], [1, 3, -1, -1, -1, -1]],
        [[2, 4, 8, -1, 4, 9], [2, 1, 2, -1, 1, 7]],
        [[1, 7, -1, -1, 6, 6], [1, 2, -1, -1, 8, 8]],
    ]
    read(both, steps, lambda request, step, width: learned.append((request.id, step, width)))
    assert learned == [
        ("short", DecodeStep(Draft([5, 9]), [5, 6]), 2),
        ("short", DecodeStep(Draft([4, 9]), [4, 8]), 2),
        ("long", DecodeStep(Draft([1, 7]), [1, 2]), 2),
        ("long", DecodeStep(Draft([8, 8]), [2]), 2),
    ]


def test_tokens_that_a_lookup_did_not_find_are_learned() -> None:
    """Not in the first step, whose draft is older than the run, nor where the end of the text may have cut it."""
    learned: list[tuple[DecodeStep, int]] = []
    steps = [  # a count, three tokens, two drafted ones: none, one, none, one, none
        [[1, 5, -1, -1, -1, -1]],
        [[2, 4, 8, -1, 4, -1]],
        [[1, 7, -1, -1, -1, -1]],
        [[1, 3, -1, -1, 6, -1]],
        [[1, 2, -1, -1, -1, -1]],
    ]
    text = [Row(steady("a", [0], max_tokens=8), 1, [0], sample=True)]
    read(text, steps, lambda request, step, width: learned.append((step, width)))
    assert learned == [
        (DecodeStep(Draft([4]), [4, 8]), 2),
        (DecodeStep(None, [7]), 2),
        (DecodeStep(Draft([6]), [3]), 2),
    ]


def test_a_run_that_captures_graphs_is_not_timed(tiny_llm, tmp_path) -> None:
    head = tiny_heads.make("draft_model", tmp_path)["model"]
    llm = tiny_llm(speculate=f"draft_model:model={head},width=3", decode_steps=2)
    rounds = llm.engine.runner.multi_step
    rounds.planner.width = lambda name, requests, others, steps: 2  # which was not rehearsed
    learn, fences = rounds.planner.learn, []

    def learn_and_note(name, rows, results, width, measured):  # type: ignore[no-untyped-def]
        fences.append(len(measured))
        return learn(name, rows, results, width, measured)

    rounds.planner.learn = learn_and_note
    llm.generate([PROMPT], replace(PARAMS, max_tokens=24))
    first, *others = fences  # one fence at the start, two for each timed step
    assert first == 1 and len(others) > 1 and all(count > 1 for count in others)


def test_runs_that_wait_for_grammars_are_not_timed(tiny_llm, tmp_path) -> None:
    """Their steps tell nothing of those that run without the host."""
    head = tiny_heads.make("draft_model", tmp_path)["model"]
    llm = tiny_llm(speculate=f"draft_model:model={head},width=3", decode_steps=2)
    planner, fences = llm.engine.runner.multi_step.planner, []
    planner.width = lambda name, requests, others, steps: 2
    learn = planner.learn
    planner.learn = lambda *given: fences.append(len(given[-1])) or learn(*given)
    structured = replace(PARAMS, structured=StructuredOutput("regex", "[a-f]{60}"), ignore_eos=False)
    llm.generate([PROMPT], structured)
    assert len(fences) > 2 and set(fences) == {1}


def test_runs_learn_from_their_drafts(tiny_llm, tmp_path) -> None:
    """The draft model is the target, so all tokens are accepted."""
    head = tiny_heads.make("draft_model", tmp_path)["model"]
    llm = tiny_llm(speculate=f"draft_model:model={head},width=3", decode_steps=4)
    planner, learned = llm.engine.runner.multi_step.planner, []
    planner.width = lambda name, requests, others, steps: 2
    planner.controller.learn = lambda request, draft, path, width: learned.append((len(draft.tokens), path))
    llm.generate([PROMPT], replace(PARAMS, max_tokens=24))
    assert learned.count((2, [0, 1])) >= 6


@pytest.mark.parametrize("count", [1, 2])
def test_passes_with_the_host_are_a_measure_where_there_are_no_others(tiny_llm, tmp_path, count: int) -> None:
    head = tiny_heads.make("draft_model", tmp_path)["model"]
    spec_manager = tiny_llm(speculate=f"draft_model:model={head},width=3", decode_steps=count).engine.spec_manager
    latency = spec_manager.controller.latency
    before = latency.seconds(1, 0) * latency.slowdown
    for _ in range(9):
        spec_manager.observe([Row(steady("a", [0]), 0, [0], sample=True)], 50.0)
    assert (latency.seconds(1, 0) * latency.slowdown == before) == (count > 1)


def test_rounds_that_draft_nothing_leave_a_drafter_that_knows_the_text(tiny_llm, tmp_path) -> None:
    """The draft is the target itself: if its KV is complete, every draft token is right."""
    head = tiny_heads.make("draft_model", tmp_path)["model"]
    params = replace(PARAMS, max_tokens=30)
    prompts = [PROMPT, PROMPT[::-1], PROMPT[:1]]
    expected = [output.completions[0].token_ids for output in tiny_llm().generate(prompts, params)]
    llm = tiny_llm(speculate=f"draft_model:model={head},width=3,adaptive=no", decode_steps=2)
    planner, widths = llm.engine.runner.multi_step.planner, []

    def alternate(name: str, requests: object, others: int, steps: int) -> int:
        widths.append(0 if len(widths) % 2 == 0 else 3)
        return widths[-1]

    planner.width = alternate
    outputs = llm.generate(prompts, params)
    assert [output.completions[0].token_ids for output in outputs] == expected
    assert sum(widths) > 3
    for output in outputs:
        spec_stats = output.stats.speculation
        assert spec_stats.accepted == spec_stats.drafted > 3
        assert spec_stats.steps > 12  # four tokens a step, if every run had drafted


# ---- the end of a run ----


class Queue(Cpu):
    """A device that notes which steps the host has waited for."""

    def __init__(self) -> None:
        self.waited: list[int] = []
        self.started = 0

    def fence(self) -> Any:
        number, self.started = self.started, self.started + 1
        return SimpleNamespace(wait=lambda: self.waited.append(number))


def follow(requests: list[Request], width: int, accepted: list[list[int]], queued: int, token: int = 7) -> Queue:
    """Run as many steps as the texts need; accepted: draft tokens that each step accepts, by row."""
    device, output = Queue(), torch.zeros(len(requests) + 3, 2 + 2 * width, dtype=torch.int32)
    riders = [Row(request, 0, [0], sample=True) for request in requests]
    outputs = RunOutputs(device, riders, len(accepted), output, queued)
    while outputs.needs_step():
        counts = [1 + count for count in accepted[device.started]]
        output.fill_(-1)
        for index, count in enumerate(counts):
            output[index, 0], output[index, 1 : 1 + count] = count, token
        outputs.put(output)
        assert device.started - len(device.waited) <= queued
    assert len(outputs.read()) == device.started
    return device


@pytest.mark.parametrize("queued", [1, 2, 5])
@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 16, 33])
def test_no_step_is_wasted_on_texts_with_a_limit(queued: int, tokens: int) -> None:
    for accepted in (0, 1, 3):
        request = steady("a", [0], max_tokens=tokens)
        device = follow([request], 3, [[accepted]] * 40, queued)
        assert device.started == -(-tokens // (1 + accepted))


def test_the_longest_text_decides_when_a_run_ends() -> None:
    short, long = steady("a", [0], max_tokens=3), steady("b", [0, 1], max_tokens=10)
    assert follow([short, long], 3, [[3, 1]] * 9, 2).started == 5
    long.output += [4] * 6
    assert follow([short, long], 3, [[3, 1]] * 9, 2).started == 2


@pytest.mark.parametrize(("ended", "started"), [(ENDED_ROWS - 1, 20), (ENDED_ROWS, 4), (ENDED_ROWS + 1, 4)])
def test_a_run_stops_when_many_texts_have_ended(ended: int, started: int) -> None:
    """The next run has fewer rows, which take less time. One step is queued beyond those that end the texts."""
    requests = [steady(str(index), [0], max_tokens=6) for index in range(ended)]
    requests += [steady(f"long {index}", [0], max_tokens=40) for index in range(3)]
    assert follow(requests, 3, [[1] * len(requests)] * 40, 2).started == started


def test_texts_of_many_lengths_have_their_tokens(tiny_llm) -> None:
    """Runs of 40 rows stop several times before the last text ends."""
    llm = tiny_llm(speculate="none", decode_steps=64, max_requests=40)
    params = [replace(PARAMS, max_tokens=2 + index) for index in range(40)]
    alone = llm.generate([PROMPT], params[-1])[0].completions[0].token_ids
    outputs = llm.generate([PROMPT] * 40, params)
    assert [list(output.completions[0].token_ids) for output in outputs] == [
        list(alone[: one.max_tokens]) for one in params
    ]


@pytest.mark.parametrize("options", [{"end_tokens": frozenset({7})}, {"stop_token_ids": [7]}])
def test_few_steps_run_after_the_end_of_a_text(options: dict[str, Any]) -> None:
    request = steady("a", [0], max_tokens=60, **options)
    for queued in (1, 2, 5):
        assert follow([request], 3, [[1]] * 40, queued).started == queued
    other = steady("b", [0], max_tokens=12)
    assert follow([request, other], 3, [[1, 1]] * 40, 2).started == 6


def test_more_steps_are_queued_if_they_are_short() -> None:
    assert queued_steps(0.0) == queued_steps(1.0) == MIN_QUEUED
    assert queued_steps(QUEUED_SECONDS / 9.5) == 10


def test_a_run_ends_with_its_text(tiny_llm, tmp_path) -> None:
    """The draft is the target itself, so each step gives four tokens."""
    head = tiny_heads.make("draft_model", tmp_path)["model"]
    llm = tiny_llm(speculate=f"draft_model:model={head},width=3,adaptive=no", decode_steps=64)
    for tokens in (2, 5, 17, 20):
        llm.engine.reset_times()
        (output,) = llm.generate([PROMPT], replace(PARAMS, max_tokens=tokens))
        assert len(output.completions[0].token_ids) == tokens
        assert llm.engine.times.steps == 1 + -(-(tokens - 1) // 4)  # with the prompt


# ---- the length of a run ----


def test_a_run_is_as_long_as_wastes_least() -> None:
    """A text of 1 s that may end anywhere, runs of f seconds: 1 / f times the host, and f / 2 wasted."""
    host, step = 0.002, 0.001
    lost = {count: host / (count * step) + count * step / 2 for count in range(1, 200)}
    best = min(lost, key=lambda count: lost[count])
    assert abs(best_length(200, step, host, 1.0) - best) <= 1
    assert best_length(7, step, host, 1.0) == 7


def test_the_length_of_a_run_has_bounds() -> None:
    assert best_length(64, 0.0, 0.0, 1.0) == 64  # nothing is known
    assert best_length(64, 1.0, 0.0, 1.0) == MIN_STEPS
    assert best_length(1, 1.0, 0.0, 1.0) == 1
    assert best_length(64, MAX_SECONDS / 10.5, 100.0, 1.0) == 10


def test_run_lengths_follow_the_host_and_the_texts(monkeypatch) -> None:
    asked = []

    def watched(most: int, step_seconds: float, host: float, text: float) -> int:
        asked.append((most, host, text))
        return 5

    monkeypatch.setattr("outrider.multi_step.planner.best_length", watched)
    length, request = RunLength(32), steady("a", [0])
    length.observe(0.1, 0.0, 0.0, [request])
    assert not asked and length.decode_steps == 32  # no run, nothing learned
    length.observe(0.5, 0.3, 0.01, [request])
    assert asked[0][:2] == (32, pytest.approx(0.04)) and length.decode_steps == 5
    length.observe(0.5, 0.3, 0.01, [request])
    assert len(asked) == 1  # a step with the host
    for busy, reason in ((0.6, FinishReason.LENGTH), (0.9, FinishReason.STOP)):
        request.finish_reason = reason
        length.observe(0.3, busy, 0.01, [request])
    assert asked[2][1] < asked[1][1] < asked[0][1]
    assert asked[1][2] > asked[0][2] > 1  # a text that reached its limit tells nothing of when texts stop
    assert asked[2][2] < asked[1][2]


def test_the_scheduler_gets_the_length_of_the_next_run(tiny_llm) -> None:
    engine = tiny_llm(decode_steps=32).engine
    engine.add(PROMPT, replace(PARAMS, max_tokens=30), "a")
    run, lengths = engine.runner.step, []

    def watched(step):  # type: ignore[no-untyped-def]
        lengths.append(step.decode_steps)
        engine.run_length.decode_steps = 5
        return run(step)

    engine.runner.step = watched
    engine.run_length.observe = lambda *received: None
    while not engine.is_idle:
        engine.step()
    assert lengths[1:3] == [5, 5]


# ---- multi-step runs in an engine ----


def test_a_quiet_step_tells_only_of_what_is_done(tiny_llm) -> None:
    watched, quiet = tiny_llm(decode_steps=3).engine, tiny_llm(decode_steps=3).engine
    found = {}
    for engine, silent in ((watched, False), (quiet, True)):
        engine.add(PROMPT, PARAMS, "long")
        engine.add(PROMPT[:2], replace(PARAMS, max_tokens=4), "short")
        engine.add(PROMPT, replace(PARAMS, stop=["zzz"]), "stops")
        steps = []
        while not engine.is_idle:
            steps.append(engine.step(quiet=silent))
        found[silent] = {output.request_id: output for outputs in steps for output in outputs if output.finished}
        unfinished = [output for outputs in steps for output in outputs if not output.finished]
        assert bool(unfinished) != silent
        assert not engine.parents
    assert found[True].keys() == {"long", "short", "stops"}
    for name, output in found[True].items():
        assert output.completions == found[False][name].completions
        assert output.stats.first_token_seconds < output.stats.seconds


def test_a_quiet_step_sees_stop_strings_at_once(tiny_llm) -> None:
    text = tiny_llm().generate([PROMPT], PARAMS)[0].completions[0].text
    engine = tiny_llm(decode_steps=2).engine
    engine.add(PROMPT, replace(PARAMS, stop=[text[4]]))
    passes = []
    while not engine.is_idle:
        engine.step(quiet=True)
        passes.append(engine.times.steps)
    assert passes[-1] <= text.index(text[4]) + 2  # tokens, and the rest of a run


class Counting:
    """A lookup that expects each token to be one more than the last."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def draft_rows(self, texts: list[RowProgress]) -> list[list[int]]:
        self.asked += [text.request.id for text in texts]
        return [[text.tokens[-1] + 1, text.tokens[-1] + 2, text.tokens[-1] + 3] for text in texts]


def test_steps_without_drafts_tell_how_drafts_would_have_fared() -> None:
    """A draft is compared up to its first wrong token, or up to the token that follows it."""
    learned: list[tuple[DecodeStep, int]] = []
    text = steady("a", [0], max_tokens=20)
    row = RowProgress(Row(text, 1, [0], sample=True))
    lookups = Counting()
    found = UnverifiedDrafts(lookups, {text}, {text}, 5, lambda request, step, width: learned.append((step, width)))
    for token in (5, 6, 7, 8, 9, 10, 3, 8, 9):
        row.read([token])
        found.read_step([row])
    assert learned == [
        (DecodeStep(Draft([6, 7, 8]), [6, 7, 8, 9]), 5),
        (DecodeStep(Draft([10, 11, 12]), [10, 3]), 5),
        (DecodeStep(Draft([4, 5, 6]), [8]), 5),
    ]
    assert [part.draft.path(part.tokens[:-1]) for part, _ in learned] == [[0, 1, 2], [0], []]
    assert len(lookups.asked) == 4  # the last draft is still to be compared


def test_each_text_gets_a_lookup_within_a_few_steps() -> None:
    """A text that was not read yet takes a step of its own; a text of another method, or that has ended, none."""
    texts = [steady(f"{number}", [0], max_tokens=99) for number in range(20)]
    ended = steady("ended", [0], max_tokens=1)
    rows = [RowProgress(Row(text, 1, [0], sample=True)) for text in (ended, *texts)]
    lookups, read = Counting(), set(texts[2:])
    found = UnverifiedDrafts(lookups, {ended, *texts[:-1]}, read, 5, lambda *learned: None)
    steps = []
    for _ in range(5):
        for row in rows:
            row.read([7])
        lookups.asked = []
        found.read_step(rows)
        steps.append(lookups.asked)
        read |= {text for text in texts if text.id in lookups.asked}
    first, second, third = [text.id for text in texts[:1]], [texts[1].id], [text.id for text in texts[2 : 2 + LOOKUPS]]
    assert steps[:3] == [first, second, third]
    assert {each for step in steps for each in step} == {text.id for text in texts[:-1]}
    assert max(map(len, steps)) == LOOKUPS


@pytest.fixture(params=["cpu", "reference"])
def recording_llm(request: pytest.FixtureRequest, tiny_folder, monkeypatch: pytest.MonkeyPatch):
    """Make an LLM on the host over a device that records, whatever backends the other tests have."""
    monkeypatch.setattr("outrider.engine.open_device", lambda backend: FakeDevice())

    def make(**options: object) -> LLM:
        return LLM(str(tiny_folder()), **{**settings(request.param), **options})

    return make


def test_a_run_without_drafts_learns_what_lookups_are_worth(recording_llm, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, the lookup forgets the texts, which it has read too far; the next runs have each text alone."""
    prompts = [PROMPT, [9, 8, 7]]
    plain = [one.completions for one in recording_llm(decode_steps=8).generate(prompts, PARAMS)]
    llm = recording_llm(speculate="ngram", decode_steps=8)
    runs, drafter = llm.engine.runner.multi_step, llm.engine.spec_manager.methods["ngram"]
    monkeypatch.setattr(runs.planner.controller, "plan_uniform", lambda *given: 0)
    learned: list[tuple[DecodeStep, int]] = []
    monkeypatch.setattr(runs.planner, "learn_step", lambda request, step, width: learned.append((step, width)))
    assert [one.completions for one in llm.generate(prompts, PARAMS)] == plain
    assert learned and all(width == 8 for _, width in learned)
    others, launch = [*drafter.states.values()], runs._launch  # the engine's own text
    read_too_far: list[object] = []

    def fail_once(*given):  # type: ignore[no-untyped-def]
        assert not any(state is failed for state in drafter.states.values() for failed in read_too_far)
        fences = launch(*given)
        if not read_too_far:
            read_too_far.extend(state for state in drafter.states.values() if state not in others)
            raise RuntimeError("the run failed")
        return fences

    monkeypatch.setattr(runs, "_launch", fail_once)
    assert [one.completions for one in llm.generate(prompts, PARAMS)] == plain
    assert len(read_too_far) == len(prompts)


def test_lookups_beside_runs_leave_the_host_time_for_grammars_and_long_prompts(
    recording_llm, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = recording_llm(speculate="ngram", decode_steps=8)
    planner = llm.engine.runner.multi_step.planner
    monkeypatch.setattr(planner.controller, "plan_uniform", lambda *given: 0)
    learned: list[Request] = []
    monkeypatch.setattr(planner, "learn_step", lambda request, step, width: learned.append(request))
    structured = replace(PARAMS, structured=StructuredOutput("regex", "[a-f]{60}"), ignore_eos=False)
    llm.generate([PROMPT], structured)
    assert not learned
    llm.generate([PROMPT], PARAMS)
    assert learned
    short, long = steady("short", [0] * MAX_READ), steady("long", [0] * (MAX_READ + 1))
    assert planner.readable("ngram", [short, long]) == {short}
