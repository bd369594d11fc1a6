"""A batch that is always full: newcomers and rounds without the host take turns."""

from __future__ import annotations

import random

from fake_runner import make

from outrider.request import Request, RowResult, Step
from outrider.scheduler import Scheduler

SEATS, ROUNDS = 64, 8


def steady(name: str, prompt: int, tokens: int) -> Request:
    request = make(name, [1] * prompt, max_tokens=tokens)
    request.multi_step = True
    return request


def results(step: Step) -> list[RowResult]:
    return [RowResult([2] * step.decode_steps if row.sample else [], passes=step.decode_steps) for row in step.rows]


def crowded(count: int, seed: int = 1) -> tuple[Scheduler, list[Request]]:
    room, dice = Scheduler(4000, 16, SEATS, 2 * SEATS, False, ROUNDS), random.Random(seed)
    requests = [steady(str(number), dice.randint(1, 20), dice.randint(1, 60)) for number in range(count)]
    for request in requests:
        room.add(request)
    return room, requests


def test_most_tokens_of_a_full_batch_come_from_rounds() -> None:
    room, requests = crowded(600)
    tokens = {True: 0, False: 0}  # from rounds, from single steps
    while (step := room.next()) is not None:
        before = sum(len(row.request.output) for row in step.rows)
        room.commit(step, results(step))
        room.check()
        tokens[step.decode_steps > 1] += sum(len(row.request.output) for row in step.rows) - before
    assert all(len(request.output) == request.params.max_tokens for request in requests)
    assert tokens[True] > 2 * tokens[False]


def test_whoever_waits_for_a_seat_waits_for_one_flight_at_most() -> None:
    room, _ = crowded(600)
    flights = 0  # in a row, while there was a seat
    while (step := room.next()) is not None:
        seats = SEATS - len(room.running)
        flights = flights + 1 if step.decode_steps > 1 and room.waiting and seats else 0
        assert flights < 2
        room.commit(step, results(step))


def test_many_newcomers_are_not_kept_waiting() -> None:
    room = Scheduler(4000, 16, SEATS, 24, False, ROUNDS)
    room.add(steady("first", 4, 100))
    step = room.next()
    assert step is not None
    room.commit(step, results(step))
    for number in range(8):
        room.add(steady(str(number), 20, 100))
    for _ in range(8):  # a step has room for one prompt
        step = room.next()
        assert step is not None and step.decode_steps == 1
        room.commit(step, results(step))
    assert not room.waiting
