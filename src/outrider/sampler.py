"""Logits to tokens: sampling metadata, logits processors, grammar masks, log-probabilities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .device import Device
from .kernels import Kernels, LogitsProcessors, SamplingMetadata, VerifyInputs
from .request import Request, Row
from .types import Draft, SamplingParams, TokenLogprobs

BAN = float("-inf")
NO_DRAFT = Draft([])
# Tokens in ascending order, each once; scale; bias.
Entries = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]
NO_ENTRIES: Entries = (np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.float32))
RowLogprobs = dict[int, list[TokenLogprobs]]  # by row of the step


@dataclass
class SamplerInput:
    """The inputs of sampling that are known before the logits are. Valid for one step.

    B: rows of the step. R: rows of logits, one per row of the step and one more for each of its drafted tokens.
    """

    rows: list[Row]
    sampling: SamplingMetadata  # [B]
    verify_inputs: VerifyInputs | None  # None: no row has a draft, so R = B
    processors: LogitsProcessors | None
    logprob_rows: list[int]  # rows of the step that want log-probabilities
    logits: Tensor  # [R, V] f32, for the model to fill
    tokens: Tensor  # [R] int32
    masks: tuple[Tensor, Tensor] | None = None  # [M, ceil(V / 32)] int32 bits, and their rows of logits [M]


class Sampler:
    def __init__(self, ops: Kernels, device: Device, vocabulary: int) -> None:
        self.ops, self.device, self.vocabulary = ops, device, vocabulary
        self._logits = torch.empty(0, vocabulary, device=device.torch_device)  # grows to the largest step so far
        self._requests: list[Request] = []
        self._set_requests([])

    def prepare(self, rows: list[Row]) -> SamplerInput:
        """Prepare sampling on the host, after the launch of the model's pass: on a GPU the two overlap."""
        requests = [row.request for row in rows]
        if self._requests != requests:
            self._set_requests(requests)
        self._positions.fill([request.length for request in requests])
        inputs = self._plain
        inputs.rows = rows
        if any(row.draft is not None for row in rows):
            inputs = replace(inputs, verify_inputs=self._verify_inputs(rows))
            inputs.logits, inputs.tokens = self._buffers(sum(1 + row.size - len(row.tokens) for row in rows))
        unprocessed: set[int] = set()
        if self._has_grammar:
            masks, mask_rows, unprocessed = build_masks(rows, self.vocabulary)
            inputs.masks = self.device.upload(masks, torch.int32), self.device.upload(mask_rows, torch.int32)
        if self._has_processors:
            inputs.processors = build_processors(rows, self.device, unprocessed)
        return inputs

    def process_logits(self, inputs: SamplerInput) -> Tensor | None:
        """Apply penalties, biases, bans and masks in place.

        Return the logits from before that, if some row wants log-probabilities, which are those of the model.
        """
        raw = inputs.logits if inputs.logprob_rows else None
        if raw is not None and (inputs.processors is not None or inputs.masks is not None):
            raw = raw.clone()
        if inputs.processors is not None:
            self.ops.process_logits(inputs.logits, inputs.processors)
        if inputs.masks is not None:
            self.ops.mask_logits(inputs.logits, *inputs.masks)
        return raw

    def row_logprobs(
        self, inputs: SamplerInput, raw: Tensor, tokens: list[list[int]], chosen: list[list[int]]
    ) -> RowLogprobs:
        """Return the log-probabilities of the tokens of each row that wants them.

        chosen: for each token of a row, the index of its logits among the row's rows of `raw`.
        """
        starts = range(len(tokens)) if inputs.verify_inputs is None else inputs.verify_inputs.starts.tolist()
        indices = [starts[row] + index for row in inputs.logprob_rows for index in chosen[row]]
        counts = [inputs.rows[row].request.params.logprobs or 0 for row in inputs.logprob_rows for _ in chosen[row]]
        found = iter(
            self.logprobs(raw[indices], [token for row in inputs.logprob_rows for token in tokens[row]], counts)
        )
        return {row: [next(found) for _ in tokens[row]] for row in inputs.logprob_rows}

    def logprobs(self, logits: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
        """Return the log-probability of tokens[r] under logits[r] ([R, V]), and the top counts[r] tokens."""
        ids = self.device.upload(tokens, torch.int32)
        top = self.ops.top_logprobs(logits, ids, top_count(counts, logits.shape[1]))
        columns = top.chosen.tolist(), top.rank.tolist(), top.values.tolist(), top.tokens.tolist()
        return token_logprobs(tokens, *columns, counts)

    def warm_up_masks(self) -> None:
        """Run the kernel of grammar masks, which a warm-up without a grammar does not reach."""
        masks = np.full((1, -(-self.vocabulary // 32)), -1, np.int32)
        logits, _ = self._buffers(1)
        self.ops.mask_logits(logits, self.device.upload(masks, torch.int32), self.device.upload([0], torch.int32))

    def _set_requests(self, requests: list[Request]) -> None:
        """Upload the sampling parameters of a batch. They are reused while its requests stay the same."""
        params = [request.params for request in requests]
        upload = self.device.upload
        self._positions = self.device.buffer(len(requests), torch.int32)
        self._sampling = SamplingMetadata(
            temperature=upload([p.temperature for p in params], torch.float32),
            top_k=upload([p.top_k for p in params], torch.int32),
            top_p=upload([p.top_p for p in params], torch.float32),
            min_p=upload([p.min_p for p in params], torch.float32),
            seeds=upload([request.seed for request in requests], torch.int64),
            positions=self._positions.tensor,
            greedy=all(p.temperature == 0 for p in params),
        )
        self._has_grammar = any(request.grammar is not None for request in requests)
        self._has_processors = any(needs_processors(request) for request in requests)
        logits, tokens = self._buffers(len(requests))
        logprob_rows = [row for row, p in enumerate(params) if p.logprobs is not None]
        # For steps without a draft.
        self._plain = SamplerInput([], self._sampling, None, None, logprob_rows, logits, tokens)
        self._requests = requests

    def _buffers(self, count: int) -> tuple[Tensor, Tensor]:
        """Return buffers for logits [R, V] and tokens [R], R being `count`."""
        if self._logits.shape[0] < count:
            self._logits = torch.empty(count, self.vocabulary, device=self.device.torch_device)
        return self._logits[:count], torch.empty(count, dtype=torch.int32, device=self.device.torch_device)

    def _verify_inputs(self, rows: list[Row]) -> VerifyInputs:
        starts, tokens, parents = [0], [], []
        for row in rows:
            draft = row.draft or NO_DRAFT
            tokens += [-1, *draft.tokens]
            parents += [-1, *(parent + 1 for parent in draft.parent_indices())]
            starts.append(len(tokens))
        upload = self.device.upload
        logits, sampled = self._draft_logits(rows, len(tokens))
        return VerifyInputs(
            starts=upload(starts, torch.int32),
            tokens=upload(tokens, torch.int32),
            parents=upload(parents, torch.int32),
            width=max(end - begin - 1 for begin, end in pairwise(starts)),
            logits=logits,
            drawn=sampled,
        )

    def _draft_logits(self, rows: list[Row], count: int) -> tuple[Tensor | None, Tensor | None]:
        """Return the logits that drafted tokens were sampled from [R, V], and a flag for each row that has them [R].

        Both are None if no draft was sampled.
        """
        if all(row.draft is None or row.draft.logits is None for row in rows):
            return None, None
        logits = torch.empty(count, self.vocabulary, device=self.device.torch_device)
        sampled = torch.zeros(count, dtype=torch.uint8, device=self.device.torch_device)
        begin = 0
        for row in rows:
            draft = row.draft or NO_DRAFT
            end = begin + 1 + len(draft.tokens)
            if draft.logits is not None:
                logits[begin + 1 : end] = draft.logits
                sampled[begin + 1 : end] = 1
            begin = end
        return logits, sampled


def top_count(counts: Sequence[int], vocabulary: int) -> int:
    """Return how many top tokens to compute: a power of two, because kernels are compiled for each number."""
    return min(1 << (max(counts) - 1).bit_length() if max(counts) else 0, vocabulary)


def token_logprobs(
    tokens: Sequence[int],
    chosen: Sequence[float],
    ranks: Sequence[int],
    values: Sequence[Sequence[float]],
    top_tokens: Sequence[Sequence[int]],
    counts: Sequence[int],
) -> list[TokenLogprobs]:
    """Return the log-probabilities of tokens from the rows of a TopLogprobs; counts: top tokens of each to report."""
    return [
        TokenLogprobs(token, logprob, rank, tuple(zip(top[:count], own[:count], strict=True)))
        for token, logprob, rank, own, top, count in zip(tokens, chosen, ranks, values, top_tokens, counts, strict=True)
    ]


@dataclass(frozen=True)
class DraftedContext:
    """A request followed by some of its drafted tokens: the context of one row of logits."""

    request: Request
    drafted: list[int]

    @property
    def output(self) -> list[int]:
        return self.request.output + self.drafted

    def ends_with(self, tokens: Sequence[int]) -> bool:
        count, known = len(tokens), self.request.length
        start = known + len(self.drafted) - count
        text = self.request.tokens(start, known) + self.drafted[max(start - known, 0) :]
        return text == list(tokens)


def paths(row: Row) -> list[list[int]]:
    """Return, for each row of logits of a row, the drafted tokens that precede it."""
    draft = row.draft or NO_DRAFT
    result: list[list[int]] = [[]]
    for token, parent in zip(draft.tokens, draft.parent_indices(), strict=True):
        result.append([*result[parent + 1], token])
    return result


def build_masks(rows: Sequence[Row], vocabulary: int) -> tuple[np.ndarray[Any, Any], list[int], set[int]]:
    """Return grammar masks [M, ceil(V / 32)], their rows of logits, and those of these rows to leave unprocessed.

    A row stays unprocessed if bans would exclude every token that the grammar allows. Its mask allows only the end.
    """
    count = sum(1 + row.size - len(row.tokens) for row in rows if row.request.grammar is not None)
    masks: np.ndarray[Any, Any] = np.empty((count, -(-vocabulary // 32)), np.int32)
    mask_rows: list[int] = []
    unprocessed: set[int] = set()
    first = 0  # row of logits
    for row in rows:
        request, draft = row.request, row.draft or NO_DRAFT
        if request.grammar is not None:
            row_masks = masks[len(mask_rows) :]
            indices = request.grammar.masks(request.output, draft, row_masks)
            before = paths(row) if needs_processors(request) else []
            for mask, index in zip(row_masks, indices if before else [], strict=False):
                if not leaves_any(mask, DraftedContext(request, before[index])):
                    mask[:] = request.grammar.end_mask
                    unprocessed.add(first + index)
            mask_rows += [first + index for index in indices]
        first += 1 + len(draft.tokens)
    return masks[: len(mask_rows)], mask_rows, unprocessed


def leaves_any(mask: np.ndarray[Any, Any], context: DraftedContext) -> bool:
    """Return True if some token that the mask allows is not banned."""
    tokens, _, bias = changed_entries(context)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    if context.request.params.allowed_token_ids is not None:
        return bool(bits[tokens[bias != BAN]].any())
    bits[tokens[bias == BAN]] = 0
    return bool(bits.any())


def build_processors(rows: Sequence[Row], device: Device, unprocessed: Collection[int] = ()) -> LogitsProcessors | None:
    """Upload the penalties, biases and bans of all rows of logits; None if there are none."""
    contexts = [DraftedContext(row.request, path) for row in rows for path in paths(row)]
    skipped = [index in unprocessed or not needs_processors(each.request) for index, each in enumerate(contexts)]
    entries = [NO_ENTRIES if skip else changed_entries(each) for each, skip in zip(contexts, skipped, strict=True)]
    only = [
        context.request.params.allowed_token_ids is not None and not skip
        for context, skip in zip(contexts, skipped, strict=True)
    ]
    counts = [len(tokens) for tokens, _, _ in entries]
    if not any(counts) and not any(only):
        return None
    tokens, scale, bias = (np.concatenate(parts) for parts in zip(*entries, strict=True))
    return LogitsProcessors(
        starts=device.upload([0, *accumulate(counts)], torch.int32),
        tokens=device.upload(tokens, torch.int32),
        scale=device.upload(scale, torch.float32),
        bias=device.upload(bias, torch.float32),
        only=device.upload([int(flag) for flag in only], torch.uint8),
    )


def needs_processors(request: Request) -> bool:
    """Return True if some step of this request may change logits."""
    params = request.params
    return bool(
        params.repetition_penalty != 1
        or params.presence_penalty
        or params.frequency_penalty
        or params.logit_bias
        or params.allowed_token_ids is not None
        or params.banned_token_ids
        or request.bad_words
        or params.min_tokens
    )


def is_plain(request: Request) -> bool:
    """Return True if the logits of the request are neither changed nor reported."""
    params = request.params
    no_logprobs = params.logprobs is None and params.prompt_logprobs is None
    return no_logprobs and params.structured is None and not needs_processors(request)


class LogitTable:
    """The changes of a request that are the same at every step, and its banned words by the token before their last.

    Arrays, because the bias of a whole vocabulary takes 50 ms a step as a dict, and 1 ms so.
    """

    def __init__(self, request: Request) -> None:
        params = request.params
        self.banned = frozenset(params.banned_token_ids)
        bias = {**params.logit_bias, **dict.fromkeys(self.banned, BAN)}
        tokens = sorted(bias if params.allowed_token_ids is None else set(params.allowed_token_ids))
        self.tokens = np.array(tokens, np.int32)
        self.bias = np.array([bias.get(token, 0.0) for token in tokens], np.float32)
        self.only = params.allowed_token_ids is not None
        self.banned_words = frozenset(word[0] for word in request.bad_words if len(word) == 1)
        self.words_by_token: dict[int, list[tuple[int, ...]]] = {}
        for word in request.bad_words:
            if len(word) > 1:
                self.words_by_token.setdefault(word[-2], []).append(word)

    def merged(self, changes: dict[int, tuple[float, float]]) -> Entries:
        """Return all changes, by token. Those of this step replace the ones of the table."""
        scale = np.ones(len(self.tokens), np.float32)
        if not changes:
            return self.tokens, scale, self.bias
        tokens = np.array(sorted(changes), np.int32)
        values = np.array([changes[int(token)] for token in tokens], np.float32)
        indices = np.searchsorted(self.tokens, tokens)
        known = np.isin(tokens, self.tokens, assume_unique=True)
        bias = self.bias.copy()
        scale[indices[known]], bias[indices[known]] = values[known, 0], values[known, 1]
        if self.only or known.all():
            return self.tokens, scale, bias
        indices, tokens, values = indices[~known], tokens[~known], values[~known]
        return (
            np.insert(self.tokens, indices, tokens),
            np.insert(scale, indices, values[:, 0]),
            np.insert(bias, indices, values[:, 1]),
        )


def changed_entries(context: DraftedContext) -> Entries:
    """Return the tokens whose logits change, with scale and bias (as in LogitsProcessors)."""
    request = context.request
    if request.logit_table is None:
        request.logit_table = LogitTable(request)
    return request.logit_table.merged(step_changes(context, request.logit_table))


def step_changes(context: DraftedContext, table: LogitTable) -> dict[int, tuple[float, float]]:
    """Return scale and bias of the tokens whose change depends on the output."""
    params, output = context.request.params, context.output
    bias = penalties(params, output)
    for token in bias.keys() & params.logit_bias.keys():
        bias[token] += params.logit_bias[token]
    repeated: set[int] = set()
    if params.repetition_penalty != 1:
        repeated = set(context.request.prompt) | set(output)
    excluded = banned(context, table)
    changes = {}
    for token in bias.keys() | repeated | excluded:
        is_banned = token in excluded or token in table.banned
        value = BAN if is_banned else bias.get(token, params.logit_bias.get(token, 0.0))
        changes[token] = (params.repetition_penalty if token in repeated else 1.0, value)
    return changes


def penalties(params: SamplingParams, output: Sequence[int]) -> dict[int, float]:
    """Return the bias that presence and frequency penalties give to each token of the output."""
    if not params.presence_penalty and not params.frequency_penalty:
        return {}
    counts = Counter(output)
    return {token: -params.presence_penalty - params.frequency_penalty * count for token, count in counts.items()}


def banned(context: DraftedContext, table: LogitTable) -> set[int]:
    """Return the tokens that may not come next: ends before min_tokens, last tokens of banned words."""
    request = context.request
    tokens = set(table.banned_words)
    if len(request.output) + len(context.drafted) < request.params.min_tokens:
        tokens |= request.end_tokens | set(request.params.stop_token_ids)
    if table.words_by_token:
        last = context.drafted[-1] if context.drafted else request.tokens(request.length - 1, request.length)[0]
        words = table.words_by_token.get(last, ())
        tokens |= {word[-1] for word in words if context.ends_with(word[:-1])}
    return tokens
