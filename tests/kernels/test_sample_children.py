"""sample_children() returns the sampled token, then the next best ones, without replacement and in order."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations

import pytest
import torch
from torch import Tensor

from outrider.kernels import Kernels, SamplingMetadata, cpu, philox
from outrider.kernels.cases import inputs
from outrider.kernels.cpu import _native
from outrider.kernels.cpu.sampling import native_sampling

SETTINGS: list[dict[str, float]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3, "top_p": 0.9},
    {"top_k": 5},
    {"min_p": 0.1, "temperature": 1.7},
]


def spread(sampling: SamplingMetadata, count: int) -> SamplingMetadata:
    """One row's settings at `count` positions."""
    return replace(sampling.take([0] * count), positions=torch.arange(count, dtype=torch.int32))


@pytest.mark.parametrize("kind", ["plain", "ties", "banned", "nothing", "nan", "one token"])
@pytest.mark.parametrize("count", [1, 3])
def test_the_first_child_is_the_sampled_token(ops: Kernels, kind: str, count: int) -> None:
    vocabulary = 1 if kind == "one token" else 5000
    logits = 3 * inputs.normal(inputs.generator(1), 50, vocabulary)  # [R, V]
    if kind == "ties":
        logits = logits.round()
    if kind == "banned":
        logits[:, 4:] = -torch.inf
    if kind == "nothing":
        logits[:] = -torch.inf
    if kind == "nan":
        logits[:25], logits[25:, ::2] = torch.nan, torch.nan
        logits[:10, 1:] = -torch.inf
    sampling = replace(inputs.make_sampling(SETTINGS * 10, seed=4), stream=philox.DRAFT)
    found = ops.sample_children(logits, sampling, count)
    assert found.tokens.shape == found.logprobs.shape == (50, count)
    assert torch.equal(found.tokens[:, 0], ops.sample(logits, sampling))


def test_order_is_by_score_then_by_id(ops: Kernels) -> None:
    """Of the noise that philox.gumbel gives; without it, of the logits."""
    logits = inputs.normal(inputs.generator(2), 20, 300).mul(4).round()  # [R, V]
    sampling = replace(inputs.make_sampling([{"temperature": 0.5}, {"temperature": 0.0}] * 10, seed=3), stream=257)
    noise = philox.gumbel(sampling.seeds[:, None], sampling.positions[:, None], torch.arange(300), 257)
    scores = torch.where(sampling.temperature[:, None] > 0, logits / 0.5 + noise, logits)
    order = torch.sort(scores, dim=-1, descending=True, stable=True)[1]
    assert torch.equal(ops.sample_children(logits, sampling, 64).tokens, order[:, :64].int())


def test_probabilities_count_every_token(ops: Kernels) -> None:
    """Also those that truncation leaves out; where a row is greedy, at temperature 1."""
    logits = 5 * inputs.normal(inputs.generator(5), 15, 700)  # [R, V]
    logits[:, 13] = -torch.inf
    sampling = inputs.make_sampling(SETTINGS * 3, seed=6)
    found = ops.sample_children(logits, sampling, 6)
    warm = torch.where(sampling.temperature > 0, sampling.temperature, 1.0).double()
    meant = torch.log_softmax(logits.double() / warm[:, None], -1).gather(1, found.tokens.long().clamp(min=0)).float()
    assert found.logprobs.dtype == torch.float32
    taken = found.tokens >= 0
    assert taken[:, 0].all() and not taken.all()
    assert (found.logprobs[taken] - meant[taken]).abs().max() < 1e-5 * meant[taken].abs().max()
    assert (found.logprobs[~taken] == -torch.inf).all()


def test_truncated_rows_are_padded(ops: Kernels) -> None:
    logits = torch.tensor([[1.0, 5.0, -torch.inf, 4.0], [0.0, torch.nan, -torch.inf, 3.0], [-torch.inf] * 4])
    rows: list[dict[str, float]] = [{"top_k": 2}, {}, {}]
    found = ops.sample_children(logits, inputs.make_sampling(rows, seed=0), 6)
    assert [sorted(row[:2]) for row in found.tokens.tolist()] == [[1, 3], [0, 3], [-1, 0]]
    assert (found.tokens[:, 2:] == -1).all() and (found.logprobs[:, 2:] == -torch.inf).all()
    assert found.logprobs[2].tolist() == [-torch.inf] * 6
    greedy = ops.sample_children(logits, inputs.make_sampling([{"temperature": 0.0, "top_k": 1}] * 3, seed=0), 3)
    assert greedy.tokens.tolist() == [[1, 3, 0], [3, 0, -1], [0, -1, -1]]


