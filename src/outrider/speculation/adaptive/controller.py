"""The adaptive width: how many tokens to draft for each request, and how many of them to verify.

Each step takes the widths that promise the most tokens a second, and 0 is a width. A request whose drafts do not pay
pauses, then probes with a short draft, because the text may change. `trim` looks at drafts after they were sampled:
lossless with exact match, as the text does not depend on drafts. For drafts that were sampled and are verified by
rejection only `plan` is called, which knows earlier steps alone.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from itertools import accumulate

from ...request import Request
from ...types import Draft, Suspension
from .acceptance_model import PRIOR_WEIGHT, REQUEST_MEMORY, DraftRates, Rates, confidence_key, products
from .backoff import EXPLORATION_SHARE, Backoff
from .latency_model import LatencyCurve, LatencyModel
from .width_search import fastest_widths

# Part of a batch whose texts may be slower than the one that decides the width of its runs. In replays of texts by a
# 1.5B (docs/log.md), 8 requests at a time give 1.01 to 1.05 of plain decoding, batches of 32 that begin together 0.99
# to 1.00; with 0.2 1.02 to 1.05 and 0.98 to 1.00, with 0.1 1.02 to 1.03 and 1.00.
SLOWER_PART = 0.15
ENDED_TEXTS = 64  # of a method, whose acceptance new texts are expected to have
MIN_FOLLOWING = 1.0  # steps without drafts: a drafter may take this time to follow a short text since it last paid


class History:
    """The acceptance of a method over one target: the model itself, or the model with an adapter."""

    def __init__(self, base: History | None = None) -> None:
        """base: of the model itself, where the history of an adapter begins."""
        self.rates: DraftRates = DraftRates(base=None if base is None else base.rates)
        self.calibration: Rates = Rates(base=None if base is None else base.calibration)
        self.budget = 0.0  # for first probes of texts, in plain steps: a share of all steps, less what all probes lost
        self.ended: deque[list[float]] = deque(maxlen=ENDED_TEXTS)  # acceptance of the tokens of a draft, by text
        self._base = base

    @property
    def is_new(self) -> bool:
        """Return whether no draft was verified yet."""
        return self._base is None and not (self.rates.has_learned or self.calibration.has_learned)


class Method:
    """The state of a method."""

    def __init__(self) -> None:
        self.history = History()
        self.adapters: dict[str, History] = {}  # by name
        self.latency = LatencyCurve()  # by width
        self.reading = LatencyCurve()  # of a prompt and the first draft after it, by tokens
        self.speed = 0.0  # expected tokens a second of each request; fading mean, 0: not known yet

    def observe_speed(self, speed: float) -> None:
        self.speed += (1 - REQUEST_MEMORY if self.speed else 1.0) * (speed - self.speed)


class State:
    """The state of a request."""

    def __init__(self, method: Method, history: History) -> None:
        self.method, self.history, self.backoff = method, history, Backoff()
        self.rates, self.calibration = DraftRates(history.rates), Rates(method=history.calibration)
        self.planned = 0  # width of the draft that `plan` asked for and `trim` is to see
        self.probes = False  # that draft is a probe
        self.may_pay = True  # drafts would pay if all of their tokens were accepted
        self.skipped = 0  # steps since a draft was expected to pay
        self.limit = 0  # tokens of the longest draft in multi-step runs
        self._counted = 0  # tokens of the text that `count_tokens` has seen

    @property
    def known(self) -> float:
        """Return how far the acceptance of this text is known, from 0 to 1."""
        return min(self.rates.weight(0) / PRIOR_WEIGHT, 1.0)

    def count_tokens(self, tokens: int) -> None:
        """Add the share for probes to the budget, of a text that has this many tokens now."""
        self.history.budget += EXPLORATION_SHARE * (tokens - self._counted)
        self._counted = tokens

    def charge(self, loss: float) -> None:
        """Count what a probe cost beyond the loss that was expected, in plain steps."""
        self.backoff.charge(loss)
        self.history.budget -= loss

    def acceptance(self, draft: Draft | None) -> list[float]:
        """Return the probability of each token to be accepted."""
        if draft is None or draft.confidence is None:
            return self.rates.acceptance(0 if draft is None else len(draft.tokens))
        rates = [self.calibration.rate(confidence_key(confidence), confidence) for confidence in draft.confidence]
        return products(rates, draft.parent_indices())


class AdaptiveController:
    def __init__(self, *suspendable: str) -> None:
        """suspendable: methods that cost nothing while they are not called; others follow every token."""
        self.latency, self.suspendable = LatencyModel(), set(suspendable)
        self.multi_step: set[str] = set()  # methods timed in multi-step runs: a step with the host takes longer
        self.suspended_runs: set[str] = set()  # methods that drafted nothing in the last multi-step run: it did not pay
        self._methods: defaultdict[str, Method] = defaultdict(Method)
        self._requests: dict[Request, State] = {}

    @property
    def num_requests(self) -> int:
        """Return the number of requests that have state here."""
        return len(self._requests)

    def begin(self, request: Request, tokens: int) -> None:
        """Suspend the drafter of a new request if its drafts are not expected to pay, and a first probe costs too much.

        A text that is not read is probed later, but a drafter without its prompt accepts fewer tokens. So among texts
        whose drafts do not pay some are read, and an easy one is found at its first token. Drafts that pay do not
        suffice: in an answer that must be short, they save less time than reading a long prompt takes. Before the first
        draft nothing is known of the text, so half of what drafts can save is expected.
        tokens: of the prompt.
        """
        if request in self._requests or not self.latency.covers(1):
            return
        state, width = self._state(request), request.width
        acceptance, verification = state.rates.acceptance(width), self.latency.table(1, width)
        drafting, history = self._drafting(request, width), state.history
        widths, speed = fastest_widths([acceptance], verification, drafting, 1)
        saving = verification[0] - 1 / speed  # seconds a token
        if history.is_new:
            saving = (verification[0] - 1 / fastest_widths([[1.0] * width], verification, drafting, 1)[1]) / 2
        reading = state.method.reading.seconds(tokens)  # with the draft; 0: not measured
        saves = reading <= request.params.max_tokens * saving
        if any(widths) and saves:
            return
        probe = (drafting[1] + verification[1]) / verification[0] - 1
        within = not reading or (reading + verification[1]) / verification[0] - 1 <= history.budget
        if within or (history.is_new and saves):
            history.budget = probe  # which `plan` subtracts
        else:
            state.backoff.pause(probe)
            reason = explain(acceptance, verification, drafting, 1, reading / verification[0])
            if reason is not None:
                request.spec_stats.suspend(reason, 0)  # `skip` counts the step

    def forget(self, request: Request) -> None:
        """Drop the state of a request that has ended."""
        state = self._requests.pop(request, None)
        if state is not None:
            state.count_tokens(len(request.output))
            if state.limit and state.known == 1.0:
                state.history.ended.append(state.rates.acceptance(state.limit))

    def draft_latency(self, method: str) -> LatencyCurve:
        """Return the seconds of a call of the method by the widest draft; 0: it only follows the text."""
        return self._methods[method].latency

    def observe_draft(self, method: str, depth: int, seconds: float) -> None:
        """Learn that a call drafted `depth` tokens in `seconds`, unless multi-step runs are timed."""
        if method not in self.multi_step:
            self.draft_latency(method).observe(depth, seconds / self.latency.slowdown)

    def observe_catch_up(self, requests: Sequence[Request], depth: int, seconds: float, batch_size: int) -> None:
        """Count the seconds of a call that resumed drafters, beyond those of a draft, as lost by their probes."""
        if self.latency.covers(batch_size):
            expected = self.draft_latency(requests[0].method).seconds(depth)
            if seconds < expected * self.latency.slowdown:  # the draft alone takes less still
                self.observe_draft(requests[0].method, depth, seconds)
            lost = (seconds / self.latency.slowdown - expected) / self.latency.seconds(batch_size, 0)
            for request in requests:
                self._state(request).charge(max(lost, 0.0) * batch_size / len(requests))

    def observe_reading(self, method: str, tokens: int, seconds: float) -> None:
        """Learn that a call read `tokens` of prompts in `seconds`."""
        self._methods[method].reading.observe(tokens, seconds / self.latency.slowdown)

    def learn(self, request: Request, draft: Draft, path: Sequence[int], width: int = 0) -> None:
        """Learn that of a verified draft the tokens with the indices `path` were accepted.

        width: tokens that were verified whatever was drafted; those that a chain lacks count as rejected.
        """
        state, accepted = self._state(request), {-1, *path}
        if path and state.may_pay:
            state.backoff.repeat()
        if draft.confidence is None:
            outcomes = [float(index in accepted) for index in range(len(draft.tokens))]
            state.rates.learn_draft(outcomes + [0.0] * (len(outcomes) < width), draft.parents)
            return
        for index, (parent, confidence) in enumerate(zip(draft.parent_indices(), draft.confidence, strict=True)):
            if parent in accepted:
                state.calibration.learn(confidence_key(confidence), index in accepted)

    def skip(self, request: Request, steps: int = 1, drafts: bool = False) -> None:
        """Count steps that `plan` was not called for. drafts: it is called next, so the step may have a draft."""
        state = self._state(request)
        state.skipped += steps
        state.backoff.skip(steps)
        if (reason := request.spec_stats.suspension) is not None and not drafts:
            request.spec_stats.suspend(reason, steps)

    def suspended_steps(self, request: Request) -> int:
        """Return for how many further steps the drafter of `request` is suspended; 0: it is not."""
        state = self._requests.get(request) if request.method in self.suspendable else None
        return 0 if state is None else state.backoff.remaining

    def should_drop(self, request: Request, batch_size: int, steps: int = 0) -> bool:
        """Return whether a drafter that has not paid costs too much to follow the text so far and `steps` more."""
        following = (self._state(request).skipped + steps) * self.draft_latency(request.method).seconds(0)
        limit = max(EXPLORATION_SHARE * request.params.max_tokens, MIN_FOLLOWING)
        return self.latency.covers(batch_size) and following > limit * self.latency.seconds(batch_size, 0)

    def thresholds(self, method: str, batch_size: int) -> tuple[float, float, float]:
        """Return `min_acceptance`, `min_continuation` and `tokens_per_second` of a `DraftContext`."""
        if not self.latency.covers(batch_size):
            return 0.0, 0.0, 0.0
        state, plain = self._methods[method], self.latency.seconds(batch_size, 0)
        verification = self.latency.seconds(batch_size, batch_size) - plain
        drafting = state.latency.seconds(2) - state.latency.seconds(1)
        speed, (first, second) = state.speed or 1 / plain, state.history.rates.acceptance(2)
        continuation = min(speed * (verification + drafting) * first / second, 1.0)
        return min(speed * verification, 1.0), continuation, speed / self.latency.slowdown

    def plan(self, requests: Sequence[Request], limits: Sequence[int], others: int = 0) -> list[int]:
        """Return how many tokens each request may draft, up to `limits`. others: requests of the step beside these."""
        if not requests or not self.latency.covers(len(requests) + others):
            return [0] * len(requests)  # measure a step without drafts first
        states = [self._state(request) for request in requests]
        acceptance = [state.rates.acceptance(limit) for state, limit in zip(states, limits, strict=True)]
        drafting = self._drafting(requests[0], max(limits))
        widths = self._choose(states, acceptance, drafting, others, False)
        self._note_suspended(requests, acceptance, widths, drafting, others)
        for state, width in zip(states, widths, strict=True):
            state.planned = width
            state.skipped = 0 if width and not state.probes else state.skipped + 1
        return widths

    def plan_uniform(
        self,
        requests: Sequence[Request],
        limits: Sequence[int],
        widths: Sequence[int],
        others: int = 0,
        steps: int = 1,
        readable: Collection[Request] = (),
    ) -> int:
        """Return how many tokens all requests draft in each of `steps` steps: the fastest of `widths`.

        It is the fastest for the slow texts of the batch: those that draft well would end sooner with drafts, but the
        others later, and the batch with them. limits: tokens that each request may draft. others: requests of the steps
        beside these. readable: requests of which steps without drafts tell what drafts would be worth.

        If the fastest width is 0, a probe for the other requests drafts one token for all requests in all steps, so
        its loss must be a small share of all tokens so far.
        """
        batch_size, most = len(requests) + others, max(widths)
        if not self.latency.covers(batch_size):
            return 0  # measure steps without drafts first
        states, name = [self._state(request) for request in requests], requests[0].method
        self.suspended_runs.add(name)
        if all(state.backoff.remaining for state in states):
            for request in requests:
                self.skip(request)
            return 0
        verification = self.latency.table(batch_size, len(requests) * most)[:: len(requests)]  # by width
        drafting = self._drafting(requests[0], most)
        acceptance = _spread(states, limits, [request in readable for request in requests])

        def speed(width: int) -> float:
            expected = sorted(1 + sum(probabilities[:width]) for probabilities in acceptance)
            return expected[int(SLOWER_PART * len(expected))] / (verification[width] + drafting[width])

        chosen = max(widths, key=speed)
        states[0].method.observe_speed(speed(chosen))
        loss = steps * (speed(0) / speed(1) - 1) if most else 0.0  # of each request by a probe, in plain steps
        probes = most > 0 and not chosen and self._probes(requests, limits, readable, loss, batch_size)
        may_pay = chosen > 0 or self._may_pay(most, verification, drafting, 1)
        for state in states:
            state.may_pay = may_pay
            state.skipped = 0 if chosen else state.skipped + 1
        if chosen or probes:
            self.suspended_runs.discard(name)
            return chosen or 1
        self._note_suspended(requests, acceptance, [0] * len(requests), drafting, others)
        return 0

    def _probes(
        self,
        requests: Sequence[Request],
        limits: Sequence[int],
        readable: Collection[Request],
        loss: float,
        batch_size: int,
    ) -> bool:
        """Return whether a run whose drafts are not expected to pay is a probe. Requests that it is not for pause."""
        due = []
        for request, limit in zip(requests, limits, strict=True):
            state = self._state(request)
            state.count_tokens(len(request.output))
            if request in readable:
                state.backoff.pause(EXPLORATION_SHARE * batch_size)  # to choose takes the host 10 us for each text
            elif limit and state.backoff.probes(loss):
                due.append(state)
        missing = max((loss - state.history.budget / batch_size for state in due), default=0.0)
        for state in due:
            if missing <= 0:
                state.history.budget -= batch_size * loss / len(due)
            else:
                state.backoff.pause(missing)
        return bool(due) and missing <= 0

    def trim(self, requests: Sequence[Request], drafts: Sequence[Draft | None], others: int = 0) -> list[int]:
        """Return how many tokens of each draft pay: those that bring more than their verification costs."""
        states = [self._state(request) for request in requests]
        planned = any(state.planned for state in states)
        if not self.latency.covers(len(requests) + others) or not (any(drafts) or planned):
            return [0] * len(requests)
        acceptance = [state.acceptance(draft) for state, draft in zip(states, drafts, strict=True)]
        deepest = max(map(len, acceptance))
        spent = [self._drafting(requests[0], deepest)[-1] if planned else 0.0] * (deepest + 1)
        lookups = all(draft is None or draft.confidence is not None for draft in drafts)  # learn without verification
        widths = self._choose(states, acceptance, spent, others, planned or lookups)
        self._note_suspended(requests, acceptance, widths, spent, others)
        for state, draft, probabilities, width in zip(states, drafts, acceptance, widths, strict=True):
            if state.planned and (draft is None or draft.confidence is not None):
                known = sorted(probabilities, reverse=True) if width else []
                alone = len(requests) + others == 1  # else drafting for one request more would look free
                state.rates.learn_draft(self._worth(state.planned, known) if alone else known or [0.0])
            state.planned = 0
        return widths

    def _choose(
        self, states: list[State], acceptance: list[list[float]], drafting: list[float], others: int, planned: bool
    ) -> list[int]:
        """Return the fastest widths, and 1 for probes. planned: `plan` has chosen the probes."""
        batch_size, method = len(states) + others, states[0].method
        verification = self.latency.table(batch_size, sum(map(len, acceptance)) + 1)
        widths, speed = fastest_widths(acceptance, verification, drafting, batch_size)
        method.observe_speed(speed / batch_size)
        rows, deepest, idle = sum(widths), max(widths), batch_size - sum(map(bool, widths))
        probed = verification[rows + 1] + drafting[max(deepest, min(1, len(drafting) - 1))]
        loss = idle * (probed / (verification[rows] + drafting[deepest]) - 1)
        for row, state in enumerate(states):
            idles = not widths[row] and len(acceptance[row]) > 0
            if not planned:
                state.may_pay = not idles or self._may_pay(len(acceptance[row]), verification, drafting, batch_size)
                state.probes = idles and state.backoff.probes(loss)
            widths[row] += idles and state.probes
        probing = [] if planned else [state for state in states if state.probes]
        for state in probing:
            state.history.budget -= loss / len(probing)
        return widths

    def _note_suspended(
        self,
        requests: Sequence[Request],
        acceptance: list[list[float]],
        widths: list[int],
        drafting: list[float],
        others: int,
    ) -> None:
        """Count a step without a draft that could have been made, and say why, in the stats of each such request."""
        batch_size = len(requests) + others
        for request, probabilities, width in zip(requests, acceptance, widths, strict=True):
            if width or not probabilities:
                continue
            verification = self.latency.table(batch_size, len(probabilities))
            if (reason := explain(probabilities, verification, drafting, batch_size)) is not None:
                request.spec_stats.suspend(reason)

    def _worth(self, planned: int, acceptance: Sequence[float]) -> list[float]:
        """Return the acceptance of the tokens of a draft as `plan` is to count it for drafts to come.

        A token that was cut cost no verification, so it counts at least as one that would just pay for it.
        acceptance: of the draft, which may be shorter or longer than planned; empty if nothing of it pays.
        """
        count = max(planned, len(acceptance))
        verification, found, least = self.latency.table(1, count), [], 1.0
        for index in range(count):
            probability = acceptance[index] if index < len(acceptance) else 0.0
            saved = (verification[index + 1] - verification[index]) / verification[0]
            least = min(least, max(probability, saved))
            found.append(least)
        return found

    @staticmethod
    def _may_pay(width: int, verification: Sequence[float], drafting: Sequence[float], batch_size: int) -> bool:
        """Return whether a draft of up to `width` tokens would raise the speed if all of them were accepted."""
        plain = (verification[0] + drafting[0]) / batch_size
        return any(verification[w] + drafting[w] < (batch_size + w) * plain for w in range(1, width + 1))

    def _drafting(self, request: Request, width: int) -> list[float]:
        """Return the seconds of drafts up to `width`."""
        seconds = self.draft_latency(request.method).table(width)
        return [0.0, *seconds[1:]] if request.method in self.suspendable else seconds

    def _state(self, request: Request) -> State:
        if request not in self._requests:
            method = self._methods[request.method]
            history = method.history
            if request.adapter is not None:
                history = method.adapters.setdefault(request.adapter.name, History(history))
            self._requests[request] = State(method, history)
        return self._requests[request]


def _spread(states: Sequence[State], limits: Sequence[int], readable: Sequence[bool]) -> list[list[float]]:
    """Return the acceptance of drafts up to `limits`, for texts of a batch that are hardly known that of earlier texts.

    All new texts have the mean of earlier ones, among which the slow ones of the batch would not be seen. So they take
    the acceptance of texts that have ended, each of another one, from the hardest to the easiest. Before a text has
    ended, `readable` ones are expected to accept nothing: what they accept is soon known without drafts.
    """
    for state, limit in zip(states, limits, strict=True):
        state.limit = max(state.limit, limit)
    spread = [state.rates.acceptance(limit) for state, limit in zip(states, limits, strict=True)]
    if len(states) == 1:  # no other text waits for its drafts
        return spread
    ended = sorted(states[0].history.ended, key=sum)
    for index, (state, own) in enumerate(zip(states, spread, strict=True)):
        known = state.known
        if known < 1 and (ended or readable[index]):
            earlier = ended[(2 * index + 1) * len(ended) // (2 * len(states))] if ended else [0.0] * len(own)
            mixed = [known * rate + (1 - known) * other for rate, other in zip(own, earlier, strict=False)]
            own[: len(mixed)] = mixed
    return spread


def explain(
    acceptance: Sequence[float],
    verification: Sequence[float],
    drafting: Sequence[float],
    batch_size: int,
    reading: float = 0.0,
) -> Suspension | None:
    """Describe the fastest step in which one request has a draft; None if it is faster than the step without one.

    acceptance: of the request's tokens. verification, drafting: seconds by drafted tokens, from 0 on. reading: of the
    prompt, in plain steps, which is the reason if that step is faster.
    """
    plain = verification[0] + drafting[0]
    expected = list(accumulate(acceptance, initial=float(batch_size)))
    width = max(range(1, len(expected)), key=lambda width: expected[width] / (verification[width] + drafting[width]))
    cost, tokens = (verification[width] + drafting[width]) / plain, expected[width] / batch_size
    pays = tokens > cost
    if pays and not reading:  # drafts of other requests are worth more, and all together would be too many
        return None
    share = (drafting[width] - drafting[0]) / plain
    return Suspension(batch_size, batch_size + width, cost, share, tokens, acceptance[0], reading if pays else 0.0)
