"""Prompt lookup: find an earlier occurrence of the text's last tokens, and copy the tokens that followed it.

vLLM copies from the earliest occurrence of the longest n-gram. This drafter copies from the latest, or from the one
where the last accepted copy continues: 1 to 6 percent more tokens a step on edits, chats, sums and translations by
SmolLM2, as many on code. A tree copies from several occurrences at once.

In multi-step runs chains are looked up on the device, with the same result: `NgramSteps`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...cache.pages import slots_of
from ...errors import UserError
from ...kernels import NgramLookup, TokenHistory
from ...multi_step.state import DecodeState, HostSteps, StepDrafter
from ...request import Request, Row
from ...types import Draft
from ..adaptive.acceptance_model import Rates
from ..drafters.lookup import (
    MAX_MATCH,
    RESUME_WINDOW,
    AcceptanceTracker,
    LookupDrafter,
    NgramIndex,
    grow_tree,
    growing_matches,
    match_length,
    min_path_acceptance,
    rates_by_match_length,
)
from ..interface import DraftContext, Target, TreeOptions

SIBLING = MAX_MATCH + 1  # evidence from here on: tokens that are tried after those of a better match were rejected
SIBLING_RATE = 0.4  # acceptance rate of such a token, as a part of that of a first one with the same match length
MATCHES_PER_BRANCH = 4  # occurrences to look at for each branch

NO_COPY = -1

Copies = tuple[int, list[tuple[int, int]]]  # number of tokens copied; (position, match length) of the sources


@dataclass(frozen=True)
class Options(TreeOptions):
    width: int = 8  # tokens that it drafts at most
    shortest: int = 1  # tokens of the shortest n-gram that is looked up
    longest: int = 3  # tokens of the longest n-gram that is looked up
    least: float | None = None  # a path ends below this acceptance probability; default: 0.1, in trees 0.02

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise UserError(
                f"`shortest` is {self.shortest} and `longest` is {self.longest}: "
                "both must be at least 1, and `longest` not below `shortest`"
            )


def build(options: Options, target: Target) -> NgramDrafter:
    options.check_tree()
    return NgramDrafter(options, target)


class NgramState:
    """The index of one request, and its last draft."""

    def __init__(self, options: Options) -> None:
        self.index = NgramIndex(options.shortest, options.longest, all_positions=options.branches > 1)
        self.tracker = AcceptanceTracker()
        self.sources: list[int] = []  # position that each token of the last draft was copied from
        self.resume: int | None = None  # position where the last accepted copy continues
        self.copy: tuple[int, int] | None = None  # of a draft on the device: source, and length of the text before it
        self.stored, self.preemptions = 0, 0  # tokens of the text on the device; stale after another preemption


class NgramDrafter(LookupDrafter[NgramState]):
    def __init__(self, options: Options, target: Target) -> None:
        trees = options.branches > 1
        super().__init__(options.width, trees, on_host=options.longest > MAX_MATCH)
        self.options, self.ops, self.device = options, target.ops, target.device
        prior = rates_by_match_length()
        # If the text depends on the drafts, requests may not influence each other.
        self.rates = Rates([*prior, *[SIBLING_RATE * rate for rate in prior]], learns=target.coupled)
        self.matches = growing_matches(options.width)
        self.least = min_path_acceptance(options)
        # The tokens of all texts on the device, one number a slot.
        size = target.page_size
        on_device = self.needs.multi_step and not self.needs.on_host
        self.pages = target.storage(0, 1, 1, target.kv_dtype, states=size) if on_device else None

    def new_state(self, request: Request) -> NgramState:
        return NgramState(self.options)

    def draft(self, state: NgramState, context: DraftContext, width: int) -> Draft:
        self._read_new_tokens(state, context)
        text = state.index.text
        match = state.index.match(state.resume)
        if match is None:
            return Draft([])
        depth = self.depth(width)
        if self.needs.trees:
            return self.draft_tree(state, match, width, depth)
        position, matched = match
        tokens = text[position : position + depth]
        if len(tokens) < depth:  # the copy reaches the text's end, and repeats itself
            tokens = (tokens * depth)[:depth]
        state.sources = list(range(position, position + depth))
        evidence = self.matches[matched : matched + depth]
        return state.tracker.start_draft(self.rates, len(text), tokens, evidence, self.least)

    def draft_tree(self, state: NgramState, match: tuple[int, int], width: int, depth: int) -> Draft:
        text, branches = state.index.text, self.options.branches

        def children(copies: Copies) -> Iterator[tuple[int, int, Copies]]:
            copied, matches = copies
            sources: dict[int, list[tuple[int, int]]] = {}  # by the token that follows
            for source in matches:
                token = text[source[0] + copied % (len(text) - source[0])]
                sources.setdefault(token, []).append(source)
            first_key = 0  # siblings of the first token have keys of their own
            for token in list(sources)[:branches]:
                matched = min(max(length for _, length in sources[token]) + copied, MAX_MATCH)
                yield token, first_key + matched, (copied + 1, sources[token])
                first_key = SIBLING

        root = 0, [match, *state.index.other_matches(match[0], MATCHES_PER_BRANCH * branches)]
        tree = grow_tree(self.rates, root, children, width, depth)
        state.sources = [matches[0][0] + copied - 1 for copied, matches in tree.states]
        return state.tracker.start_draft(self.rates, len(text), tree.tokens, tree.evidence, self.least, tree.parents)

    def _read_new_tokens(self, state: NgramState, context: DraftContext) -> None:
        """Index the tokens since the last call, and learn which of the last draft they contain."""
        text = state.index.text
        state.index.extend(context.tokens(len(text), context.length))
        if state.copy is not None:
            self._take_over(state, *state.copy)
        accepted = state.tracker.observe(self.rates, text)
        if accepted:
            # The text has one more token, which continues the copy or replaces its next token.
            state.resume = state.sources[accepted[-1]] + 2

    # ---- decode steps without the host ----

    def bind(self, state: DecodeState) -> StepDrafter | HostSteps:
        return super().bind(state) if self.pages is None else NgramSteps(self, state)

    def kept_tokens(self, width: int) -> list[int]:
        """Return how many tokens of a draft are worth verifying, by the length of the match."""
        tracker, depth = AcceptanceTracker(), self.depth(width)
        drafts = (self.matches[matched : matched + depth] for matched in range(MAX_MATCH + 1))
        return [len(tracker.start_draft(self.rates, 0, evidence, evidence, self.least).tokens) for evidence in drafts]

    def depth(self, width: int) -> int:
        return min(width, self.options.max_depth or width)

    def _take_over(self, state: NgramState, source: int, length: int) -> None:
        """Continue on the host after a draft on the device, which was copied from `source`."""
        text, depth, state.copy = state.index.text, self.depth(self.options.width), None
        state.sources = list(range(source, source + depth))
        before = text[max(length - MAX_MATCH, 0) : length]
        matched = match_length(text, source, before, 0)
        tokens = [text[source + index % (length - source)] for index in range(depth)]
        state.tracker.start_draft(self.rates, length, tokens, self.matches[matched : matched + depth], self.least)


class NgramSteps:
    """A StepDrafter: stores the tokens that ran, and looks n-grams up among those of the text."""

    logits: Tensor | None = None

    def __init__(self, drafter: NgramDrafter, state: DecodeState) -> None:
        assert drafter.pages is not None
        device, options = drafter.device, drafter.options
        self.lookups, self.state, self.pages, self.device = drafter, state, drafter.pages, device
        self.copies = device.buffer(3 * state.rows, torch.int32)  # [B, 3], see Kernels.ngram_drafts
        kept = device.upload(drafter.kept_tokens(state.width), torch.int32)
        self.lookup = NgramLookup(options.shortest, options.longest, RESUME_WINDOW, kept)
        self.depth = drafter.depth(state.width)

    @property
    def _tokens(self) -> Tensor:
        """Return the tokens of all slots [slots], and as many more, which take those of padding."""
        return self.pages.states.view(torch.int32).flatten()

    def begin(self, rows: Sequence[Row]) -> None:
        """Upload the tokens that the device lacks, and the last copy of each text."""
        copies: list[int] = []
        slots: list[int] = []
        tokens: list[int] = []
        for row in rows:
            request = row.request
            found = self.lookups.states.setdefault(request, NgramState(self.lookups.options))
            stored = found.stored if found.preemptions == request.preemptions else 0
            slots += slots_of(request.pages, range(stored, row.start), self.pages.page_size)
            tokens += request.tokens(stored, row.start)
            found.stored, found.preemptions = row.start, request.preemptions
            source, length = found.copy or (
                (found.sources[0], found.tracker.start) if found.tracker.tokens else (NO_COPY, NO_COPY)
            )
            copies += [source, length, NO_COPY if found.resume is None else found.resume]
        self.copies.fill(copies + [NO_COPY] * (3 * (self.state.rows - len(rows))))
        if tokens:
            packed = self.device.upload(slots + tokens, torch.int32)
            self._tokens[packed[: len(slots)].long()] = packed[len(slots) :]

    def extend(self) -> None:
        slots, tokens = self.state.batch.slots, self._tokens
        spare = self.pages.count * self.pages.page_size
        tokens[torch.where(slots < 0, spare, slots).long()] = self.state.batch.tokens

    def decode(self) -> None:
        state, copies = self.state, self.copies.tensor.view(-1, 3)
        history = TokenHistory(self._tokens, state.batch.page_tables, self.pages.page_size)
        drafts = self.lookups.ops.ngram_drafts(
            history, self.lookup, state.newest, state.positions, state.max_lengths, copies, self.depth
        )
        state.drafts[:, : self.depth].copy_(drafts)
        if self.depth < state.width:
            state.drafts[:, self.depth :].fill_(-1)

    def finish(self, requests: Sequence[Request], computed: Sequence[int]) -> None:
        copies = self.copies.read(3 * len(requests))
        for row, (request, done) in enumerate(zip(requests, computed, strict=True)):
            source, length, resume = copies[3 * row : 3 * row + 3]
            found = self.lookups.states[request]
            found.stored, found.resume = done, None if resume == NO_COPY else resume
            found.copy = None if source == NO_COPY else (source, length)
            found.tracker.tokens = ()  # a copy on the device replaced it
