"""Logits processors, banned words, grammar masks and log-probabilities of multi-step runs.

Steps with these run the target by the graphs of steps with the host. Their other kernels are launched one by one, ahead
of the device: runs of all shapes with graphs of their own would double the number of graphs. All is computed on the
device but the masks, which the host fills while the target runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..device import Device, Fence
from ..kernels import Batch, DecodeProcessors, Kernels
from ..kernels.structures import (
    COUNTED,
    MARK_ALLOWED,
    MARK_BANNED,
    MARK_BIAS,
    MARK_END,
    MARK_PROMPT,
    ONLY_ALLOWED,
    PROCESSED,
)
from ..request import Request, Row, RowResult
from ..sampler import NO_DRAFT, DraftedContext, leaves_any, needs_processors, token_logprobs, top_count
from ..types import SamplingParams, TokenLogprobs
from .progress import RunOutputs, as_draft
from .state import DecodeState

NO_TOKEN = -1


class RunProcessing:
    """Creates the StepProcessing of runs. The marks of texts stay on the device from run to run."""

    def __init__(self, ops: Kernels, device: Device, vocabulary: int) -> None:
        self.ops, self.device, self.vocabulary = ops, device, vocabulary
        self._marks = device.zeros((0, vocabulary), torch.int32)
        self._bias = device.zeros((0, vocabulary), torch.float64)
        self._counted: list[tuple[Request, int] | None] = []  # by row: the text of its marks, and its output tokens

    def begin(self, rows: Sequence[Row], state: DecodeState, steps: int) -> StepProcessing | None:
        """Prepare a run of at most `steps` steps; None: no row needs more than sampling."""
        requests = [row.request for row in rows]
        processed = [needs_processors(request) for request in requests]
        wanted = [index for index, request in enumerate(requests) if request.params.logprobs is not None]
        structured = [index for index, request in enumerate(requests) if request.grammar is not None]
        if not wanted and not structured and not any(processed):
            return None
        processors = self._processors(requests, state.rows) if any(processed) else None
        words = None
        if any(len(word) > 1 for request in requests for word in request.bad_words):
            words = BannedWords(self.device, rows, state.rows)
        logprobs = None
        if wanted:
            logprobs = RunLogprobs(self.ops, self.device, requests, wanted, state, steps, self.vocabulary)
        masks = (
            GrammarMasks(self.ops, self.device, requests, structured, state, self.vocabulary) if structured else None
        )
        return StepProcessing(self.ops, processors, words, masks, logprobs)

    def finish(self, requests: Sequence[Request], added: Sequence[int]) -> None:
        """Note the tokens that the run added to each text: they are counted."""
        self._counted = [(request, len(request.output) + count) for request, count in zip(requests, added, strict=True)]

    def warm_up(self, widths: Sequence[int]) -> None:
        """Compile the kernels for runs that draft these numbers of tokens."""
        request = Request("warm-up", [0], SamplingParams(presence_penalty=1.0, logit_bias={0: 1.0}), 0)
        processors = self._processors([request], 1)
        for width in widths:
            logits = self.device.zeros((width + 1, self.vocabulary), torch.float32)
            tokens = self.device.zeros((1, width + 1), torch.int32)
            self.ops.process_decode_logits(logits, processors, tokens[:, :width].contiguous(), tokens[:, 0])
            self.ops.count_tokens(processors, tokens)

    def _processors(self, requests: Sequence[Request], count: int) -> DecodeProcessors:
        """Fill the marks of the rows whose text is another one than in the last run."""
        upload, counted, self._counted = self.device.upload, self._counted, []  # none if this fails
        if len(self._marks) < count:
            self._marks, counted = self.device.zeros((count, self.vocabulary), torch.int32), []
        if len(self._bias) < count and any(request.params.logit_bias for request in requests):
            self._bias, counted = self.device.zeros((count, self.vocabulary), torch.float64), []
        kinds, penalties, lengths = [0] * count, [[1.0, 0.0, 0.0]] * count, [0] * count
        for row, request in enumerate(requests):
            params = request.params
            if not needs_processors(request):
                continue
            kinds[row] = PROCESSED | (COUNTED if has_penalties(request) else 0)
            kinds[row] |= ONLY_ALLOWED if params.allowed_token_ids is not None else 0
            penalties[row] = [params.repetition_penalty, params.presence_penalty, params.frequency_penalty]
            lengths[row] = len(request.prompt) + params.min_tokens
            if row < len(counted) and counted[row] == (request, len(request.output)):
                continue
            self._marks[row].copy_(upload(marks_of(request, self.vocabulary), torch.int32))
            if params.logit_bias:
                bias: np.ndarray[Any, Any] = np.zeros(self.vocabulary)
                bias[list(params.logit_bias)] = list(params.logit_bias.values())
                self._bias[row].copy_(upload(bias, torch.float64))
        return DecodeProcessors(
            self._marks[:count],
            self._bias[:count],
            upload(np.array(penalties), torch.float64),
            upload(lengths, torch.int32),
            upload(kinds, torch.int32),
        )


def has_penalties(request: Request) -> bool:
    params = request.params
    return bool(params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty)


def marks_of(request: Request, vocabulary: int) -> np.ndarray[Any, Any]:
    """Return the marks of all tokens for a text: [V] int32."""
    params = request.params
    marks: np.ndarray[Any, Any] = np.zeros(vocabulary, np.int32)
    if has_penalties(request) and request.output:
        marks += np.bincount(request.output, minlength=vocabulary).astype(np.int32)
    if params.repetition_penalty != 1:
        marks[request.prompt] |= MARK_PROMPT
    marks[list(params.logit_bias)] |= MARK_BIAS
    marks[[*params.banned_token_ids, *(word[0] for word in request.bad_words if len(word) == 1)]] |= MARK_BANNED
    if params.min_tokens:
        marks[[*request.end_tokens, *params.stop_token_ids]] |= MARK_END
    marks[list(params.allowed_token_ids or ())] |= MARK_ALLOWED
    return marks


class StepProcessing:
    """The steps of a run: call `drafted` with drafts, `before` with the logits after them, `after` with the tokens."""

    def __init__(
        self,
        ops: Kernels,
        processors: DecodeProcessors | None,
        words: BannedWords | None,
        masks: GrammarMasks | None,
        logprobs: RunLogprobs | None,
    ) -> None:
        self.ops, self.processors, self.words, self.masks, self.logprobs = ops, processors, words, masks, logprobs
        self.batch: Batch | None = None  # read by the target's graph; None: the target runs without one

    def drafted(self, drafts: Tensor) -> None:
        """Note the drafts [B, W] that the next step verifies."""
        if self.masks is not None:
            self.masks.put(drafts)

    def before(self, logits: Tensor, state: DecodeState, outputs: RunOutputs) -> None:
        """Process logits [B * (W + 1), V] in place. outputs: of the steps before this one."""
        if self.logprobs is not None:
            self.logprobs.keep(logits, changes=self.processors is not None or self.masks is not None)
        if self.masks is not None:
            self.masks.keep(logits)
        if self.processors is not None:
            self.ops.process_decode_logits(logits, self.processors, state.drafts, state.positions)
        if self.words is not None:
            self.words.ban(logits, state)
        if self.masks is not None:
            self.masks.apply(logits, outputs)

    def after(self, tokens: Tensor, counts: Tensor) -> None:
        """Read the tokens of a step: tokens [B, W + 1] int32, -1 after counts[b] of them."""
        if self.processors is not None:
            self.ops.count_tokens(self.processors, tokens)
        if self.words is not None:
            self.words.advance(tokens, counts)
        if self.logprobs is not None:
            self.logprobs.put(tokens)

    def logprobs_of(self, row: int, result: RowResult) -> list[TokenLogprobs]:
        """Return the log-probabilities of all tokens of a row; none if it wants none."""
        if self.logprobs is None:
            return []
        steps = [step.tokens for step in result.decode_steps] or [[token] for token in result.tokens]
        return self.logprobs.read(row, steps)


class BannedWords:
    """Words of several tokens: the last one is banned while the text ends with the others. Letters: M words of a text,
    L tokens of the longest word but its last, W draft tokens.
    """

    def __init__(self, device: Device, rows: Sequence[Row], count: int) -> None:
        words = [[word for word in row.request.bad_words if len(word) > 1] for row in rows]
        most, longest = max(map(len, words)), max(len(word) - 1 for own in words for word in own)
        starts = np.full((count, most, longest), NO_TOKEN, np.int32)
        lasts = np.full((count, most), NO_TOKEN, np.int64)
        recent = np.full((count, longest), NO_TOKEN - 1, np.int32)  # no word has this token
        for index, (row, own) in enumerate(zip(rows, words, strict=True)):
            for number, word in enumerate(own):
                starts[index, number, longest - len(word) + 1 :] = word[:-1]
                lasts[index, number] = word[-1]
            before = row.request.tokens(max(row.start + 1 - longest, 0), row.start + 1)
            recent[index, longest - len(before) :] = before
        self.starts, self.lasts = device.upload(starts, torch.int32), device.upload(lasts, torch.int64)
        self.recent = device.upload(recent, torch.int32)  # [B, L]: the last tokens of each text

    def ban(self, logits: Tensor, state: DecodeState) -> None:
        longest = self.recent.shape[1]
        ends = torch.cat([self.recent, state.drafts], 1).unfold(1, longest, 1)[:, :, None]  # [B, W + 1, 1, L]
        starts = self.starts[:, None]  # [B, 1, M, L]
        bans = ((starts == ends) | (starts == NO_TOKEN)).all(-1) & (self.lasts >= 0)[:, None]  # [B, W + 1, M]
        rows = logits.view(state.rows, state.width + 1, -1)
        tokens = self.lasts.clamp(min=0)[:, None].expand_as(bans)
        rows.scatter_reduce_(2, tokens, torch.where(bans, -torch.inf, torch.inf), "amin")

    def advance(self, tokens: Tensor, counts: Tensor) -> None:
        """Keep the last tokens of each text after a step that added tokens[b, : counts[b]]."""
        longest = self.recent.shape[1]
        last = counts[:, None] + torch.arange(longest, device=counts.device)  # [B, L]
        self.recent = torch.cat([self.recent, tokens], 1).gather(1, last)


class GrammarMasks:
    """Masks the logits of the rows with a grammar. Its next mask depends on the newest token, so the host reads a step
    before it fills the masks of the next one. The target runs that step meanwhile.
    """

    def __init__(
        self,
        ops: Kernels,
        device: Device,
        requests: Sequence[Request],
        structured: Sequence[int],
        state: DecodeState,
        vocabulary: int,
    ) -> None:
        self.ops, self.device, self.requests, self.structured = ops, device, requests, structured
        self.most = state.width + 1
        self.masks: np.ndarray[Any, Any] = np.empty((len(structured) * self.most, -(-vocabulary // 32)), np.int32)
        self.drafts = device.host_zeros((state.rows, state.width), torch.int32)
        self.fence: Fence | None = None  # after the copy of the drafts
        self.processed = any(needs_processors(requests[index]) for index in structured)
        self.raw: Tensor | None = None  # [B * (W + 1), V]: the logits of this step before all processors

    def put(self, drafts: Tensor) -> None:
        """Start the copy of the drafts [B, W] of the next step."""
        if self.most > 1:
            self.drafts.copy_(drafts, non_blocking=True)
            self.fence = self.device.fence()

    def keep(self, logits: Tensor) -> None:
        """Keep the logits of a step, if processors may leave none of the tokens that a mask allows."""
        self.raw = logits.clone() if self.processed else None

    def apply(self, logits: Tensor, outputs: RunOutputs) -> None:
        """Wait for the steps so far and for the drafts, then mask the logits [B * (W + 1), V] of this step.

        As in `sampler.build_masks`, a row of which nothing would be left gets its end, without processors.
        """
        outputs.read()
        if self.fence is not None:
            self.fence.wait()
        drafts: list[list[int]] = self.drafts.tolist()
        rows: list[int] = []  # of logits
        unprocessed: list[int] = []
        for index in self.structured:
            request, progress = self.requests[index], outputs.rows[index]
            if request.grammar is None or progress.remaining <= 0:
                continue  # its text has ended
            draft, masks = as_draft(drafts[index]) or NO_DRAFT, self.masks[len(rows) :]
            nodes = request.grammar.masks(request.output + progress.tokens, draft, masks)
            for node, mask in zip(nodes, masks, strict=False):
                rows.append(index * self.most + node)
                drafted = progress.tokens + draft.tokens[:node]
                if needs_processors(request) and not leaves_any(mask, DraftedContext(request, drafted)):
                    mask[:] = request.grammar.end_mask
                    unprocessed.append(rows[-1])
        upload = self.device.upload
        if unprocessed and self.raw is not None:
            chosen = upload(unprocessed, torch.int64)
            logits[chosen] = self.raw[chosen]
        if rows:
            self.ops.mask_logits(logits, upload(self.masks[: len(rows)], torch.int32), upload(rows, torch.int32))


class RunLogprobs:
    """The log-probabilities of the rows that want them, copied to the host with each step. Letter K: top tokens."""

    def __init__(
        self,
        ops: Kernels,
        device: Device,
        requests: Sequence[Request],
        wanted: Sequence[int],
        state: DecodeState,
        steps: int,
        vocabulary: int,
    ) -> None:
        self.ops, self.wanted, self.most = ops, wanted, state.width + 1
        self.counts = [requests[row].params.logprobs or 0 for row in wanted]
        self.top = top_count(self.counts, vocabulary)  # K
        rows = [row * self.most + index for row in wanted for index in range(self.most)]
        self.rows = None if len(wanted) == state.rows else device.upload(rows, torch.int64)  # of the logits; None: all
        self.raw: Tensor | None = None  # [rows, V]: the logits of this step before all processors
        # Log-probability of the token, its rank; log-probabilities of the top tokens, and the tokens.
        self.host = device.host_zeros((steps, len(rows), 2 + 2 * self.top), torch.int32)
        self.steps = 0  # copied so far

    def keep(self, logits: Tensor, changes: bool) -> None:
        """Keep the logits of a step. changes: they will be processed in place."""
        if self.rows is not None:
            self.raw = logits.index_select(0, self.rows)
        else:
            self.raw = logits.clone() if changes else logits

    def put(self, tokens: Tensor) -> None:
        """Start the copy of the log-probabilities of tokens [B, W + 1]; those of -1 are not read."""
        assert self.raw is not None
        chosen = tokens.flatten() if self.rows is None else tokens.flatten().index_select(0, self.rows)
        found = self.ops.top_logprobs(self.raw, chosen.clamp(min=0), self.top)
        parts = [found.chosen[:, None].view(torch.int32), found.rank[:, None], found.values.view(torch.int32)]
        self.host[self.steps].copy_(torch.cat([*parts, found.tokens], 1), non_blocking=True)
        self.raw, self.steps = None, self.steps + 1

    def read(self, row: int, steps: Sequence[Sequence[int]]) -> list[TokenLogprobs]:
        """Return the log-probabilities of the tokens that a row got in each step; none if it wants none."""
        if row not in self.wanted:
            return []
        index, top = self.wanted.index(row), self.top
        first, numbers = index * self.most, self.host.numpy()
        found = np.concatenate([numbers[step, first : first + len(own)] for step, own in enumerate(steps)])
        chosen, values = (np.ascontiguousarray(part).view(np.float32) for part in (found[:, 0], found[:, 2 : 2 + top]))
        tokens = [token for own in steps for token in own]
        columns = chosen.tolist(), found[:, 1].tolist(), values.tolist(), found[:, 2 + top :].tolist()
        return token_logprobs(tokens, *columns, [self.counts[index]] * len(tokens))
