"""A batch that is always full: admissions and multi-step runs alternate."""

from __future__ import annotations

import random

from fake_runner import make

from outrider.request import Request, RowResult, Step
from outrider.scheduler import Scheduler

MAX_REQUESTS, DECODE_STEPS = 64, 8


def multi_step_request(name: str, prompt: int, tokens: int) -> Request:
    request = make(name, [1] * prompt, max_tokens=tokens)
    request.multi_step = True
    return request


def results(step: Step) -> list[RowResult]:
    return [RowResult([2] * step.decode_steps if row.sample else [], passes=step.decode_steps) for row in step.rows]


def full_scheduler(count: int, seed: int = 1) -> tuple[Scheduler, list[Request]]:
    scheduler, rng = Scheduler(4000, 16, MAX_REQUESTS, 2 * MAX_REQUESTS, False, DECODE_STEPS), random.Random(seed)
    requests = [multi_step_request(str(number), rng.randint(1, 20), rng.randint(1, 60)) for number in range(count)]
    for request in requests:
        scheduler.add(request)
    return scheduler, requests


def test_a_full_batch_gets_most_tokens_from_multi_step_runs() -> None:
    scheduler, requests = full_scheduler(600)
    tokens = {True: 0, False: 0}  # from multi-step runs, from single steps
    while (step := scheduler.next()) is not None:
        before = sum(len(row.request.output) for row in step.rows)
        scheduler.commit(step, results(step))
        scheduler.check()
        tokens[step.decode_steps > 1] += sum(len(row.request.output) for row in step.rows) - before
    assert all(len(request.output) == request.params.max_tokens for request in requests)
    assert tokens[True] > 2 * tokens[False]


def test_a_waiting_request_waits_for_at_most_one_multi_step_run() -> None:
    scheduler, _ = full_scheduler(600)
    multi_step_runs = 0  # in a row, while the batch had a free row
    while (step := scheduler.next()) is not None:
        free_rows = MAX_REQUESTS - len(scheduler.running)
        multi_step_runs = multi_step_runs + 1 if step.decode_steps > 1 and scheduler.waiting and free_rows else 0
        assert multi_step_runs < 2
        scheduler.commit(step, results(step))


def test_many_waiting_requests_are_not_starved_by_multi_step_runs() -> None:
    scheduler = Scheduler(4000, 16, MAX_REQUESTS, 24, False, DECODE_STEPS)
    scheduler.add(multi_step_request("first", 4, 100))
    step = scheduler.next()
    assert step is not None
    scheduler.commit(step, results(step))
    for number in range(8):
        scheduler.add(multi_step_request(str(number), 20, 100))
    for _ in range(8):  # a step has room for one prompt
        step = scheduler.next()
        assert step is not None and step.decode_steps == 1
        scheduler.commit(step, results(step))
    assert not scheduler.waiting
