"""Each rule of the scheduler by itself."""

from __future__ import annotations

from typing import Any

import pytest
from fake_runner import FakeRunner, advance, assert_plain, drain, make

from outrider.errors import UserError
from outrider.request import Request, RowResult
from outrider.scheduler import Scheduler
from outrider.types import FinishReason, TokenLogprobs


def make_scheduler(
    pages: int = 50,
    max_requests: int = 8,
    max_step_tokens: int = 16,
    prefix_cache: bool = True,
    window: int = 0,
    window_pages: int = 0,
) -> Scheduler:
    return Scheduler(pages, 2, max_requests, max_step_tokens, prefix_cache, window=window, window_pages=window_pages)


def test_an_empty_scheduler_has_no_step() -> None:
    scheduler = make_scheduler()
    assert scheduler.next() is None and scheduler.is_idle


def test_decodes_run_before_prompts_and_prompts_in_pieces() -> None:
    scheduler, runner = make_scheduler(max_step_tokens=4), FakeRunner(2)
    scheduler.add(make("a", [1, 2]))
    advance(scheduler, runner)
    scheduler.add(make("b", range(10)))
    scheduler.add(make("c", [3]))
    assert advance(scheduler, runner) == {"a": 1, "b": 3}
    assert advance(scheduler, runner) == {"a": 1, "b": 3}
    assert advance(scheduler, runner) == {"a": 1, "b": 3}
    assert advance(scheduler, runner) == {"b": 1, "c": 1}


def test_prompts_beside_a_decode_are_cut_shorter_than_alone() -> None:
    scheduler, runner = make_scheduler(max_step_tokens=16, prefix_cache=False), FakeRunner(2)
    scheduler.add(make("a", range(20)))
    assert sizes(scheduler, runner, 3) == {"a": 16}  # no other request waits for this step
    assert sizes(scheduler, runner, 3) == {"a": 4}
    scheduler.add(make("b", range(7)))
    scheduler.add(make("c", [3, 4]))
    assert sizes(scheduler, runner, 3) == {"a": 1, "b": 3}
    assert sizes(scheduler, runner, 3) == {"a": 1, "b": 3}
    assert sizes(scheduler, runner, 3) == {"a": 1, "b": 1, "c": 2}


def sizes(scheduler: Scheduler, runner: FakeRunner, prompt_tokens: int) -> dict[str, int]:
    """Run a step with this limit; return the tokens of each row."""
    step = scheduler.next(prompt_tokens=prompt_tokens)
    assert step is not None
    scheduler.commit(step, runner.step(step))
    return {row.request.id: row.size for row in step.rows}


def test_a_row_samples_only_at_the_end_of_what_is_known() -> None:
    scheduler, runner = make_scheduler(max_step_tokens=4), FakeRunner(2)
    request = make("a", [1, 2, 3, 4, 0, 1])
    scheduler.add(request)
    step = scheduler.next()
    assert step is not None and [(row.start, row.tokens, row.sample) for row in step.rows] == [(0, [1, 2, 3, 4], False)]
    assert scheduler.commit(step, runner.step(step)) == [request] and not request.output
    step = scheduler.next()
    assert step is not None and [(row.start, row.tokens, row.sample) for row in step.rows] == [(4, [0, 1], True)]
    assert len(request.pages) == 3
    scheduler.commit(step, runner.step(step))
    assert len(request.output) == 1 and request.computed == 6


def test_rows_are_limited() -> None:
    scheduler, runner = make_scheduler(max_requests=2), FakeRunner(2)
    for name in "abc":
        scheduler.add(make(name, [1], max_tokens=2))
    assert advance(scheduler, runner) == {"a": 1, "b": 1}
    assert [request.id for request in scheduler.waiting] == ["c"]
    advance(scheduler, runner)
    assert advance(scheduler, runner) == {"c": 1}


def test_more_running_requests_than_tokens_in_a_step() -> None:
    scheduler, runner = make_scheduler(max_step_tokens=1), FakeRunner(2)
    requests = [make(name, [1, 2], index=at) for at, name in enumerate("ab")]
    for request in requests:
        scheduler.add(request)
    assert [advance(scheduler, runner) for _ in range(3)] == [{"a": 1}] * 3
    drain(scheduler, runner)
    for request in requests:
        assert_plain(request)


