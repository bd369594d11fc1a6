"""sample() follows the truncated softmax, and its noise does not depend on the batch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from outrider.kernels import Kernels, SamplingMetadata, cpu, philox
from outrider.kernels.cases import inputs

LOGITS = [1.0, -0.5, 2.0, 2.0, 0.3, -3.0, 1.4, 0.0, -torch.inf, 1.9]
SETTINGS: list[dict[str, float]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 3},
    {"top_k": 1},
    {"top_p": 0.8},
    {"top_p": 0.3},
    {"min_p": 0.4},
    {"top_k": 6, "top_p": 0.75, "temperature": 1.5},
    {"top_p": 0.95, "min_p": 0.35, "temperature": 0.8},
]


def kept(settings: dict[str, float]) -> dict[int, float]:
    """The tokens that may be drawn, with their probabilities, by the words of the protocol."""
    temperature = settings.get("temperature", 1.0)
    order = sorted(range(len(LOGITS)), key=lambda token: (-LOGITS[token], token))
    order = order[: int(settings.get("top_k", 0)) or None]
    weights = {token: math.exp(LOGITS[token] / temperature) for token in order}
    total, reached, left = sum(weights.values()), 0.0, []
    for token in order:
        if settings.get("top_p", 1.0) == 1 or reached < settings["top_p"] * total:
            left.append(token)
        reached += weights[token]
    floor = settings.get("min_p", 0.0) * weights[order[0]]
    left = [token for token in left if weights[token] >= floor and weights[token] > 0]
    total = sum(weights[token] for token in left)
    return {token: weights[token] / total for token in left}


def draw(ops: Kernels, settings: dict[str, float], count: int) -> Tensor:
    """One seed at `count` positions: [count]."""
    sampling = inputs.make_sampling([settings] * count, seed=0)
    sampling = SamplingMetadata(
        **{**vars(sampling), "seeds": torch.full((count,), 77), "positions": torch.arange(count, dtype=torch.int32)}
    )
    return ops.sample(torch.tensor(LOGITS).repeat(count, 1), sampling)


def limit(freedom: int) -> float:
    """The value that chi-square exceeds once in ten thousand (Wilson and Hilferty's approximation)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_samples_follow_the_truncated_softmax(ops: Kernels, settings: dict[str, float]) -> None:
    count = 20_000
    tokens = draw(ops, settings, count)
    assert tokens.dtype == torch.int32
    expected = kept(settings)
    seen = torch.bincount(tokens, minlength=len(LOGITS)).tolist()
    assert {token for token, times in enumerate(seen) if times} <= set(expected)
    statistic = sum((seen[token] - count * share) ** 2 / (count * share) for token, share in expected.items())
    assert statistic <= (limit(len(expected) - 1) if len(expected) > 1 else 0)


def test_chi_square_detects_a_wrong_temperature() -> None:
    tokens = draw(cpu, {"temperature": 1.2}, 20_000)
    seen = torch.bincount(tokens, minlength=len(LOGITS)).tolist()
    expected = kept({})
    assert sum((seen[t] - 20_000 * share) ** 2 / (20_000 * share) for t, share in expected.items()) > limit(8)


def test_a_seed_draws_the_same_tokens_in_any_batch(ops: Kernels) -> None:
    random = inputs.generator(5)
    logits = 3 * inputs.normal(random, 40, 333)  # [R, V]
    rows: list[dict[str, float]] = [{}, {"top_k": 9}, {"top_p": 0.6}, {"temperature": 0.0}]
    sampling = inputs.make_sampling(rows * 10, seed=8)
    whole = ops.sample(logits, sampling)
    for order in (torch.randperm(40, generator=random).tolist(), [11], list(range(5, 22))):
        assert torch.equal(ops.sample(logits[order], sampling.take(order)), whole[order])


def test_seed_and_position_both_change_the_noise(ops: Kernels) -> None:
    flat = torch.zeros(64, 500)
    sampling = inputs.make_sampling([{}] * 64, seed=1)
    fixed = torch.zeros(64, dtype=torch.int32)
    by_seed = ops.sample(flat, SamplingMetadata(**{**vars(sampling), "positions": fixed}))
    by_position = ops.sample(flat, SamplingMetadata(**{**vars(sampling), "seeds": fixed.long()}))
    neither = ops.sample(flat, SamplingMetadata(**{**vars(sampling), "seeds": fixed.long(), "positions": fixed}))
    assert len(set(by_seed.tolist())) > 40
    assert len(set(by_position.tolist())) > 40
    assert len(set(neither.tolist())) == 1


def test_streams_and_epochs_change_the_noise(ops: Kernels) -> None:
    """The words are those of philox.gumbel, whatever the keys."""
    flat, everything = torch.zeros(64, 500), torch.arange(500)
    sampling = inputs.make_sampling([{}] * 64, seed=1)
    epochs = torch.arange(64, dtype=torch.int32) * 1000 - 7
    drawn = []
    for stream in (philox.TARGET, philox.DRAFT, philox.RESIDUAL):
        for keys in (None, epochs):
            tokens = ops.sample(flat, replace(sampling, stream=stream, epochs=keys))
            at = torch.zeros(64, dtype=torch.int32) if keys is None else keys
            noise = philox.gumbel(sampling.seeds[:, None], sampling.positions[:, None], everything, stream, at[:, None])
            assert torch.equal(tokens, noise.argmax(-1).int())
            drawn.append(tuple(tokens.tolist()))
    assert len(set(drawn)) == 6
    assert torch.equal(ops.sample(flat, replace(sampling, epochs=epochs * 0)), ops.sample(flat, sampling))


def test_rows_of_nan_stay_in_range(ops: Kernels) -> None:
    logits = torch.full((4, 77), torch.nan)
    logits[2:, 3] = 1.0
    sampling = inputs.make_sampling([{}, {"temperature": 0.0}, {"top_p": 0.5}, {"temperature": 0.0}], seed=1)
    tokens = ops.sample(logits, sampling).tolist()
    assert all(0 <= token < 77 for token in tokens) and tokens[2:] == [3, 3]


def test_greedy_takes_the_lowest_id_among_equals(ops: Kernels) -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [-torch.inf] * 4, [-torch.inf, -torch.inf, -9.0, -torch.inf]])
    sampling = inputs.make_sampling([{"temperature": 0.0}] * 3, seed=0)
    assert ops.sample(logits, sampling).tolist() == [1, 0, 2]
