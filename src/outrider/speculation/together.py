"""Several drafters for one request, as in `suffix+eagle3`: what they guess is merged into one tree.

What several of them guess alike is one token of it. The tree holds the tokens that are likeliest kept, whoever guessed
them: each drafter's confidence is first set right by how often its tokens came true.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..types import Guess, Request, UserError
from . import Draft, MethodOptions, Needs, Proposer, Target, Turn
from . import build as build_method
from .odds import Calibration

UNSAID = 0.6  # the confidence of a drafter that has none
PATIENCE = 16  # a drafter that seemed not worth its time is asked again after so many turns
HOPED = 2.0  # tokens that one that costs time is expected to give, before it is known
MEMORY = 0.9


@dataclass(frozen=True)
class Options(MethodOptions):
    width: int = 0  # tokens of the tree; 0: room for all that they may draft
    members: tuple[tuple[str, MethodOptions], ...] = ()  # the drafters, and the flags of each


@dataclass
class Last:
    """What was guessed for a request last."""

    guesses: list[Guess]  # of each member
    merged: Guess
    said: list[float]  # the chance of each merged token, as its drafters put it
    start: int  # how long the text was


class Together:
    def __init__(self, members: Sequence[tuple[str, Proposer]], width: int, learns: bool) -> None:
        self.members = members
        self.learns = learns  # else drafts may not depend on what other requests were about
        needs = [member.needs for _, member in members]
        self.needs = Needs(
            width=width,
            taps=tuple(sorted({tap for need in needs for tap in need.taps})),
            follows=any(need.follows for need in needs),
            lookahead=max(need.lookahead for need in needs),
            trees=True,
            draws=any(need.draws for need in needs),
        )
        self.order = sorted(range(len(members)), key=lambda index: needs[index].costs)  # who is free comes first
        self.worth = [HOPED] * len(members)  # tokens that a draft of each gave
        self._calibrations: dict[int, Calibration] = {}  # by who guessed a token: bit i is member i
        self._last: dict[Request, Last] = {}
        self._idle: dict[Request, int] = {}  # turns that a member which costs time was not asked

    def propose(self, turns: Sequence[Turn], last: Tensor, hidden: Tensor | None) -> Draft:
        self._judge(turns)
        found: list[list[Guess]] = [[Guess([])] * len(self.members) for _ in turns]
        for index in self.order:
            _, member = self.members[index]
            asked = [replace(turn, width=self._width(index, turn, found[row])) for row, turn in enumerate(turns)]
            draft = member.propose(asked, last, self._states(member.needs.taps, hidden))
            for row, (turn, guess) in enumerate(zip(asked, guesses_of(draft), strict=True)):
                found[row][index] = guess.cut(turn.width)
        merged = [self._merge(guesses, turn.width) for turn, guesses in zip(turns, found, strict=True)]
        for turn, guesses, (guess, said) in zip(turns, found, merged, strict=True):
            self._last[turn.request] = Last(guesses, guess, said, turn.length)
        return Draft(
            [guess.tokens for guess, _ in merged],
            parents=[guess.parents or [] for guess, _ in merged],
            confidence=[guess.confidence or [] for guess, _ in merged],
            origins=[guess.origins or [] for guess, _ in merged],
        )

    def accept(self, requests: Sequence[Request], kept: Sequence[int]) -> None:
        """Who guessed what of it, the text tells: at the next turn."""

    def release(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._last.pop(request, None)
            self._idle.pop(request, None)
        for _, member in self.members:
            member.release(requests)

    def _judge(self, turns: Sequence[Turn]) -> None:
        """Tell each member what was kept of its own guesses, and learn how far each is to be trusted."""
        told = [(turn, last) for turn in turns if turn.fresh and (last := self._last.pop(turn.request, None))]
        for index, (_, member) in enumerate(self.members):
            kept = [len(last.guesses[index].path(turn.fresh[:-1])) for turn, last in told]
            member.accept([turn.request for turn, _ in told], kept)
        for turn, last in told:
            if self.learns and last.start == turn.length - len(turn.fresh):
                self._learn(last, turn.fresh)

    def _learn(self, last: Last, came: list[int]) -> None:
        merged = last.merged
        assert merged.origins is not None
        before: dict[int, int] = {-1: 0}  # tokens of the guess that came true -> how many tokens came with them
        for place, parent in enumerate(merged.before()):
            if parent in before and before[parent] < len(came):
                right = came[before[parent]] == merged.tokens[place]
                self._calibration(merged.origins[place]).learn(last.said[place], right)
                if right:
                    before[place] = before[parent] + 1
        for index, guess in enumerate(last.guesses):
            if guess.tokens:
                self.worth[index] += (1 - MEMORY) * (len(guess.path(came)) - self.worth[index])

    def _width(self, index: int, turn: Turn, found: Sequence[Guess]) -> int:
        """What a member may draft: nothing where that would cost time, and the others have found more than it gives."""
        needs = self.members[index][1].needs
        room = turn.width if needs.context is None else min(turn.width, needs.context - turn.length)
        width = max(min(room, needs.width), 0)
        if not (needs.costs and self.learns and width):
            return width
        expected = sum(survivals(self._merge(found, turn.width)[0]))
        idle = self._idle.get(turn.request, 0) + 1
        if expected + turn.floor < self.worth[index] or idle > PATIENCE:
            idle = 0
        self._idle[turn.request] = idle
        return 0 if idle else width

    def _states(self, taps: tuple[int, ...], hidden: Tensor | None) -> Tensor | None:
        """The columns of hidden [T, taps * E] that a member reads."""
        if hidden is None or not taps or taps == self.needs.taps:
            return hidden if taps else None
        parts = hidden.chunk(len(self.needs.taps), 1)
        return torch.cat([parts[self.needs.taps.index(tap)] for tap in taps], 1)

    def _calibration(self, origin: int) -> Calibration:
        return self._calibrations.setdefault(origin, Calibration())

    def _merge(self, guesses: Sequence[Guess], width: int) -> tuple[Guess, list[float]]:
        """The likeliest `width` tokens of all guesses as one tree, and the chances that their drafters gave them."""
        places: dict[tuple[int, int], int] = {}  # (parent, token) -> its place
        parents: list[int] = []
        tokens: list[int] = []
        said: list[float] = []
        origins: list[int] = []
        for index, guess in enumerate(guesses):
            at: list[int] = []
            for number, (token, before) in enumerate(zip(guess.tokens, guess.before(), strict=True)):
                parent = at[before] if before >= 0 else -1
                place = places.setdefault((parent, token), len(tokens))
                if place == len(tokens):
                    tokens.append(token)
                    parents.append(parent)
                    said.append(0.0)
                    origins.append(0)
                said[place] = max(said[place], guess.confidence[number] if guess.confidence else UNSAID)
                origins[place] |= 1 << index
                at.append(place)
        whole = Guess(tokens, parents, confidence=self._chances(said, origins), origins=origins)
        order = ranking(whole)[:width]
        return pick(whole, order), [said[place] for place in order]

    def _chances(self, said: list[float], origins: list[int]) -> list[float]:
        if not self.learns:
            return said
        return [self._calibration(origin).rate(chance) for chance, origin in zip(said, origins, strict=True)]


def guesses_of(draft: Draft) -> list[Guess]:
    """The guess for each row of a draft."""
    tokens = draft.rows(draft.tokens)
    parents = draft.rows(draft.parents) if draft.parents is not None else [None] * len(tokens)
    said = draft.confidence if draft.confidence is not None else [None] * len(tokens)
    return [
        Guess(row, before, confidence=None if chances is None else list(chances[: len(row)]))
        for row, before, chances in zip(tokens, parents, said, strict=True)
    ]


def survivals(guess: Guess) -> list[float]:
    """How likely each token is kept, with all before it."""
    found: list[float] = []
    for chance, parent in zip(guess.confidence or (), guess.before(), strict=True):
        found.append(chance * (found[parent] if parent >= 0 else 1.0))
    return found


def ranking(guess: Guess) -> list[int]:
    """The places of its tokens, those that are likeliest kept first. No token is likelier than its parent."""
    chances = survivals(guess)
    return sorted(range(len(chances)), key=lambda place: (-chances[place], place))


def pick(guess: Guess, order: Sequence[int]) -> Guess:
    """The tokens at these places, which include the parents of each before it."""
    now = {place: number for number, place in enumerate(order)} | {-1: -1}
    parents, said, origins = guess.before(), guess.confidence or [], guess.origins or []
    return Guess(
        [guess.tokens[place] for place in order],
        [now[parents[place]] for place in order],
        confidence=[said[place] for place in order],
        origins=[origins[place] for place in order],
    )


def build(options: Options, target: Target) -> Together:
    if target.sampled and not target.coupled:
        names = "+".join(name for name, _ in options.members)
        raise UserError(
            f"`{names}` merges guesses, so no distribution is left that they were drawn from: "
            "leave out `draft=probabilistic`, or verify exactly"
        )
    members = [(name, build_method(name, own, target)) for name, own in options.members]
    width = options.width or sum(member.needs.width for _, member in members)
    return Together(members, width, learns=target.coupled)
