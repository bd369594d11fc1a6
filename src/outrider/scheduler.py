"""Who runs next, with how many tokens. No torch here.

Requests are served in the order of their arrival, waiting or running. When pages run out, the youngest running
request gives up its pages and waits again: its tokens stay, only their keys and values are computed anew. The
oldest request never gives way, and every request fits into the cache alone, so all of them finish.

Drafted tokens run after a request's newest one. They take what room a step and the cache have left, never a page from
another request, and what was not kept of them is forgotten by not counting it: their slots are written anew.
"""

from __future__ import annotations

import itertools
import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .cache.prefix import PrefixCache
from .errors import UserError
from .request import Request, Row, RowResult, Step
from .types import DecodeStep, Draft, Ending, FinishReason, TokenLogprobs

# Where only a few come in a step, beside so many times more that run, these have their rounds first: in a full batch
# someone ends in every step, and with a newcomer in each there would be no rounds at all.
CROWD = 8
PATIENCE = 8  # steps without a page for anyone
BROKEN_OFF = (
    "the answer broke off: no token was left that `structured` allows, the vocabulary has, and no ban excludes, or to "
    "find one took too much work"
)


@dataclass
class _Plan:
    """A step in the making: its rows, and how many tokens it still has room for."""

    budget: int
    rows: dict[Request, Row] = field(default_factory=dict)

    def put(self, row: Row) -> None:
        self.drop(row.request)
        self.rows[row.request] = row
        self.budget -= row.size

    def drop(self, request: Request) -> None:
        row = self.rows.pop(request, None)
        self.budget += row.size if row is not None else 0