def test_the_youngest_gives_way_and_resumes_without_loss() -> None:
    scheduler, runner = make_scheduler(pages=5), FakeRunner(2)
    old, young = make("old", [0, 1, 2, 3], 6), make("young", [3, 2, 1, 0], 6)
    scheduler.add(old)
    scheduler.add(young)
    while not young.preemptions:
        advance(scheduler, runner)
    assert scheduler.waiting == [young] and not young.pages and young.computed == 0 and young.output
    scheduler.add(make("late", [1]))
    assert [request.id for request in scheduler.waiting] == ["young", "late"]
    drain(scheduler, runner)
    assert_plain(old)
    assert_plain(young)
    assert old.preemptions == 0
    assert scheduler.cache.available == 5


def test_an_old_prompt_takes_pages_from_a_decode_that_was_already_planned() -> None:
    scheduler, runner = make_scheduler(pages=9, max_step_tokens=4), FakeRunner(2)
    # The second sample waits for the first and is overtaken; keys of another drafter make it run its whole prompt.
    samples = [make(f"f-{at}", range(7), 4, index=at, parent_id="f", n=2) for at in range(2)]
    samples[1].kv_method = "other"
    young = make("young", [1], 8)
    for request in (*samples, young):
        scheduler.add(request)
    assert [advance(scheduler, runner) for _ in range(4)] == [
        {"f-0": 4},
        {"f-0": 3, "young": 1},
        {"f-0": 1, "young": 1, "f-1": 2},
        {"f-0": 1, "young": 1, "f-1": 2},
    ]
    assert advance(scheduler, runner) == {"f-0": 1, "f-1": 2}
    assert scheduler.waiting == [young] and young.preemptions == 1
    drain(scheduler, runner)
    for request in (*samples, young):
        assert_plain(request)


def test_younger_requests_do_not_overtake_the_oldest_that_waits_for_pages() -> None:
    scheduler, runner = make_scheduler(pages=6), FakeRunner(2)
    scheduler.add(make("running", [0, 1, 2, 3], 6))
    advance(scheduler, runner)
    scheduler.add(make("big", [4] * 9, 2))
    scheduler.add(make("small", [3], 1))
    assert advance(scheduler, runner) == {"running": 1}
    assert [request.id for request in scheduler.waiting] == ["big", "small"]
    assert scheduler.cache.lookups == 3  # a wait is not a lookup
    drain(scheduler, runner)


def test_the_cache_supplies_all_but_the_last_token() -> None:
    scheduler, runner = make_scheduler(), FakeRunner(2)
    scheduler.add(make("a", [1, 2, 3, 4], 1))
    drain(scheduler, runner)
    again, longer = make("b", [1, 2, 3, 4], 1), make("c", [1, 2, 3, 4, 0], 1)
    scheduler.add(again)
    scheduler.add(longer)
    assert advance(scheduler, runner) == {"b": 2, "c": 1}
    assert (again.cached_tokens, longer.cached_tokens) == (2, 4)
    assert (scheduler.cache.lookups, scheduler.cache.hits) == (3 + 3 + 4, 6)


def test_generated_tokens_are_shared_too() -> None:
    scheduler, runner = make_scheduler(), FakeRunner(2)
    first = make("a", [1, 2, 3], 4)
    scheduler.add(first)
    drain(scheduler, runner)
    second = make("b", [*first.prompt, *first.output, 0], 1)
    scheduler.add(second)
    drain(scheduler, runner)
    assert second.cached_tokens == 6  # the last generated token never ran
    assert_plain(second)


def test_without_prefix_cache_everything_runs() -> None:
    scheduler, runner = make_scheduler(prefix_cache=False), FakeRunner(2)
    for name in "ab":
        scheduler.add(make(name, [1, 2, 3, 4], 1))
        assert advance(scheduler, runner) == {name: 4}
    assert scheduler.cache.available == 50 and scheduler.cache.idle == 0


def test_prompt_logprobs_need_every_prompt_token_once() -> None:
    scheduler, runner = make_scheduler(max_step_tokens=4), FakeRunner(2)
    prompt = [1, 2, 3, 4, 0, 1, 2]
    scheduler.add(make("warm", prompt, 1))
    drain(scheduler, runner)
    request = make("a", prompt, 3, prompt_logprobs=1)
    scheduler.add(request)
    assert advance(scheduler, runner) == {"a": 4}
    assert request.cached_tokens == 0
    scheduler.preempt_all()
    assert advance(scheduler, runner) == {"a": 3}  # four tokens are known and cached: two pages come back
    assert [entry.token for entry in request.prompt_logprobs] == prompt[1:]
    scheduler.preempt_all()
    assert advance(scheduler, runner) == {"a": 2}
    drain(scheduler, runner)
    assert [entry.token for entry in request.prompt_logprobs] == prompt[1:]
    assert request.cached_tokens == 0
    assert_plain(request)


