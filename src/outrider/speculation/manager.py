"""Call the drafters of an engine after each step, validate their drafts and trim them to the tokens that pay.

`propose` groups rows by method, `_draft_isolated` contains failures, `_draft` calls the drafter.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from ..request import Request, Row
from ..types import Draft, SamplingParams, SpecStats
from .adaptive import AdaptiveController
from .adaptive.latency_model import least_seconds
from .combined import CombinedDrafter
from .config import SpeculationPlan
from .drafter_pool import DrafterPool
from .drafters.catch_up import CatchUpBuffers
from .interface import DraftBatch, DraftContext, Proposer, Target
from .registry import members
from .verifier import Verifier

log = logging.getLogger(__name__)
# Share of the time that lookups take at last while they find nothing that pays. Pauses grow up to it by a step a call.
# On SmolLM2-135M a lookup takes 4.5 % of a step. Replayed texts of ten prompt sets are 1.2 % faster than with a lookup
# in each step, and the slowest set reaches 0.99 of plain decoding instead of 0.96 (docs/log.md, "Lookups that pause").
LOOKUP_SHARE = 0.005
READ_TOKENS = 16  # of the prompt whose reading by a drafter is measured at start-up; longer ones are extrapolated


class CapturedDrafting(Protocol):
    """Calls a drafter by CUDA graphs (multi_step/drafting.py)."""

    def propose(self, name: str, contexts: Sequence[DraftContext], hidden: Tensor | None) -> DraftBatch | None:
        """Draft as Proposer.propose does; None if the graphs for it do not exist."""
        ...


Thresholds = tuple[float, float, float]  # `min_acceptance`, `min_continuation`, `tokens_per_second` of a DraftContext
NO_THRESHOLDS: Thresholds = (0.0, 0.0, 0.0)


@dataclass(frozen=True)
class RowOutcome:
    """A row after verification."""

    row: Row
    first: int  # index of its first token in the batch
    tokens: list[int]  # the request's new tokens; none inside a prompt

    @property
    def num_accepted(self) -> int:
        """Return how many draft tokens were accepted."""
        return len(self.tokens) - 1 if self.row.draft is not None else 0

    @property
    def path(self) -> list[int]:
        """Return the indices of the accepted tokens in the draft."""
        return [] if self.row.draft is None else self.row.draft.path(self.tokens[:-1])

    @property
    def computed(self) -> int:
        """Return how many tokens of the text have final KV."""
        return self.row.start + len(self.row.tokens) + self.num_accepted

    def context(self, width: int = 0, thresholds: Thresholds = NO_THRESHOLDS) -> DraftContext:
        """Return the request as its drafter sees it; width: tokens to draft."""
        row, (acceptance, continuation, speed) = self.row, thresholds
        return DraftContext(
            row.request, row.start, self.computed, self.tokens, width, self.first, acceptance, speed, continuation
        )

    @property
    def ends(self) -> bool:
        """Return whether one of its tokens ends the request."""
        request = self.row.request
        if request.continues_after(self.tokens):
            return False
        first = len(request.output) + 1
        return any(request.ending(count, token) for count, token in enumerate(self.tokens, first))


@dataclass(frozen=True)
class AuxStates:
    """The aux hidden states of a step."""

    layers: tuple[int, ...]
    states: Sequence[Tensor]  # [T, E] of each layer, or one tensor [T, layers * E]

    def joined(self, layers: tuple[int, ...]) -> Tensor:
        """Return the states of these layers: [T, layers * E]."""
        if len(self.states) == 1 and layers == self.layers:
            return self.states[0]
        parts = self.states if len(self.states) == len(self.layers) else self.states[0].chunk(len(self.layers), -1)
        return torch.cat([parts[self.layers.index(layer)] for layer in layers], -1)


@dataclass(frozen=True)
class Proposal:
    """The draft that a request verifies next."""

    draft: Draft | None = None
    dropped: bool = False  # the request continues without a drafter: it failed, or does not pay


NO_PROPOSAL, DROPPED = Proposal(), Proposal(dropped=True)


@dataclass
class Pause:
    """Steps in which no lookup is made for a request."""

    steps: int = 0
    remaining: int = 0
    cut: bool = False  # the lookup found a draft, which did not pay


@dataclass(frozen=True)
class Assignment:
    """The method of a request and its needs, as fields of Request."""

    method: str = ""
    drafters: tuple[str, ...] = ()
    width: int = 0
    lookahead: int = 0
    kv_method: str = ""


class SpeculationManager:
    def __init__(self, plan: SpeculationPlan, target: Target) -> None:
        self.plan, self.target = plan, target
        self.verifier = Verifier(target.ops, target.device, plan.verification, plan.rates, plan.replacement)
        self.controller = AdaptiveController()
        self.method_stats: dict[str, SpecStats] = {}  # by method, of requests that have finished
        self.adapter_stats: dict[str, dict[str, SpecStats]] = {}  # of those with an adapter, by its name and method
        self.pool = DrafterPool(plan, target, self.controller)
        self.methods = self.pool.methods
        self.max_width = 0  # limit on drafted tokens, of recurrent layers that keep their inputs; 0: none
        self._no_tokens = target.device.upload([], torch.int32)
        self._last_token = target.device.buffer(1, torch.int32)  # refilled by each call for one request
        self._batch_size = 0  # requests in the step
        self._runs_follow = False  # all requests of the step can take part in multi-step runs
        self._catch_up = CatchUpBuffers(target.page_size)
        self._pauses: dict[Request, Pause] = {}  # of requests whose last lookup found nothing that pays
        self.captured_drafting: CapturedDrafting | None = None  # see `use`
        self._warned: set[str] = set()  # methods whose logits were not finite

    # ---- requests ----

    def assign(self, params: SamplingParams) -> Assignment:
        """Choose the drafter of a request, and how many tokens it drafts at once."""
        name = self.pool.choose(params)
        if not name or params.speculate_width == 0:
            return Assignment()
        needs = self.pool.get(name).needs
        width = min(needs.width, params.speculate_width or needs.width, self.max_width or needs.width)
        return Assignment(name, tuple(members(name)), width, needs.lookahead, name if needs.has_kv else "")

    def release(self, requests: Sequence[Request]) -> None:
        """Free the state of finished requests, and add their stats to those of the methods."""
        for request in requests:
            self.controller.forget(request)
            self._catch_up.forget(request)
            self._pauses.pop(request, None)
            if request.method:
                self.method_stats.setdefault(request.method, SpecStats()).add(request.spec_stats)
                if request.adapter is not None:
                    by_method = self.adapter_stats.setdefault(request.adapter.name, {})
                    by_method.setdefault(request.method, SpecStats()).add(request.spec_stats)
        for name, proposer in self.methods.items():
            try:
                proposer.release(requests)
            except Exception:  # these requests have finished, and others are not affected
                log.exception("`%s` failed to release `%s`", name, ", ".join(request.id for request in requests))

    def adapts(self, request: Request) -> bool:
        """Return whether widths and pauses of a request follow measured times and acceptance.

        If drafts shape the text, a request with a seed keeps its width, so that the seed reproduces its text.
        """
        params = request.params
        if not self.plan.adaptive or params.always_draft:
            return False
        return not (self.plan.shapes_text and params.seed is not None and params.temperature > 0)

    def _is_blind(self, proposer: Proposer) -> bool:
        """Return whether tokens of a draft may not decide its width: they were sampled, and rejection reads that."""
        return self.plan.shapes_text and self.plan.sampled and proposer.needs.has_probs

    def count_nonfinite(self, requests: Sequence[Request], counts: Sequence[int]) -> None:
        """Count drafted tokens that verification ignored, and warn once for each method."""
        for request, count in zip(requests, counts, strict=True):
            request.spec_stats.nonfinite += count
            if count and request.method not in self._warned:
                self._warned.add(request.method)
                log.warning(
                    "`%s` drafts from logits that are not finite (NaN or infinite). Such tokens are rejected, so texts "
                    "are right but slower: its weights may be damaged, or overflow their type",
                    request.method,
                )

    def drafter(self, name: str) -> Proposer:
        """Return the drafter of a method, or of `METHOD/MEMBER`, a member of combined drafters."""
        method, _, member = name.partition("/")
        proposer = self.methods[method]
        return dict(proposer.members)[member] if isinstance(proposer, CombinedDrafter) and member else proposer

    @staticmethod
    def is_member(name: str) -> bool:
        return "/" in name

    def use(self, captured: CapturedDrafting) -> None:
        """Draft by CUDA graphs where they exist."""
        self.captured_drafting = captured
        for name, proposer in self.methods.items():
            if isinstance(proposer, CombinedDrafter):
                proposer.captured = {
                    member: partial(captured.propose, f"{name}/{member}") for member, _ in proposer.members
                }

    def can_multi_step(self, name: str) -> bool:
        """Return whether requests of this method, or without one, can be decoded without the host.

        Methods that requests name beside the engine's have no graphs.
        """
        return not name or (name == self.plan.method and self.methods[name].needs.multi_step)

    # ---- latency ----

    def profile(self, positions: int) -> None:
        """Measure the latency of drafting and of reading prompts before the first request; no page is in use yet.

        positions: how many fit into the pages.
        """
        for name, proposer in self.methods.items():
            needs = proposer.needs
            if not (self.plan.adaptive and (needs.costs_time or needs.has_kv)):
                continue
            try:
                measure = partial(self._profile, name, proposer)
                measure(needs.width)  # warm-up; the next call may be recorded
                drafted = least_seconds(measure, (needs.width, 1, 0))
                for width, seconds in drafted.items():
                    self.controller.observe_draft(name, width, seconds)
                fits = READ_TOKENS + needs.lookahead + 2 <= min(positions, needs.context or positions)
                if name in self.controller.suspendable and fits:
                    read = least_seconds(partial(measure, 1), (READ_TOKENS,))
                    for tokens, seconds in {1: drafted[1], **read}.items():
                        self.controller.observe_reading(name, tokens, seconds)
            except Exception:  # a permanent fault is reported with the first request
                log.debug("`%s` failed in its profile run", name, exc_info=True)

    def _profile(self, name: str, proposer: Proposer, width: int, tokens: int = 1) -> float:
        """Return the seconds of one draft after a prompt of some tokens, which has run, and one more token."""
        config, size = self.target.model.config, self.target.page_size
        pages = list(range(-(-(tokens + 1 + max(proposer.needs.lookahead, width)) // size)))
        # Different tokens: rows of the same token would choose the same experts, and cost less than others.
        prompt = [index % config.vocabulary for index in range(tokens)]
        request = Request("profile", prompt, SamplingParams(temperature=0), 0, method=name, pages=pages)
        context = DraftContext(request, 0, tokens, [0], width, 0)
        features = len(proposer.needs.aux_layers) * config.width
        hidden = torch.zeros(tokens, features, device=self.target.device.torch_device) if features else None
        started = time.perf_counter()
        proposer.propose([context], self.target.device.upload([0], torch.int32), hidden).drafts()  # reads them back
        seconds = time.perf_counter() - started
        proposer.release([request])
        return seconds

    def observe(self, rows: Sequence[Row], seconds: float) -> None:
        """Learn the latency of a target pass, except of prompts."""
        if not self.methods or not self.plan.adaptive or self.controller.multi_step:
            return
        drafted = context = 0
        for row in rows:
            if len(row.tokens) != 1:
                return
            drafted, context = drafted + row.size - 1, context + row.start
        self.controller.latency.observe(len(rows), drafted, seconds, context / len(rows))

    # ---- one step ----

    def begin(self, rows: Sequence[Row]) -> None:
        """Decide whether the drafters of new requests read their prompts, before the target runs them.

        If they do not, the target need not keep the hidden states of the prompts.
        """
        for row in rows:
            request = row.request
            is_new = request.width > 0 and not request.output
            if is_new and request.method in self.controller.suspendable and self.adapts(request):
                self.controller.begin(request, request.length - row.start)

    def aux_layers(self, rows: Sequence[Row]) -> tuple[int, ...]:
        """Return the layers of the target whose states the drafters of these rows read."""
        layers: set[int] = set()
        for row in rows:
            if row.request.width and not self._skips_states(row.request):
                layers.update(self.methods[row.request.method].needs.aux_layers)
        return tuple(sorted(layers))

    def _skips_states(self, request: Request) -> bool:
        """Return whether the drafter will not read the states of this step: it resumes after more than a window."""
        return self.controller.suspended_steps(request) > self._catch_up.window

    def propose(self, outcomes: Sequence[RowOutcome], states: AuxStates) -> list[Proposal]:
        """Draft for each row that continues and has a drafter."""
        proposals = [NO_PROPOSAL] * len(outcomes)
        self._batch_size = len(outcomes)
        self._runs_follow = all(outcome.row.request.multi_step for outcome in outcomes)
        groups: dict[str, list[int]] = {}
        for index, outcome in enumerate(outcomes):
            request = outcome.row.request
            if request.width and not self._skips(outcome):
                groups.setdefault(request.method, []).append(index)
        for name, indices in groups.items():
            layers = self.methods[name].needs.aux_layers
            hidden = states.joined(layers) if layers else None
            if name in self.controller.suspendable:
                indices = [index for index in indices if not self._is_suspended(outcomes[index], hidden)]
            if indices:
                drafted = self._draft_isolated(name, [outcomes[index] for index in indices], hidden)
                for index, proposal in zip(indices, drafted, strict=True):
                    proposals[index] = proposal
        return proposals

    def _skips(self, outcome: RowOutcome) -> bool:
        """Return whether nothing is done for this row in this step; count the step then, unless it gave no token."""
        request, steps = outcome.row.request, min(len(outcome.tokens), 1)
        pause = self._pauses.get(request)
        if pause is not None and pause.remaining:
            pause.remaining -= steps
            if pause.cut and request.spec_stats.suspension is not None:
                request.spec_stats.suspend(request.spec_stats.suspension, steps)
            return True
        if self._skips_states(request):
            self.controller.skip(request, steps)
            return True
        return False

    def _is_suspended(self, outcome: RowOutcome, hidden: Tensor | None) -> bool:
        """Return whether the drafter is not called for this row; then store the states that it may need later."""
        request, controller = outcome.row.request, self.controller
        remaining, steps = controller.suspended_steps(request), min(len(outcome.tokens), 1)
        if not remaining:
            return False
        controller.skip(request, steps, drafts=remaining <= steps)  # a chunk of a prompt gives no token
        self._catch_up.add(outcome.context(), hidden)
        return controller.suspended_steps(request) > 0

    def _draft_isolated(
        self, name: str, outcomes: list[RowOutcome], hidden: Tensor | None, accepted: bool = False
    ) -> list[Proposal]:
        """Draft for all rows of a method. If that fails, draft row by row: only a row that fails loses its drafter.

        accepted: `accept` has been called for these rows.
        """
        try:
            if not accepted:
                self._accept(name, outcomes)
                accepted = True
            return self._draft(name, outcomes, hidden)
        except Exception:
            if len(outcomes) > 1:
                by_row = (self._draft_isolated(name, [outcome], hidden, accepted) for outcome in outcomes)
                return [proposal for proposals in by_row for proposal in proposals]
            log.exception("`%s` failed on request `%s`, which continues without it", name, outcomes[0].row.request.id)
            return [DROPPED]

    def _accept(self, name: str, outcomes: list[RowOutcome]) -> None:
        """Report the number of accepted tokens to the drafter, and learn the acceptance rates."""
        requests: list[Request] = []
        accepted: list[int] = []
        for outcome in outcomes:
            if outcome.tokens:
                requests.append(outcome.row.request)
                accepted.append(outcome.num_accepted)
        self.methods[name].accept(requests, accepted)
        if self.plan.adaptive:
            blind = self._is_blind(self.methods[name])
            for outcome in outcomes:
                if outcome.tokens and (draft := outcome.row.draft) is not None:
                    draft = replace(draft, confidence=None) if blind else draft
                    self.controller.learn(outcome.row.request, draft, outcome.path)

    def _draft(self, name: str, outcomes: list[RowOutcome], hidden: Tensor | None) -> list[Proposal]:
        """Call the drafter once for all rows, validate its drafts, and trim them to the tokens that pay."""
        proposer, suspendable = self.methods[name], name in self.controller.suspendable
        timed, blind = self._is_timed(proposer), self._is_blind(proposer)
        called_at = time.perf_counter()
        contexts = self._contexts(name, outcomes, timed, blind)
        called = self._called(contexts, hidden) if suspendable else contexts
        if not called:
            return [NO_PROPOSAL] * len(outcomes)
        resumed = [context.request for context in called if context.request in self._catch_up] if suspendable else []
        drafting, hidden = self._catch_up.recall(called, hidden)
        last = self._last_tokens(drafting) if proposer.needs.has_kv else self._no_tokens
        started = time.perf_counter()
        batch = self.captured_drafting.propose(name, drafting, hidden) if self.captured_drafting else None
        if batch is None:
            batch = proposer.propose(drafting, last, hidden)
        drafts = validated(batch, drafting, self.target.model.config.vocabulary, self.verifier)
        if timed and not batch.recorded:
            self._observe_draft(name, drafting, batch, resumed, time.perf_counter() - started)
        for request in resumed:
            self._catch_up.forget(request)
        trimmed = drafts if blind else self._trim(drafting, drafts)
        if not timed and self.plan.adaptive and self.target.can_suspend:
            self._pause(drafting, drafts, trimmed, time.perf_counter() - called_at)
        proposals = [NO_PROPOSAL] * len(drafting)
        for index, draft in enumerate(trimmed):
            if draft is not None:
                proposals[index] = Proposal(draft)
            elif timed and not suspendable and self._should_drop(drafting[index]):
                proposals[index] = DROPPED
        if len(drafting) == len(contexts):
            return proposals
        by_request = {context.request: proposal for context, proposal in zip(drafting, proposals, strict=True)}
        return [by_request.get(context.request, NO_PROPOSAL) for context in contexts]

    def _called(self, contexts: list[DraftContext], hidden: Tensor | None) -> list[DraftContext]:
        """Return the contexts that a drafter is called for; keep what it may need later of those without a draft."""
        called = []
        for context in contexts:
            if context.num_draft_tokens or not context.new_tokens:
                called.append(context)
                if context.request not in self._catch_up:
                    continue
            self._catch_up.add(context, hidden)
        return called

    def _observe_draft(
        self, name: str, contexts: list[DraftContext], batch: DraftBatch, resumed: list[Request], seconds: float
    ) -> None:
        """Learn the latency of a call: of a draft, of catching up, or of reading prompts; if it reads some, of none."""
        reading = sum(not context.new_tokens or not context.request.output for context in contexts)
        depth = max(context.num_draft_tokens for context in contexts) if batch.reached is None else batch.reached
        if resumed:
            self.controller.observe_catch_up(resumed, depth, seconds, self._batch_size)
        elif not reading:
            self.controller.observe_draft(name, depth, seconds)
        elif reading == len(contexts):
            self.controller.observe_reading(name, sum(one.computed - one.start for one in contexts), seconds)

    def _pause(
        self, contexts: list[DraftContext], drafts: list[Draft | None], trimmed: list[Draft | None], seconds: float
    ) -> None:
        """Pause lookups for requests without a draft that pays. A call took `seconds`."""
        latency, batch_size = self.controller.latency, self._batch_size
        if not latency.covers(batch_size):
            return
        most = int(seconds / (LOOKUP_SHARE * latency.slowdown * latency.seconds(batch_size, 0)))
        for context, found, draft in zip(contexts, drafts, trimmed, strict=True):
            request = context.request
            if draft is not None or not self.adapts(request):
                self._pauses.pop(request, None)
                continue
            pause = self._pauses.setdefault(request, Pause())
            pause.cut = found is not None
            pause.steps = pause.remaining = min(pause.steps + 1, most, request.width)

    def _is_timed(self, proposer: Proposer) -> bool:
        """Return whether the seconds of drafting are measured."""
        return self.plan.adaptive and (proposer.needs.costs_time or proposer.needs.has_kv)

    def _contexts(self, name: str, outcomes: list[RowOutcome], timed: bool, blind: bool) -> list[DraftContext]:
        """Return the context of each row, with the number of tokens to draft and the thresholds at which they pay."""
        widths, contexts = self._widths(name, outcomes, blind), []
        thresholds = self.controller.thresholds(name, self._batch_size) if timed and not blind else NO_THRESHOLDS
        for outcome, width in zip(outcomes, widths, strict=True):
            adapts = thresholds is not NO_THRESHOLDS and self.adapts(outcome.row.request)
            contexts.append(outcome.context(width, thresholds if adapts else NO_THRESHOLDS))
        return contexts

    def _should_drop(self, context: DraftContext) -> bool:
        """Return whether the request continues without its drafter, which does not pay and costs time to keep up."""
        request = context.request
        dropped = self.adapts(request) and bool(context.new_tokens)
        dropped = dropped and self.controller.should_drop(request, self._batch_size)
        if dropped:
            reason = request.spec_stats.suspension
            log.info(
                "`%s` does not pay for request `%s`, which continues without it: %s", request.method, request.id, reason
            )
        return dropped

    def _last_tokens(self, contexts: list[DraftContext]) -> Tensor:
        """Return the first token of each text that has not run: [B]."""
        tokens = []
        for context in contexts:
            new = context.new_tokens  # the last of them has not run
            tokens.append(new[-1] if new else context.tokens(context.computed, context.computed + 1)[0])
        if len(tokens) > 1:
            return self.target.device.upload(tokens, torch.int32)
        self._last_token.fill(tokens)
        return self._last_token.tensor

    def _widths(self, name: str, outcomes: list[RowOutcome], blind: bool) -> list[int]:
        """Return how many tokens to draft for each row: as many as fit, or as pay if drafting costs time."""
        needs = self.methods[name].needs
        most = self.plan.width(self._batch_size) if self.plan.widths else needs.width
        widths = []
        for outcome in outcomes:
            widths.append(0 if not outcome.tokens or outcome.ends else self._max_width(outcome, most))
        if not (needs.costs_time and self.plan.adaptive):
            suspended = self._runs_follow and name in self.controller.suspended_runs
            return [0] * len(widths) if suspended else widths  # a run would not verify what a lookup finds now
        drafting = [row for row, width in enumerate(widths) if width > 0 and self.adapts(outcomes[row].row.request)]
        if not drafting:
            return widths
        requests, limits = [outcomes[row].row.request for row in drafting], [widths[row] for row in drafting]
        planned = self.controller.plan(requests, limits, self._batch_size - len(drafting))
        for row, width in zip(drafting, planned, strict=True):
            if not (width and needs.stops_early) or blind:  # else it stops where drafts do not pay
                widths[row] = width
        return widths

    def _max_width(self, outcome: RowOutcome, most: int) -> int:
        """Return how many tokens fit into the text, the pages and the drafter's context."""
        request, needs = outcome.row.request, self.methods[outcome.row.request.method].needs
        length = request.length + len(outcome.tokens)
        remaining = request.max_length - length - 1
        if needs.trees:  # tokens that are too deep are cut later; the drafter checks its own slots
            fits = remaining > 0 and length < (self.plan.max_context or length + 1)
            return min(request.width, most) if fits else 0
        width = min(request.width, most, remaining)
        if request.lookahead:  # the newest token and all drafted ones but the last are written
            width = min(width, len(request.pages) * self.target.page_size - length + 1)
        for limit in (needs.context, self.plan.max_context):
            if limit is not None:
                width = min(width, limit - length)
        return max(width, 0)

    def _trim(self, contexts: list[DraftContext], drafts: list[Draft | None]) -> list[Draft | None]:
        """Cut tokens that are not worth verifying."""
        if not self.plan.adaptive:
            return drafts
        rows = [row for row, context in enumerate(contexts) if self.adapts(context.request)]
        if not any(contexts[row].num_draft_tokens for row in rows):
            return drafts
        requests, own = [contexts[row].request for row in rows], [drafts[row] for row in rows]
        widths = self.controller.trim(requests, own, self._batch_size - len(rows))
        trimmed = list(drafts)
        for row, draft, width in zip(rows, own, widths, strict=True):
            trimmed[row] = draft.cut(width) if draft and width else None
        return trimmed


