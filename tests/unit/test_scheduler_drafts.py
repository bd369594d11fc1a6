"""Drafted tokens in the scheduler: the rows, tokens and pages that they take, and what rejection leaves."""

from __future__ import annotations

from fake_runner import FakeRunner, drain, make

from outrider.request import Request, Row, RowResult, Step
from outrider.scheduler import Scheduler
from outrider.types import Draft


def make_scheduler(max_step_tokens: int = 16) -> Scheduler:
    return Scheduler(50, 2, 8, max_step_tokens)


def guessing(scheduler: Scheduler, request: Request, tokens: list[int], parents: list[int] | None = None) -> Row:
    """Commit one token for the request, with a draft after it; return the row of the next step."""
    step = scheduler.next()
    assert step is not None
    scheduler.commit(step, [RowResult([1], draft=Draft(tokens, parents))])
    step = scheduler.next()
    assert step is not None
    return step.rows[0]


def test_drafted_tokens_run_after_the_newest_and_have_pages() -> None:
    scheduler = make_scheduler()
    request = make("a", [0, 1, 2], 9)
    scheduler.add(request)
    row = guessing(scheduler, request, [2, 3, 4])
    assert (row.tokens, row.start, row.draft) == ([1], 3, Draft([2, 3, 4]))
    assert len(request.pages) * scheduler.cache.page_size >= 7
    scheduler.commit(Step([row]), [RowResult([2, 3, 0], draft=Draft([4]))])
    assert request.output == [1, 2, 3, 0] and request.computed == 6
    assert (request.spec_stats.steps, request.spec_stats.drafted, request.spec_stats.accepted) == (2, 3, 2)
    assert request.spec_stats.drafted_per_depth == [1, 1, 1] and request.spec_stats.accepted_per_depth == [1, 1, 0]
    scheduler.check()


def test_a_draft_never_exceeds_the_length_or_the_step() -> None:
    scheduler = make_scheduler(max_step_tokens=5)
    request = make("a", [0, 1, 2], 9, max_length=7)
    scheduler.add(request)
    row = guessing(scheduler, request, [2, 3, 4, 0])
    assert row.draft == Draft([2, 3])  # four tokens known, one for the target's own
    cramped = make_scheduler(max_step_tokens=3)
    other = make("b", [0, 1, 2], 9)
    cramped.add(other)
    assert guessing(cramped, other, [2, 3, 4, 0]).draft == Draft([2])  # half of what is left, rounded up


def test_a_tree_may_be_broader_than_what_is_left_of_the_text_is_long() -> None:
    scheduler = make_scheduler(max_step_tokens=64)
    request = make("a", [0, 1, 2], 9, max_length=6)
    scheduler.add(request)
    row = guessing(scheduler, request, [1, 2, 3, 4, 0, 1], [-1, 0, -1, 1, -1, 2])
    assert row.draft == Draft([1, 3, 0], [-1, -1, -1])  # four tokens known, one drafted, one from the target
    assert len(request.pages) * scheduler.cache.page_size >= 7  # each drafted token has its own slot
    scheduler.commit(Step([row]), [RowResult([3, 2])])
    assert request.output == [1, 3, 2] and request.spec_stats.accepted_per_depth == [1]
    scheduler.check()


def test_a_draft_takes_no_page_from_another_request() -> None:
    size = 4
    scheduler = Scheduler(4, size, 4, 64)
    first, second = make("a", [0] * 7, 4), make("b", [1] * 7, 4)
    for request in (first, second):
        scheduler.add(request)
    step = scheduler.next()
    assert step is not None
    scheduler.commit(step, [RowResult([1], draft=Draft([2, 3, 4])) for _ in step.rows])
    step = scheduler.next()
    assert step is not None and len(step.rows) == 2
    assert [row.draft for row in step.rows] == [None, None]
    assert first.draft is None and first.preemptions == second.preemptions == 0
    scheduler.check()


def test_a_preempted_request_loses_its_draft() -> None:
    scheduler = make_scheduler()
    request = make("a", [0, 1, 2], 9)
    scheduler.add(request)
    guessing(scheduler, request, [2, 3])
    scheduler.preempt_all()
    step = scheduler.next()
    assert step is not None and step.rows[0].draft is None
    scheduler.check()


def test_a_request_whose_drafter_failed_continues_without_it() -> None:
    scheduler = make_scheduler()
    request = make("a", [0, 1, 2], 9, kv_method="drafter", lookahead=3)
    request.method, request.width = "drafter", 4
    scheduler.add(request)
    step = scheduler.next()
    assert step is not None
    scheduler.commit(step, [RowResult([1], dropped=True)])
    assert (request.width, request.lookahead, request.kv_method, request.method) == (0, 0, "", "drafter")


def test_pages_without_a_drafters_entries_are_not_taken_for_its_own() -> None:
    scheduler, runner = Scheduler(40, 2, 4, 64), FakeRunner(2)
    prompt = [0, 1, 2, 3, 4, 0, 1, 2, 3]
    for name, followed, cached in (
        ("plain", "", 0),
        ("drafted", "x", 0),  # what is there lacks its entries
        ("again", "x", 8),
        ("other", "y", 0),
        ("reader", "", 8),  # without a drafter, pages of any may be read
    ):
        request = make(name, prompt, 1, kv_method=followed)
        scheduler.add(request)
        drain(scheduler, runner, width=2)
        assert request.cached_tokens == cached, name


def test_a_plain_request_publishes_below_a_drafters_pages() -> None:
    scheduler, runner = Scheduler(40, 2, 4, 64), FakeRunner(2)
    prompt = [0, 1, 2, 3, 4, 0, 1, 2, 3]
    drafted, reader, longer = (
        make("drafted", prompt[:5], 1, kv_method="x"),
        make("reader", prompt, 1),
        make("l", prompt, 1),
    )
    for request in (drafted, reader, longer):
        scheduler.add(request)
        drain(scheduler, runner)
        scheduler.check()
    assert (drafted.cached_tokens, reader.cached_tokens, longer.cached_tokens) == (0, 4, 8)
    again = make("again", prompt, 1, kv_method="x")
    scheduler.add(again)
    drain(scheduler, runner)
    assert again.cached_tokens == 4  # the rest lacks its drafter's entries


def test_a_text_that_ends_inside_a_draft_counts_its_last_token_as_the_targets_own() -> None:
    scheduler = make_scheduler()
    request = make("a", [0, 1, 2], 9, end_tokens=frozenset({3}))
    scheduler.add(request)
    row = guessing(scheduler, request, [2, 3, 4])
    scheduler.commit(Step([row]), [RowResult([2, 3, 4, 0])])
    assert request.output == [1, 2, 3]
    assert len(request.output) == request.spec_stats.steps + request.spec_stats.accepted
