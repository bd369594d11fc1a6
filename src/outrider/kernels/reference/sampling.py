"""Logits processors, sampling and log-probabilities in plain torch.

Many rows at once: the only sums are those of top-p, which are float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..philox import NONE, gumbel
from ..structures import ChildTokens, LogitsProcessors, SamplingMetadata, TopLogprobs

CHUNK_NUMBERS = 1 << 20  # logits that are processed at once
MAX_LOGIT = torch.finfo(torch.float32).max / 4  # larger logits count as this, so that differences are finite


def sample(logits: Tensor, sampling: SamplingMetadata, out: Tensor | None = None) -> Tensor:
    tokens = torch.empty(logits.shape[0], dtype=torch.int32) if out is None else out  # [R]
    for rows in row_chunks(*logits.shape):
        tokens[rows] = draw(logits[rows], sampling.take(rows))
    return tokens


def draw(logits: Tensor, sampling: SamplingMetadata) -> Tensor:
    """Sample the token of each row: [R]."""
    return noisy_scores(without_nan(logits), sampling).argmax(-1).int()


def noisy_scores(logits: Tensor, sampling: SamplingMetadata) -> Tensor:
    """Return the scores whose argmax is sampled: [R, V]; -inf for excluded tokens. At temperature 0: the logits."""
    scores = logits.clone()
    noisy = (sampling.temperature > 0).nonzero()[:, 0]
    if len(noisy):
        chosen = sampling.take(noisy)
        raised = logits[noisy] / chosen.temperature[:, None] + noise(chosen, logits.shape[1])  # [noisy, V]
        scores[noisy] = raised.masked_fill(~is_allowed(logits[noisy], chosen), -torch.inf)
    return scores


def sample_children(logits: Tensor, sampling: SamplingMetadata, count: int) -> ChildTokens:
    rows, vocabulary = logits.shape
    tokens = torch.full((rows, count), -1, dtype=torch.int32)
    logprobs = torch.full((rows, count), -torch.inf)
    some = min(count, vocabulary)
    for part in row_chunks(rows, vocabulary):
        clean, chosen = without_nan(logits[part]), sampling.take(part)
        scores, order = (each[:, :some] for each in descending(noisy_scores(clean, chosen)))
        taken = scores > -torch.inf
        taken[:, :1] = True  # `sample` always returns a token
        warm = torch.where(chosen.temperature > 0, chosen.temperature, 1.0)
        row_logprobs = log_softmax(clean, warm).gather(1, order)
        tokens[part, :some] = order.int().masked_fill(~taken, -1)
        logprobs[part, :some] = row_logprobs.float().masked_fill(~taken, -torch.inf)
    return ChildTokens(tokens, logprobs)


def process_logits(logits: Tensor, processors: LogitsProcessors) -> None:
    starts = processors.starts.tolist()
    for row in range(logits.shape[0]):
        entries = slice(starts[row], starts[row + 1])
        tokens, scale = processors.tokens[entries].long(), processors.scale[entries]
        before = logits[row, tokens]
        after = torch.where(before > 0, before / scale, before * scale) + processors.bias[entries]
        if processors.only[row]:
            logits[row] = -torch.inf
        logits[row, tokens] = after


def mask_logits(logits: Tensor, masks: Tensor, rows: Tensor) -> None:
    token = torch.arange(logits.shape[1], device=logits.device)  # [V]
    allowed = (masks[:, token // 32] >> (token % 32)) & 1  # [M, V]
    row_ids = rows.long()
    logits[row_ids] = logits[row_ids].masked_fill(allowed == 0, -torch.inf)


def top_logprobs(logits: Tensor, tokens: Tensor, count: int) -> TopLogprobs:
    logprobs = torch.cat([torch.log_softmax(row[None], -1) for row in logits])  # [R, V]
    chosen = logprobs.gather(1, tokens.long()[:, None])  # [R, 1]
    taken = logits.gather(1, tokens.long()[:, None])
    _, order = descending(logits)  # by logits, like the rank: log-softmax may round different logits to one value
    values = logprobs.gather(1, order.long())
    return TopLogprobs(
        chosen=chosen[:, 0],
        rank=1 + (logits > taken).sum(1, dtype=torch.int32),
        values=values[:, :count].contiguous(),
        tokens=order[:, :count].to(torch.int32),
    )


def noise(sampling: SamplingMetadata, vocabulary: int) -> Tensor:
    """Return the Gumbel noise of each token: [R, V] f32."""
    epochs = NONE if sampling.epochs is None else sampling.epochs[:, None]
    everything = torch.arange(vocabulary)
    return gumbel(sampling.seeds[:, None], sampling.positions[:, None], everything, sampling.stream, epochs)


def is_allowed(logits: Tensor, sampling: SamplingMetadata) -> Tensor:
    """Return which tokens truncation allows at a temperature above 0: [R, V] bool."""
    size = logits.shape[1]
    ordered, order = descending(logits.clamp(max=MAX_LOGIT))
    index = torch.arange(size)
    count = torch.where(sampling.top_k > 0, sampling.top_k.clamp(max=size), size)[:, None]  # [R, 1]
    # Float64, so that the order of summation does not move the threshold.
    weight = torch.exp((ordered.double() - ordered[:, :1]) / sampling.temperature[:, None])  # [R, V], the largest is 1
    weight = weight.masked_fill(index >= count, 0.0)
    top_p, min_p = sampling.top_p[:, None].double(), sampling.min_p[:, None].double()
    reached = torch.cumsum(weight, 1) / weight.sum(1, keepdim=True)
    nucleus = 1 + (reached < top_p).sum(1, keepdim=True)
    count = torch.where(top_p < 1, torch.minimum(count, nucleus), count)
    count = torch.minimum(count, (weight >= min_p).sum(1, keepdim=True))
    return torch.zeros_like(order, dtype=torch.bool).scatter(1, order, index < count)


def probabilities(logits: Tensor, sampling: SamplingMetadata) -> Tensor:
    """Return the distribution of `sample`: [R, V] f64; zeros if every token of a row is banned."""
    logits = without_nan(logits)
    greedy = sampling.temperature == 0  # [R]
    warm = replace(sampling, temperature=sampling.temperature.masked_fill(greedy, 1.0))
    probs = softmax(logits, warm.temperature) * is_allowed(logits, warm)  # [R, V]
    total = probs.sum(-1, keepdim=True)
    probs = torch.where(total > 0, probs / total, 0.0)
    best = torch.zeros_like(probs).scatter(1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.where(greedy[:, None], best, probs)


def softmax(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return the softmax at these temperatures: [R, V] f64."""
    return torch.softmax(logits.double() / temperature.double()[:, None], -1).nan_to_num(0.0)


def log_softmax(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return the log-softmax at these temperatures: [R, V] f64; -inf if every token of a row is banned."""
    scores = logits.clamp(max=MAX_LOGIT).double() / temperature.double()[:, None]
    return torch.log_softmax(scores, -1).nan_to_num(nan=-torch.inf, neginf=-torch.inf)


def without_nan(logits: Tensor) -> Tensor:
    return logits.masked_fill(logits.isnan(), -torch.inf)


def descending(values: Tensor) -> tuple[Tensor, Tensor]:
    """Sort descending; ties: the lower id first."""
    ordered, order = torch.sort(values, dim=-1, descending=True, stable=True)
    return ordered, order


def row_chunks(count: int, width: int) -> Iterator[slice]:
    """Split `count` rows of `width` numbers into ranges of at most CHUNK_NUMBERS numbers."""
    step = max(CHUNK_NUMBERS // max(width, 1), 1)
    for first in range(0, count, step):
        yield slice(first, min(first + step, count))