# ---- validation: a wrong draft must not reach the target's pass ----


def validated(
    batch: DraftBatch, contexts: Sequence[DraftContext], vocabulary: int, verifier: Verifier
) -> list[Draft | None]:
    """Return the draft for each context, cut to its width. Raises ValueError if one cannot be verified."""
    drafts: list[Draft | None] = []
    reads = verifier.reads_drafts
    for context, full in zip(contexts, batch.drafts(), strict=True):
        draft = full.cut(context.num_draft_tokens)
        if not reads and draft.logits is not None:
            draft = replace(draft, logits=None)  # large, and not read
        check_draft(draft, vocabulary)
        if draft.parents is not None and draft.parents == list(range(-1, len(draft.tokens) - 1)):
            draft = replace(draft, parents=None)  # a tree of one branch: chains are cheaper to run
        if draft.parents is not None and verifier.mode == "block":
            raise ValueError(f"a tree was drafted, but `verify=block` verifies only chains: {draft.parents}")
        drafts.append(draft if draft.tokens else None)
    return drafts


def check_draft(draft: Draft, vocabulary: int) -> None:
    """Refuse token ids, parents or shapes with which the target's pass would read out of bounds."""
    tokens, parents = draft.tokens, draft.parents
    types = {*map(type, tokens), *map(type, parents or ())} - {int}
    if types and not all(hasattr(kind, "__index__") for kind in types):
        raise ValueError(f"tokens and parents of a draft must be whole numbers: {tokens}, {parents}")
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
        raise ValueError(f"the last token of the vocabulary is {vocabulary - 1}, but these were drafted: {tokens}")
    if parents is not None and (
        len(parents) != len(tokens) or any(not -1 <= parent < index for index, parent in enumerate(parents))
    ):
        raise ValueError(f"a drafted token has a parent that is not listed before it: {parents}")
    confidence, origins = draft.confidence, draft.origins
    if (confidence is not None and len(confidence) != len(tokens)) or (
        origins is not None and len(origins) != len(tokens)
    ):
        raise ValueError(f"{len(tokens)} tokens were drafted, but with another number of confidences or origins")
    if draft.logits is not None and tuple(draft.logits.shape) != (len(tokens), vocabulary):
        raise ValueError(f"{len(tokens)} tokens were sampled from logits of shape {list(draft.logits.shape)}")
