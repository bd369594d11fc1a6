"""The adaptive width: how many tokens to draft for each request, and how many of them to verify.

Each step takes the widths that promise the most tokens a second, and 0 is a width. Widths that do not seem to pay are
explored from time to time, because the text may change. The exploration budget is a small share of the time, plus the
time that accepted tokens of explorations have saved.

`trim` looks at drafts after they were sampled. That is lossless with exact match, where the text does not depend on the
drafts; the other verification modes run without this controller.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter

from ...request import Request
from ...types import Draft
from .acceptance_model import PRIOR_WEIGHT, REQUEST_MEMORY, WEAK_PRIOR_WEIGHT, Calibration, IndexRates, Rates, products
from .latency_model import LatencyCurve, LatencyModel
from .suspension import MAX_STEPS, MIN_STEPS, Backoff

HYSTERESIS = 0.03  # relative gain of other widths for which the last ones are left
MAX_LOST = 0.15  # likewise, summed over the steps since the other widths are faster
SUSPENSION_HYSTERESIS = 0.01  # relative gain over no drafts to begin drafting, relative loss to end it
YIELD_LEFT = 0.3  # share of a request's yields left after a suspension: the text may have changed
EXPLORATION_SHARE = 0.003  # of the time: the most that explorations may lose in the long run
EXPLORATION_CAPACITY = 4.0  # steps without drafts: the most that explorations may lose at once; half of it at first
FOLLOWING_COST = 0.05  # of a step without drafts: a drafter that is not asked for long may cost this much

Entry = tuple[float, int, int, bool]  # acceptance, depth and request of a token; whether a draft may end after it


class Method:
    """The state of a method."""

    def __init__(self) -> None:
        self.rates = IndexRates()
        self.calibration = Calibration()
        self.yields = Rates((0.0, 0.0), weight=WEAK_PRIOR_WEIGHT)  # tokens accepted and verified of a draft
        self.latency = LatencyCurve()  # by width
        self.parents: Sequence[int] | None = None  # of its last draft without confidence, if that was a tree
        self.confident = False  # its drafts have confidences
        self.spent = 0.0  # seconds of the last draft
        self.usual = 0.0  # fading mean of them
        self.width = 0.0  # mean over the requests of the last step
        self.tokens, self.seconds = 0.0, 0.0  # of a step: tokens expected for each request, and latency; fading sums
        self.lost = 0.0  # relative gain of other widths, summed over steps
        self.budget: float | None = None  # seconds that explorations may lose; None: not known yet

    def record(self, widths: Sequence[int], expected: float, seconds: float, plain: float) -> None:
        """Learn what a step is expected to yield, in tokens for each request."""
        self.tokens = REQUEST_MEMORY * self.tokens + expected
        self.seconds = REQUEST_MEMORY * self.seconds + seconds
        self.width = sum(widths) / len(widths)
        if self.budget is None:
            self.budget = EXPLORATION_CAPACITY / 2 * plain
        self.budget = min(self.budget + EXPLORATION_SHARE * seconds, EXPLORATION_CAPACITY * plain)


class RequestState:
    """The state of a request."""

    __slots__ = (
        "backoff",
        "calibration",
        "explored",
        "method",
        "planned",
        "rates",
        "skipped",
        "waited",
        "width",
        "yields",
    )

    def __init__(self, method: Method) -> None:
        self.method = method
        self.rates = IndexRates(method.rates)
        self.calibration = Calibration(method.calibration)
        self.yields = Rates((0.0, 0.0), method.yields, WEAK_PRIOR_WEIGHT)
        self.backoff = Backoff()
        self.width = -1  # the last one; -1: none yet
        self.planned = False  # `plan` asked for the draft that `trim` is to see
        self.skipped = 0  # steps in a row without a draft
        self.waited = 0  # steps since it drafted all that it could
        self.explored: tuple[int, float] | None = None  # width that seemed to pay; seconds that a token beyond is worth

    def acceptance(self, width: int) -> list[float]:
        """Return the probability of each token of a draft that is not there yet, or has no confidences."""
        parents = self.method.parents
        if parents is not None and len(parents) < width:
            parents = [*parents, *range(len(parents) - 1, width - 1)]
        return self.rates.cumulative(width, parents)


class WidthSearch:
    """The widths of one step, by the acceptance of each request's tokens and by their latencies."""

    def __init__(
        self, acceptance: list[list[float]], verification: list[float], drafting: list[float], batch_size: int
    ) -> None:
        self.acceptance, self.batch_size = acceptance, batch_size
        self.verification, self.drafting = verification, drafting  # seconds by drafted tokens, by the widest draft

    def seconds(self, widths: Sequence[int]) -> float:
        return self.verification[sum(widths)] + self.drafting[min(max(widths), len(self.drafting) - 1)]

    def expected(self, widths: Sequence[int]) -> float:
        """Return the tokens of a step with these widths."""
        rows = zip(self.acceptance, widths, strict=True)
        return self.batch_size + sum(sum(acceptance[:width]) for acceptance, width in rows)

    def speed(self, widths: Sequence[int]) -> float:
        """Return the tokens a second with these widths."""
        return self.expected(widths) / self.seconds(widths)

    def fastest(self) -> tuple[list[int], float]:
        """Return the widths with the most tokens a second: probable tokens first, as many as raise it."""
        entries = self._entries()
        best = self.batch_size / (self.verification[0] + self.drafting[0])
        chosen: list[Entry] = []
        cheapest = float("inf")
        for depth in range(len(self.drafting) - 1, 0, -1):
            drafting = self.drafting[depth]
            if drafting >= cheapest:
                continue  # a deeper draft costs no more
            cheapest = drafting
            if depth < len(self.drafting) - 1:
                entries = [entry for entry in entries if entry[1] < depth]
            expected, left = float(self.batch_size), len(entries)
            for count, (acceptance, _, _, ends) in enumerate(entries, 1):
                seconds = self.verification[count] + drafting
                if expected + acceptance * left <= best * seconds:
                    break  # the tokens that follow are no more probable
                expected, left = expected + acceptance, left - 1
                if ends and expected > best * seconds:
                    best, chosen = expected / seconds, entries[:count]
        return self._widths(chosen), best

    def profitable(self, speed: float) -> list[int]:
        """Return the widths that gain most if a second is worth `speed` tokens, or those of a step without drafts."""
        speed = max(speed, self.batch_size / (self.verification[0] + self.drafting[0]))
        entries, taken = self._entries(), 0
        gain = best = 0.0
        for count, (acceptance, _, _, ends) in enumerate(entries, 1):
            gain += acceptance
            profit = gain - speed * (self.verification[count] - self.verification[0])
            if ends and profit > best:
                best, taken = profit, count
        return self._widths(entries[:taken])

    def _entries(self) -> list[Entry]:
        """Return all tokens, the most probable first; tokens behind less probable ones share their mean with them."""
        entries: list[Entry] = []
        for row, acceptance in enumerate(self.acceptance):
            if acceptance == sorted(acceptance, reverse=True):
                entries += [(value, depth, row, True) for depth, value in enumerate(acceptance)]
                continue
            pools: list[tuple[float, int]] = []  # mean, number of tokens
            for value in acceptance:
                size = 1
                while pools and pools[-1][0] < value:
                    mean, more = pools.pop()
                    value, size = (mean * more + value * size) / (more + size), more + size
                pools.append((value, size))
            depth = 0
            for value, size in pools:
                entries += [(value, depth + index, row, index == size - 1) for index in range(size)]
                depth += size
        if len(self.acceptance) > 1:
            entries.sort(key=itemgetter(0), reverse=True)  # stable: the tokens of a draft stay in order
        return entries

    def _widths(self, chosen: list[Entry]) -> list[int]:
        widths = [0] * len(self.acceptance)
        for _, _, row, _ in chosen:
            widths[row] += 1
        return widths


