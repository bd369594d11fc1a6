"""Random lives of many requests: whatever happens to them, each comes to what the plain loop gives."""

from __future__ import annotations

import pytest
from fake_runner import FakeRunner, drain, make, plain_loop
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from outrider.scheduler import Scheduler
from outrider.types import FinishReason, Request, Step, UserError


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, steps, aborts, preemptions and clearings in any order; every output is the plain loop's."""

    @initialize(
        pages=st.integers(3, 9),
        page_size=st.integers(1, 3),
        max_requests=st.integers(1, 4),
        max_step_tokens=st.integers(1, 7),
        prefix_cache=st.booleans(),
    )
    def open(self, pages: int, page_size: int, max_requests: int, max_step_tokens: int, prefix_cache: bool) -> None:
        self.room = Scheduler(pages, page_size, max_requests, max_step_tokens, prefix_cache)
        self.runner = FakeRunner(page_size)
        self.requests: list[Request] = []

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        max_tokens=st.integers(1, 7),
        min_tokens=st.integers(0, 2),
        count=st.sampled_from([1, 1, 1, 2, 3]),
        ends=st.sets(st.integers(0, 1), max_size=1),
        stops=st.sets(st.integers(2, 3), max_size=1),
        prompt_logprobs=st.sampled_from([None, None, 1]),
    )
    def arrive(
        self,
        prompt: list[int],
        max_tokens: int,
        min_tokens: int,
        count: int,
        ends: set[int],
        stops: set[int],
        prompt_logprobs: int | None,
    ) -> None:
        room = self.room.cache.pages * self.room.cache.page_size
        name = f"r{len(self.requests)}"
        for index in range(count):
            request = make(
                f"{name}-{index}",
                prompt,
                max_tokens,
                min_tokens=min(min_tokens, max_tokens),
                stop_token_ids=sorted(stops),
                end_tokens=frozenset(ends),
                prompt_logprobs=prompt_logprobs,
                index=index,
                family=name,
                max_length=14,
            )
            if min(len(prompt) + max_tokens, 14) > room:
                with pytest.raises(UserError):
                    self.room.add(request)
            else:
                self.room.add(request)
                self.requests.append(request)

    @rule(burst=st.sampled_from([1, 1, 1, 2, 3]), times=st.integers(1, 4))
    def step(self, burst: int, times: int) -> None:
        for _ in range(times):
            step = self.room.next()
            assert (step is None) == self.room.is_idle, "nothing runs, though something waits"
            if step is None:
                return
            self._check_step(step)
            touched = self.room.commit(step, self.runner.step(step, burst))
            assert touched == [row.request for row in step.rows]
            self.room.check()

    def _check_step(self, step: Step) -> None:
        cache = self.room.cache
        assert sum(len(row.tokens) for row in step.rows) <= self.room.max_step_tokens
        assert len(self.room.running) <= self.room.max_requests
        for row in step.rows:
            assert row.tokens and row.start == row.request.computed
            for page in row.request.pages[row.start // cache.page_size :]:
                assert cache.references(page) == 1 and not cache.is_published(page), "a shared page is written"

    @precondition(lambda self: self.room.running or self.room.waiting)
    @rule(which=st.integers(0, 99), event=st.sampled_from(["abort", "family", "finish", "preempt", "clear", "lose"]))
    def disturb(self, which: int, event: str) -> None:
        """Something happens between a step and its commit."""
        step = self.room.next()
        assert step is not None
        results = self.runner.step(step)
        live = self.room.running + self.room.waiting
        request = live[which % len(live)]
        if event == "abort":
            assert self.room.abort(request.id) == [request]
        elif event == "family":
            assert request in self.room.abort(request.family)
        elif event == "finish":
            self.room.finish(request, FinishReason.STOP, "text")
        elif event == "preempt":
            self.room.preempt_all()
        elif event == "clear":
            self.room.clear_cache()
        else:
            return  # the runner died; the step is never committed
        self.room.check()
        touched = self.room.commit(step, results)
        assert request not in touched or event == "clear"
        assert event != "preempt" or not touched

    @rule()
    def wipe(self) -> None:
        """New weights: whatever the cache held is wrong from now on."""
        self.room.preempt_all()
        self.room.clear_cache()
        self.runner.slots.clear()
        assert self.room.cache.available == self.room.cache.pages

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "room"):
            self.room.check()

    def teardown(self) -> None:
        if not hasattr(self, "room"):
            return
        drain(self.room, self.runner)
        assert self.room.cache.available == self.room.cache.pages, "a page leaked"
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
        if request.params.prompt_logprobs is not None:
            assert [entry.token for entry in request.prompt_logprobs] == request.prompt[1:]


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=200, stateful_step_count=25, deadline=None)
