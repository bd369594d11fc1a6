"""The one place where logits become tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .device import Device
from .kernels import Choice, Edits, Kernels
from .types import Request, SamplingParams, TokenLogprobs

BAN = float("-inf")


@dataclass(frozen=True)
class Picked:
    token: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True)
class Pending:
    """All that is known of a choice before the logits are: row r continues requests[r]. Valid for one step."""

    requests: list[Request]
    choice: Choice
    edits: Edits | None
    wanted: list[int]  # rows that report log-probabilities
    logits: Tensor  # [R, V] f32, for the model to fill
    tokens: Tensor  # [R] int32


class Sampler:
    def __init__(self, ops: Kernels, device: Device, vocabulary: int) -> None:
        self.ops, self.device, self.vocabulary = ops, device, vocabulary
        self._edited = False
        self._settle([])

    def prepare(self, requests: list[Request]) -> Pending:
        """The host's part, done before the model runs: beside a device it overlaps, on a CPU its data is still warm."""
        if self._pending.requests != requests:
            self._settle(requests)
        self._positions.fill([request.length for request in requests])
        if not self._edited:
            return self._pending
        return replace(self._pending, edits=build_edits(requests, self.device))

    def pick(self, pending: Pending) -> list[Picked]:
        """One token for each row of pending.logits, which it may change."""
        logits, edits, wanted = pending.logits, pending.edits, pending.wanted
        # Log-probabilities are the model's own: they are read from the logits as they were before the edits.
        raw = logits[wanted] if wanted else None
        if edits is not None:
            self.ops.edit_logits(logits, edits)
        chosen: list[int] = self.ops.sample(logits, pending.choice, pending.tokens).tolist()
        picked = [Picked(token, None) for token in chosen]
        if raw is not None:
            counts = [pending.requests[row].params.logprobs or 0 for row in wanted]
            for row, found in zip(wanted, self.logprobs(raw, [chosen[row] for row in wanted], counts), strict=True):
                picked[row] = Picked(chosen[row], found)
        return picked

    def logprobs(self, logits: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
        """How likely each of `tokens` was under its row of `logits` [R, V], with the counts[r] likeliest."""
        at = self.device.upload(tokens, torch.int32)
        top = self.ops.top_logprobs(logits, at, min(max(counts), logits.shape[1]))
        rows = zip(top.tokens.tolist(), top.values.tolist(), strict=True)
        pairs = [tuple(zip(ids, values, strict=True)) for ids, values in rows]
        return [
            TokenLogprobs(token, logprob, rank, likeliest[:count])
            for token, logprob, rank, likeliest, count in zip(
                tokens, top.chosen.tolist(), top.rank.tolist(), pairs, counts, strict=True
            )
        ]

    def _settle(self, requests: list[Request]) -> None:
        """Make what serves for as long as the same requests go on."""
        params = [request.params for request in requests]
        count, upload, place = len(requests), self.device.upload, self.device.place
        self._positions = self.device.buffer(count, torch.int32)
        choice = Choice(
            temperature=upload([p.temperature for p in params], torch.float32),
            top_k=upload([p.top_k for p in params], torch.int32),
            top_p=upload([p.top_p for p in params], torch.float32),
            min_p=upload([p.min_p for p in params], torch.float32),
            seeds=upload([request.seed for request in requests], torch.int64),
            positions=self._positions.tensor,
        )
        self._edited = any(needs_edits(request) for request in requests)
        self._pending = Pending(
            requests=requests,
            choice=choice,
            edits=None,
            wanted=[row for row, p in enumerate(params) if p.logprobs is not None],
            logits=torch.empty(count, self.vocabulary, device=place),  # [R, V]
            tokens=torch.empty(count, dtype=torch.int32, device=place),  # [R]
        )


def build_edits(requests: Sequence[Request], device: Device) -> Edits | None:
    """Penalties, biases and bans of all rows, or None when no row has any."""
    rows = [row_edits(request) if needs_edits(request) else {} for request in requests]
    only = [request.params.allowed_token_ids is not None for request in requests]
    if not any(rows) and not any(only):
        return None
    starts = [0]
    for row in rows:
        starts.append(starts[-1] + len(row))
    entries = [(token, scale, bias) for row in rows for token, (scale, bias) in row.items()]
    return Edits(
        starts=device.upload(starts, torch.int32),
        tokens=device.upload([token for token, _, _ in entries], torch.int32),
        scale=device.upload([scale for _, scale, _ in entries], torch.float32),
        bias=device.upload([bias for _, _, bias in entries], torch.float32),
        only=device.upload([int(flag) for flag in only], torch.uint8),
    )


def needs_edits(request: Request) -> bool:
    """Whether any step of this request may change logits."""
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


def row_edits(request: Request) -> dict[int, tuple[float, float]]:
    """For each token that is touched: the scale and the bias of kernels.Edits."""
    params = request.params
    bias = penalties(params, request.output)
    for token, value in params.logit_bias.items():
        bias[token] = bias.get(token, 0.0) + value
    for token in banned(request):
        bias[token] = BAN
    repeated: set[int] = set()
    if params.repetition_penalty != 1:
        repeated = set(request.prompt) | set(request.output)
    touched = bias.keys() | repeated
    if params.allowed_token_ids is not None:
        touched = set(params.allowed_token_ids)
    return {t: (params.repetition_penalty if t in repeated else 1.0, bias.get(t, 0.0)) for t in sorted(touched)}


def penalties(params: SamplingParams, output: Sequence[int]) -> dict[int, float]:
    if not params.presence_penalty and not params.frequency_penalty:
        return {}
    counts = Counter(output)
    return {token: -params.presence_penalty - params.frequency_penalty * count for token, count in counts.items()}


def banned(request: Request) -> set[int]:
    """Tokens that may not come next: banned ids, ends that come too early, last tokens of banned words."""
    params = request.params
    tokens = set(params.banned_token_ids)
    if len(request.output) < params.min_tokens:
        tokens |= request.end_tokens | set(params.stop_token_ids)
    for word in request.bad_words:
        before = word[:-1]
        if request.tokens(request.length - len(before), request.length) == list(before):
            tokens.add(word[-1])
    return tokens
