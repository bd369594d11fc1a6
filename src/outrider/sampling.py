"""The one place where logits become tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

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


class Sampler:
    def __init__(self, ops: Kernels, device: Device) -> None:
        self.ops, self.device = ops, device
        self._requests: list[Request] = []
        self._settings: dict[str, Tensor] = {}
        self._plain = False

    def pick(self, logits: Tensor, requests: Sequence[Request]) -> list[Picked]:
        """One token for each row of `logits` [R, V]; row r continues requests[r]. Changes `logits`."""
        self._settle(requests)
        if self._plain:
            return [Picked(token, None) for token in self.ops.sample(logits, self._choice(requests)).tolist()]
        wanted = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
        edits = build_edits(requests, self.device)
        # Log-probabilities are the model's own, so they are read from the logits as they were before the edits.
        raw = logits[wanted].clone() if wanted and edits is not None else logits[wanted] if wanted else None
        if edits is not None:
            self.ops.edit_logits(logits, edits)
        tokens = self.ops.sample(logits, self._choice(requests))  # [R]
        chosen: list[int] = tokens.tolist()
        picked = [Picked(token, None) for token in chosen]
        if raw is not None:
            counts = [requests[row].params.logprobs or 0 for row in wanted]
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

    def _settle(self, requests: Sequence[Request]) -> None:
        """What stays while the same requests go on: their settings, and whether any wants more than a token."""
        if self._requests == list(requests):
            return
        self._requests = list(requests)
        params = [request.params for request in requests]
        upload = self.device.upload
        self._settings = {
            "temperature": upload([p.temperature for p in params], torch.float32),
            "top_k": upload([p.top_k for p in params], torch.int32),
            "top_p": upload([p.top_p for p in params], torch.float32),
            "min_p": upload([p.min_p for p in params], torch.float32),
            "seeds": upload([request.seed for request in requests], torch.int64),
        }
        self._plain = not any(needs_edits(request) or request.params.logprobs is not None for request in requests)

    def _choice(self, requests: Sequence[Request]) -> Choice:
        positions = self.device.upload([request.length for request in requests], torch.int32)
        return Choice(positions=positions, **self._settings)


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
