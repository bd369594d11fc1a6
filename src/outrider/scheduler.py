"""The scheduler: which requests run in the next step, and with how many tokens. No torch here.

Requests are served in the order of arrival. When pages run out, the youngest running request is preempted: it keeps
its tokens, frees its pages and waits, and its keys and values are recomputed later. The oldest request is never
preempted, and every request fits into the cache alone, so all of them finish.

Drafted tokens run after a request's newest token. They use the tokens and pages that a step has left and never preempt
a request. The keys and values of rejected tokens are not counted as computed, so the next step overwrites them.

Layers with a sliding window store keys and values in window pages. A request gives back those that no window reaches
any more. It keeps the pages themselves for the layers that attend to the whole text, and for its drafter.

The states of recurrent layers are in slots. If a step ends at or just behind the end of a page, the prefix cache keeps
the slot as a snapshot, and the next step writes to another one: nothing is copied. Snapshots stay after the end of a
prompt and where texts branch. Of others a request has one at a time: after its last chunk, or its last full page.
"""

from __future__ import annotations

import itertools
import time
from bisect import insort
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Protocol

from .adapters import Adapter
from .cache.prefix import Match, PrefixCache
from .cache.state_slots import StateSlots
from .cache.window_pages import WindowPages
from .config import most_window_pages
from .errors import UserError
from .request import Request, Row, RowResult, Step
from .types import FinishReason

# If the last step admitted fewer than 1/8 of the running requests, a multi-step run comes before the next admission.
# In a full batch some request ends in every step, so admitting one in each would leave no multi-step run at all.
ADMISSION_RATIO = 8
# Samples of one prompt. At most this share of `max_requests` run at once, so that other requests are admitted.
RUNNING_SHARE = 1 / 2
# Beside requests with fewer samples, at most this share of `max_requests` decode in one step, because all of them would
# slow down the others, which shall keep a third of their speed. Of 64 these are 3: on two cores a step of 4 rows takes
# 2.1 to 2.8 times as long as one of a single row, and one of 5 rows 2.5 to 3.4 times. Requests with about as many
# samples (up to 3 times) do not limit each other.
DECODING_SHARE = 1 / 20
MIN_SAMPLES = 3  # both shares are at least this
# A text that shares at least this many more tokens with another one than a snapshot covers is read up to the branch in
# a step of its own, to keep the states there. Fewer are read again in the time of that step.
BRANCH_TOKENS = 64
MAX_EMPTY_STEPS = 8  # steps without a page for any request, after which pages must have leaked
NO_TOKEN_ALLOWED = (
    "the output ended early: no token is left that `structured` allows and no ban excludes, or finding one exceeds "
    "the work limit of the grammar"
)


class AdapterSlots(Protocol):
    """Lends slots to adapters (adapters.AdapterManager)."""

    def take(self, adapter: Adapter) -> bool: ...

    def give_back(self, adapter: Adapter) -> None: ...


