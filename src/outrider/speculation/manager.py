"""All the drafters of an engine: who drafts for which request, how much, and what becomes of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..request import Request, Row
from ..types import Draft, SamplingParams, SpecStats
from .adaptive import AdaptiveController, CatchUpBuffers
from .config import SpeculationPlan
from .drafter_pool import DrafterPool
from .interface import DraftContext, Proposer, Target
from .registry import members
from .sound import sound_guesses
from .verifier import Verifier

log = logging.getLogger(__name__)
SELDOM = 4  # of so many plain passes one is timed while requests rest


@dataclass(frozen=True)
class RowOutcome:
    """What a row of a step came to."""

    row: Row
    first: int  # where its first token stands among the tokens of the step
    tokens: list[int]  # that it chose; none inside a prompt

    @property
    def kept(self) -> int:
        """Drafted tokens that stayed."""
        return len(self.tokens) - 1 if self.row.draft is not None else 0

    @property
    def path(self) -> list[int]:
        """The places of those tokens in the draft."""
        return [] if self.row.draft is None else self.row.draft.path(self.tokens[:-1])

    @property
    def computed(self) -> int:
        return self.row.start + len(self.row.tokens) + self.kept

    def context(self, width: int = 0) -> DraftContext:
        return DraftContext(self.row.request, self.row.start, self.computed, self.tokens, width, self.first)

    @property
    def ends(self) -> bool:
        """Whether the request is over, as far as its tokens tell."""
        request = self.row.request
        first = len(request.output) + 1
        return any(request.ending(count, token) for count, token in enumerate(self.tokens, first))


@dataclass(frozen=True)
class Proposal:
    draft: Draft | None = None
    dropped: bool = False  # the method failed on this request, or does not pay


NOTHING = Proposal()


@dataclass(frozen=True)
class Assignment:
    """Fields of a Request: who drafts for it, and what that takes."""

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
        self.method_stats: dict[str, SpecStats] = {}  # by method, of requests that are gone
        self.roster = DrafterPool(plan, target, self.controller)
        self.methods = self.roster.methods
        self._nothing = target.device.upload([], torch.int32)
        self._crowd = self._passes = 0  # requests in the step; passes so far
        self._catch_up = CatchUpBuffers(target.page_size)

    # ---- requests come and go ----

    def assign(self, params: SamplingParams) -> Assignment:
        """Who drafts for a request, and how much at once."""
        name = self.roster.asked(params)
        if not name or params.speculate_width == 0:
            return Assignment()
        needs = self.roster.find(name).needs
        width = min(needs.width, params.speculate_width or needs.width)
        return Assignment(name, tuple(members(name)), width, needs.lookahead, name if needs.has_kv else "")

    def release(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.controller.forget(request)
            self._catch_up.forget(request)
            if request.method:
                self.method_stats.setdefault(request.method, SpecStats()).add(request.spec_stats)
        for name, proposer in self.methods.items():
            try:
                proposer.release(requests)
            except Exception:  # they are over, and the others have no part in it
                log.exception("`%s` failed to let go of `%s`", name, ", ".join(request.id for request in requests))

    # ---- what things cost ----

    def profile(self) -> None:
        """Learn what drafts cost before anyone waits for one; the pages are still nobody's."""
        for name, proposer in self.methods.items():
            needs = proposer.needs
            if not (self.plan.adaptive and (needs.costs_time or needs.has_kv)):
                continue
            try:
                for count, width in enumerate((needs.width, needs.width, 1, 0)):
                    seconds = self._profile(name, proposer, width)
                    if count:  # the first time is for warming up
                        self.controller.draft_latency(name).observe(width, seconds)
            except Exception:  # if it is a real fault, requests will meet it
                log.debug("`%s` failed in rehearsal", name, exc_info=True)

    def _profile(self, name: str, proposer: Proposer, width: int) -> float:
        """Seconds of a draft for a text of two tokens, of which one has run."""
        shape, size = self.target.model.config, self.target.page_size
        pages = list(range(-(-(2 + max(proposer.needs.lookahead, width)) // size)))
        request = Request("rehearsal", [0], SamplingParams(temperature=0), 0, method=name, pages=pages)
        context = DraftContext(request, 0, 1, [0], width, 0)
        taps = len(proposer.needs.aux_layers)
        hidden = torch.zeros(1, taps * shape.width, device=self.target.device.torch_device) if taps else None
        started = time.perf_counter()
        proposer.propose([context], self.target.device.upload([0], torch.int32), hidden).drafts()  # once they are there
        seconds = time.perf_counter() - started
        proposer.release([request])
        return seconds

    # ---- one step ----

    def aux_layers(self, rows: Sequence[Row]) -> tuple[int, ...]:
        """The states of the target that drafters of these rows read."""
        names = {row.request.method for row in rows if row.request.width and not self._skips_states(row.request)}
        return tuple(sorted({tap for name in names for tap in self.methods[name].needs.aux_layers}))

    def _skips_states(self, request: Request) -> bool:
        """Return whether the states of this step are not needed: the drafter resumes after more than a window."""
        return self.controller.suspended_steps(request) > self._catch_up.window

    def observe(self, rows: Sequence[Row], seconds: float) -> None:
        """What a target pass took. Passes over prompts are no measure, and plain ones while all rest hardly news."""
        self._passes += 1
        if self._passes % SELDOM and self.controller.all_suspended(row.request for row in rows):
            return
        learns = self.methods and self.plan.adaptive and not self.controller.multi_step
        if learns and all(len(row.tokens) == 1 for row in rows):
            self.controller.latency.observe(len(rows), sum(row.size for row in rows) - len(rows), seconds)

    def propose(self, outcomes: Sequence[RowOutcome], states: Mapping[int, Tensor]) -> list[Proposal]:
        """A guess for each row that goes on and has a drafter. states: tap -> [T, E]."""
        proposals = [NOTHING] * len(outcomes)
        self._crowd = len(outcomes)
        groups: dict[str, list[int]] = {}
        for index, outcome in enumerate(outcomes):
            if outcome.row.request.width:
                groups.setdefault(outcome.row.request.method, []).append(index)
        for name, indices in groups.items():
            found = self._propose_all(name, [outcomes[index] for index in indices], states)
            for index, proposal in zip(indices, found, strict=True):
                proposals[index] = proposal
        return proposals

    def _propose_all(self, name: str, outcomes: list[RowOutcome], states: Mapping[int, Tensor]) -> list[Proposal]:
        """For all requests of a method, of which some may rest."""
        taps = self.methods[name].needs.aux_layers
        if all(self._skips_states(outcome.row.request) for outcome in outcomes):
            for outcome in outcomes:
                self.controller.step_suspended(outcome.row.request, self._crowd)
            return [NOTHING] * len(outcomes)
        hidden = torch.cat([states[tap] for tap in taps], -1) if taps else None  # [T, taps * E]
        if name not in self.controller.suspendable:
            return self._propose(name, outcomes, hidden)
        awake = [outcome for outcome in outcomes if not self._suspended(outcome.context(), hidden)]
        found = iter(self._propose(name, awake, hidden) if awake else ())
        present = {outcome.row.request for outcome in awake}
        return [next(found) if outcome.row.request in present else NOTHING for outcome in outcomes]

    def _suspended(self, context: DraftContext, hidden: Tensor | None) -> bool:
        """Return whether the drafter is not called for this request, and keep the states that it may need later."""
        request, controller = context.request, self.controller
        if controller.suspended_steps(request):
            suspended = controller.step_suspended(request, self._crowd)
        elif not context.new_tokens and controller.unprofitable(request.method):
            suspended = True
        else:
            return False
        self._catch_up.add(context, hidden)
        return suspended

    def _propose(
        self, name: str, outcomes: list[RowOutcome], hidden: Tensor | None, told: bool = False
    ) -> list[Proposal]:
        """A drafter that fails on one request loses that one, not the others. `told`: it knows what was kept."""
        try:
            if not told:
                self._tell(name, outcomes)
                told = True
            return self._ask(name, outcomes, hidden)
        except Exception:
            if len(outcomes) > 1:
                return [proposal for outcome in outcomes for proposal in self._propose(name, [outcome], hidden, told)]
            log.exception("`%s` failed on request `%s`, which goes on without it", name, outcomes[0].row.request.id)
            return [Proposal(dropped=True)]

    def _tell(self, name: str, outcomes: list[RowOutcome]) -> None:
        judged = [outcome for outcome in outcomes if outcome.tokens]
        self.methods[name].accept([outcome.row.request for outcome in judged], [outcome.kept for outcome in judged])
        if self.plan.adaptive:
            for outcome in judged:
                if outcome.row.draft is not None:
                    self.controller.learn(outcome.row.request, outcome.row.draft, outcome.path)

    def _ask(self, name: str, outcomes: list[RowOutcome], hidden: Tensor | None) -> list[Proposal]:
        proposer = self.methods[name]
        widths = self._widths(proposer, outcomes)
        contexts = [outcome.context(width) for outcome, width in zip(outcomes, widths, strict=True)]
        if name not in self.controller.suspendable:
            return self._draft(name, contexts, hidden)
        for context in contexts:
            if context.request in self._catch_up or (context.new_tokens and not context.num_draft_tokens):
                self._catch_up.add(context, hidden)
        asked = [context for context in contexts if context.num_draft_tokens or not context.new_tokens]
        found = iter(self._draft(name, asked, hidden) if asked else ())
        return [next(found) if context.num_draft_tokens or not context.new_tokens else NOTHING for context in contexts]

    def _draft(self, name: str, contexts: list[DraftContext], hidden: Tensor | None) -> list[Proposal]:
        proposer, controller, batch_size = self.methods[name], self.controller, self._crowd
        timed = self.plan.adaptive and (proposer.needs.costs_time or proposer.needs.has_kv)
        if timed:
            floor, onward = controller.min_acceptance(name, batch_size), controller.min_continuation(name, batch_size)
            pace = controller.tokens_per_second(name, batch_size)
            contexts = [
                replace(context, min_acceptance=floor, tokens_per_second=pace, min_continuation=onward)
                for context in contexts
            ]
        behind = any(context.request in self._catch_up for context in contexts)
        contexts, hidden = self._catch_up.recall(contexts, hidden)
        last = self._last(contexts) if proposer.needs.has_kv else self._nothing
        started = time.perf_counter()
        draft_batch = proposer.propose(contexts, last, hidden)
        drafts = sound_guesses(draft_batch, contexts, self.target.model.config.vocabulary, self.verifier)
        if timed and all(context.new_tokens for context in contexts):  # to follow a prompt is no measure
            deep = (
                max(context.num_draft_tokens for context in contexts)
                if draft_batch.reached is None
                else draft_batch.reached
            )
            controller.observe_draft(name, deep, None if behind else time.perf_counter() - started)
        for context in contexts:
            self._catch_up.forget(context.request)
        trimmed = zip(contexts, self._trim(contexts, drafts), strict=True)
        leaves = timed and name not in controller.suspendable
        return [Proposal(draft, draft is None and leaves and self._lets_go(context)) for context, draft in trimmed]

    def _lets_go(self, context: DraftContext) -> bool:
        """A drafter that never pays, and whose following costs time, leaves the request to plain decoding."""
        gone = bool(context.new_tokens) and self.controller.should_drop(context.request, self._crowd)
        if gone:
            log.info(
                "`%s` does not pay for request `%s`, which goes on without", context.request.method, context.request.id
            )
        return gone

    def _last(self, contexts: list[DraftContext]) -> Tensor:
        """The first token of each text that has not run: [B]."""
        tokens = [context.tokens(context.computed, context.computed + 1)[0] for context in contexts]
        return self.target.device.upload(tokens, torch.int32)

    def _widths(self, proposer: Proposer, outcomes: list[RowOutcome]) -> list[int]:
        """What the text, the pages and the drafter have room for; of a drafter that costs time only what pays."""
        needs = proposer.needs
        most = self.plan.width(self._crowd) if self.plan.widths else needs.width
        room = [0 if not outcome.tokens or outcome.ends else self._room(outcome, most) for outcome in outcomes]
        going = [row for row, width in enumerate(room) if width > 0]
        if not (self.plan.adaptive and needs.costs_time and going):
            return room
        requests = [outcomes[row].row.request for row in going]
        rooms, others = [room[row] for row in going], self._crowd - len(going)
        planned = self.controller.plan(requests, rooms, others, needs.stops_early)
        for row, width in zip(going, planned, strict=True):
            room[row] = width
        return room

    def _room(self, outcome: RowOutcome, most: int) -> int:
        request, needs = outcome.row.request, self.methods[outcome.row.request.method].needs
        length = request.length + len(outcome.tokens)
        width, left = min(request.width, most), request.max_length - length - 1
        if needs.trees:  # what is too deep is left out later; what a drafter has no room to write, it sees itself
            return width if left > 0 else 0
        width = min(width, left)
        if request.lookahead:  # the newest token and all drafted ones but the last are written
            width = min(width, len(request.pages) * self.target.page_size - length + 1)
        return max(width if needs.context is None else min(width, needs.context - length), 0)

    def _trim(self, contexts: list[DraftContext], drafts: list[Draft | None]) -> list[Draft | None]:
        """Cut what is not worth verifying."""
        if not self.plan.adaptive or not any(context.num_draft_tokens for context in contexts):
            return drafts
        widths = self.controller.trim([context.request for context in contexts], drafts, self._crowd - len(contexts))
        return [draft.cut(width) if draft and width else None for draft, width in zip(drafts, widths, strict=True)]

    def can_multi_step(self, name: str) -> bool:
        """Whether requests of this method, or of none, can be decoded without the host."""
        return not name or self.methods[name].needs.multi_step
