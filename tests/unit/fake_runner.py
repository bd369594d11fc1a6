"""A model that needs no weights, for the scheduler's tests: it notices every wrong page and every lost token."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

from outrider.request import Request, Row, RowResult, Step
from outrider.scheduler import Scheduler
from outrider.types import Draft, FinishReason, SamplingParams, TokenLogprobs

VOCABULARY = 5


def make(name: str, prompt: Iterable[int], max_tokens: int = 4, **options: Any) -> Request:
    names = ("index", "parent_id", "end_tokens", "max_length", "lookahead", "kv_method")
    own = {key: options.pop(key) for key in names if key in options}
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


def draft(request: Request, history: list[int], width: int, branches: int) -> Draft:
    """Draft `width` tokens after `history`: right up to a depth that depends on it, then wrong."""
    tokens: list[int] = []
    parents: list[int] = []
    path, trunk = list(history), -1
    right = zlib.crc32(bytes(history)) % (width + 1)
    while len(tokens) < width:
        token = (choose(request, path) + (len(path) - len(history) >= right)) % VOCABULARY
        for sibling in range(min(branches, width - len(tokens)) - 1, -1, -1):
            tokens.append((token + sibling) % VOCABULARY)
            parents.append(trunk)
        path.append(token)
        trunk = len(tokens) - 1
    return Draft(tokens, parents if branches > 1 else None)


class FakeRunner:
    """Writes into every slot the whole history that it stands for, and believes only what it reads back.

    Requests that a drafter follows have a second set of slots: a prefix without them must not be taken for them.
    Recurrent layers have states: each knows its text, and how much of that it has read for good. Layers with a sliding
    window have slots in window pages, of which they read the last ones.
    """

    def __init__(self, page_size: int, window: int = 0, recurrent: bool = False) -> None:
        self.states: dict[int, tuple[int, tuple[int, ...]]] | None = {} if recurrent else None
        self.page_size = page_size
        self.window = window  # tokens that a token reads in layers with a window, itself included; 0: no such layers
        self.window_pages: dict[int, int] = {}  # by page, as the steps tell it
        self.window_slots: dict[tuple[int, int], tuple[int, ...]] = {}
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}
        self.followed: dict[tuple[int, int], tuple[int, ...]] = {}

    def step(self, step: Step, width: int = 0, branches: int = 1) -> list[RowResult]:
        """Run the rows; draft `width` tokens for the next step."""
        writers: dict[int, Request] = {}
        window_writers: dict[int, Request] = {}
        results = []
        self.window_pages.update(step.window_pages)
        if self.states is not None:
            self.check_states(step.rows)
        for row in step.rows:
            histories = self.histories(row)
            for index, history in enumerate(histories):
                page, _ = slot = self.slot(row.request, row.start + index)
                assert writers.setdefault(page, row.request) is row.request, "two rows write one page"
                self.slots[slot] = history
                if self.window:
                    window_page, _ = slot = self.window_slot(row.request, row.start + index)
                    assert window_writers.setdefault(window_page, row.request) is row.request
                    self.window_slots[slot] = history
            results.append(self.answer(row, histories, width, branches))
        return results

    def check_states(self, rows: list[Row]) -> None:
        """Each row continues the state of its own text, and no row writes what another one reads or writes."""
        assert self.states is not None
        read = [row.states[0] for row in rows]
        written = [row.states[1] for row in rows]
        assert len(set(written)) == len(rows), "two rows write one state"
        for row, source, target in zip(rows, read, written, strict=True):
            assert target == source or target not in read, "a row writes a state that another one reads"
            assert read.count(target) <= 1, "a row writes a state that another one reads"
            if row.start > 0:
                length, text = self.states[source]
                assert length <= row.start <= len(text), f"`{row.request.id}` cannot continue at {row.start}"
                assert row.start - length <= max(self.page_size, 8), "more inputs than lines"
                assert list(text[: row.start]) == row.request.tokens(0, row.start), "the state of another text"

    def histories(self, row: Row) -> list[tuple[int, ...]]:
        """What each token of the row stands for: all tokens up to it, on its own path."""
        history = self.read(self.slots, row.request, row.start)
        if self.window:
            self.read_window(row.request, history)
        found: list[tuple[int, ...]] = []
        for token in row.tokens:
            history = (*history, token)
            found.append(history)
        draft = row.draft or Draft([])
        for index, token in enumerate(draft.tokens):
            before = index - 1 if draft.parents is None else draft.parents[index]
            found.append((*found[len(row.tokens) + before], token))
        return found

    def slot(self, request: Request, position: int) -> tuple[int, int]:
        return request.pages[position // self.page_size], position % self.page_size

    def read(self, slots: dict[tuple[int, int], tuple[int, ...]], request: Request, stop: int) -> tuple[int, ...]:
        """Tokens [0, stop) as the pages hold them; each slot must agree on all that stands before it."""
        history: tuple[int, ...] = ()
        for position in range(stop):
            held = slots[self.slot(request, position)]
            assert held[:-1] == history, f"`{request.id}` reads a page that was written for another prefix"
            history = held
        return history

    def window_slot(self, request: Request, position: int) -> tuple[int, int]:
        page, offset = self.slot(request, position)
        return self.window_pages[page], offset

    def read_window(self, request: Request, history: tuple[int, ...]) -> None:
        """The window pages hold the end of this history, as far as a window reaches back."""
        for position in range(max(len(history) - self.window + 1, 0), len(history)):
            held = self.window_slots[self.window_slot(request, position)]
            assert held == history[: position + 1], f"`{request.id}` reads a window page of another prefix"

    def answer(self, row: Row, histories: list[tuple[int, ...]], width: int, branches: int) -> RowResult:
        request, stop = row.request, row.start + len(row.tokens)
        assert list(histories[len(row.tokens) - 1]) == request.tokens(0, stop), f"`{request.id}` runs another history"
        known = len(request.prompt_logprobs)
        prompt: list[TokenLogprobs] = []
        if request.params.prompt_logprobs is not None and known >= row.start:
            prompt = [TokenLogprobs(token, 0.0, 1, ()) for token in request.prompt[known + 1 : stop + 1]]
        tokens, path = self.verify(row, histories) if row.sample else ([], [])
        for depth, index in enumerate(path):  # the accepted path is compacted
            self.slots[self.slot(request, stop - 1 + depth)] = histories[len(row.tokens) - 1 + index]
            if self.window:
                self.window_slots[self.window_slot(request, stop - 1 + depth)] = histories[len(row.tokens) - 1 + index]
        kept = stop + max(len(path) - 1, 0)
        if self.states is not None:
            _, target, read = row.states
            accepted = histories[len(row.tokens) - 1 + (path[-1] if path else 0)]
            assert len(accepted) == kept
            self.states[target] = row.start + read, accepted
        if request.kv_method:
            self.follow(row, kept)
        if not row.sample:
            return RowResult([], [], prompt)
        logprobs = [TokenLogprobs(token, float(stop + index), 1, ()) for index, token in enumerate(tokens)]
        return RowResult(tokens, logprobs, prompt, draft(request, request.tokens(0, stop) + tokens, width, branches))

    def verify(self, row: Row, histories: list[tuple[int, ...]]) -> tuple[list[int], list[int]]:
        """The tokens chosen along the draft, and the places that they were chosen at."""
        own = len(row.tokens) - 1
        tokens, path = [], [0]
        while True:
            tokens.append(choose(row.request, list(histories[own + path[-1]])))
            wanted = (*histories[own + path[-1]], tokens[-1])
            children = [at for at, history in enumerate(histories[own:]) if history == wanted]
            if not children:
                return tokens, path
            path.append(children[0])

    def follow(self, row: Row, stop: int) -> None:
        history = self.read(self.followed, row.request, row.start)
        for position in range(row.start, stop):
            history = (*history, self.slots[self.slot(row.request, position)][-1])
            self.followed[self.slot(row.request, position)] = history


def advance(scheduler: Scheduler, runner: FakeRunner, width: int = 0, branches: int = 1) -> dict[str, int]:
    """One step. How many tokens each request ran."""
    step = scheduler.next()
    assert step is not None
    scheduler.commit(step, runner.step(step, width, branches))
    scheduler.check()
    return {row.request.id: len(row.tokens) for row in step.rows}


def drain(scheduler: Scheduler, runner: FakeRunner, width: int = 0, branches: int = 1) -> None:
    for _ in range(1000):
        if scheduler.is_idle:
            assert scheduler.next() is None
            return
        advance(scheduler, runner, width, branches)
    raise AssertionError("the requests never finish")


def assert_plain(request: Request) -> None:
    assert (request.output, request.finish_reason, request.stop_reason) == plain_loop(request)
