"""How many drafted tokens pay: from what passes have cost so far, and from how often drafts were kept.

Each step takes the widths that promise the most tokens a second, and zero is a width. A choice is left for one that
promises clearly more, or a little more for long. What does not seem to pay is tried again from time to time, because
the text may change: what trials may lose is earned as a small share of the time, and what they win is theirs to spend.

Admission looks at a guess after it was drawn. That is lossless with exact match, where the text does not depend on
what is drafted; the modes that draw their own coins run without control.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...request import Request
from ...types import Draft
from .acceptance_model import falling, products
from .history import MEMORY, Drafter, Past, Trial
from .latency_model import LatencyCurve, LatencyModel
from .suspension import MEMORY as SPENT_MEMORY
from .suspension import Rest, paying
from .width_search import Offer

CLEARLY = 0.03  # another choice must promise this much more
FOR_LONG = 0.15  # or that much more, added up over the steps that it did
WAKING = 0.3  # what is left after a rest of what a request's drafts came to: the text may have changed
RESTS, DEAR = 128, 0.05  # turns without a draft, and share of a plain pass, that are too much for a drafter to follow


class AdaptiveController:
    def __init__(self, *suspendable: str) -> None:
        """lazy: methods that cost nothing while they are not asked, and may rest. Others follow every token."""
        self.latency, self.suspendable = LatencyModel(), set(suspendable)
        self.multi_step: set[str] = set()  # methods whose rounds are timed: a step with the host takes longer
        self._drafters: dict[str, Drafter] = {}
        self._requests: dict[Request, Past] = {}
        self._suspended: dict[Request, Rest] = {}

    @property
    def num_requests(self) -> int:
        """Return the number of requests that have state here."""
        return len(self._requests)

    def draft_latency(self, method: str) -> LatencyCurve:
        """Seconds of a call of the method by the width of its widest guess; 0: it only followed."""
        return self._drafter(method).curve

    # ---- what became of guesses ----

    def learn(self, request: Request, draft: Draft, path: Sequence[int]) -> None:
        """Of a guess that was verified the places in `path` were kept."""
        past = self._past(request)
        if past.trial is not None:
            past.drafter.purse += past.trial.worth * sum(place >= past.trial.beyond for place in path)
            past.trial = None
        if draft.confidence is None:
            survivals = [0.0] * len(draft.tokens)
            for place in path:
                survivals[place] = 1.0
            past.drafter.branches = draft.parents is not None
            (past.odds if draft.parents is None else past.places).learn(survivals)
            return
        kept = {-1, *path}
        learn = past.calibration.learn
        for place, (before, confidence) in enumerate(zip(draft.parent_indices(), draft.confidence, strict=True)):
            if before in kept:
                learn(confidence, place in kept)

    def skip(self, request: Request, turns: int) -> None:
        """So many more turns went by without a draft."""
        self._past(request).rests += turns

    def forget(self, request: Request) -> None:
        self._requests.pop(request, None)
        self._suspended.pop(request, None)

    # ---- suspended drafters ----

    def suspended_steps(self, request: Request) -> int:
        """Return for how many further steps the drafter of `request` is suspended; 0: it is not."""
        rest = self._suspended.get(request)
        return 0 if rest is None else rest.left

    def all_suspended(self, requests: Iterable[Request]) -> bool:
        """Return whether the drafters of all `requests` are suspended."""
        return bool(self._suspended) and all(request in self._suspended for request in requests)

    def step_suspended(self, request: Request, batch_size: int) -> bool:
        """Count a step of a suspended request and return whether it stays suspended."""
        rest = self._suspended[request]
        rest.left -= 1
        if not rest.left:
            self._wake(request, batch_size)
        return rest.left > 0

    def _wake(self, request: Request, batch_size: int) -> None:
        """Its rest is over: what its drafts came to before says less now, and each step since gave one token."""
        del self._suspended[request]
        past = self._past(request)
        past.yields.fade(WAKING)
        if self.latency.known:
            drafter, faded = past.drafter, MEMORY**past.rest.length
            steps = (1 - faded) / (1 - MEMORY)
            drafter.tokens = faded * drafter.tokens + steps
            drafter.seconds = faded * drafter.seconds + steps * self.latency.seconds(batch_size, 0)

    def unprofitable(self, method: str) -> bool:
        """Whether a new request's drafts are not expected to pay: then its prompt need not be followed either."""
        drafter = self._drafter(method)
        if not (self.latency.known and drafter.yields.known):
            return False
        return not paying([drafter.yields], [True], self.latency, drafter.usual, 1)[0]

    def observe_draft(self, method: str, depth: int, seconds: float | None) -> None:
        """A draft was so deep. seconds: what it took, unless it had much to catch up with."""
        drafter = self._drafter(method)
        if seconds is not None and method not in self.multi_step:
            drafter.curve.observe(depth, seconds)
        if depth and drafter.curve.known:
            drafter.spent = drafter.curve.seconds(depth)
            drafter.usual += (1 - SPENT_MEMORY if drafter.usual else 1.0) * (drafter.spent - drafter.usual)

    # ---- before a draft ----

    def plan(
        self, requests: Sequence[Request], rooms: Sequence[int], others: int = 0, stops: bool = False
    ) -> list[int]:
        """How many tokens each request may draft, of `rooms`. All have one method, whose drafts cost time.

        others: requests of the step that are not among these. stops: the method ends a draft itself where it does not
        pay to go on.
        """
        batch_size = len(requests) + others
        if not requests or not self.latency.covers(batch_size):
            return [0] * len(requests)  # a step shows what a plain one costs
        pasts = [self._past(request) for request in requests]
        drafter = pasts[0].drafter
        offer = Offer(
            [past.survivals(room) for past, room in zip(pasts, rooms, strict=True)],
            self.latency.table(batch_size, sum(rooms)),
            drafter.curve.table(0, max(rooms)) if drafter.curve.known else [0.0] * (max(rooms) + 1),
            batch_size,
        )
        if requests[0].method in self.suspendable:
            offer.drafting[0] = 0.0
            widths = self._choose(drafter, pasts, rooms, offer, stops)
            self._suspended |= {
                request: past.rest for request, past in zip(requests, pasts, strict=True) if past.rest.left
            }
            return widths
        widths = self._settle(drafter, pasts, rooms, offer)
        if not any(widths):
            drafter.note(offer, widths)
        idle = []
        for row, past in enumerate(pasts):
            past.trial, past.width = None, widths[row]
            if past.waits(widths[row], rooms[row]):
                idle.append(row)
        self._try(drafter, pasts, idle, rooms, widths, offer)
        if drafter.confident:
            self._widen(rooms, widths, offer.drafting)
        for past, width in zip(pasts, widths, strict=True):
            past.rests, past.planned = 0 if width else past.rests + 1, width > 0
        drafter.spent = offer.drafting[max(widths)]
        return widths

    def _choose(
        self, drafter: Drafter, pasts: list[Past], rooms: Sequence[int], offer: Offer, stops: bool
    ) -> list[int]:
        """The widths of those whose drafts pay, or may turn out to; the others begin a rest."""
        widths, _ = offer.best()
        chosen = [width > 0 for width in widths]
        if drafter.yields.known:
            drafting = [past.rest.drafts > 0 for past in pasts]
            chosen = paying([past.yields for past in pasts], drafting, self.latency, drafter.usual, offer.batch_size)
        for row, past in enumerate(pasts):
            past.trial = None
            if chosen[row]:
                past.rest.succeed()
            past.planned = chosen[row] or past.rest.probe()
            if past.planned:
                widths[row] = rooms[row] if stops else offer.alone(row)
            else:
                widths[row] = 0
                past.rest.begin()
            past.width = widths[row]
            drafter.patience = past.rest.patience
        idle = [row for row, past in enumerate(pasts) if widths[row] and past.waits(widths[row], rooms[row])]
        self._try(drafter, pasts, idle, rooms, widths, offer)
        if drafter.confident:
            self._widen(rooms, widths, offer.drafting)
        if not any(widths):
            drafter.note(offer, widths)
        return widths

    @staticmethod
    def _settle(drafter: Drafter, pasts: list[Past], rooms: Sequence[int], offer: Offer) -> list[int]:
        """The best widths, unless the last ones are nearly as good."""
        best, pace = offer.best()
        last = [
            width if past.width < 0 else min(past.width, room)
            for past, width, room in zip(pasts, best, rooms, strict=True)
        ]
        if last == best:
            drafter.regret = 0.0
            return best
        present = offer.pace(last)
        drafter.regret += pace / present - 1 if present else 1.0
        if pace <= present * (1 + CLEARLY) and drafter.regret <= FOR_LONG:
            return last
        drafter.regret = 0.0
        return best

    @staticmethod
    def _widen(rooms: Sequence[int], widths: list[int], drafting: list[float]) -> None:
        """A drafter that says how sure it is may draft what costs it nothing: there is more to choose from."""
        deepest = max(widths)
        if deepest == 0:
            return
        while deepest + 1 < len(drafting) and drafting[deepest + 1] <= drafting[deepest] * 1.001:
            deepest += 1
        for row, width in enumerate(widths):
            if width:
                widths[row] = min(deepest, rooms[row])

    def min_acceptance(self, method: str, requests: int) -> float:
        """The chance below which one token more for each of `requests` does not pay, at the present tokens a second."""
        drafter = self._drafter(method)
        if not self.latency.known or requests < 1:
            return 0.0
        width = max(round(drafter.width), 1)
        rows = requests * (width - 1 if method in self.suspendable else width)
        more = (self.latency.seconds(requests, rows + requests) - self.latency.seconds(requests, rows)) / requests
        return min(more * self.tokens_per_second(method, requests) * requests, 1.0)

    def min_continuation(self, method: str, requests: int) -> float:
        """The chance of a token after which it pays to guess another one: what that costs and how far it is kept."""
        drafter = self._drafter(method)
        floor = self.min_acceptance(method, requests)
        if not (self.latency.known and drafter.curve.known) or requests < 1:
            return floor
        width = max(round(drafter.width), 1)
        more = drafter.curve.seconds(width + 1) - drafter.curve.seconds(width)
        return min((floor + more * self.tokens_per_second(method, requests)) / drafter.odds.rates(2)[1], 1.0)

    def tokens_per_second(self, method: str, requests: int) -> float:
        """Tokens a second that each of `requests` makes at present; 0: not known yet."""
        if not self.latency.known or requests < 1:
            return 0.0
        return self._drafter(method).pace or 1 / self.latency.seconds(requests, 0)

    def should_drop(self, request: Request, requests: int) -> bool:
        """Whether a drafter that has not been asked for long should no longer follow: that alone is dear."""
        past = self._past(request)
        if past.rests < RESTS:
            return False
        return past.drafter.curve.seconds(0) > DEAR * self.latency.seconds(requests, 0)

    # ---- after a draft ----

    def trim(self, requests: Sequence[Request], drafts: Sequence[Draft | None], others: int = 0) -> list[int]:
        """How many tokens of each guess pay: those that bring more than the time of their verification is worth."""
        batch_size = len(requests) + others
        pasts = [self._past(request) for request in requests]
        if not self.latency.covers(batch_size) or not (any(drafts) or any(past.planned for past in pasts)):
            return [0] * len(requests)
        survivals = [
            [] if draft is None else self._survivals(past, draft) for past, draft in zip(pasts, drafts, strict=True)
        ]
        widths = self._admit(pasts, survivals, batch_size)
        for past, chances, width in zip(pasts, survivals, widths, strict=True):
            if past.planned:
                past.yields.add(sum(chances[:width]), width)
                past.rest.worthwhile = width > 0
            past.planned = False
        return widths

    def _survivals(self, past: Past, draft: Draft) -> list[float]:
        """The chance of each token to be kept."""
        if draft.confidence is None:
            return past.survivals(len(draft.tokens))
        chances = products([past.calibration.rate(said) for said in draft.confidence], draft.parents)
        past.odds.learn(falling(chances))
        past.drafter.confident = True
        return chances

    def _admit(self, pasts: list[Past], survivals: list[list[float]], batch_size: int) -> list[int]:
        rooms = [len(chances) for chances in survivals]
        drafter = pasts[0].drafter
        spent = drafter.spent if any(past.planned for past in pasts) else 0.0
        offer = Offer(survivals, self.latency.table(batch_size, sum(rooms)), [spent], batch_size)
        widths = offer.worth(drafter.pace * batch_size)
        drafter.note(offer, widths)
        idle = []
        for row, past in enumerate(pasts):
            if not past.planned:
                past.trial = None
                if past.waits(widths[row], rooms[row]):
                    idle.append(row)
            elif past.trial is not None:
                widths[row] = max(widths[row], min(1 if drafter.confident else past.trial.width, rooms[row]))
            elif widths[row] == 0 and rooms[row]:
                idle.append(row)
        self._try(drafter, pasts, idle, rooms, widths, offer)
        return widths

    # ---- trials ----

    @staticmethod
    def _try(
        drafter: Drafter, pasts: list[Past], idle: list[int], rooms: Sequence[int], widths: list[int], offer: Offer
    ) -> None:
        """Widen some guesses beyond what seems to pay, while there is something to lose: longest waiting first.

        Where nothing is drafted, one token tells most; where something is, all that there is room for.
        """
        if not idle:
            return
        if len(idle) > 1:
            idle.sort(key=lambda row: -pasts[row].waited)
        drafted, deepest = sum(widths), max(widths)
        now = offer.seconds(drafted, deepest)
        worth = 1 / (max(drafter.pace, 1 / offer.seconds(0, 0)) * offer.batch_size)
        for row in idle:
            beyond = widths[row]
            width = rooms[row] if beyond else 1
            drafted, deepest = drafted + width - beyond, max(deepest, width)
            loss = offer.seconds(drafted, deepest) - now
            if loss > drafter.purse:
                return
            drafter.purse -= loss
            now += loss
            widths[row] = width
            pasts[row].waited = 0
            pasts[row].trial = Trial(width, beyond, worth)

    def _drafter(self, method: str) -> Drafter:
        found = self._drafters.get(method)
        if found is None:
            found = self._drafters[method] = Drafter()
        return found

    def _past(self, request: Request) -> Past:
        found = self._requests.get(request)
        if found is None:
            found = self._requests[request] = Past(self._drafter(request.method))
        return found
