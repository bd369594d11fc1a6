"""Draft after a step with the host by the CUDA graphs of multi-step runs: the drafter's part of one decode step.

The accepted tokens of the step and the target's states become the DecodeState of a run, as if the run had computed
them. Rows that ran more tokens than fit, as those of prompts, are read first, without a draft. Then their last token is
read once more, which gives the same KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..cache.pages import slots_of
from ..request import Row
from ..speculation.interface import DraftBatch, DraftContext
from .planner import run_widths
from .state import HostSteps, MultiStepDrafter

if TYPE_CHECKING:
    from .loop import Key, MultiStepRunner, RunBuffers

HOST_TOKENS = 512  # tokens that the host indexes for a lookup in the time that the graphs take to find a draft


class CapturedDrafting:
    def __init__(self, runs: MultiStepRunner) -> None:
        self.runs, self.spec_manager = runs, runs.planner.spec_manager

    def propose(self, name: str, contexts: Sequence[DraftContext], hidden: Tensor | None) -> DraftBatch | None:
        """Draft as Proposer.propose does; None if the graphs for it do not exist."""
        drafting = [row for row, context in enumerate(contexts) if context.num_draft_tokens and context.new_tokens]
        found = self._find(name, [contexts[row] for row in drafting]) if drafting else None
        if found is None:
            return None
        key, buffers = found
        drafter = self.runs.planner.drafter(name)
        fitting = {row for row in drafting if self._fits(drafter, contexts[row], buffers.state.width)}
        reading = [row for row in range(len(contexts)) if row not in fitting]
        if reading:
            drafter.read([contexts[row] for row in reading], hidden)
        known = [contexts[row] for row in drafting if row not in fitting]
        if not drafter.ready([context.request for context in known], [context.computed for context in known]):
            return None
        return self._run(key, buffers, contexts, drafting, fitting, hidden)

    def _find(self, name: str, contexts: Sequence[DraftContext]) -> tuple[Key, RunBuffers] | None:
        """Return the buffers of the narrowest captured run that drafts enough tokens."""
        runs = self.runs
        needs, widths = self.spec_manager.drafter(name).needs, [context.num_draft_tokens for context in contexts]
        if not (runs.graphs.decoding and needs.multi_step) or runs.eager_drafter:
            return None
        new_tokens = sum(context.computed - context.start for context in contexts)
        if needs.on_host or (not needs.costs_time and new_tokens <= HOST_TOKENS):  # a lookup
            return None
        size = runs.pages.page_size
        if any(len(context.request.pages) * size < context.computed + needs.lookahead for context in contexts):
            return None  # the drafter would miss the KV of its own tokens
        rows = [as_row(context) for context in contexts]
        for width in run_widths(needs.width):
            # A draft that is made in one pass depends on its width. Of others the first tokens are a narrower one.
            if width >= max(widths) and (needs.stops_early or width == min(widths)):
                key = runs.key(name, rows, width)
                if runs.graphs.is_usable(("extend", *key)) and runs.graphs.is_usable(("decode", *key)):
                    return runs.buffers_for(name, rows, width)
        return None

    @staticmethod
    def _fits(drafter: MultiStepDrafter, context: DraftContext, width: int) -> bool:
        """Return whether the drafter knows the text before this step, and the accepted tokens fit into a run's row."""
        return context.computed - context.start <= width + 1 and drafter.ready([context.request], [context.start])

    def _run(
        self,
        key: Key,
        buffers: RunBuffers,
        contexts: Sequence[DraftContext],
        drafting: list[int],
        fitting: set[int],
        hidden: Tensor | None,
    ) -> DraftBatch:
        runs, drafter = self.runs, buffers.drafter
        assert drafter is not None and not isinstance(drafter, HostSteps)
        chosen = [contexts[row] for row in drafting]
        runs.fill(buffers, [as_row(context) for context in chosen])
        counts = [
            context.computed - context.start if row in fitting else 1
            for row, context in zip(drafting, chosen, strict=True)
        ]
        self._fill_batch(buffers, chosen, counts, hidden)
        runs.graphs.run(("extend", *key), drafter.extend)
        runs.graphs.run(("decode", *key), drafter.decode)
        listed: list[list[int]] = buffers.state.drafts.tolist()
        drafter.finish([context.request for context in chosen], [context.computed for context in chosen])
        tokens: list[list[int]] = [[] for _ in contexts]
        for row, draft in zip(drafting, listed, strict=False):
            tokens[row] = draft[: draft.index(-1)] if -1 in draft else draft
        confidence: list[list[float]] | None = None
        if buffers.state.estimates is not None:
            confidence = [[] for _ in contexts]
            for row, estimates in zip(drafting, buffers.state.estimates.tolist(), strict=False):
                confidence[row] = estimates[: len(tokens[row])]
        logits = None
        if drafter.logits is not None:
            stored = drafter.logits.view(buffers.state.rows, buffers.state.width + 1, -1)[: len(drafting), 1:]
            logits = stored.new_zeros(len(contexts), *stored.shape[1:])
            logits[runs.device.upload(drafting, torch.int64)] = stored
        lengths = [len(row) for row in tokens]
        return DraftBatch(tokens, lengths, logits=logits, confidence=confidence, reached=buffers.state.width)

    def _fill_batch(
        self, buffers: RunBuffers, contexts: list[DraftContext], counts: list[int], hidden: Tensor | None
    ) -> None:
        """Fill what the target's part of a decode step leaves: the last `counts` accepted tokens of each row."""
        state, size = buffers.state, self.runs.pages.page_size
        rows, most = state.rows, state.width + 1
        tokens, positions, sources = ([0] * (rows * most) for _ in range(3))
        slots = [-1] * (rows * most)
        firsts, ends = [0] * rows, list(range(0, rows * most, most))
        for index, (context, count) in enumerate(zip(contexts, counts, strict=True)):
            begin, first, stop = index * most, context.computed - count, context.computed
            tokens[begin : begin + count] = context.tokens(first, stop)
            positions[begin : begin + count] = range(first, stop)
            slots[begin : begin + count] = slots_of(context.request.pages, range(first, stop), size)
            source = context.first_row + first - context.start
            sources[begin : begin + count] = range(source, source + count)
            firsts[index], ends[index] = first, begin + count - 1
        packed = self.runs.device.upload(tokens + positions + slots + sources + firsts + ends, torch.int32)
        parts = torch.split(packed, [rows * most] * 4 + [rows] * 2)
        batch = state.batch
        targets = batch.tokens, batch.positions, batch.slots, None, state.ran_positions, state.last_accepted
        for target, part in zip(targets, parts, strict=True):
            if target is not None:
                target.copy_(part)
        if hidden is not None:
            torch.index_select(hidden, 0, parts[3], out=state.hidden)


def as_row(context: DraftContext) -> Row:
    """Return the row of the next step: the newest token, which has not run."""
    return Row(context.request, context.computed, context.tokens(context.computed, context.computed + 1), sample=True)