def samples_of(prompt: list[int], count: int) -> list[Request]:
    return [make(f"f-{index}", prompt, 3, index=index, parent_id="f", n=count) for index in range(count)]


def test_samples_wait_for_the_prompt_of_the_first() -> None:
    scheduler, runner = make_scheduler(max_step_tokens=4), FakeRunner(2)
    samples = samples_of([1, 2, 3, 4, 0], 3)
    for sample in samples:
        scheduler.add(sample)
    scheduler.add(make("other", [4, 4], 1))
    assert advance(scheduler, runner) == {"f-0": 4}
    assert advance(scheduler, runner) == {"f-0": 1, "other": 2}
    assert advance(scheduler, runner) == {"f-0": 1, "f-1": 1, "f-2": 1}
    assert [sample.cached_tokens for sample in samples] == [0, 4, 4]
    assert samples[1].pages[:2] == samples[0].pages[:2]
    drain(scheduler, runner)
    for sample in samples:
        assert_plain(sample)


def many_samples(scheduler: Scheduler, runner: FakeRunner, count: int) -> list[Request]:
    samples = [make(f"f-{index}", [1, 2, 3], 9, index=index, parent_id="f", n=count) for index in range(count)]
    for sample in samples:
        scheduler.add(sample)
    advance(scheduler, runner)
    advance(scheduler, runner)
    return samples


def test_many_samples_of_one_prompt_do_not_fill_the_engine() -> None:
    scheduler, runner = make_scheduler(pages=200, max_requests=16), FakeRunner(2)
    samples = many_samples(scheduler, runner, 20)
    assert scheduler.running_count == 8
    scheduler.add(make("other", [4], 1))
    assert "other" in advance(scheduler, runner)
    drain(scheduler, runner)
    for sample in samples:
        assert_plain(sample)


def test_many_samples_of_one_prompt_alternate_beside_others() -> None:
    scheduler, runner = make_scheduler(pages=200, max_requests=16), FakeRunner(2)
    samples = many_samples(scheduler, runner, 8)
    assert len(advance(scheduler, runner)) == 8  # alone, all of them run
    scheduler.add(make("other", [4], 9))
    advance(scheduler, runner)
    for _ in range(3):
        rows = advance(scheduler, runner)
        assert "other" in rows and len(rows) == 4  # more would leave it less than a third of its speed
        lengths = [len(sample.output) for sample in samples]
        assert max(lengths) - min(lengths) <= 1
        scheduler.check()
    drain(scheduler, runner)
    for sample in samples:
        assert_plain(sample)


def test_prompts_with_many_samples_each_run_all_of_them() -> None:
    scheduler, runner = make_scheduler(pages=200, max_requests=16, max_step_tokens=32), FakeRunner(2)
    many_samples(scheduler, runner, 8)
    for index in range(8):
        scheduler.add(make(f"g-{index}", [4, 5], 6, index=index, parent_id="g", n=8))
    advance(scheduler, runner)
    advance(scheduler, runner)
    assert len(advance(scheduler, runner)) == 16


def test_samples_do_not_wait_for_one_that_is_gone() -> None:
    scheduler, runner = make_scheduler(), FakeRunner(2)
    samples = samples_of([1, 2, 3], 2)
    for sample in samples:
        scheduler.add(sample)
    scheduler.finish(samples[0], FinishReason.ABORT)
    assert advance(scheduler, runner) == {"f-1": 3}


def test_samples_without_prefix_cache_just_run() -> None:
    scheduler, runner = make_scheduler(prefix_cache=False), FakeRunner(2)
    for sample in samples_of([1, 2, 3], 2):
        scheduler.add(sample)
    assert advance(scheduler, runner) == {"f-0": 3, "f-1": 3}


def test_samples_end_one_by_one_and_only_once() -> None:
    scheduler, runner = make_scheduler(), FakeRunner(2)
    samples = samples_of([1, 2, 3], 3)
    other = make("other", [1], 2)
    for request in (*samples, other):
        scheduler.add(request)
    advance(scheduler, runner)
    for sample in (samples[1], samples[0], samples[2], samples[1]):  # a request that is gone is gone
        scheduler.finish(sample, FinishReason.ABORT)
    assert all(sample.finish_reason is FinishReason.ABORT and not sample.pages for sample in samples)
    scheduler.check()
    drain(scheduler, runner)
    assert_plain(other)


def step_with(scheduler: Scheduler, *tokens: int) -> list[Request]:
    step = scheduler.next()
    assert step is not None and len(step.rows) == 1
    logprobs = [TokenLogprobs(token, 0.0, 1, ()) for token in tokens]
    return scheduler.commit(step, [RowResult(list(tokens), logprobs)])


