"""Thresholds of top-k, top-p and min-p on CUDA keep the tokens that the reference keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor, inf, nan

from outrider.kernels import SamplingMetadata
from outrider.kernels.cases import inputs
from outrider.kernels.cuda import thresholds
from outrider.kernels.cuda.device import DEVICE, INTERPRETED
from outrider.kernels.cuda.thresholds import BLOCK, POOL, find_thresholds, is_kept
from outrider.kernels.reference import sampling as reference_sample

LLAMA = 128_256  # the vocabulary of Llama 3: no multiple of a split


@triton.jit
def _mask(logits, thresholds, last_ids, mask, vocabulary, padded: tl.constexpr):
    row, token = tl.program_id(0), tl.arange(0, padded)
    logit = tl.load(logits + row * vocabulary + token, mask=token < vocabulary, other=0.0)
    kept = is_kept(logit, token, tl.load(thresholds + row), tl.load(last_ids + row))
    tl.store(mask + row * vocabulary + token, kept.to(tl.uint8), mask=token < vocabulary)


def check_limits(logits: Tensor, settings: list[dict[str, float]]) -> None:
    """Tokens of logit -inf are never drawn: whether they are kept does not matter."""
    sampling = inputs.make_sampling(settings, seed=0)
    clean = reference_sample.without_nan(logits)
    keys, last_ids = find_thresholds(logits.to(DEVICE), index(sampling))
    mask = torch.empty(logits.shape, dtype=torch.uint8, device=DEVICE)
    rows, vocabulary = logits.shape
    padded = triton.next_power_of_2(vocabulary)
    _mask[(rows,)](clean.to(DEVICE), keys, last_ids, mask, vocabulary, padded=padded)
    alive = clean > -inf
    for row, setting in enumerate(settings):
        meant = reference_sample.is_allowed(clean[row : row + 1], sampling.take([row]))[0]
        assert torch.equal(mask[row].bool().cpu() & alive[row], meant & alive[row]), setting


def index(sampling: SamplingMetadata) -> SamplingMetadata:
    return replace(
        sampling, **{name: value.to(DEVICE) for name, value in vars(sampling).items() if isinstance(value, Tensor)}
    )


RULES: list[dict[str, float]] = [
    {"top_k": 3},
    {"top_k": 2060, "temperature": 0.4},
    {"top_p": 0.0},
    {"top_p": 0.5, "temperature": 5.0},
    {"top_p": 0.9999999, "temperature": 1e-3},
    {"min_p": 0.05},
    {"min_p": 1.5},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.02, "temperature": 2.0},
]


KINDS = ("plain", "ties", "equal", "banned", "infinite", "nan", "nothing")


@pytest.mark.filterwarnings("ignore:overflow")  # the exponent of a weight that is 0
@pytest.mark.parametrize(
    ("kind", "vocabulary"), [*((kind, 65) for kind in KINDS), ("plain", 1), ("ties", 4500), ("equal", 2100)]
)
def test_the_threshold_is_the_references(kind: str, vocabulary: int) -> None:
    random = inputs.generator(vocabulary)
    logits = 3 * inputs.normal(random, len(RULES), vocabulary)  # [R, V]
    scattered = torch.rand(logits.shape, generator=random) < 0.3
    if kind == "ties":
        logits = logits.round()
    if kind == "equal":
        logits = logits * 0  # of both signs
    if kind == "banned":
        logits[:, 5:] = -inf
    if kind == "infinite":
        logits[scattered], logits[0], logits[1] = inf, inf, logits[1] * 1e38
    if kind == "nan":
        logits[scattered] = nan
    if kind == "nothing":
        logits[:] = -inf
    check_limits(logits, RULES)


def test_neutral_parameters_keep_all_tokens() -> None:
    logits = inputs.normal(inputs.generator(1), 5, 33)
    settings: list[dict[str, float]] = [
        {},
        {"temperature": 0.0, "top_k": 2},
        {"top_k": 33},
        {"top_k": 99},
        {"top_k": -1},
    ]
    keys, _ = find_thresholds(logits.to(DEVICE), index(inputs.make_sampling(settings, seed=0)))
    assert (keys == -(2**31)).all()


def normal(seed: int, rows: int, vocabulary: int, deviation: float) -> Tensor:
    return deviation * inputs.normal(inputs.generator(seed), rows, vocabulary)


@pytest.mark.parametrize("deviation", [0.05, 1.0])
def test_a_flat_row_has_a_nucleus_of_many_tokens(deviation: float) -> None:
    """It holds about 50,000 tokens at a deviation of 1."""
    check_limits(normal(1, 1, LLAMA, deviation), [{"top_p": 0.72}])


@pytest.mark.skipif(not INTERPRETED, reason="a compiled kernel cannot be patched")
@pytest.mark.parametrize("deviation", [0.05, 1.0, 3.0])
def test_the_bins_of_the_threshold_fit_into_the_pool(deviation: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search over the whole row gives the same thresholds, a hundred times slower."""
    monkeypatch.setattr(thresholds, "_search_row", None)
    rules: list[dict[str, float]] = [{"top_p": 0.5}, {"top_p": 0.95}, {"top_k": 50}, {"top_k": 5000, "top_p": 0.9}]
    check_limits(normal(1, 4, LLAMA, deviation), rules)


