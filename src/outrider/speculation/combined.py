"""Several drafters for one request, as in `suffix+eagle3`: their drafts are merged into one tree.

What several of them guess alike is one token of it. The tree holds the tokens that are likeliest kept, whoever guessed
them: each drafter's confidence is first set right by how often its tokens came true.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import UserError
from ..request import Request
from ..types import Draft
from .adaptive.acceptance_model import Calibration, products
from .adaptive.latency_model import LatencyCurve
from .drafters.tree_shapes import LIKELY
from .interface import DraftBatch, DraftContext, MethodOptions, Needs, Proposer, Target
from .registry import build as build_method

PATIENCE, LONGEST = 16, 1024  # a drafter that is not worth its time is asked again after so many contexts, then later
HOPED = 2.0  # tokens that one that costs time is expected to give, before it is known
MEMORY = 0.9


@dataclass(frozen=True)
class Options(MethodOptions):
    width: int = 0  # tokens of the tree; 0: room for all that they may draft
    members: tuple[tuple[str, MethodOptions], ...] = ()  # the drafters, and the flags of each


Evidence = tuple[int, float]  # who guessed a token (bit i is member i) and if others guessed another; chance as told
CONTESTED = 1 << 30  # that bit


@dataclass
class Last:
    """What was guessed for a request last."""

    drafts: list[Draft]  # of each member
    merged: Draft
    evidence: list[Evidence]  # for each merged token
    start: int  # how long the text was


@dataclass
class Idle:
    """Turns at which a member was not asked, and after how many it is asked all the same."""

    turn_count: int = 0
    patience: int = PATIENCE

    def asks(self, pays: bool) -> bool:
        self.turn_count += 1
        if pays:
            self.turn_count, self.patience = 0, PATIENCE
        elif self.turn_count > self.patience:
            self.turn_count, self.patience = 0, min(2 * self.patience, LONGEST)
        return self.turn_count == 0


class CombinedDrafter:
    def __init__(self, members: Sequence[tuple[str, Proposer]], width: int, learns: bool) -> None:
        self.members = members
        self.learns = learns  # else drafts may not depend on what other requests were about
        needs = [member.needs for _, member in members]
        self.needs = Needs(
            width=width,
            aux_layers=tuple(sorted({tap for need in needs for tap in need.aux_layers})),
            has_kv=any(need.has_kv for need in needs),
            lookahead=max(need.lookahead for need in needs),
            trees=True,
            has_probs=any(need.has_probs for need in needs),
        )
        self.order = sorted(range(len(members)), key=lambda index: needs[index].costs_time)  # who is free comes first
        self.worth = [HOPED] * len(members)  # tokens that a draft of each gave
        self._calibrations: dict[int, Calibration] = {}  # by who guessed a token, alone or against others
        self._last: dict[Request, Last] = {}
        self._curves = [LatencyCurve() for _ in members]  # seconds of a call of each by its widest guess
        self._idle: dict[Request, dict[int, Idle]] = {}  # by member that costs time

    def propose(self, contexts: Sequence[DraftContext], last: Tensor, hidden: Tensor | None) -> DraftBatch:
        self._judge(contexts)
        found: list[list[Draft]] = [[Draft([])] * len(self.members) for _ in contexts]
        for index in self.order:
            _, member = self.members[index]
            asked = [self._turn(index, context, found[row]) for row, context in enumerate(contexts)]
            started = time.perf_counter()
            drafts = member.propose(asked, last, self._states(member.needs.aux_layers, hidden)).drafts()
            if member.needs.costs_time and all(context.new_tokens for context in contexts):
                self._curves[index].observe(
                    max(context.num_draft_tokens for context in asked), time.perf_counter() - started
                )
            for row, (context, draft) in enumerate(zip(asked, drafts, strict=True)):
                found[row][index] = draft.cut(context.num_draft_tokens)
        merged = [
            self._merge(drafts, context.num_draft_tokens) for context, drafts in zip(contexts, found, strict=True)
        ]
        for context, drafts, (draft, evidence) in zip(contexts, found, merged, strict=True):
            self._last[context.request] = Last(drafts, draft, evidence, context.length)
        return DraftBatch(
            [draft.tokens for draft, _ in merged],
            parents=[draft.parents or [] for draft, _ in merged],
            confidence=[draft.confidence or [] for draft, _ in merged],
            origins=[draft.origins or [] for draft, _ in merged],
        )

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the weights of all drafters."""
        return sum(getattr(member, "weight_bytes", 0) for _, member in self.members)

    def accept(self, requests: Sequence[Request], kept: Sequence[int]) -> None:
        """Do nothing: the text tells at the next call which tokens of each member were accepted."""

    def release(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._last.pop(request, None)
            self._idle.pop(request, None)
        for _, member in self.members:
            member.release(requests)

    def _judge(self, contexts: Sequence[DraftContext]) -> None:
        """Tell each member what was kept of its own guesses, and learn how far each is to be trusted."""
        known = [(context, self._last.pop(context.request, None)) for context in contexts if context.new_tokens]
        # A guess for another text was never verified: its request gave way, or the call that made it failed.
        told = [
            (context, last)
            for context, last in known
            if last and last.start == context.length - len(context.new_tokens)
        ]
        for index, (_, member) in enumerate(self.members):
            kept = [len(last.drafts[index].path(context.new_tokens[:-1])) for context, last in told]
            member.accept([context.request for context, _ in told], kept)
        for context, last in told if self.learns else ():
            self._learn(last, context.new_tokens)

    def _learn(self, last: Last, came: list[int]) -> None:
        merged = last.merged
        before: dict[int, int] = {-1: 0}  # tokens of the guess that came true -> how many tokens came with them
        for place, parent in enumerate(merged.parent_indices()):
            if parent in before and before[parent] < len(came):
                right = came[before[parent]] == merged.tokens[place]
                who, told = last.evidence[place]
                self._calibration(who).learn(told, right)
                if right:
                    before[place] = before[parent] + 1
        for index, draft in enumerate(last.drafts):
            if draft.tokens:
                self.worth[index] += (1 - MEMORY) * (len(draft.path(came)) - self.worth[index])

    def _turn(self, index: int, context: DraftContext, found: Sequence[Draft]) -> DraftContext:
        """What a member is asked: nothing where that would cost more than it adds to what the others have found."""
        needs = self.members[index][1].needs
        room = (
            context.num_draft_tokens
            if needs.context is None
            else min(context.num_draft_tokens, needs.context - context.length)
        )
        width = max(min(room, needs.width), 0)
        if not (needs.costs_time and self.learns and width):
            return replace(context, num_draft_tokens=width)
        curve = self._curves[index]
        seconds = curve.seconds(width) - curve.seconds(0) if curve.known else 0.0
        adds = self.worth[index] - sum(survivals(self._merge(found, context.num_draft_tokens)[0]))
        idle = self._idle.setdefault(context.request, {}).setdefault(index, Idle())
        if not idle.asks(adds > context.tokens_per_second * seconds):
            return replace(context, num_draft_tokens=0)
        return replace(
            context,
            num_draft_tokens=width,
            min_acceptance=min(context.min_acceptance + context.tokens_per_second * seconds / width, 1.0),
        )

    def _states(self, aux_layers: tuple[int, ...], hidden: Tensor | None) -> Tensor | None:
        """The columns of hidden [T, aux_layers * E] that a member reads."""
        if hidden is None or not aux_layers or aux_layers == self.needs.aux_layers:
            return hidden if aux_layers else None
        parts = hidden.chunk(len(self.needs.aux_layers), 1)
        return torch.cat([parts[self.needs.aux_layers.index(tap)] for tap in aux_layers], 1)

    def _calibration(self, who: int) -> Calibration:
        return self._calibrations.setdefault(who, Calibration())

    def _merge(self, drafts: Sequence[Draft], width: int) -> tuple[Draft, list[Evidence]]:
        """The likeliest `width` tokens of all guesses as one tree, and what speaks for each."""
        places: dict[tuple[int, int], int] = {}  # (parent, token) -> its place
        parents: list[int] = []
        tokens: list[int] = []
        told: list[float] = []
        origins: list[int] = []
        for index, draft in enumerate(drafts):
            at: list[int] = []
            for number, (token, before) in enumerate(zip(draft.tokens, draft.parent_indices(), strict=True)):
                parent = at[before] if before >= 0 else -1
                place = places.setdefault((parent, token), len(tokens))
                if place == len(tokens):
                    tokens.append(token)
                    parents.append(parent)
                    told.append(0.0)
                    origins.append(0)
                told[place] = max(told[place], draft.confidence[number] if draft.confidence else LIKELY)
                origins[place] |= 1 << index
                at.append(place)
        siblings = Counter(parents)
        whose = [
            origin | CONTESTED if siblings[parent] > 1 else origin
            for origin, parent in zip(origins, parents, strict=True)
        ]
        evidence = list(zip(whose, told, strict=True))
        chances = [self._calibration(who).rate(chance) for who, chance in evidence] if self.learns else told
        whole = Draft(tokens, parents, confidence=chances, origins=origins)
        order = ranking(whole)[:width]
        return whole.pick(order), [evidence[place] for place in order]


def survivals(draft: Draft) -> list[float]:
    """How likely each token is kept, with all before it."""
    return products(draft.confidence or (), draft.parent_indices())


def ranking(draft: Draft) -> list[int]:
    """The places of its tokens, those that are likeliest kept first. No token is likelier than its parent."""
    chances = survivals(draft)
    return sorted(range(len(chances)), key=lambda place: (-chances[place], place))


def build(options: Options, target: Target) -> CombinedDrafter:
    if target.sampled and not target.coupled:
        names = "+".join(name for name, _ in options.members)
        raise UserError(
            f"`{names}` merges guesses, so no distribution is left that they were drawn from: "
            "leave out `draft=probabilistic`, or verify exactly"
        )
    members = [(name, build_method(name, own, target)) for name, own in options.members]
    width = options.width or sum(member.needs.width for _, member in members)
    return CombinedDrafter(members, width, learns=target.coupled)
