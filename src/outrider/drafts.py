"""What drafters guess, and what became of it: plain data, no torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Draft:
    """What a drafter expects to come next: a chain of tokens, or a tree when `parents` says so."""

    tokens: list[int]
    parents: list[int] | None = None  # for each token the one before it, listed earlier; -1: the request's newest
    logits: Any = None  # [tokens, V] f32 tensor that they were drawn from, before the temperature; None: not drawn
    confidence: list[float] | None = None  # how likely each is kept if the one before it is, as its drafter says
    origins: list[int] | None = None  # of several drafters, who guessed each token: bit i is drafter i; None: only one

    def cut(self, count: int) -> Draft:
        """The first `count` tokens; parents come before their children, so what is left is whole."""
        if count >= len(self.tokens):
            return self
        parts = (self.tokens, self.parents, self.logits, self.confidence, self.origins)
        return Draft(*(None if part is None else part[:count] for part in parts))  # type: ignore[arg-type]

    def within(self, levels: int) -> Draft:
        """The tokens before which fewer than so many were guessed."""
        if self.parents is None:
            return self.cut(max(levels, 0))
        kept = [place for place, depth in enumerate(self.depths()) if depth < levels]
        return self if len(kept) == len(self.tokens) else self.pick(kept)

    def pick(self, places: Sequence[int]) -> Draft:
        """The tokens at these places as a tree of their own; the one before each must be picked before it."""
        now = {place: number for number, place in enumerate(places)} | {-1: -1}
        before = self.before()
        return Draft(
            [self.tokens[place] for place in places],
            [now[before[place]] for place in places],
            None if self.logits is None else self.logits[places],
            None if self.confidence is None else [self.confidence[place] for place in places],
            None if self.origins is None else [self.origins[place] for place in places],
        )

    def before(self) -> Sequence[int]:
        """For each token the one that it follows; -1: the request's newest."""
        return range(-1, len(self.tokens) - 1) if self.parents is None else self.parents

    def path(self, tokens: Sequence[int]) -> list[int]:
        """The places of the guessed tokens that these are, as far as they were guessed."""
        found: list[int] = []
        last = -1
        for token in tokens:
            following = (place for place, before in enumerate(self.before()) if before == last)
            last = next((place for place in following if self.tokens[place] == token), -1)
            if last < 0:
                break
            found.append(last)
        return found

    def depths(self) -> list[int]:
        """How many tokens stand between each and the request's newest."""
        if self.parents is None:
            return list(range(len(self.tokens)))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return depths


@dataclass
class DrafterStats:
    """One of several drafters: tokens that it guessed, alone or with others, and of these kept."""

    drafted: int = 0
    accepted: int = 0


@dataclass
class SpecStats:
    """What speculation gave, to a request or to a method. A step keeps `accepted` drafts and one token of its own."""

    steps: int = 0  # target passes that gave a token
    drafted: int = 0
    accepted: int = 0
    offered: list[int] = field(default_factory=list)  # [i]: steps that had drafted a token at depth i
    kept: list[int] = field(default_factory=list)  # [i]: steps that kept it
    widths: dict[int, int] = field(default_factory=dict)  # tokens drafted -> steps that verified so many; 0: none
    drafters: dict[str, DrafterStats] = field(default_factory=dict)  # of several

    @property
    def mean_length(self) -> float:
        """Tokens a step, the one that the target adds itself included."""
        return 1 + self.accepted / self.steps if self.steps else 0.0

    @property
    def rates(self) -> list[float]:
        """How often a step that had drafted a token at depth i kept it, whatever became of those before."""
        return [kept / offered for kept, offered in zip(self.kept, self.offered, strict=True)]

    def count_plain(self, steps: int) -> None:
        """Steps that had nothing to verify."""
        self.steps += steps
        self.widths[0] = self.widths.get(0, 0) + steps

    def count(self, draft: Draft | None, kept: Sequence[int], drafters: Sequence[str] = ()) -> None:
        """A step that verified `guess` and kept these tokens of it; `drafters` as the bits of its origins name them."""
        if draft is None or not draft.tokens:
            self.count_plain(1)
            return
        self.steps += 1
        width = len(draft.tokens)
        self.widths[width] = self.widths.get(width, 0) + 1
        deepest, accepted = 1 + max(draft.depths()), len(kept)
        self.drafted += width
        self.accepted += accepted
        self._credit(draft, kept, drafters)
        for counts in (self.offered, self.kept):
            counts.extend([0] * (deepest - len(counts)))
        for depth in range(deepest):
            self.offered[depth] += 1
            self.kept[depth] += depth < accepted

    def _credit(self, draft: Draft, kept: Sequence[int], drafters: Sequence[str]) -> None:
        """Who guessed what; a token that several guessed counts for each of them."""
        if draft.origins is None:
            return
        path = draft.path(kept)
        for bit, name in enumerate(drafters):
            credit = self.drafters.setdefault(name, DrafterStats())
            credit.drafted += sum(origin >> bit & 1 for origin in draft.origins)
            credit.accepted += sum(draft.origins[place] >> bit & 1 for place in path)

    def add(self, other: SpecStats) -> None:
        self.steps += other.steps
        self.drafted += other.drafted
        self.accepted += other.accepted
        for mine, counts in ((self.offered, other.offered), (self.kept, other.kept)):
            mine.extend([0] * (len(counts) - len(mine)))
            for depth, value in enumerate(counts):
                mine[depth] += value
        for width, steps in other.widths.items():
            self.widths[width] = self.widths.get(width, 0) + steps
        for name, theirs in other.drafters.items():
            credit = self.drafters.setdefault(name, DrafterStats())
            credit.drafted += theirs.drafted
            credit.accepted += theirs.accepted
