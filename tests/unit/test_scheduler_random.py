"""Random schedules of many requests: whatever happens, each gives the output of the plain loop."""

from __future__ import annotations

import pytest
from fake_runner import FakeRunner, make, plain_loop
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from outrider.errors import UserError
from outrider.request import Request, Step
from outrider.scheduler import Scheduler
from outrider.types import FinishReason

LONGEST = 14  # tokens of prompt and output
WIDEST = 5  # tokens of a draft

# Few beginnings, so that prompts share their pages; and some that share nothing.
PROMPTS = st.builds(
    lambda base, length, tail: [*base[:length], *tail],
    st.sampled_from([(0, 1, 0, 0, 1, 1, 0, 1, 1, 0), (0, 1, 0, 0, 1, 0, 0, 0, 1, 1)]),
    st.integers(1, 10),
    st.lists(st.integers(0, 1), max_size=2),
)
NEW_REQUESTS = st.fixed_dictionaries(
    {
        "prompt": PROMPTS,
        "max_tokens": st.integers(1, 8),
        "min_tokens": st.integers(0, 2),
        "n": st.sampled_from([1, 1, 2, 3]),
        "end_tokens": st.sampled_from([frozenset(), frozenset({0}), frozenset({4})]),
        "stop_token_ids": st.sampled_from([(), (), (3,), (0, 2)]),
        "prompt_logprobs": st.sampled_from([None, None, None, 1]),
        "lookahead": st.sampled_from([0, 0, 1, 4]),
        "kv_method": st.sampled_from(["", "", "a", "b"]),
    }
)
EVENTS = ["abort", "family", "finish", "preempt", "clear", "lose", "wipe"]


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, steps, drafts, aborts, preemptions and clearings in any order."""

    @initialize(
        page_size=st.integers(1, 3),
        capacity=st.integers(12, 22),
        max_requests=st.integers(1, 5),
        max_step_tokens=st.integers(1, 12),
        prefix_cache=st.sampled_from([True, True, True, False]),
        snapshots=st.sampled_from([None, None, 0, 1, 2, 20]),
        window=st.sampled_from([0, 0, 1, 2, 5]),
        spare_windows=st.integers(0, 8),
    )
    def open(
        self,
        page_size: int,
        capacity: int,
        max_requests: int,
        max_step_tokens: int,
        prefix_cache: bool,
        snapshots: int | None,
        window: int,
        spare_windows: int,
    ) -> None:
        """snapshots: of a model with recurrent layers; None: another model.

        spare_windows: window pages beyond those that one request needs.
        """
        slots = 0 if snapshots is None else max_requests + 2 + snapshots
        window_pages = -(-(window + max_step_tokens) // page_size) + 1 + spare_windows if window else 0
        self.scheduler = Scheduler(
            capacity // page_size,
            page_size,
            max_requests,
            max_step_tokens,
            prefix_cache,
            window=window,
            window_pages=window_pages,
            state_slots=slots,
        )
        self.runner = FakeRunner(page_size, window, recurrent=slots > 0)
        self.requests: list[Request] = []
        self.branched = False  # some draft was a tree
        self.lost = False  # a lost step may leave more pages than the next one needs

    @rule(added=st.lists(NEW_REQUESTS, min_size=1, max_size=3))
    def arrive(self, added: list[dict]) -> None:
        for options in added:
            options = {**options, "min_tokens": min(options["min_tokens"], options["max_tokens"])}
            name = f"r{len(self.requests)}"
            for index in range(options["n"]):
                request = make(f"{name}-{index}", index=index, parent_id=name, max_length=LONGEST, **options)
                self._add(request)

    def _add(self, request: Request) -> None:
        longest = min(len(request.prompt) + request.params.max_tokens, LONGEST)
        if longest <= self.scheduler.cache.pages * self.scheduler.cache.page_size:
            self.scheduler.add(request)
            self.requests.append(request)
        else:
            with pytest.raises(UserError):
                self.scheduler.add(request)

    @precondition(lambda self: not self.scheduler.is_idle)
    @rule(width=st.sampled_from([0, 1, 2, WIDEST]), branches=st.sampled_from([1, 1, 2]), times=st.integers(1, 6))
    def run(self, width: int, branches: int, times: int) -> None:
        self.branched |= branches > 1
        for _ in range(times):
            self._advance(width, branches)

    def _advance(self, width: int = 0, branches: int = 1) -> None:
        step = self.scheduler.next()
        assert (step is None) == self.scheduler.is_idle, "nothing runs, though something waits"
        if step is not None:
            self._check_step(step)
            touched = self.scheduler.commit(step, self.runner.step(step, width, branches))
            assert touched == [row.request for row in step.rows]
        self.scheduler.check()

    def _check_step(self, step: Step) -> None:
        cache, running = self.scheduler.cache, self.scheduler.running
        assert sum(row.size for row in step.rows) <= self.scheduler.max_step_tokens
        assert len(running) <= self.scheduler.max_requests
        starved = [request for request in running if request not in {row.request for row in step.rows}]
        if self.runner.states is None:
            assert not starved or sum(row.size for row in step.rows) == self.scheduler.max_step_tokens
        for row in step.rows:
            stop = row.start + len(row.tokens)
            assert row.tokens and row.start == row.request.computed
            assert row.sample == (stop == row.request.length)
            assert row.draft is None or (row.sample and stop + 1 + max(row.draft.depths()) < row.request.max_length)
            written = -(-(row.start + row.size) // cache.page_size)
            longest = -(-min(row.request.length, LONGEST) // cache.page_size)
            assert written <= len(row.request.pages), "a page is missing"
            if not (self.lost or row.request.lookahead or row.request.spec_stats.drafted or row.draft):
                assert len(row.request.pages) == written, "a page too many"
            most = LONGEST + (WIDEST if self.branched else 0)  # only what stands side by side may reach beyond
            assert len(row.request.pages) <= max(longest, -(-most // cache.page_size)), "a page beyond the longest"
            for page in row.request.pages[row.start // cache.page_size :]:
                assert cache.references(page) == 1 and not cache.is_published(page), "a shared page is written"

    @precondition(lambda self: not self.scheduler.is_idle)
    @rule(which=st.integers(0, 99), event=st.sampled_from(EVENTS))
    def disturb(self, which: int, event: str) -> None:
        """Something happens between a step and its commit."""
        step = self.scheduler.next()
        assert step is not None
        results = self.runner.step(step)
        live = self.scheduler.running + self.scheduler.waiting
        request = live[which % len(live)]
        if event == "lose":  # the runner died
            self.lost = True
            return
        if event == "abort":
            self.scheduler.finish(request, FinishReason.ABORT)
        elif event == "family":
            for sample in [one for one in live if one.parent_id == request.parent_id]:
                self.scheduler.finish(sample, FinishReason.ABORT)
        elif event == "finish":
            self.scheduler.finish(request, FinishReason.STOP, "text")
        if event in ("preempt", "wipe"):
            self.scheduler.preempt_all()
        if event in ("clear", "wipe"):
            self.scheduler.clear_cache()
            assert self.scheduler.cache.idle == 0
        if event == "wipe":  # new weights: nothing of what lay there may be read again
            self.runner.slots.clear()
            self.runner.followed.clear()
            self.runner.window_slots.clear()
            if self.runner.states is not None:
                self.runner.states.clear()
        self.scheduler.check()
        touched = self.scheduler.commit(step, results)
        assert request not in touched or event == "clear"
        assert not touched or event not in ("preempt", "wipe")

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        bound = sum(LONGEST * (request.preemptions + 2) for request in self.requests) + LONGEST**2
        for _ in range(bound):
            if self.scheduler.is_idle:
                break
            self._advance()
        assert self.scheduler.is_idle, "the requests never finish"
        assert self.scheduler.cache.available == self.scheduler.cache.pages, "a page leaked"
        windows = self.scheduler.windows
        assert windows is None or windows.available == windows.count, "a window page leaked"
        if self.scheduler.states is not None:
            assert self.scheduler.states.available + len(self.scheduler.cache.snapshot_slots) == (
                self.scheduler.states.count
            ), "a state slot leaked"
        for request in self.requests:
            self._check_end(request)

    def _check_end(self, request: Request) -> None:
        output, reason, stop = plain_loop(request)
        first = len(request.prompt)
        assert [entry.token for entry in request.logprobs] == request.output
        assert [entry.logprob for entry in request.logprobs] == list(range(first, first + len(request.output)))
        if request.finish_reason is FinishReason.ABORT or request.stop_reason == "text":
            assert request.output == output[: len(request.output)]
            return
        assert (request.output, request.finish_reason, request.stop_reason) == (output, reason, stop)
        if request.wants_prompt_logprobs:
            assert [entry.token for entry in request.prompt_logprobs] == request.prompt[1:]


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=150, stateful_step_count=20)