@pytest.mark.parametrize(
    ("options", "given", "kept", "reason", "stop_reason"),
    [
        ({"end_tokens": frozenset({4})}, [1, 4, 2], [1, 4], FinishReason.STOP, None),
        ({"stop_token_ids": [3]}, [3, 2], [3], FinishReason.STOP, 3),
        ({"stop_token_ids": [4], "end_tokens": frozenset({4})}, [4], [4], FinishReason.STOP, None),
        ({"stop_token_ids": [3], "min_tokens": 2}, [3, 3, 3, 3], [3, 3, 3], FinishReason.STOP, 3),
        ({"end_tokens": frozenset({3}), "min_tokens": 1}, [3, 3], [3, 3], FinishReason.STOP, None),
        ({"max_tokens": 2}, [1, 2, 0], [1, 2], FinishReason.LENGTH, None),
        ({"max_length": 5}, [1, 2, 0], [1, 2], FinishReason.LENGTH, None),
        ({"max_tokens": 1, "stop_token_ids": [1]}, [1], [1], FinishReason.STOP, 1),
    ],
)
def test_endings(options: dict[str, Any], given: list[int], kept: list[int], reason: str, stop_reason: int) -> None:
    scheduler = make_scheduler()
    request = make("a", [0, 1, 2], **{"max_tokens": 9, **options})
    scheduler.add(request)
    assert step_with(scheduler, *given) == [request]
    assert (request.output, request.finish_reason, request.stop_reason) == (kept, reason, stop_reason)
    assert [entry.token for entry in request.logprobs] == kept
    assert scheduler.is_idle and not request.pages
    scheduler.check()


def test_several_tokens_of_one_row_all_count() -> None:
    scheduler = make_scheduler()
    request = make("a", [0, 1, 2], 9)
    scheduler.add(request)
    step_with(scheduler, 4, 4, 4)
    assert request.output == [4, 4, 4] and request.computed == 3
    step = scheduler.next()
    assert step is not None and step.rows[0].tokens == [4, 4, 4] and step.rows[0].sample


def test_a_row_without_a_token_is_asked_again() -> None:
    scheduler = make_scheduler()
    request = make("a", [0, 1, 2, 3])
    scheduler.add(request)
    step_with(scheduler)
    step = scheduler.next()
    assert step is not None and (step.rows[0].start, step.rows[0].tokens) == (3, [3])
    scheduler.check()


def test_the_engine_ends_a_request_before_or_after_its_last_token() -> None:
    scheduler, runner = make_scheduler(), FakeRunner(2)
    early, late = make("early", [1, 2]), make("late", [1, 3], 1)
    for request in (early, late):
        scheduler.add(request)
    advance(scheduler, runner)
    assert late.finish_reason is FinishReason.LENGTH
    for request in (early, late):
        scheduler.finish(request, FinishReason.STOP, "###")
        assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, "###")
    scheduler.check()
    assert scheduler.is_idle


def test_one_request_fails_alone() -> None:
    scheduler, runner = make_scheduler(), FakeRunner(2)
    bad, good = make("bad", [1, 2]), make("good", [1, 3])
    for request in (bad, good):
        scheduler.add(request)
    scheduler.next()
    scheduler.finish(bad, FinishReason.ERROR)
    assert bad.finish_reason is FinishReason.ERROR
    drain(scheduler, runner)
    assert_plain(good)


@pytest.mark.parametrize("event", ["abort", "preempt", "superseded"])
def test_rows_that_lost_their_request_are_ignored(event: str) -> None:
    scheduler, runner = make_scheduler(), FakeRunner(2)
    request, other = make("a", [1, 2, 3]), make("b", [2, 1, 0])
    for one in (request, other):
        scheduler.add(one)
    step = scheduler.next()
    assert step is not None
    results = runner.step(step)
    if event == "abort":
        scheduler.finish(request, FinishReason.ABORT)
        assert scheduler.commit(step, results) == [other]
    elif event == "preempt":
        scheduler.preempt_all()
        assert scheduler.commit(step, results) == []
    else:
        scheduler.next()
        assert scheduler.commit(step, results) == []
    assert request.output == []
    drain(scheduler, runner)
    assert_plain(other)


def test_clearing_the_cache_while_running_loses_nothing() -> None:
    scheduler, runner = make_scheduler(), FakeRunner(2)
    request = make("a", [1, 2, 3, 4], 6)
    scheduler.add(request)
    advance(scheduler, runner)
    advance(scheduler, runner)
    scheduler.preempt_all()
    scheduler.clear_cache()
    runner.slots.clear()
    assert scheduler.cache.available == 50 and scheduler.cache.idle == 0
    assert advance(scheduler, runner) == {"a": 6}
    drain(scheduler, runner)
    assert_plain(request)
    assert request.preemptions == 1


