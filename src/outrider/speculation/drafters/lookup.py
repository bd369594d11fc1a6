"""What the drafters without a model share: where a text said the same before, and how often such guesses come true."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from ...request import Request
from ..adaptive.acceptance_model import Rates
from ..interface import DraftBatch, DraftContext, Needs
from .tree_shapes import best_first

TOKEN_BITS = 24  # more than any vocabulary needs; an n-gram's key is its tokens side by side, so none collide
FAR = 24  # evidence beyond this many tokens tells nothing more
NO_PLACE = -1
NEARBY = 32  # tokens after the last copy in which it is looked for again

History = TypeVar("History")
State = TypeVar("State")


class Likely(NamedTuple):
    """A draft for one request."""

    tokens: list[int]
    chances: list[float]  # how likely each is kept if the one before it is
    parents: list[int] | None = None  # None: a chain


class LookupOptions(Protocol):
    @property
    def least(self) -> float | None: ...

    @property
    def branches(self) -> int: ...


def least_of(options: LookupOptions) -> float:
    """A tree may be less sure of each of its paths: they share the work of one step."""
    return options.least if options.least is not None else 0.1 if options.branches == 1 else 0.02


class Lookup(ABC, Generic[History]):
    """A Proposer that reads texts and nothing else. What it keeps of each request, it begins with the first draft."""

    def __init__(self, width: int, trees: bool = False) -> None:
        self.needs = Needs(width=width, trees=trees)
        self.histories: dict[Request, History] = {}

    @abstractmethod
    def begin(self, request: Request) -> History: ...

    @abstractmethod
    def draft(self, history: History, context: DraftContext, width: int) -> Likely: ...

    def propose(self, contexts: Sequence[DraftContext], last: Tensor, hidden: Tensor | None) -> DraftBatch:
        found = [
            self._guess(context) if context.num_draft_tokens and context.new_tokens else Likely([], [])
            for context in contexts
        ]
        parents = [one.parents or [] for one in found] if self.needs.trees else None
        return DraftBatch([one.tokens for one in found], None, parents, confidence=[one.chances for one in found])

    def _guess(self, context: DraftContext) -> Likely:
        history = self.histories.get(context.request)
        if history is None:
            history = self.histories[context.request] = self.begin(context.request)
        return self.draft(history, context, min(context.num_draft_tokens, self.needs.width))

    def accept(self, requests: Sequence[Request], kept: Sequence[int]) -> None:
        """Nothing to rewind: only text that stands was ever read."""

    def release(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.histories.pop(request, None)


class Grams:
    """A growing text, and where each n-gram of it was seen last; if `all_places`, also where before that. Only what is
    new is ever read.
    """

    def __init__(self, shortest: int, longest: int, all_places: bool = False) -> None:
        self.shortest = shortest
        self.longest = longest
        self.text: list[int] = []
        self.ends: list[int] = []  # keys of the n-grams that end the text, shortest first
        self.places: dict[int, int] = {}  # n-gram -> where its last follower stands; 100 to 300 bytes a token
        # By size: for each place, where the n-gram before it was followed the time before; NO_PLACE: never.
        self.earlier: list[list[int]] = [[] for _ in range(shortest, longest + 1)] if all_places else []

    def extend(self, tokens: Sequence[int]) -> None:
        places, ends, short, rest = self.places, self.ends, self.shortest - 1, self.longest - 1
        for place, token in enumerate(tokens, len(self.text)):
            # The n-grams at the end join only now that they have a follower: until then they are the question.
            for links in self.earlier:
                links.append(NO_PLACE)
            for links, key in zip(self.earlier, ends[short:], strict=False):
                links[-1] = places.get(key, NO_PLACE)
            for key in ends[short:]:
                places[key] = place
            last = token + 1  # never 0, so that n-grams of different lengths differ too
            ends = [last, *[key << TOKEN_BITS | last for key in ends[:rest]]]
        self.text.extend(tokens)
        self.ends = ends

    def match(self, near: int | None) -> tuple[int, int] | None:
        """Where to copy from, and how many tokens before that place agree with the text's end.

        The longest n-gram wins; among its occurrences the one where the last copy (`near`) would go on, else the
        latest.
        """
        text, place, size = self.text, None, self.shortest - 1
        for key in self.ends[size:]:
            found = self.places.get(key)
            if found is None:
                break
            place = found
            size += 1
        if place is None:
            return None
        if near is not None and place != near:
            place = self._ahead(near, size) or place
        return place, agreement(text, place, text, size)

    def others(self, first: int, most: int) -> list[tuple[int, int]]:
        """Further places to copy from than `first`, with what agrees before them: the most first, then the latest."""
        text, found = self.text, {first: 0}
        keys = self.ends[self.shortest - 1 :]
        for size, links, key in reversed(
            [*zip(range(self.shortest, self.longest + 1), self.earlier, keys, strict=False)]
        ):
            place, steps = self.places.get(key, NO_PLACE), 0
            while place != NO_PLACE and steps < most and len(found) <= most:
                if place not in found:
                    found[place] = agreement(text, place, text, size)
                place, steps = links[place], steps + 1
        del found[first]
        return sorted(found.items(), key=lambda one: -one[1])

    def _ahead(self, near: int, size: int) -> int | None:
        text = self.text
        stop = min(near + NEARBY, len(text)) - 1
        at = max(near, size) - 1
        while at < stop:
            try:
                at = text.index(text[-1], at, stop) + 1
            except ValueError:
                return None
            if text[at - size : at] == text[-size:]:
                return at
        return None


def agreement(text: Sequence[int], place: int, other: Sequence[int], known: int) -> int:
    """How many tokens before `place` equal the last of `other`, at most FAR; `known` of them surely do."""
    limit = min(place, len(other), FAR)
    while known < limit and text[place - known - 1] == other[-known - 1]:
        known += 1
    return known


def by_agreement() -> list[float]:
    """How often a copied token is right after so many that were; measured on SmolLM2's code, chats and sums."""
    return [0.1] + [1 - 0.8 * count**-0.8 for count in range(1, FAR + 1)]