class AdaptiveController:
    def __init__(self, *suspendable: str) -> None:
        """suspendable: methods that cost nothing while they are not called; others follow every token."""
        self.latency, self.suspendable = LatencyModel(), set(suspendable)
        self.multi_step: set[str] = set()  # methods timed in multi-step runs: a step with the host takes longer
        self._methods: dict[str, Method] = {}
        self._requests: dict[Request, RequestState] = {}

    @property
    def num_requests(self) -> int:
        """Return the number of requests that have state here."""
        return len(self._requests)

    def draft_latency(self, method: str) -> LatencyCurve:
        """Return the seconds of a call of the method by the widest draft; 0: it only follows the text."""
        return self._method(method).latency

    def forget(self, request: Request) -> None:
        self._requests.pop(request, None)

    # ---- outcomes ----

    def learn(self, request: Request, draft: Draft, path: Sequence[int]) -> None:
        """Learn that of a verified draft the tokens with the indices `path` were accepted."""
        state = self._state(request)
        if state.explored is not None:
            width, worth = state.explored
            state.method.budget = (state.method.budget or 0.0) + worth * sum(index >= width for index in path)
            state.explored = None
        accepted = {-1, *path}
        if draft.confidence is None:
            state.method.parents = draft.parents
            state.rates.learn([float(index in accepted) for index in range(len(draft.tokens))], draft.parents)
            return
        for index, (parent, confidence) in enumerate(zip(draft.parent_indices(), draft.confidence, strict=True)):
            if parent in accepted:
                state.calibration.learn(confidence, index in accepted)

    def skip(self, request: Request, steps: int) -> None:
        """Count steps without a draft that `plan` was not called for."""
        self._state(request).skipped += steps

    def observe_draft(self, method: str, depth: int, seconds: float | None) -> None:
        """Learn from a call that drafted `depth` tokens in `seconds`; None: it also had to catch up."""
        state = self._method(method)
        if seconds is not None and method not in self.multi_step:
            state.latency.observe(depth, seconds)
        if depth and state.latency.known:
            state.spent = state.latency.seconds(depth)
            state.usual += (1 - REQUEST_MEMORY if state.usual else 1.0) * (state.spent - state.usual)

    # ---- suspended drafters ----

    def suspended_steps(self, request: Request) -> int:
        """Return for how many further steps the drafter of `request` is suspended; 0: it is not."""
        state = self._requests.get(request)
        return 0 if state is None else state.backoff.remaining

    def all_suspended(self, requests: Iterable[Request]) -> bool:
        """Return whether the drafters of all `requests` are suspended."""
        return all(self.suspended_steps(request) for request in requests)

    def step_suspended(self, request: Request, batch_size: int) -> bool:
        """Count a step of a suspended request and return whether it stays suspended."""
        state = self._requests[request]
        state.backoff.remaining -= 1
        if not state.backoff.remaining:
            state.yields.fade(YIELD_LEFT)
        return state.backoff.remaining > 0

    def unprofitable(self, method: str) -> bool:
        """Return whether drafts for a new request are not expected to pay: its prompt need not be processed then."""
        state = self._method(method)
        if not self.latency.known or not state.usual:
            return False
        return not self._paying([state.yields], [(1.0, 1)], True, state.usual, 1)[0]

    def _paying(
        self,
        yields: Sequence[Rates],
        priors: Sequence[tuple[float, int]],
        active: bool,
        drafting: float,
        batch_size: int,
    ) -> list[bool]:
        """Return for which requests drafts pay, if all of them together take `drafting` seconds.

        priors: tokens accepted and verified of a draft, before they are known. active: some draft already.
        """
        means = [(one.rate(0, prior[0]), one.rate(1, prior[1])) for one, prior in zip(yields, priors, strict=True)]
        best, taken = batch_size / self.latency.seconds(batch_size, 0), 0
        best *= 1 - SUSPENSION_HYSTERESIS if active else 1 + SUSPENSION_HYSTERESIS
        order = sorted(range(len(means)), key=lambda row: -means[row][0])
        tokens, rows = float(batch_size), 0.0
        for count, row in enumerate(order, 1):
            tokens, rows = tokens + means[row][0], rows + means[row][1]
            speed = tokens / (self.latency.seconds(batch_size, rows) + drafting)
            if speed > best:
                best, taken = speed, count
        chosen = set(order[:taken])
        return [row in chosen for row in range(len(means))]

    # ---- before a draft ----

    def plan(
        self, requests: Sequence[Request], limits: Sequence[int], others: int = 0, stops_early: bool = False
    ) -> list[int]:
        """Return how many tokens each request may draft, up to `limits`; all have one method, whose drafts cost time.

        others: requests of the step beside these. stops_early: the method ends a draft itself where it does not pay.
        """
        batch_size = len(requests) + others
        if not requests or not self.latency.covers(batch_size):
            return [0] * len(requests)  # measure a step without drafts first
        states = [self._state(request) for request in requests]
        method, deepest = states[0].method, max(limits)
        search = WidthSearch(
            [state.acceptance(limit) for state, limit in zip(states, limits, strict=True)],
            self.latency.table(batch_size, sum(limits)),
            method.latency.table(0, deepest) if method.latency.known else [0.0] * (deepest + 1),
            batch_size,
        )
        if requests[0].method in self.suspendable:
            search.drafting[0] = 0.0
            widths = self._suspend(method, states, limits, search, stops_early)
        else:
            widths = self._settle(method, states, limits, search)
        if not any(widths):
            self._record(method, search, widths)
        idle = []
        for row, (state, width) in enumerate(zip(states, widths, strict=True)):
            state.explored, state.width = None, width
            if not state.backoff.remaining and self._explores(state, width, limits[row]):
                idle.append(row)
        self._explore(method, states, idle, limits, widths, search)
        if method.confident and any(widths):
            self._widen(limits, widths, search.drafting)
        for state, width in zip(states, widths, strict=True):
            state.skipped, state.planned = 0 if width else state.skipped + 1, width > 0
        method.spent = search.drafting[max(widths)]
        return widths

    def _suspend(
        self, method: Method, states: list[RequestState], limits: Sequence[int], search: WidthSearch, stops_early: bool
    ) -> list[int]:
        """Return the widths of requests whose drafts pay, or are probed; suspend the others."""
        fastest, _ = search.fastest()
        paying = [width > 0 for width in fastest]
        if method.confident:  # what `trim` left of its drafts says more
            priors = [(sum(a[:width]), width) for a, width in zip(search.acceptance, fastest, strict=True)]
            yields = [state.yields for state in states]
            active = any(state.backoff.drafts for state in states)
            drafting = method.usual or search.drafting[max(fastest)]
            paying = self._paying(yields, priors, active, drafting, search.batch_size)
        unknown = method.yields.weights[0] < PRIOR_WEIGHT
        # Each of many suspended requests is probed less often; the root bounds how long a text that became easy waits.
        suspended = search.batch_size - sum(paying)
        factor = max(suspended * self.latency.seconds(1, 0) / search.verification[0], 1.0) ** 0.5
        widths = []
        for row, state in enumerate(states):
            if paying[row]:
                state.backoff.succeed()
            elif not unknown and not state.backoff.probe():
                state.backoff.suspend(factor)
                widths.append(0)
                continue
            alone = WidthSearch([search.acceptance[row]], search.verification, search.drafting, 1)
            widths.append(limits[row] if stops_early else max(alone.fastest()[0][0], 1))
        return widths

    @staticmethod
    def _settle(method: Method, states: list[RequestState], limits: Sequence[int], search: WidthSearch) -> list[int]:
        """Return the fastest widths, unless the last ones are nearly as fast."""
        fastest, speed = search.fastest()
        last = [
            width if state.width < 0 else min(state.width, limit)
            for state, width, limit in zip(states, fastest, limits, strict=True)
        ]
        if last != fastest:
            gain = speed / search.speed(last) - 1
            method.lost += gain
            if gain <= HYSTERESIS and method.lost <= MAX_LOST:
                return last
        method.lost = 0.0
        return fastest

    @staticmethod
    def _widen(limits: Sequence[int], widths: list[int], drafting: list[float]) -> None:
        """Let a drafter with confidences draft deeper where that costs no time: `trim` has more to choose from."""
        deepest = max(widths)
        latency = drafting[deepest] * (1 + HYSTERESIS)
        while deepest + 1 < len(drafting) and drafting[deepest + 1] <= latency:
            deepest += 1
        for row, width in enumerate(widths):
            if width:
                widths[row] = min(deepest, limits[row])

    # ---- thresholds ----

    def min_acceptance(self, method: str, batch_size: int) -> float:
        """Return the probability below which one more token for each request does not pay to verify."""
        if not self.latency.known or batch_size < 1:
            return 0.0
        width = max(round(self._method(method).width), 1)
        rows = batch_size * (width - 1 if method in self.suspendable else width)
        more = self.latency.seconds(batch_size, rows + batch_size) - self.latency.seconds(batch_size, rows)
        return min(more * self.tokens_per_second(method, batch_size), 1.0)

    def min_continuation(self, method: str, batch_size: int) -> float:
        """Return the probability of a token below which drafting another one does not pay."""
        threshold, state = self.min_acceptance(method, batch_size), self._method(method)
        if not (self.latency.known and state.latency.known) or batch_size < 1:
            return threshold
        width = max(round(state.width), 1)
        more = state.latency.seconds(width + 1) - state.latency.seconds(width)
        return min((threshold + more * self.tokens_per_second(method, batch_size)) / state.rates.rates(2)[1], 1.0)

    def tokens_per_second(self, method: str, batch_size: int) -> float:
        """Return the present tokens a second of each request; 0: not known yet."""
        if not self.latency.known or batch_size < 1:
            return 0.0
        state = self._method(method)
        return state.tokens / state.seconds if state.seconds else 1 / self.latency.seconds(batch_size, 0)

    def should_drop(self, request: Request, batch_size: int) -> bool:
        """Return whether a drafter that has not been called for long costs too much to follow the text."""
        state = self._state(request)
        if state.skipped < 2 * MAX_STEPS:
            return False
        return state.method.latency.seconds(0) > FOLLOWING_COST * self.latency.seconds(batch_size, 0)

    # ---- after a draft ----

    def trim(self, requests: Sequence[Request], drafts: Sequence[Draft | None], others: int = 0) -> list[int]:
        """Return how many tokens of each draft pay: those that bring more than their verification costs."""
        batch_size = len(requests) + others
        states = [self._state(request) for request in requests]
        if not self.latency.covers(batch_size) or not (any(drafts) or any(state.planned for state in states)):
            return [0] * len(requests)
        acceptance = [
            [] if draft is None else self._acceptance(state, draft) for state, draft in zip(states, drafts, strict=True)
        ]
        limits, method = [len(one) for one in acceptance], states[0].method
        spent = method.spent if any(state.planned for state in states) else 0.0
        search = WidthSearch(acceptance, self.latency.table(batch_size, sum(limits)), [spent], batch_size)
        widths = search.profitable(method.tokens / method.seconds * batch_size if method.seconds else 0.0)
        self._record(method, search, widths)
        idle = []
        for row, state in enumerate(states):
            if not state.planned:
                state.explored = None
                if self._explores(state, widths[row], limits[row]):
                    idle.append(row)
            elif state.explored is not None:
                widths[row] = max(widths[row], min(1 if method.confident else limits[row], limits[row]))
            elif widths[row] == 0 and limits[row]:
                idle.append(row)
        self._explore(method, states, idle, limits, widths, search)
        for state, row_acceptance, width in zip(states, acceptance, widths, strict=True):
            if state.planned:
                if not row_acceptance:
                    state.rates.learn([0.0])  # the drafter itself saw nothing that pays
                state.yields.learn(0, sum(row_acceptance[:width]))
                state.yields.learn(1, width)
                if not width:
                    state.backoff.probes = 0
            state.planned = False
        return widths

    @staticmethod
    def _acceptance(state: RequestState, draft: Draft) -> list[float]:
        """Return the probability of each token to be accepted."""
        if draft.confidence is None:
            return state.acceptance(len(draft.tokens))
        found = products([state.calibration.rate(confidence) for confidence in draft.confidence], draft.parents)
        state.rates.learn(sorted(found, reverse=True))
        state.method.confident = True
        return found

    @staticmethod
    def _record(method: Method, search: WidthSearch, widths: Sequence[int]) -> None:
        expected = search.expected(widths) / search.batch_size
        method.record(widths, expected, search.seconds(widths), search.verification[0])

    # ---- exploration ----

    @staticmethod
    def _explores(state: RequestState, width: int, limit: int) -> bool:
        """Count a step and return whether more than `width` should be tried."""
        state.waited = 0 if width >= limit else state.waited + 1
        return width < limit and (width == 0 or state.waited >= MIN_STEPS)

    @staticmethod
    def _explore(
        method: Method,
        states: list[RequestState],
        idle: list[int],
        limits: Sequence[int],
        widths: list[int],
        search: WidthSearch,
    ) -> None:
        """Widen some drafts beyond what seems to pay while the budget lasts, those that waited longest first.

        If nothing is drafted, one token says most; else all that the limit allows.
        """
        if not idle or not method.budget:
            return
        now = search.seconds(widths)
        worth = (
            min(method.seconds / method.tokens if method.tokens else now, search.verification[0]) / search.batch_size
        )
        for row in sorted(idle, key=lambda row: -states[row].waited):
            before = widths[row]
            widths[row] = limits[row] if before else 1
            loss = search.seconds(widths) - now
            if loss > method.budget:
                widths[row] = before
                return
            method.budget -= loss
            now += loss
            states[row].waited, states[row].explored = 0, (before, worth)

    def _method(self, name: str) -> Method:
        found = self._methods.get(name)
        if found is None:
            found = self._methods[name] = Method()
        return found

    def _state(self, request: Request) -> RequestState:
        found = self._requests.get(request)
        if found is None:
            found = self._requests[request] = RequestState(self._method(request.method))
        return found
