"""A model that needs no weights, for the scheduler's tests: it notices every wrong page and every lost token."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

from outrider.scheduler import Scheduler
from outrider.types import FinishReason, Request, Row, RowResult, SamplingParams, Step, TokenLogprobs

VOCABULARY = 5


def make(name: str, prompt: Iterable[int], max_tokens: int = 4, **options: Any) -> Request:
    own = {key: options.pop(key) for key in ("index", "family", "end_tokens", "max_length") if key in options}
    params = SamplingParams(max_tokens=max_tokens, **options)
    return Request(name, list(prompt), params, seed=own.get("index", 0), **{"max_length": 1000, **own})


def choose(request: Request, history: list[int]) -> int:
    """The fake model and sampler: the next token depends on every token before it, and on the seed."""
    ending = {*request.end_tokens, *request.params.stop_token_ids}
    banned = ending if len(history) - len(request.prompt) < request.params.min_tokens else set()
    token = zlib.crc32(bytes([request.seed % 256, *history])) % VOCABULARY
    return next(at % VOCABULARY for at in range(token, token + VOCABULARY) if at % VOCABULARY not in banned)


def plain_loop(request: Request) -> tuple[list[int], FinishReason, int | None]:
    """What the request must come to, whatever happens on the way."""
    output: list[int] = []
    while True:
        output.append(choose(request, request.prompt + output))
        if len(output) > request.params.min_tokens and output[-1] in request.end_tokens:
            return output, FinishReason.STOP, None
        if len(output) > request.params.min_tokens and output[-1] in request.params.stop_token_ids:
            return output, FinishReason.STOP, output[-1]
        if len(output) == request.params.max_tokens or len(request.prompt) + len(output) == request.max_length:
            return output, FinishReason.LENGTH, None


class FakeRunner:
    """Writes into every slot the whole history that it stands for, and believes only what it reads back."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}

    def step(self, step: Step, burst: int = 1) -> list[RowResult]:
        writers: dict[int, Request] = {}
        for row in step.rows:
            for position in range(row.start, row.start + len(row.tokens)):
                page = row.request.pages[position // self.page_size]
                assert writers.setdefault(page, row.request) is row.request, "two rows write one page"
                before = self.read(row.request, position)
                token = row.tokens[position - row.start]
                self.slots[page, position % self.page_size] = (*before, token)
        return [self.answer(row, burst) for row in step.rows]

    def read(self, request: Request, stop: int) -> tuple[int, ...]:
        """Tokens [0, stop) as the pages hold them; each slot must agree on all that stands before it."""
        history: tuple[int, ...] = ()
        for position in range(stop):
            slot = self.slots[request.pages[position // self.page_size], position % self.page_size]
            assert slot[:-1] == history, f"`{request.id}` reads a page that was written for another prefix"
            history = slot
        return history

    def answer(self, row: Row, burst: int) -> RowResult:
        request, stop = row.request, row.start + len(row.tokens)
        history = list(self.read(request, stop))
        assert history == request.tokens(0, stop), f"`{request.id}` runs on another history than its own"
        known = len(request.prompt_logprobs)
        prompt: list[TokenLogprobs] = []
        if request.params.prompt_logprobs is not None and known >= row.start:
            prompt = [TokenLogprobs(token, 0.0, 1, ()) for token in request.prompt[known + 1 : stop + 1]]
        if not row.sample:
            return RowResult([], [], prompt)
        tokens: list[int] = []
        for _ in range(burst):
            tokens.append(choose(request, history + tokens))
        logprobs = [TokenLogprobs(token, float(stop + index), 1, ()) for index, token in enumerate(tokens)]
        return RowResult(tokens, logprobs, prompt)


def advance(room: Scheduler, runner: FakeRunner) -> dict[str, int]:
    """One step. How many tokens each request ran."""
    step = room.next()
    assert step is not None
    room.commit(step, runner.step(step))
    room.check()
    return {row.request.id: len(row.tokens) for row in step.rows}


def drain(room: Scheduler, runner: FakeRunner) -> None:
    for _ in range(1000):
        if room.is_idle:
            assert room.next() is None
            return
        advance(room, runner)
    raise AssertionError("the requests never finish")


def assert_plain(request: Request) -> None:
    assert (request.output, request.finish_reason, request.stop_reason) == plain_loop(request)