def rising(width: int) -> list[int]:
    """Levels by agreement: each guess that comes true is evidence for the next, up to FAR."""
    return [min(count, FAR) for count in range(FAR + width + 1)]


class Sketch(NamedTuple, Generic[State]):
    """A tree of guesses, one entry a token in each list."""

    tokens: list[int]
    parents: list[int]
    levels: list[int]  # of evidence
    states: list[State]


def sketch(
    odds: Rates, root: State, following: Callable[[State], Iterable[tuple[int, int, State]]], width: int, depth: int
) -> Sketch[State]:
    """The tree that is likeliest by the prior.

    `following` gives what may come after a state: token, level and state of each, the first to try first.
    """

    def below(above: int, state: State) -> Iterator[tuple[tuple[int, int, int, State], float]]:
        left = chance = 1.0
        for token, level, after in following(state) if above < depth else ():
            chance = min(left * odds.prior[level], chance)  # none is taken for likelier than one that is tried before
            left -= chance
            yield (above + 1, token, level, after), chance

    grown = best_first(below(0, root), lambda item: below(item[0], item[3]), width)
    found: Sketch[State] = Sketch([], grown.parents, [], [])
    for _, token, level, state in grown.items:
        found.tokens.append(token)
        found.levels.append(level)
        found.states.append(state)
    return found


class Record:
    """A request's last draft, judged by the text that came; and how its drafts fare beside everyone's.

    The text itself says which guesses were right, those included that were cut before they ran.
    """

    __slots__ = ("levels", "parents", "rates", "start", "tokens")

    def __init__(self) -> None:
        self.start = 0
        self.tokens: Sequence[int] = ()
        self.levels: Sequence[int] = ()
        self.parents: Sequence[int] | None = None
        self.rates: Rates | None = None  # acceptance rates of this request by evidence

    def note(
        self,
        odds: Rates,
        start: int,
        tokens: list[int],
        levels: Sequence[int],
        least: float,
        parents: list[int] | None = None,
    ) -> Likely:
        """Remember a guess for the text from `start` on. What of it to draft, and how likely each token is kept.

        A level's rate is that of tokens which are tried: the second of two that follow the same one is tried if the
        first is wrong. A draft ends where the chance that all of a path is kept falls below `least`. That chance is
        taken from the prior, so that drafts do not depend on what other requests were about; how likely they are is
        learned.
        """
        self.start, self.tokens, self.levels, self.parents = start, tokens, levels, parents
        rates = self._rates(odds)
        confidence: list[float] = []
        # Of the text's end, then of each token: its path's chance by the prior; the chance that no child so far is
        # right, by the prior and as it was learned; the chance of the last child, by the prior.
        whole, left, due, most = [1.0], [1.0], [1.0], [1.0]
        for place, level in enumerate(levels):
            before = place if parents is None else parents[place] + 1
            prior = min(left[before] * odds.prior[level], most[before])
            if whole[before] * prior < least:
                break
            chance = due[before] * rates.rate(level)
            most[before] = prior
            left[before] -= prior
            due[before] -= chance
            whole.append(whole[before] * prior)
            for fresh in (left, due, most):
                fresh.append(1.0)
            confidence.append(chance)
        count = len(confidence)
        return Likely(tokens[:count], confidence, None if parents is None else parents[:count])

    def _rates(self, odds: Rates) -> Rates:
        if self.rates is None:
            self.rates = Rates(odds.prior, odds)
        return self.rates

    def judge(self, odds: Rates, text: Sequence[int]) -> list[int]:
        """Learn from what came. The places in the guess of the tokens that were right."""
        path: list[int] = []
        children: dict[int, list[int]] = {}
        for place, parent in enumerate(range(-1, len(self.tokens) - 1) if self.parents is None else self.parents):
            children.setdefault(parent, []).append(place)
        at = -1
        for came in text[self.start : self.start + len(self.tokens)]:
            at = next((place for place in children.get(at, ()) if self._try(odds, place, came)), NO_PLACE)
            if at == NO_PLACE:
                break
            path.append(at)
        self.tokens = self.levels = ()
        return path

    def _try(self, odds: Rates, place: int, came: int) -> bool:
        level, right = self.levels[place], self.tokens[place] == came
        self._rates(odds).learn(level, right)
        return right