class Scheduler:
    def __init__(
        self,
        pages: int,
        page_size: int,
        max_requests: int,
        max_step_tokens: int,
        prefix_cache: bool = True,
        decode_steps: int = 1,
    ) -> None:
        self.max_requests = max_requests
        self.max_step_tokens = max_step_tokens
        self.decode_steps = decode_steps  # passes that a step may have where all rows are steady
        self.cache = PrefixCache(pages, page_size, prefix_cache)
        self._clock = itertools.count()
        self._arrivals: dict[Request, int] = {}  # every request that is not finished
        self._names: dict[str, Request] = {}
        self._leaders: dict[str, Request] = {}  # the first sample of each family
        self._waiting: list[Request] = []  # both lists: oldest first
        self._running: list[Request] = []
        self._flight: dict[Request, Row] = {}  # rows that `next` gave out and `commit` still accepts
        self._came = 0  # requests that the last step let in
        self._famine = 0  # steps in a row for which nobody got a page

    @property
    def waiting(self) -> list[Request]:
        return list(self._waiting)

    @property
    def running(self) -> list[Request]:
        return list(self._running)

    @property
    def waiting_count(self) -> int:
        """Any thread may ask, as for `running_count`."""
        return len(self._waiting)

    @property
    def running_count(self) -> int:
        return len(self._running)

    @property
    def is_idle(self) -> bool:
        return not self._arrivals

    def add(self, request: Request) -> None:
        self._refuse_impossible(request)
        self._arrivals[request] = next(self._clock)
        self._names[request.id] = request
        if request.index == 0 and request.parent_id:
            self._leaders[request.parent_id] = request
        self._waiting.append(request)

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a request. What it published stays in the cache until the pages are needed.

        A request that has already ended gets the new reason: a stop string may show in the very last token.
        """
        request.finish_reason, request.stop_reason = reason, stop_reason
        if request not in self._arrivals:
            return
        (self._running if request in self._running else self._waiting).remove(request)
        self._give_up_pages(request)
        del self._arrivals[request], self._names[request.id]
        if self._leaders.get(request.parent_id) is request:
            del self._leaders[request.parent_id]

    def next(self) -> Step | None:
        """The next step, or None when nothing is left to do. Supersedes a step that was not committed."""
        plan = _Plan(self.max_step_tokens)
        decoding, reading = self._in_turn()
        self._extend_all(decoding, plan)
        self._attach_guesses(plan)
        self._extend_all(reading, plan)
        waited = len(self._waiting)
        if not (0 < CROWD * self._came < len(self._running) and self._is_steady(plan.rows)):
            self._admit(plan)
        self._came = waited - len(self._waiting)
        self._flight = plan.rows
        self._refuse_famine(plan)
        return Step(list(plan.rows.values()), self._several(plan.rows)) if plan.rows else None

    def commit(self, step: Step, results: list[RowResult]) -> list[Request]:
        """Take in what the runner answered; return the requests that it moved on, finished or not.

        Rows of requests that ended or gave way since `next` are ignored: they run again, or never.
        """
        touched = []
        for row, result in zip(step.rows, results, strict=True):
            if self._flight.get(row.request) is row:
                del self._flight[row.request]
                self._accept(row, result)
                touched.append(row.request)
        return touched

    def preempt_all(self) -> None:
        """Every running request waits again and loses nothing but time."""
        while self._running:
            self._preempt(self._running[-1])

    def clear_cache(self) -> None:
        """Forget every shared prefix. Call `preempt_all` before, if running requests must recompute theirs too."""
        self.cache.clear()

    def check(self) -> None:
        """Assert what must hold between any two calls."""
        self.cache.check()
        size = self.cache.page_size
        held = [0] * self.cache.pages
        for request in self._running:
            assert 0 <= request.computed < request.length, f"`{request.id}` has nothing to run"
            assert len(request.pages) * size >= request.computed, f"`{request.id}` lost a page"
            for page in request.pages:
                held[page] += 1
            for page in request.pages[request.computed // size :]:
                assert self.cache.references(page) == 1, f"`{request.id}` would write a shared page"
                assert not self.cache.is_published(page), f"`{request.id}` would write a published page"
        assert held == [self.cache.references(page) for page in range(self.cache.pages)], "a page leaked"
        assert all(not request.pages and request.computed == 0 for request in self._waiting), "a waiting page"
        for queue in (self._waiting, self._running):
            assert queue == sorted(queue, key=self._arrivals.__getitem__), "a queue is out of order"
        assert len(self._waiting) + len(self._running) == len(self._arrivals) == len(self._names), "a request is lost"
        assert set(self._waiting) | set(self._running) == set(self._arrivals), "a request is lost"
        assert set(self._flight) <= set(self._running), "a row in flight has no pages"
        assert set(self._leaders.values()) <= set(self._arrivals), "a family follows a finished request"

    def _refuse_impossible(self, request: Request) -> None:
        if request.id in self._names:
            raise UserError(f"request id `{request.id}` is in use: pick another")
        if not request.prompt:
            raise UserError(f"the prompt of request `{request.id}` is empty: give at least one token")
        if len(request.prompt) >= request.max_length:
            raise UserError(
                f"the prompt of request `{request.id}` has {len(request.prompt)} tokens, but prompt and output "
                f"together may have {request.max_length}: shorten the prompt"
            )
        longest = min(request.max_length, len(request.prompt) + request.params.max_tokens)
        room = self.cache.pages * self.cache.page_size
        if longest > room:
            raise UserError(
                f"request `{request.id}` may grow to {longest} tokens, but the key/value cache holds {room}: "
                "lower `max_tokens`, or raise `cache_tokens`"
            )

    def _refuse_famine(self, plan: _Plan) -> None:
        """Every request fits into the cache alone: where again and again none does, pages are lost."""
        self._famine = self._famine + 1 if self._arrivals and not plan.rows else 0
        if self._famine == PATIENCE:
            self._famine = 0
            raise RuntimeError(f"no page is left for any of {len(self._arrivals)} requests, and none is in use")

    def _in_turn(self) -> tuple[list[Request], list[Request]]:
        """Running requests, oldest first: those with a single token to run, and those in a prompt, which come after.

        Pieces of prompts would starve the others.
        """
        decoding: list[Request] = []
        reading: list[Request] = []
        for request in self._running:
            (reading if request.length - request.computed > 1 else decoding).append(request)
        return decoding, reading

    def _extend_all(self, requests: list[Request], plan: _Plan) -> None:
        for request in requests:
            if plan.budget == 0:
                return
            if request.pages:  # else it gave way to an older one, just now
                self._extend(request, plan)

    def _attach_guesses(self, plan: _Plan) -> None:
        """Let drafted tokens run with the rows so far; half of the step stays for prompts."""
        allowance = plan.budget - plan.budget // 2
        for request, row in list(plan.rows.items()):
            # The last token that fits is the target's own; how broad a guess is does not matter to the text's length.
            levels = request.max_length - request.length - 1
            draft = request.draft
            if draft is not None and request.grammar is not None:
                draft = request.grammar.prune(request.output, draft)
            draft = draft.within(levels).cut(allowance) if draft is not None else None
            count = len(draft.tokens) if draft is not None else 0
            # A drafter that writes ahead may need room even where it had nothing to guess this time.
            ahead = max(min(1 + count + request.lookahead, request.max_length - request.computed), 1 + count)
            pages = self.cache.allocate(self._missing_pages(request, ahead))
            request.pages += pages or []
            request.draft = draft if count and pages is not None else None
            if request.draft is not None:
                allowance -= count
                plan.put(replace(row, draft=request.draft))

    def _several(self, rows: dict[Request, Row]) -> int:
        """How many passes there are pages for, if all requests are steady and none is in its prompt."""
        if not self._is_steady(rows):
            return 1
        # As many as the longest text to come will take, as far as its drafts have been kept so far.
        left = max((request.max_length - request.length) / max(request.spec_stats.mean_length, 1.0) for request in rows)
        rounds = max(min(self.decode_steps, math.ceil(left)), 1)
        for request in rows:
            # Each pass may keep all that it verified, and the last one drafts.
            ahead = min(rounds * (1 + request.width) + request.lookahead, request.max_length - request.computed)
            pages = self.cache.allocate(self._missing_pages(request, ahead))
            if pages is None:
                return 1
            request.pages += pages
        return rounds

    def _is_steady(self, rows: dict[Request, Row]) -> bool:
        alone = all(request.multi_step and row.sample and len(row.tokens) == 1 for request, row in rows.items())
        return self.decode_steps > 1 and alone

    def _extend(self, request: Request, plan: _Plan) -> None:
        """Plan a row for a running request; while pages are lacking, the youngest gives way, itself if need be."""
        count = min(plan.budget, request.length - request.computed)
        while (pages := self.cache.allocate(self._missing_pages(request, count))) is None:
            youngest = self._running[-1]
            plan.drop(youngest)
            self._preempt(youngest)
            if youngest is request:
                return
        request.pages += pages
        stop = request.computed + count
        tokens = request.tokens(request.computed, stop)
        plan.put(Row(request, request.computed, tokens, sample=stop == request.length))

    def _admit(self, plan: _Plan) -> None:
        """Let waiting requests in, oldest first, while there are rows, tokens and pages."""
        place = 0
        while plan.budget > 0 and len(self._running) < self.max_requests and place < len(self._waiting):
            request = self._waiting[place]
            if self._waits_for_family(request):
                place += 1
            elif self._take_prefix(request):
                del self._waiting[place]
                insort(self._running, request, key=self._arrivals.__getitem__)
                self._extend(request, plan)
            else:
                return  # nobody overtakes the oldest, or it might wait for ever

    def _take_prefix(self, request: Request) -> bool:
        """Give a request what the cache holds of it, if there are pages for all the rest that is known of it."""
        limit = self._reusable(request)
        match = self.cache.match(request.tokens(0, limit), limit, request.kv_method)
        request.pages, request.computed = match.pages, match.tokens
        if self._missing_pages(request, request.length - request.computed) > self.cache.available:
            self.cache.undo(match)
            request.pages, request.computed = [], 0
            return False
        if request.preemptions == 0:
            request.cached_tokens = min(match.tokens, len(request.prompt))
        return True

    def _waits_for_family(self, request: Request) -> bool:
        """Whether the first sample is about to compute, and publish, the prompt that this one shares."""
        leader = self._leaders.get(request.parent_id)
        if leader is None or leader is request or not self.cache.sharing:
            return False
        return leader.computed < len(leader.prompt)

    def _reusable(self, request: Request) -> int:
        """How many tokens the cache may supply: the last one must run, and each that owes a prompt logprob."""
        missing = len(request.prompt) - 1 - len(request.prompt_logprobs)
        if request.params.prompt_logprobs is not None and missing > 0:
            return len(request.prompt_logprobs)
        return request.length - 1

    def _missing_pages(self, request: Request, count: int) -> int:
        needed = -(-(request.computed + count) // self.cache.page_size)
        return max(needed - len(request.pages), 0)

    def _accept(self, row: Row, result: RowResult) -> None:
        request = row.request
        request.prompt_logprobs += result.prompt_logprobs
        ending = self._append(request, row.draft, result)
        request.draft = result.draft
        if result.dropped:
            request.width, request.lookahead, request.kv_method = 0, 0, ""
        # The newest token has not run yet; everything before it that did run is history.
        ran = len(result.tokens) - 1 if row.draft is not None or result.passes > 1 else 0
        request.computed = min(row.start + len(row.tokens) + ran, request.length - 1)
        size = self.cache.page_size
        first, full = row.start // size, request.computed // size
        if full > first:
            self.cache.publish(request.tokens(first * size, full * size), request.pages, first, request.kv_method)
        if ending == (FinishReason.STOP, None) and request.grammar and not request.grammar.complete(request.output):
            self.finish(request, FinishReason.ERROR, BROKEN_OFF)
        elif ending is not None:
            self.finish(request, *ending)

    def _append(self, request: Request, draft: Draft | None, result: RowResult) -> Ending | None:
        """Append what a row found in all its passes; `guess` is what the first of them verified."""
        rounds = result.decode_steps
        if result.passes == 1:
            rounds = [DecodeStep(draft, result.tokens)]
        elif not rounds:
            if request.goes_on(result.tokens) and not request.params.trace:
                request.output += result.tokens  # nearly always, and there may be thousands of requests
                request.spec_stats.count_plain(len(result.tokens))
                return None
            rounds = [DecodeStep(None, [token]) for token in result.tokens]
        for each in rounds:
            ending = self._append_round(request, each, result.logprobs)
            if ending is not None:
                return ending
        return None

    @staticmethod
    def _append_round(request: Request, found: DecodeStep, logprobs: Sequence[TokenLogprobs]) -> Ending | None:
        """Append the tokens of a pass up to the one that ends the request, if one does."""
        ending = None
        for index, token in enumerate(found.tokens):
            request.output.append(token)
            request.logprobs += logprobs[index : index + 1]
            ending = request.ending(len(request.output), token)
            if ending is not None:
                break
        if found.tokens:  # the last one counts as the target's own
            request.spec_stats.count(found.draft, found.tokens[:index], request.drafters)
            if request.params.trace:
                bare = None if found.draft is None else replace(found.draft, logits=None)
                request.trace.append(DecodeStep(bare, found.tokens[: index + 1]))
        return ending

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._give_up_pages(request)
        request.preemptions += 1
        insort(self._waiting, request, key=self._arrivals.__getitem__)

    def _give_up_pages(self, request: Request) -> None:
        self._flight.pop(request, None)
        self.cache.release(request.pages)
        request.pages, request.computed = [], 0
