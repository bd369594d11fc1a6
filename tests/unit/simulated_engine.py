"""An engine without a model: steps have made-up costs, and texts say which drafts of theirs come true."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.request import Request
from outrider.speculation.adaptive import AdaptiveController
from outrider.types import Draft, SamplingParams

MISS = 9


@dataclass
class Text:
    """For each position how likely the drafter's first candidate is right, and which candidate is."""

    rates: list[float]
    ranks: list[int]
    found: list[bool]  # whether a lookup finds anything here

    def __len__(self) -> int:
        return len(self.ranks)


def candidates(rate: float) -> tuple[float, float, float]:
    """How likely each of a tree's branches is: the second and the third share what the first leaves."""
    left = rate * (1 - rate)
    return rate, left * 0.6, left * 0.3


def write(length: int, alpha: Callable[[float], float], seed: int, spread: float = 0.0, found: float = 1.0) -> Text:
    """alpha: by how far the text has come (0 to 1). spread: how much the rates differ between positions."""
    coin = random.Random(seed)
    rates, ranks = [], []
    for position in range(length):
        mean = alpha(position / length)
        rate = coin.betavariate(mean / spread, (1 - mean) / spread) if spread else mean
        toss, rank = coin.random(), 0
        for rank, share in enumerate((*candidates(rate), 1.0)):  # noqa: B007
            if toss < share:
                break
            toss -= share
        rates.append(rate)
        ranks.append(rank if rank < 3 else MISS)
    return Text(rates, ranks, [coin.random() < found for _ in range(length)])


@dataclass(frozen=True)
class Drafter:
    width: int
    seconds: Callable[[int], float] | None = None  # by width; None: it costs nothing and is not planned
    tree: bool = False
    confidence: Callable[[float], float] | None = None  # from the true rate; None: no confidence
    stops: bool = False  # it ends where going on does not pay
    waking: float = 0.0  # seconds that it takes to catch up after a rest

    def ends(self, draft: Draft | None, floor: float, onward: float) -> tuple[Draft | None, int]:
        """What it drafts if it may stop, and how deep it went."""
        if draft is None or draft.confidence is None or not self.stops:
            return draft, len(draft.tokens) if draft is not None else 0
        whole = 1.0
        for depth, confidence in enumerate(draft.confidence):
            whole *= confidence
            if whole < floor:
                return (draft.cut(depth) if depth else None), depth + 1
            if whole < onward:
                return draft.cut(depth + 1), depth + 1
        return draft, len(draft.tokens)

    def draft(self, text: Text, position: int, width: int, at: float) -> Draft | None:
        """at: the acceptance rate that it assumes at each position without confidence."""
        if width == 0 or not text.found[position]:
            return None
        if not self.tree:
            confidence = None
            if self.confidence is not None:
                confidence = [self.confidence(text.rates[(position + depth) % len(text)]) for depth in range(width)]
            return Draft([0] * width, confidence=confidence)
        return self._grow(text, position, width, at)

    def _grow(self, text: Text, position: int, width: int, at: float) -> Draft:
        """Add the most probable nodes first. A token is its rank among the candidates."""
        heap: list[tuple[float, int, int, int, float]] = []
        tokens: list[int] = []
        parents: list[int] = []
        confidence: list[float] = []
        depths: list[int] = []
        pushed = 0

        def push(parent: int, depth: int, rate: float) -> None:
            nonlocal pushed
            known = at if self.confidence is None else text.rates[(position + depth) % len(text)]
            for rank, share in enumerate(candidates(known)):
                heapq.heappush(heap, (-rate * share, pushed, parent, rank, share))
                pushed += 1

        push(-1, 0, 1.0)
        while len(tokens) < width:
            rate, _, parent, rank, share = heapq.heappop(heap)
            depths.append(0 if parent < 0 else depths[parent] + 1)
            tokens.append(rank)
            parents.append(parent)
            confidence.append(share)
            push(len(tokens) - 1, depths[-1] + 1, -rate)
        return Draft(
            tokens, parents, confidence=None if self.confidence is None else list(map(self.confidence, confidence))
        )


def kept(text: Text, position: int, draft: Draft) -> list[int]:
    """Return the indices of the accepted draft tokens."""
    path: list[int] = []
    last = -1
    for index, parent in enumerate(draft.parent_indices()):
        if parent == last and draft.tokens[index] == text.ranks[(position + len(path)) % len(text)]:
            path.append(index)
            last = index
    return path


@dataclass
class Noise:
    """What a clock shows: a little off, sometimes far off; `slower` from half of the run on."""

    seed: int = 1
    spread: float = 0.05
    tails: float = 0.02
    slower: float = 1.0
    coin: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.coin = random.Random(self.seed)

    def __call__(self, seconds: float, far: float) -> float:
        seconds *= self.coin.lognormvariate(0, self.spread) * (self.slower if far > 0.5 else 1.0)
        return seconds * self.coin.uniform(2, 20) if self.coin.random() < self.tails else seconds