def test_a_vocabulary_of_one(ops: Kernels) -> None:
    found = ops.sample_children(
        torch.tensor([[3.0], [-7.0]]), inputs.make_sampling([{}, {"temperature": 0.0}], seed=0), 3
    )
    assert found.tokens.tolist() == [[0, -1, -1]] * 2
    assert found.logprobs.tolist() == [[0.0, -torch.inf, -torch.inf]] * 2


def test_tokens_are_drawn_without_replacement(ops: Kernels) -> None:
    """Three of four, in order: q(a) * q(b) / (1 - q(a)) * q(c) / (1 - q(a) - q(b))."""
    count, logits = 20_000, torch.tensor([0.9, -0.4, 1.6, 0.1])
    sampling = replace(spread(inputs.make_sampling([{"temperature": 0.8}], seed=9), count), stream=philox.DRAFT)
    found = ops.sample_children(logits.repeat(count, 1), sampling, 3).tokens.long()
    seen = torch.bincount((found * torch.tensor([16, 4, 1])).sum(1), minlength=64)
    q = torch.softmax(logits.double() / 0.8, -1).tolist()
    law = {
        16 * a + 4 * b + c: q[a] * q[b] / (1 - q[a]) * q[c] / (1 - q[a] - q[b]) for a, b, c in permutations(range(4), 3)
    }
    assert int(seen[list(law)].sum()) == count
    statistic = sum((int(seen[at]) - count * share) ** 2 / (count * share) for at, share in law.items())
    assert statistic < 23 + 4 * math.sqrt(46)


def test_streams_for_siblings_are_independent(ops: Kernels) -> None:
    """Draws with replacement: sibling j of a node is drawn by `sample` on stream DRAFT + 256 * j."""
    count, flat = 4000, torch.zeros(4)
    sampling = spread(inputs.make_sampling([{}], seed=2), count)
    streams = [philox.DRAFT + 256 * sibling for sibling in range(4)]
    drawn = [ops.sample(flat.repeat(count, 1), replace(sampling, stream=stream)) for stream in streams]
    for sibling, tokens in enumerate(drawn):
        noise = philox.gumbel(sampling.seeds[:, None], sampling.positions[:, None], torch.arange(4), streams[sibling])
        assert torch.equal(tokens, noise.argmax(-1).int())
        for other in drawn[:sibling]:
            assert abs(float((tokens == other).double().mean()) - 0.25) < 4 * math.sqrt(0.25 * 0.75 / count)


@pytest.mark.parametrize("vocabulary", [1, 15, 63, 64, 65, 4095, 4097, 8200])
@pytest.mark.parametrize("count", [1, 5, 64])
def test_nothing_is_read_or_written_outside(level: str, vocabulary: int, count: int) -> None:
    """Huge logits stand before and after the rows, and what surrounds the results stays as it was."""
    rows = 3
    buffer = torch.full((rows * vocabulary + 128,), 1e30)
    buffer[64:-64] = inputs.normal(inputs.generator(7), rows * vocabulary)
    logits = buffer[64:-64].view(rows, vocabulary)
    sampling = inputs.make_sampling([{}, {"temperature": 0.0}, {"top_p": 0.9}], seed=1)
    tokens = torch.full((rows * count + 32,), -77, dtype=torch.int32)
    logprobs = torch.full((rows * count + 32,), -77.0)
    where = [each.data_ptr() + 16 * each.element_size() for each in (tokens, logprobs)]
    _native.sample_children(logits.data_ptr(), rows, vocabulary, native_sampling(sampling, rows), count, *where)
    for each in (tokens, logprobs):
        assert (each[:16] == -77).all() and (each[-16:] == -77).all()
    alone = cpu.sample_children(logits.clone(), sampling, count)
    assert torch.equal(tokens[16:-16].view(rows, count), alone.tokens)
    assert torch.equal(logprobs[16:-16].view(rows, count), alone.logprobs)
    assert inside(alone.tokens, vocabulary)


def inside(tokens: Tensor, vocabulary: int) -> bool:
    """All are ids or padding, and no row has one twice."""
    rows = [[token for token in row if token != -1] for row in tokens.tolist()]
    return all(len(set(row)) == len(row) and all(0 <= token < vocabulary for token in row) for row in rows)