@dataclass
class _StepBuilder:
    """A step under construction."""

    budget: int  # tokens that the step can still take
    rows: dict[Request, Row] = field(default_factory=dict)

    def put(self, row: Row) -> None:
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
        adapters: AdapterSlots | None = None,
        window: int = 0,
        window_pages: int = 0,
        state_slots: int = 0,
    ) -> None:
        """adapters: lends the slots in which requests with an adapter run; None: no request has one.

        window: the widest sliding window of all layers, in tokens; window_pages: the pages of the layers that have one.
        Both are 0 for a model without.

        state_slots: of a model with recurrent layers, one more at least than requests can run; 0: another model. Those
        that no request needs hold snapshots.
        """
        self.max_requests = max_requests
        self.max_step_tokens = max_step_tokens
        self.decode_steps = decode_steps  # limit on decode steps of one Step, if all rows are multi-step
        self.adapters = adapters
        self.states = StateSlots(state_slots) if state_slots else None
        self.windows = WindowPages(window_pages, pages, page_size, window) if window else None
        self._most_windows = most_window_pages(window, max_step_tokens, page_size)  # that a request holds at once
        self.cache = PrefixCache(pages, page_size, prefix_cache, self.states, self.windows)
        self._clock = itertools.count()
        self._order: dict[Request, int] = {}  # arrival number of every unfinished request
        self._by_id: dict[str, Request] = {}
        self._first_samples: dict[str, Request] = {}  # by parent id
        self._waiting: list[Request] = []  # both lists: oldest first
        self._running: list[Request] = []
        self._scheduled: dict[Request, Row] = {}  # rows that `next` returned and `commit` still accepts
        self._admitted = 0  # requests that the last step admitted
        self._blocked = 0  # requests for which the last step had no row, tokens or pages left
        self._empty_steps = 0  # consecutive steps in which no request got a page

    @property
    def waiting(self) -> list[Request]:
        return list(self._waiting)

    @property
    def running(self) -> list[Request]:
        return list(self._running)

    @property
    def waiting_count(self) -> int:
        """Return the number of waiting requests. Safe from any thread, as `running_count`."""
        return len(self._waiting)

    @property
    def blocked_count(self) -> int:
        """Return the number of waiting requests that the last step could not admit, without those added since."""
        return min(self._blocked, len(self._waiting))

    @property
    def running_count(self) -> int:
        return len(self._running)

    @property
    def is_idle(self) -> bool:
        return not self._order

    def add(self, request: Request) -> None:
        self._check_fits(request)
        self._order[request] = next(self._clock)
        self._by_id[request.id] = request
        if request.index == 0 and request.parent_id:
            self._first_samples[request.parent_id] = request
        self._waiting.append(request)

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a request. Its published pages stay in the prefix cache until they are evicted.

        A finished request gets the new reason: a stop string may complete with the very last token.
        """
        request.finish_reason, request.stop_reason = reason, stop_reason
        if request not in self._order:
            return
        if request in self._running:
            self._stop_running(request)
        else:
            self._waiting.remove(request)
        self._free_pages(request)
        del self._order[request], self._by_id[request.id]
        if self._first_samples.get(request.parent_id) is request:
            del self._first_samples[request.parent_id]

    def next(self, decode_steps: int | None = None, prompt_tokens: int | None = None) -> Step | None:
        """Build the next step; None if no request is left. It supersedes a step that was not committed.

        decode_steps: of a multi-step run, at most; None: as many as this scheduler allows.
        prompt_tokens: of all prompts, at most, if another request decodes in the step; None: as many as fit.
        """
        step = _StepBuilder(self.max_step_tokens)
        decoding, prefilling = self._running_by_phase()
        self._extend_all(self._fair_share(decoding), step)
        self._attach_drafts(step)
        if step.rows and prompt_tokens is not None:
            step.budget = min(step.budget, prompt_tokens)
        self._extend_all(prefilling, step)
        waiting = len(self._waiting)
        few_admitted = 0 < ADMISSION_RATIO * self._admitted < len(self._running)
        if not (few_admitted and self._can_multi_step(step.rows)):
            self._admit(step)
            self._blocked = len(self._waiting)
        self._admitted = waiting - len(self._waiting)
        self._reserve_for_drafts(step)
        self._scheduled = step.rows
        self._check_progress(step)
        if not step.rows:
            return None
        allocated = self._allocate_decode_steps(step.rows, decode_steps or self.decode_steps)
        changes = {} if self.windows is None else dict(self.windows.changes)
        return Step(list(step.rows.values()), allocated, changes)

    def commit(self, step: Step, results: list[RowResult]) -> list[Request]:
        """Apply the runner's results; return the requests that advanced, finished or not.

        Rows of requests that finished or were preempted since `next` are ignored.
        """
        advanced = []
        if self.windows is not None:
            self.windows.changes.clear()  # the runner has applied them
        for row, result in zip(step.rows, results, strict=True):
            if self._scheduled.get(row.request) is row:
                del self._scheduled[row.request]
                self._accept(row, result)
                advanced.append(row.request)
        return advanced

    def preempt_all(self) -> None:
        """Move every running request back to the waiting queue. No token is lost."""
        while self._running:
            self.preempt(self._running[-1])

    def preempt(self, request: Request) -> None:
        """Move a running request back to the waiting queue. No token is lost."""
        self._stop_running(request)
        self._free_pages(request)
        request.preemptions += 1
        insort(self._waiting, request, key=self._order.__getitem__)

    def clear_cache(self) -> None:
        """Drop every cached prefix. Call `preempt_all` first if running requests must recompute theirs too."""
        self.cache.clear()

    def check(self) -> None:
        """Assert the invariants that hold between any two calls."""
        self.cache.check()
        size = self.cache.page_size
        held = [0] * self.cache.pages
        for request in self._running:
            assert 0 <= request.computed < request.length, f"`{request.id}` has no token to run"
            assert len(request.pages) * size >= request.computed, f"`{request.id}` lost a page"
            for page in request.pages:
                held[page] += 1
            for page in request.pages[request.computed // size :]:
                assert self.cache.references(page) == 1, f"`{request.id}` would write a shared page"
                assert not self.cache.is_published(page), f"`{request.id}` would write a published page"
        assert held == [self.cache.references(page) for page in range(self.cache.pages)], "a page leaked"
        if self.windows is not None:
            readers = Counter(page for one in self._running for page in one.pages[one.passed :])
            published = [page for page in range(self.cache.pages) if self.cache.is_published(page)]
            self.windows.check(published, [readers[page] for page in range(self.cache.pages)])
        assert all(not request.pages and request.computed == 0 for request in self._waiting), (
            "a waiting request holds pages"
        )
        for queue in (self._waiting, self._running):
            assert queue == sorted(queue, key=self._order.__getitem__), "a queue is out of order"
        assert len(self._waiting) + len(self._running) == len(self._order) == len(self._by_id), "a request is lost"
        assert set(self._waiting) | set(self._running) == set(self._order), "a request is lost"
        assert set(self._scheduled) <= set(self._running), "a scheduled row has no pages"
        assert set(self._first_samples.values()) <= set(self._order), "samples wait for a finished request"
        if self.states is not None:
            self._check_states(self.states)

    def _check_states(self, states: StateSlots) -> None:
        held = Counter(slot for one in self._running for slot in (one.state_slot, one.next_state_slot) if slot >= 0)
        held.update(self.cache.snapshot_slots)
        assert all(held[slot] == states.references(slot) for slot in range(states.count)), "a state slot leaked"
        assert len(held) + states.available == states.count, "a state slot is lost"
        targets = [one.next_state_slot for one in self._running if one.next_state_slot >= 0]
        assert all(held[slot] == 1 for slot in targets), "a step would write a shared state"

    def _check_fits(self, request: Request) -> None:
        """Refuse a request that could never finish."""
        if request.id in self._by_id:
            raise UserError(f"request id `{request.id}` is in use: pick another")
        if not request.prompt:
            raise UserError(f"the prompt of request `{request.id}` is empty: give at least one token")
        if len(request.prompt) >= request.max_length:
            raise UserError(
                f"the prompt of request `{request.id}` has {len(request.prompt)} tokens, but prompt and output "
                f"together may have {request.max_length}: shorten the prompt"
            )
        longest = min(request.max_length, len(request.prompt) + request.params.max_tokens)
        capacity = self.cache.pages * self.cache.page_size
        pages = -(-longest // self.cache.page_size)
        windows = self.cache.pages if self.windows is None else self.windows.count
        if pages > self.cache.pages or min(pages, self._most_windows) > windows:
            raise UserError(
                f"request `{request.id}` may grow to {longest} tokens, but the key/value cache holds {capacity}: "
                "lower `max_tokens`, or raise `cache_tokens`"
            )

    def _check_progress(self, step: _StepBuilder) -> None:
        """Fail if no request got a page for many steps: each fits into the cache alone, so pages have leaked."""
        self._empty_steps = self._empty_steps + 1 if self._order and not step.rows else 0
        if self._empty_steps == MAX_EMPTY_STEPS:
            self._empty_steps = 0
            raise RuntimeError(f"no page is left for any of {len(self._order)} requests, and none is in use")

    def _running_by_phase(self) -> tuple[list[Request], list[Request]]:
        """Return the running requests that decode and those that prefill, oldest first.

        Decoding requests are scheduled first, because chunks of prompts would starve them.
        """
        decoding: list[Request] = []
        prefilling: list[Request] = []
        for request in self._running:
            (prefilling if request.length - request.computed > 1 else decoding).append(request)
        return decoding, prefilling

    def _fair_share(self, decoding: list[Request]) -> list[Request]:
        """Return the requests that decode next: of many samples of one prompt those with the fewest tokens."""
        most = max(int(DECODING_SHARE * self.max_requests), MIN_SAMPLES)
        if len(decoding) <= most:
            return decoding
        most = max(most, MIN_SAMPLES * min(request.params.n for request in self._running))
        samples: dict[str, list[Request]] = defaultdict(list)
        for request in decoding:
            if request.params.n > most:
                samples[request.parent_id].append(request)
        waiting: set[Request] = set()
        for own in samples.values():
            waiting.update(sorted(own, key=lambda one: len(one.output))[most:])
        return [request for request in decoding if request not in waiting]

    def _extend_all(self, requests: list[Request], step: _StepBuilder) -> None:
        for request in requests:
            if step.budget == 0:
                return
            if request.pages:  # else it was preempted for an older request of this step
                self._extend(request, step)

    def _attach_drafts(self, step: _StepBuilder) -> None:
        """Add drafted tokens to the rows so far. Half of the remaining tokens is left for prompts."""
        allowance = step.budget - step.budget // 2
        for request, row in list(step.rows.items()):
            # The target itself adds the last token that fits. Only the depth of a tree counts against the length.
            max_depth = request.max_length - request.length - 1
            draft = request.draft
            if draft is not None and request.grammar is not None:
                draft = request.grammar.prune(request.output, draft)
            draft = draft.within(max_depth).cut(allowance) if draft is not None else None
            count = len(draft.tokens) if draft is not None else 0
            # A drafter that writes keys ahead needs pages even if it proposed nothing for this step.
            ahead = max(min(1 + count + request.lookahead, request.max_length - request.computed), 1 + count)
            request.draft = draft if self._allocate(request, ahead) and count else None
            if request.draft is not None:
                allowance -= count
                step.budget -= count
                step.rows[request] = Row(request, row.start, row.tokens, row.sample, request.draft, row.unread)

    def _reserve_for_drafts(self, step: _StepBuilder) -> None:
        """Allocate the pages that drafters write after prompts that end in this step, if there are free ones.

        Without them the first token of an answer has no draft, and a step with the host follows.
        """
        for request, row in step.rows.items():
            if request.lookahead and row.sample and row.draft is None:
                ahead = min(len(row.tokens) + 1 + request.lookahead, request.max_length - request.computed)
                self._allocate(request, ahead)

    def _allocate_decode_steps(self, rows: dict[Request, Row], most: int) -> int:
        """Allocate pages for a multi-step run and return its decode steps; 1 if rows or pages do not allow one."""
        if not self._can_multi_step(rows):
            return 1
        # A step adds at least one token. If drafts are accepted, the run ends earlier (multi_step/progress.py).
        decode_steps = max(min(most, max(one.max_length - one.length for one in rows)), 1)
        for request in rows:
            # Each decode step may accept its whole draft, and the last one drafts ahead.
            ahead = min(decode_steps * (1 + request.width) + request.lookahead, request.max_length - request.computed)
            if not self._allocate(request, ahead):
                return 1
        return decode_steps

    def _can_multi_step(self, rows: dict[Request, Row]) -> bool:
        return self.decode_steps > 1 and all(
            request.multi_step and row.sample and len(row.tokens) == 1 for request, row in rows.items()
        )

    def _extend(self, request: Request, step: _StepBuilder) -> None:
        """Add a row for a running request, preempting the youngest requests, itself included, for its pages."""
        count = self._chunk(request, min(step.budget, request.length - request.computed))
        while not self._allocate(request, count):
            youngest = self._running[-1]
            step.drop(youngest)
            self.preempt(youngest)
            if youngest is request:
                return
        if not self._choose_state_slot(request, count):
            return
        stop = request.computed + count
        tokens = request.tokens(request.computed, stop)
        unread = self._unread(request.computed, stop, stop == request.length)
        step.put(Row(request, request.computed, tokens, sample=stop == request.length, unread=unread))

    def _chunk(self, request: Request, count: int) -> int:
        """Return how many of `count` tokens run in a step: not those behind a branch, if the states there are kept."""
        to_branch = request.branch - request.computed
        return to_branch if 0 < to_branch < count else count

    def _unread(self, start: int, stop: int, sample: bool) -> int:
        """Return how many of a row's tokens its state leaves to the next step, so that it is a snapshot of a full page.

        The last token of a text must run again in a text that begins with all of it, so the page before it counts.
        """
        if self.states is None or not self.cache.sharing:
            return 1
        size = self.cache.page_size
        full = (stop - 1 if sample else stop) // size * size
        return max(stop - full, 1) if full >= start else 1

    def _choose_state_slot(self, request: Request, count: int) -> bool:
        """Choose the slot that a step writes its state to; False: there is none before another request has run.

        A state that a snapshot or another request shares is written to another slot. So is the state after a chunk, if
        a slot is free, so that the step can be repeated if it fails. A step of one token, and the start of a text, can
        be repeated in place. If any other step in place fails, the request ends with an error.
        """
        if self.states is None or request.next_state_slot >= 0:
            return True
        if self.states.references(request.state_slot) == 1:
            spare = self.states.available > self.max_requests - len(self._running)  # each request to come needs one
            if spare and count > 1 and request.computed > 0:
                request.next_state_slot = self.states.take()
            return True
        slot = self.cache.take_slot()
        if slot is not None:
            request.next_state_slot = slot
            return True
        self.cache.drop_snapshot(request.state_slot)
        return self.states.references(request.state_slot) == 1

    def _advance_state(self, request: Request) -> None:
        """Make the state that a step wrote the state of the request."""
        if self.states is not None and request.next_state_slot >= 0:
            self.states.give_back(request.state_slot)
            request.state_slot, request.next_state_slot = request.next_state_slot, -1

    def _keep_snapshot(self, row: Row, result: RowResult) -> None:
        """Keep the state that a step wrote, if a page ends behind what it has read, within the computed tokens."""
        if self.states is None:
            return
        request, size = row.request, self.cache.page_size
        last = len(result.decode_steps[-1].tokens) if result.decode_steps else 1  # tokens of the last decode step
        read = row.start + (len(row.tokens) - row.unread if result.passes == 1 else len(result.tokens) - last)
        is_prompt_end = row.sample and row.start < len(request.prompt)
        full = (request.computed - is_prompt_end) // size * size  # as in _unread
        snapshot = None
        if 0 < full >= read:
            snapshot = self.cache.keep_snapshot(request.pages[full // size - 1], request.state_slot)
        if snapshot is not None:
            if request.snapshot is not None and not request.snapshot.reused:
                self.cache.drop_snapshot(request.snapshot.slot)
            request.snapshot = snapshot
        if is_prompt_end or request.computed == request.branch:
            request.snapshot = None  # it stays: other texts may begin with this prompt, or branch here again

    def _admit(self, step: _StepBuilder) -> None:
        """Admit waiting requests, oldest first, while there are rows, tokens, pages, and slots for their adapters."""
        if not self._waiting:
            return
        no_slot = False
        index, most = 0, max(int(RUNNING_SHARE * self.max_requests), MIN_SAMPLES)
        samples = Counter(request.parent_id for request in self._running)
        while step.budget > 0 and len(self._running) < self.max_requests and index < len(self._waiting):
            request = self._waiting[index]
            if self._waits_for_first_sample(request) or (request.parent_id and samples[request.parent_id] >= most):
                index += 1
            elif request.adapter is not None and (no_slot or not self._take_slot(request.adapter)):
                no_slot = True  # younger requests without an adapter may overtake, others would keep the slots
                index += 1
            elif self._take_prefix(request):
                del self._waiting[index]
                samples[request.parent_id] += 1
                insort(self._running, request, key=self._order.__getitem__)
                self._extend(request, step)
            else:
                if self.adapters is not None and request.adapter is not None:
                    self.adapters.give_back(request.adapter)
                return  # younger requests do not overtake the oldest, which might starve

    def _take_slot(self, adapter: Adapter) -> bool:
        assert self.adapters is not None, f"the adapter `{adapter.name}` has no slots"
        return self.adapters.take(adapter)

    def _take_prefix(self, request: Request) -> bool:
        """Give a request its cached prefix, if there is memory for the rest of its tokens; else return False."""
        limit = self._reusable(request)
        match = self.cache.match(request.tokens(0, limit), limit, request.kv_method, request.cache_salt)
        missing = -(-(request.length - match.tokens) // self.cache.page_size)
        fits = missing <= self.cache.available
        if self.windows is not None:
            held = len(match.pages) - match.passed
            fits = fits and min(missing, self._most_windows - held) <= self.windows.available
        if not fits or not self._take_state_slot(request, match):
            self.cache.undo(match)
            return False
        request.pages, request.computed, request.passed = match.pages, match.tokens, match.passed
        if request.admitted is None:
            request.admitted = time.perf_counter()
        if request.preemptions == 0:
            request.cached_tokens = min(match.tokens, len(request.prompt))
        return True

    def _take_state_slot(self, request: Request, match: Match) -> bool:
        """Give a request a slot for its states, and the snapshot to continue from; False: no slot is left."""
        if self.states is None:
            return True
        slot = self.cache.take_slot()
        if slot is None:
            return False
        request.state_slot, request.next_state_slot = (slot, -1) if match.tokens == 0 else (match.state_slot, slot)
        is_far = match.published_tokens - match.tokens >= BRANCH_TOKENS
        request.branch = match.published_tokens if is_far else 0
        return True

    def _waits_for_first_sample(self, request: Request) -> bool:
        """Return True while the first sample of its parent still computes the prompt that both share."""
        first = self._first_samples.get(request.parent_id)
        if first is None or first is request or not self.cache.sharing:
            return False
        return first.computed < len(first.prompt)

    def _reusable(self, request: Request) -> int:
        """Return how many tokens the cache may supply. The last one and those that owe prompt logprobs must run."""
        missing = len(request.prompt) - 1 - len(request.prompt_logprobs)
        if request.wants_prompt_logprobs and missing > 0:
            return len(request.prompt_logprobs)
        return request.length - 1

    def _allocate(self, request: Request, count: int) -> bool:
        """Give a request the pages that its next `count` tokens lack; return False if there are too few."""
        missing = self._missing_pages(request, count)
        pages = self.cache.allocate(missing) if missing else []
        if pages is None:
            return False
        request.pages += pages
        return True

    def _missing_pages(self, request: Request, count: int) -> int:
        needed = -(-(request.computed + count) // self.cache.page_size)
        return max(needed - len(request.pages), 0)

    def _release_passed(self, request: Request) -> None:
        """Give back the window pages that no layer's window reaches any more."""
        if self.windows is not None:
            first = self.windows.first_reached(request.computed)
            self.cache.release_windows(request.pages[request.passed : first])
            request.passed = first

    def _accept(self, row: Row, result: RowResult) -> None:
        request = row.request
        request.prompt_logprobs += result.prompt_logprobs
        self._advance_state(request)
        spec_stats, steps = request.spec_stats, request.spec_stats.steps
        ending = request.append(row.draft, result)
        request.draft = result.draft
        if not request.width and spec_stats.suspension is not None:  # its drafter was dropped: it did not pay
            spec_stats.suspend(spec_stats.suspension, spec_stats.steps - steps)
        if result.dropped:
            request.width, request.lookahead, request.kv_method = 0, 0, ""
        # The newest token has not run yet. All tokens before it have.
        ran = len(result.tokens) - 1 if row.draft is not None or result.passes > 1 else 0
        request.computed = min(row.start + len(row.tokens) + ran, request.length - 1)
        size = self.cache.page_size
        first, full = row.start // size, request.computed // size
        if full > first:
            tokens = request.tokens(first * size, full * size)
            self.cache.publish(tokens, request.pages, first, request.kv_method, request.cache_salt)
        self._keep_snapshot(row, result)
        self._release_passed(request)
        if ending == (FinishReason.STOP, None) and request.grammar and not request.grammar.complete(request.output):
            self.finish(request, FinishReason.ERROR, NO_TOKEN_ALLOWED)
        elif ending is not None:
            self.finish(request, *ending)

    def _stop_running(self, request: Request) -> None:
        self._running.remove(request)
        if self.adapters is not None and request.adapter is not None:
            self.adapters.give_back(request.adapter)
        if self.states is not None:
            self._advance_state(request)
            self.states.give_back(request.state_slot)
            request.snapshot = None

    def _free_pages(self, request: Request) -> None:
        self._scheduled.pop(request, None)
        self.cache.release(request.pages, request.passed)
        request.pages, request.computed, request.passed = [], 0, 0
