"""Follow a multi-step run from the host: read finished steps while later ones run, and stop when texts have ended.

Drafts are accepted at different rates, so that texts of the same length end in different steps. What the host does with
a step while others run on the device costs no time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence

from torch import Tensor

from ..device import Device, Fence
from ..request import Request, Row
from ..types import DecodeStep, Draft
from .state import HostSteps

# Device time that is queued ahead of the host: the device should not wait while another thread has the interpreter.
# What is queued at the end of a text is lost: with 5 ms, answers of 11 to 33 tokens by a 1.5B took 2 to 6 % longer.
QUEUED_SECONDS = 0.002
MIN_QUEUED = 2  # steps that are queued, at least: one runs while the host reads the one before it
# Lookups of the host in a step without drafts, which tell what drafts would be worth. For 32 texts of a 1.5B, one for
# each text in each step gains nothing more (docs/log.md). A lookup takes 10 to 20 us, a step at least 1 ms.
LOOKUPS = 8
ENDED_ROWS = 16  # a run stops after this many of its texts have ended: the next run has fewer rows


def queued_steps(step_seconds: float) -> int:
    """Return how many steps to queue ahead of the host. step_seconds: of one step; 0: not known."""
    return max(math.ceil(QUEUED_SECONDS / step_seconds), MIN_QUEUED) if step_seconds else MIN_QUEUED


def as_draft(tokens: list[int]) -> Draft | None:
    """Return the draft of a row of DecodeState.drafts."""
    count = tokens.index(-1) if -1 in tokens else len(tokens)
    return Draft(tokens[:count]) if count else None


class RowProgress:
    """The tokens of one row, as far as the host has read them."""

    def __init__(self, row: Row) -> None:
        self.request = request = row.request
        limit = min(request.max_length - len(request.prompt), request.params.max_tokens)
        self.remaining = limit - len(request.output)  # tokens that the text may still get
        self.stops = request.end_tokens.union(request.params.stop_token_ids)
        self.tokens: list[int] = []  # those after the end of the text included
        self.steps: list[DecodeStep] = []  # empty if the run drafts nothing

    def read(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.remaining -= len(tokens)
        if self.remaining > 0 and not self.stops.isdisjoint(tokens):
            self.remaining = 0


class UnverifiedDrafts:
    """What a lookup would draft in a run without drafts. The tokens that follow tell how much of it is accepted.

    The host looks up while the device runs later steps.
    """

    def __init__(
        self,
        lookups: HostSteps,
        requests: Container[Request],
        read: Container[Request],
        width: int,
        learn: Callable[[Request, DecodeStep, int], None],
    ) -> None:
        """requests: those to look up for. read: those whose text the lookup has read but for its last tokens."""
        self.lookups, self.requests, self.texts, self.width, self.learn = lookups, requests, read, width, learn
        self._drafts: dict[Request, tuple[int, list[int]]] = {}  # tokens of the run before each draft, and the draft
        self._next = 0  # the row to begin with in the next step

    def read_step(self, rows: Sequence[RowProgress]) -> None:
        """Learn from the tokens of a step, and look up for some of the texts."""
        left, first, count = LOOKUPS, self._next, len(rows)
        for index in range(first, first + count):
            row = rows[index % count]
            if row.remaining <= 0 or row.request not in self.requests or not self._is_due(row):
                continue
            if left > 0:
                left -= 1 if row.request in self.texts else LOOKUPS  # to read a prompt takes longer
                (draft,) = self.lookups.draft_rows([row])
                self._drafts[row.request] = len(row.tokens), draft
                self._next = index + 1

    def _is_due(self, row: RowProgress) -> bool:
        """Return whether the text has no draft whose next token is still to come; learn from one that has ended."""
        begin, draft = self._drafts.get(row.request, (-1, []))
        if begin < 0:
            return True
        accepted = len(row.tokens) - begin - 1
        if accepted < len(draft) and draft[accepted] == row.tokens[-1]:
            return False
        del self._drafts[row.request]
        self.learn(row.request, DecodeStep(Draft(draft), row.tokens[begin:]), self.width)
        return True


class RunOutputs:
    """The outputs of all steps of a run on the host, as in RunBuffers.output."""

    def __init__(
        self,
        device: Device,
        rows: Sequence[Row],
        steps: int,
        output: Tensor,
        queued: int,
        learn: Callable[[Request, DecodeStep, int], None] | None = None,
        unverified: UnverifiedDrafts | None = None,
    ) -> None:
        """queued: steps that may run before the host has read them.

        learn: called with each step of a text, and the number of tokens that it was to draft.
        unverified: learns from steps without drafts.
        """
        self.device, self.queued, self.learn, self.unverified = device, queued, learn, unverified
        self.rows = [RowProgress(row) for row in rows]
        self.most = output.shape[1] // 2  # tokens that a row gets in one step: W + 1
        self.host = device.host_zeros((steps, *output.shape), output.dtype)
        self.fences: list[Fence] = []  # after each step that was started
        self.steps: list[list[list[int]]] = []  # those that were read

    def put(self, output: Tensor) -> None:
        """Copy the output of the step that was just started."""
        self.host[len(self.fences)].copy_(output, non_blocking=True)
        self.fences.append(self.device.fence())

    def needs_step(self) -> bool:
        """Return whether some text needs another step, even if all draft tokens of the queued ones are accepted.

        Waits for queued steps if there are too many, or if one of them may end the last text. No step follows if
        enough texts have ended for a run of fewer rows.
        """
        while True:
            if sum(row.remaining <= 0 for row in self.rows) >= ENDED_ROWS:
                return False
            running = len(self.fences) - len(self.steps)
            if running < self.queued and any(row.remaining > running * self.most for row in self.rows):
                return True
            if not running:
                return False
            self._read_step()

    def read(self) -> list[list[list[int]]]:
        """Wait for all steps, and return their outputs."""
        while len(self.steps) < len(self.fences):
            self._read_step()
        return self.steps

    def _read_step(self) -> None:
        index = len(self.steps)
        self.fences[index].wait()
        output: list[list[int]] = self.host[index].tolist()
        self.steps.append(output)
        for row, (count, *values) in zip(self.rows, output, strict=False):  # rows that pad come last
            tokens = values[:count]
            if self.most > 1:
                step = DecodeStep(as_draft(values[self.most : 2 * self.most - 1]), tokens)
                row.steps.append(step)
                # The first draft is older than the run, the last ones may be cut at the end of the text.
                drafted = 0 if step.draft is None else len(step.draft.tokens)
                width = self.most - 1 if index and row.remaining > self.most else drafted
                if self.learn is not None and row.remaining > 0 and width:
                    self.learn(row.request, step, width)
            row.read(tokens)
        if self.unverified is not None:
            self.unverified.read_step(self.rows)