@dataclass
class Simulation:
    texts: list[Text]  # one for each request of the batch
    drafter: Drafter
    verification: Callable[[int, int], float]  # requests, drafted tokens
    noise: Noise = field(default_factory=Noise)
    at: float = 0.6
    measured: bool = True  # costs are measured before the first step
    widths: Counter[int] = field(default_factory=Counter)  # tokens verified under control -> how often
    _woken: set[Request] = field(default_factory=set)  # who rested since the last draft

    def fixed(self, width: int) -> float:
        """Tokens a second with one width all along."""
        positions, tokens, seconds = [0] * len(self.texts), 0, 0.0
        most, batch_size = sum(map(len, self.texts)), len(self.texts)
        drafting = self.drafter.seconds(width) if self.drafter.seconds else 0.0
        while tokens < most:
            drafted = 0
            for row, text in enumerate(self.texts):
                position, gained = positions[row], 1
                if width and text.found[position]:
                    drafted += width
                    gained += self._gain(text, position, width)
                tokens += gained
                positions[row] = (position + gained) % len(text)
            seconds += drafting + self.verification(batch_size, drafted)
        return tokens / seconds

    def _gain(self, text: Text, position: int, width: int) -> int:
        if self.drafter.tree:
            draft = self.drafter.draft(text, position, width, self.at)
            return len(kept(text, position, draft)) if draft is not None else 0
        gained = 0
        while gained < width and text.ranks[(position + gained) % len(text)] == 0:
            gained += 1
        return gained

    def controlled(self, controller: AdaptiveController, method: str = "some") -> float:
        """Tokens a second under control, in true seconds: the clock's errors mislead, and cost nothing themselves."""
        requests = [Request(str(row), [1], SamplingParams(), 0, method=method) for row in range(len(self.texts))]
        batch_size = len(self.texts)
        if self.measured:
            self._measure(controller, method)
        positions, tokens, seconds = [0] * batch_size, 0, 0.0
        drafts: list[Draft | None] = [None] * batch_size
        most = sum(map(len, self.texts))
        while tokens < most:
            far = tokens / most
            rows = sum(len(draft.tokens) for draft in drafts if draft is not None)
            true = self.verification(batch_size, rows)
            seconds += true
            controller.latency.observe(batch_size, rows, self.noise(true, far))
            for row, draft in enumerate(drafts):
                gained = 1
                self.widths[len(draft.tokens) if draft is not None else 0] += 1
                if draft is not None:
                    path = kept(self.texts[row], positions[row], draft)
                    controller.learn(requests[row], draft, path)
                    gained += len(path)
                tokens += gained
                positions[row] = (positions[row] + gained) % len(self.texts[row])
            drafts, spent = self._draft(controller, requests, positions, far)
            seconds += spent
        return tokens / seconds

    def _draft(
        self, controller: AdaptiveController, requests: list[Request], positions: list[int], far: float
    ) -> tuple[list[Draft | None], float]:
        """Return the drafts of all requests that are not suspended, and the true seconds that they took."""
        drafter, batch_size, method = self.drafter, len(requests), requests[0].method
        awake = [row for row, request in enumerate(requests) if not self._rests(controller, request, batch_size)]
        if not awake:
            return [None] * batch_size, 0.0
        asking, spent = [requests[row] for row in awake], 0.0
        widths = [drafter.width] * len(awake)
        if drafter.seconds is not None:
            widths = controller.plan(asking, widths, batch_size - len(awake))
            if drafter.stops:
                widths = [drafter.width if width else 0 for width in widths]
        drafted = [
            drafter.draft(self.texts[row], positions[row], width, self.at)
            for row, width in zip(awake, widths, strict=True)
        ]
        if drafter.seconds is not None:
            price = controller.thresholds(method, batch_size)[:2]
            ended = [drafter.ends(draft, *price) for draft in drafted]
            drafted = [draft for draft, _ in ended]
            deepest = max(deep for _, deep in ended) if drafter.stops else max(widths)
            if deepest or method not in controller.suspendable:
                spent = drafter.seconds(deepest)
                woken = [request for request in asking if request in self._woken]
                if woken:
                    spent += drafter.waking * len(woken)
                    controller.observe_catch_up(woken, deepest, self.noise(spent, far), batch_size)
                else:
                    controller.observe_draft(method, deepest, self.noise(spent, far))
                self._woken -= set(asking)
        kept_widths = controller.trim(asking, drafted, batch_size - len(awake))
        drafts: list[Draft | None] = [None] * batch_size
        for row, draft, width in zip(awake, drafted, kept_widths, strict=True):
            drafts[row] = draft.cut(width) if draft and width else None
        return drafts, spent

    def _rests(self, controller: AdaptiveController, request: Request, batch_size: int) -> bool:
        if not controller.suspended_steps(request):
            return False
        controller.skip(request)
        suspended = controller.suspended_steps(request) > 0
        if not suspended:
            self._woken.add(request)
        return suspended

    def _measure(self, controller: AdaptiveController, method: str) -> None:
        for _ in range(3):
            for drafted in (0, 1, 3, 7, 15, 31, 63):
                controller.latency.observe(1, drafted, self.noise(self.verification(1, drafted), 0.0))
            if self.drafter.seconds is not None:
                for width in (0, 1, 2, 4, 8):
                    controller.draft_latency(method).observe(width, self.noise(self.drafter.seconds(width), 0.0))
