"""Combined drafters for one request, as in `suffix+eagle3`: their drafts are merged into one tree.

Equal tokens of several drafters are one node. The tree has the tokens that are most probably accepted. The confidence
of each drafter is calibrated first, by how often its tokens were accepted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import UserError
from ..request import Request
from ..types import Draft
from .adaptive.acceptance_model import Rates, confidence_key, products
from .adaptive.backoff import Backoff
from .adaptive.latency_model import LatencyCurve
from .drafters.tree_builder import FIRST_RATE
from .interface import DraftBatch, DraftContext, MethodOptions, Needs, Proposer, Target
from .registry import build as build_method

INITIAL_GAIN = 2.0  # accepted tokens that a drafter which costs time is expected to give before it is measured


@dataclass(frozen=True)
class Options(MethodOptions):
    width: int = 0  # tokens of the tree; 0: as many as all drafters together
    members: tuple[tuple[str, MethodOptions], ...] = ()  # the drafters, and the options of each


Evidence = tuple[int, float]  # drafters that proposed a token (bit i: member i) and CONTESTED; confidence as reported
CONTESTED = 1 << 30  # another token was proposed after the same parent


@dataclass
class LastDraft:
    """The last draft for a request."""

    drafts: list[Draft]  # of each member
    merged: Draft
    evidence: list[Evidence]  # for each merged token
    start: int  # length of the text


class CombinedDrafter:
    def __init__(self, members: Sequence[tuple[str, Proposer]], width: int, learns: bool) -> None:
        self.members = members
        self.learns = learns  # False: drafts may not depend on other requests
        needs = [member.needs for _, member in members]
        self.needs = Needs(
            width=width,
            aux_layers=tuple(sorted({layer for need in needs for layer in need.aux_layers})),
            has_kv=any(need.has_kv for need in needs),
            lookahead=max(need.lookahead for need in needs),
            trees=True,
            has_probs=any(need.has_probs for need in needs),
        )
        self.order = sorted(range(len(members)), key=lambda index: needs[index].costs_time)  # those without cost first
        # By member: drafts by CUDA graphs, as CapturedDrafting.propose does; None if they do not exist.
        self.captured: dict[str, Callable[[Sequence[DraftContext], Tensor | None], DraftBatch | None]] = {}
        self._gains = Rates([INITIAL_GAIN] * len(members))  # mean number of accepted tokens of a draft, by member
        self._request_gains: dict[Request, Rates] = {}
        self._calibrations: dict[int, Rates] = {}  # by the drafters that proposed a token, and CONTESTED
        self._last: dict[Request, LastDraft] = {}
        self._curves = [LatencyCurve() for _ in members]  # seconds of a call by its widest draft, by member
        self._backoffs: dict[Request, dict[int, Backoff]] = {}  # by member that costs time

    def propose(self, contexts: Sequence[DraftContext], last: Tensor, hidden: Tensor | None) -> DraftBatch:
        self._observe(contexts)
        recorded = False
        drafted: list[list[Draft]] = [[Draft([])] * len(self.members) for _ in contexts]
        for index in self.order:
            name, member = self.members[index]
            called = [self._member_context(index, context, drafted[row]) for row, context in enumerate(contexts)]
            started = time.perf_counter()
            states = self._states(member.needs.aux_layers, hidden)
            batch = self.captured[name](called, states) if name in self.captured else None
            batch = member.propose(called, last, states) if batch is None else batch
            drafts, recorded = batch.drafts(), recorded or batch.recorded
            if member.needs.costs_time and not batch.recorded and all(context.new_tokens for context in contexts):
                self._curves[index].observe(
                    max(context.num_draft_tokens for context in called), time.perf_counter() - started
                )
            for row, (context, draft) in enumerate(zip(called, drafts, strict=True)):
                drafted[row][index] = draft.cut(context.num_draft_tokens)
        merged = [
            self._merge(drafts, context.num_draft_tokens) for context, drafts in zip(contexts, drafted, strict=True)
        ]
        for context, drafts, (draft, evidence) in zip(contexts, drafted, merged, strict=True):
            self._last[context.request] = LastDraft(drafts, draft, evidence, context.length)
        return DraftBatch(
            [draft.tokens for draft, _ in merged],
            parents=[draft.parents or [] for draft, _ in merged],
            confidence=[draft.confidence or [] for draft, _ in merged],
            origins=[draft.origins or [] for draft, _ in merged],
            recorded=recorded,
        )

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the weights of all drafters."""
        return sum(getattr(member, "weight_bytes", 0) for _, member in self.members)

    def accept(self, requests: Sequence[Request], accepted: Sequence[int]) -> None:
        """Do nothing: the next call compares the text with the draft of each member."""

    def release(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._last.pop(request, None)
            self._backoffs.pop(request, None)
            self._request_gains.pop(request, None)
        for _, member in self.members:
            member.release(requests)

    def _observe(self, contexts: Sequence[DraftContext]) -> None:
        """Pass on to each member how many of its tokens were accepted, and learn from it."""
        lasts = [(context, self._last.pop(context.request, None)) for context in contexts if context.new_tokens]
        # A draft for another text was never verified: its request was preempted, or the call that made it failed.
        verified = [
            (context, last)
            for context, last in lasts
            if last and last.start == context.length - len(context.new_tokens)
        ]
        for index, (_, member) in enumerate(self.members):
            accepted = [len(last.drafts[index].path(context.new_tokens[:-1])) for context, last in verified]
            member.accept([context.request for context, _ in verified], accepted)
        for context, last in verified if self.learns else ():
            self._learn(context.request, last, context.new_tokens)

    def _learn(self, request: Request, last: LastDraft, new_tokens: list[int]) -> None:
        """Learn the calibration of each group of drafters, and the gain of each member."""
        merged = last.merged
        depths: dict[int, int] = {-1: 0}  # index of an accepted token -> number of tokens up to it
        for index, parent in enumerate(merged.parent_indices()):
            if parent in depths and depths[parent] < len(new_tokens):
                accepted = new_tokens[depths[parent]] == merged.tokens[index]
                origins, confidence = last.evidence[index]
                self._calibration(origins).learn(confidence_key(confidence), accepted)
                if accepted:
                    depths[index] = depths[parent] + 1
        for member, draft in enumerate(last.drafts):
            if draft.tokens:
                self._gains_of(request).learn(member, len(draft.path(new_tokens)))

    def _member_context(self, index: int, context: DraftContext, drafted: Sequence[Draft]) -> DraftContext:
        """Return the context for a member: without draft tokens if they cost more than they add to those drafted."""
        needs = self.members[index][1].needs
        capacity = (
            context.num_draft_tokens
            if needs.context is None
            else min(context.num_draft_tokens, needs.context - context.length)
        )
        width = max(min(capacity, needs.width), 0)
        if not (needs.costs_time and self.learns and width):
            return replace(context, num_draft_tokens=width)
        seconds = self._curves[index].seconds(width) - self._curves[index].seconds(0)
        gain = self._gains_of(context.request).rate(index) - sum(
            path_acceptance(self._merge(drafted, context.num_draft_tokens)[0])
        )
        loss = context.tokens_per_second * seconds - gain
        backoff = self._backoffs.setdefault(context.request, {}).setdefault(index, Backoff())
        if loss >= 0 and not backoff.probes(loss):
            return replace(context, num_draft_tokens=0)
        return replace(
            context,
            num_draft_tokens=width,
            min_acceptance=min(context.min_acceptance + context.tokens_per_second * seconds / width, 1.0),
        )

    def _states(self, layers: tuple[int, ...], hidden: Tensor | None) -> Tensor | None:
        """Return the columns of hidden [T, layers * E] that a member reads."""
        if hidden is None or not layers or layers == self.needs.aux_layers:
            return hidden if layers else None
        columns = hidden.chunk(len(self.needs.aux_layers), 1)
        return torch.cat([columns[self.needs.aux_layers.index(layer)] for layer in layers], 1)

    def _gains_of(self, request: Request) -> Rates:
        return self._request_gains.setdefault(request, Rates(self._gains.prior, self._gains))

    def _calibration(self, origins: int) -> Rates:
        return self._calibrations.setdefault(origins, Rates())

    def _merge(self, drafts: Sequence[Draft], width: int) -> tuple[Draft, list[Evidence]]:
        """Merge all drafts; return the `width` most probable tokens as one tree, and the evidence for each."""
        indices: dict[tuple[int, int], int] = {}  # (parent, token) -> index of the merged token
        parents: list[int] = []
        tokens: list[int] = []
        reported: list[float] = []
        origins: list[int] = []
        for member, draft in enumerate(drafts):
            merged: list[int] = []  # index of each token of this draft
            for number, (token, before) in enumerate(zip(draft.tokens, draft.parent_indices(), strict=True)):
                parent = merged[before] if before >= 0 else -1
                index = indices.setdefault((parent, token), len(tokens))
                if index == len(tokens):
                    tokens.append(token)
                    parents.append(parent)
                    reported.append(0.0)
                    origins.append(0)
                confidence = draft.confidence[number] if draft.confidence else FIRST_RATE
                reported[index] = max(reported[index], confidence)
                origins[index] |= 1 << member
                merged.append(index)
        siblings = Counter(parents)
        groups = [
            origin | CONTESTED if siblings[parent] > 1 else origin
            for origin, parent in zip(origins, parents, strict=True)
        ]
        evidence = list(zip(groups, reported, strict=True))
        calibrated = [
            self._calibration(group).rate(confidence_key(rate), rate) if self.learns else rate
            for group, rate in evidence
        ]
        tree = Draft(tokens, parents, confidence=calibrated, origins=origins)
        order = ranking(tree)[:width]
        return tree.pick(order), [evidence[index] for index in order]


def path_acceptance(draft: Draft) -> list[float]:
    """Return the probability that each token and all before it are accepted."""
    return products(draft.confidence or (), draft.parent_indices())


def ranking(draft: Draft) -> list[int]:
    """Return the indices of the tokens, most probable paths first. No path is more probable than its parent's."""
    probabilities = path_acceptance(draft)
    return sorted(range(len(probabilities)), key=lambda index: (-probabilities[index], index))


def build(options: Options, target: Target) -> CombinedDrafter:
    if target.sampled and not target.coupled:
        names = "+".join(name for name, _ in options.members)
        raise UserError(
            f"`{names}` merges drafts, so the distribution that they were sampled from is lost: "
            "leave out `draft=probabilistic`, or use `verify=exact`"
        )
    members = [(name, build_method(name, member_options, target)) for name, member_options in options.members]
    width = options.width or sum(member.needs.width for _, member in members)
    return CombinedDrafter(members, width, learns=target.coupled)