@pytest.mark.parametrize("shift", [-50.0, 0.0, 1e4])
def test_the_zero_crossing_of_keys_does_not_matter(shift: float) -> None:
    rules: list[dict[str, float]] = [{"top_p": 0.4}, {"top_p": 0.999}, {"top_k": 3000}, {"top_k": 9000, "top_p": 0.5}]
    check_limits(normal(2, 4, 3 * BLOCK - 77, 1.0) + shift, rules)


def test_a_peak_above_many_tokens() -> None:
    logits = normal(3, 3, 2 * BLOCK, 1.0)
    logits[:, 5000] = torch.tensor([6.0, 9.0, 30.0])
    check_limits(logits, [{"top_p": 0.95}] * 3)


@pytest.mark.filterwarnings("ignore:overflow")  # the exponent of a weight that is 0
def test_outliers_leave_the_threshold() -> None:
    logits = normal(4, 3, 2 * BLOCK, 1.0)
    logits[:, ::3], logits[:, 5] = -1e9, -3e38
    check_limits(logits, [{"top_k": 2500}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.9}])


@pytest.mark.parametrize("count", [1, BLOCK + 1, 9001])
def test_equal_logits_are_kept_by_id(count: int) -> None:
    logits = torch.full((5, 9001), -2.5)
    shares = [{"top_p": (count - 0.5) / 9001}, {"top_p": 0.25}, {"top_k": count, "top_p": 0.5}, {"top_k": POOL + 9}]
    check_limits(logits, [{"top_k": count}, *shares])


def test_a_nucleus_that_ends_inside_a_tie() -> None:
    """Weights are powers of 2, so that sums are exact: 1 + 4096 / 2 + 8192 / 4 at a temperature of 1 / ln 2."""
    logits = torch.full((4, 1 + BLOCK + 2 * BLOCK), -2.0)
    logits[:, 5000], logits[:, 1 : 2 * BLOCK : 2] = 0.0, -1.0
    logits[:, 5001] = -2.0
    logits[:, 8191] = -1.0
    total = torch.exp2(logits[0].double()).sum().item()
    goals = [1 / total, 1.5 / total, 1000.75 / total, 3000.25 / total]
    settings = [{"top_p": goal, "temperature": 1.4426950408889634} for goal in goals]
    check_limits(logits, settings)


def test_more_tokens_than_the_pool_holds() -> None:
    rules: list[dict[str, float]] = [
        {"top_k": POOL + 1},
        {"top_k": 7000},
        {"top_k": POOL - 3, "top_p": 0.9},
        {"top_k": 5000, "top_p": 0.9, "min_p": 0.03},
        {"top_k": 300, "top_p": 0.9, "min_p": 0.2},
        {"top_p": 0.9, "min_p": 0.02},
    ]
    check_limits(normal(5, 6, 2 * BLOCK + 5, 1.0), rules)
    check_limits(normal(6, 6, 2 * BLOCK + 5, 1.0).round(), rules)


@pytest.mark.parametrize("vocabulary", [1, 7, BLOCK + 1])
def test_few_allowed_tokens(vocabulary: int) -> None:
    """As a grammar leaves them: fewer than top-k, one, none."""
    rules: list[dict[str, float]] = [{"top_k": 50}, {"top_p": 0.9}, {"top_k": 3, "top_p": 0.6, "min_p": 0.1}]
    for allowed in (0, 1, 5):
        logits = torch.full((3, vocabulary), -inf)
        ids = torch.randperm(vocabulary, generator=inputs.generator(allowed))[:allowed]
        logits[:, ids] = normal(8, 3, len(ids), 2.0)
        check_limits(logits, rules)


def test_thresholds_do_not_depend_on_the_batch() -> None:
    rules: list[dict[str, float]] = [{"top_p": 0.9}, {"top_k": 40, "top_p": 0.7, "temperature": 0.7}, {}]
    settings = [rules[row % 3] for row in range(17)]
    logits = normal(9, 17, BLOCK + 300, 1.0).to(DEVICE)
    whole = find_thresholds(logits, index(inputs.make_sampling(settings, seed=0)))
    for rows in ([0], [1], [16, 1, 3]):
        sampling = index(inputs.make_sampling([settings[row] for row in rows], seed=0))
        part = find_thresholds(logits[rows], sampling)
        assert all(torch.equal(some, every[rows]) for some, every in zip(part, whole, strict=True))