@pytest.mark.parametrize(
    ("request_", "culprit"),
    [
        (make("a", []), "empty"),
        (make("a", [1] * 5, max_length=5), "5 tokens"),
        (make("a", [1] * 5, max_tokens=6), "`max_tokens`"),
        (make("taken", [1]), "`taken` is in use"),
    ],
)
def test_refusals(request_: Request, culprit: str) -> None:
    scheduler = make_scheduler(pages=5)
    scheduler.add(make("taken", [1]))
    with pytest.raises(UserError, match=culprit):
        scheduler.add(request_)
    scheduler.check()
    assert len(scheduler.waiting) == 1


def test_a_request_that_just_fits_runs_alone() -> None:
    scheduler, runner = make_scheduler(pages=5), FakeRunner(2)
    requests = [make("small", [1] * 3, 5), make("big", [2] * 5, 5), make("long", [3] * 5, max_tokens=99, max_length=10)]
    for request in requests:
        scheduler.add(request)
    drain(scheduler, runner)
    for request in requests:
        assert_plain(request)


@pytest.mark.parametrize("kv_method", ["", "eagle3"])
def test_window_pages_behind_the_window_are_given_back(kv_method: str) -> None:
    """A text of 60 tokens lives in 6 window pages of 2: a window of 5, a step of 4, and a page for both ends."""
    scheduler, runner = make_scheduler(max_step_tokens=4, window=5, window_pages=6), FakeRunner(2, window=5)
    windows = scheduler.windows
    assert windows is not None
    request = make("a", [number % 4 for number in range(40)], 20, kv_method=kv_method)
    scheduler.add(request)
    while not scheduler.is_idle:
        advance(scheduler, runner)
        assert len(request.pages) - request.passed <= 4  # of the window alone, between two steps
    assert_plain(request)
    assert windows.available == 6
    assert scheduler.cache.available == 50


def test_a_text_whose_windows_never_fit_is_refused() -> None:
    scheduler = make_scheduler(max_step_tokens=4, window=5, window_pages=5)
    scheduler.add(make("short", [1] * 8, 2))
    with pytest.raises(UserError, match="may grow to 60 tokens"):
        scheduler.add(make("long", [1] * 40, 20))


def test_without_a_window_a_long_text_is_refused() -> None:
    scheduler = make_scheduler(pages=8, max_step_tokens=4)
    with pytest.raises(UserError, match="may grow to 60 tokens, but the key/value cache holds 16"):
        scheduler.add(make("a", [1] * 40, 20))


def test_a_prefix_is_found_while_its_window_pages_are_stored() -> None:
    scheduler = make_scheduler(max_step_tokens=4, window=5, window_pages=8)
    runner = FakeRunner(2, window=5)
    prompt = [number % 4 for number in range(16)]

    def run(request: Request) -> int:
        scheduler.add(request)
        while not scheduler.is_idle:
            advance(scheduler, runner)
        assert_plain(request)
        return request.cached_tokens

    assert run(make("first", prompt, 2)) == 0
    assert run(make("again", prompt, 2)) == 14
    assert run(make("other", [3, 3, 1] * 12, 2)) == 0  # takes all window pages
    assert scheduler.cache.evictions == 0
    assert run(make("evicted", prompt, 2)) == 0
    assert run(make("computed again", prompt, 2)) == 14  # it gave its window pages to the published pages
    used = 50 - len(scheduler.cache._free)
    assert used == 8 + 18, "pages that were computed again are stored twice"


def test_requests_wait_for_window_pages_and_are_preempted_for_them() -> None:
    scheduler = make_scheduler(max_step_tokens=8, window=5, window_pages=9, prefix_cache=False)
    runner = FakeRunner(2, window=5)
    requests = [make(f"r{number}", [number, 1], 30) for number in range(4)]
    for request in requests:
        scheduler.add(request)
    drain(scheduler, runner)
    for request in requests:
        assert_plain(request)
    assert sum(request.preemptions for request in requests) > 0
    assert scheduler.windows is not None and scheduler.windows.available == 9


def test_window_pages_of_a_step_that_was_lost_reach_the_next_one() -> None:
    scheduler, runner = make_scheduler(window=3, window_pages=20), FakeRunner(2, window=3)
    request = make("a", range(4), 3)
    scheduler.add(request)
    assert scheduler.next() is not None  # it never runs
    drain(scheduler, runner)
    assert_plain(request)
