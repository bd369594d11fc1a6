"""Test whether sampled answers follow the target's distribution: Pearson's chi-square over short answers.

`outrider verify` and the tests of the sampling distribution share this module. Answers are sampled among few tokens
(`top_k` or `allowed_token_ids`), so that every answer and its probability can be listed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import Tensor

from ..llm import LLM
from ..types import SamplingParams, SpecStats

Text = tuple[int, ...]
LENGTH = 3  # tokens of an answer that are compared
# Positions whose joint distribution is compared: single tokens, neighbors, the whole answer.
POSITION_SETS: tuple[tuple[int, ...], ...] = ((0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2))
MAX_LOGPROBS = 100  # the most log-probabilities that a request may ask for

MIN_EXPECTED = 5.0  # bins with a lower expected count are merged: below, the chi-square approximation is poor
FALSE_ALARM = 1e-6  # probability that counts of the right distribution exceed the threshold
POWER = 0.9  # probability that a bias of the size `detectable` exceeds the threshold


@dataclass
class SampledAnswers:
    counts: Counter[Text] = field(default_factory=Counter)
    spec_stats: SpecStats = field(default_factory=SpecStats)


def expected(llm: LLM, prompt: Sequence[int], params: SamplingParams) -> dict[Text, float]:
    """Return the probability of every answer under plain decoding."""
    probs: dict[Text, float] = {(): 1.0}
    for _ in range(LENGTH):
        following = next_token_probs(llm, [[*prompt, *text] for text in probs], params)
        probs = {
            (*text, token): prob * next_prob
            for (text, prob), next_probs in zip(probs.items(), following, strict=True)
            for token, next_prob in next_probs.items()
        }
    return probs


def next_token_probs(llm: LLM, texts: Sequence[Sequence[int]], params: SamplingParams) -> list[dict[int, float]]:
    """Return the target's distribution after each text, over the tokens that `params` allow."""
    allowed = params.allowed_token_ids
    request = SamplingParams(max_tokens=1, temperature=0, logprobs=params.top_k or MAX_LOGPROBS, speculate=False)
    distributions = []
    for output in llm.generate(list(texts), request):
        logprobs = output.completions[0].logprobs
        assert logprobs is not None, "the request asks for them"
        listed = dict(logprobs[0].top)
        chosen = listed if allowed is None else {token: listed[token] for token in allowed}
        weights = {token: math.exp(logprob / params.temperature) for token, logprob in chosen.items()}
        distributions.append({token: weight / sum(weights.values()) for token, weight in weights.items()})
    return distributions


def draw(llm: LLM, prompt: Sequence[int], params: SamplingParams, samples: int) -> SampledAnswers:
    """Sample answers from the engine as it is configured, each with its own seed, or without one if `params` has none.

    One token more than `LENGTH` is generated: otherwise the last compared token could not be drafted.
    """
    longer = replace(params, max_tokens=LENGTH + 1, ignore_eos=True)
    requests = [longer if params.seed is None else replace(longer, seed=params.seed + n) for n in range(samples)]
    sampled = SampledAnswers()
    for output in llm.generate([list(prompt)] * samples, requests):
        sampled.counts[tuple(output.completions[0].token_ids[:LENGTH])] += 1
        if output.stats is not None:
            sampled.spec_stats.add(output.stats.speculation)
    return sampled


def comparisons(counts: Mapping[Text, int], probs: Mapping[Text, float]) -> dict[tuple[int, ...], Comparison]:
    """Compare counts with probabilities, once for each set of positions."""
    total = sum(counts.values())
    results: dict[tuple[int, ...], Comparison] = {}
    for positions in POSITION_SETS:
        seen, wanted = marginal(counts, positions), marginal(probs, positions)
        texts = [*wanted, *(text for text in seen if text not in wanted)]
        results[positions] = compare(
            torch.tensor([seen.get(text, 0.0) for text in texts]),
            torch.tensor([total * wanted.get(text, 0.0) for text in texts], dtype=torch.float64),
        )
    return results


def marginal(weights: Mapping[Text, float], positions: Sequence[int]) -> dict[Text, float]:
    """Sum the weights of all texts that agree at `positions`."""
    sums: dict[Text, float] = {}
    for text, weight in weights.items():
        part = tuple(text[index] for index in positions if index < len(text))  # an aborted answer is shorter
        sums[part] = sums.get(part, 0.0) + weight
    return sums


@dataclass(frozen=True)
class Comparison:
    statistic: float  # infinite if an answer of probability 0 was seen
    freedom: int
    samples: float

    @property
    def threshold(self) -> float:
        return quantile(self.freedom)

    @property
    def excess(self) -> float:
        """Return the statistic relative to its threshold: above 1 the distribution is wrong."""
        return self.statistic / self.threshold

    @property
    def holds(self) -> bool:
        return self.excess < 1

    @property
    def detectable(self) -> float:
        """Return the total variation from which on any bias fails the test with probability `POWER`.

        A distribution q with sum |q - p| = 2 d has sum (q - p)^2 / p >= (2 d)^2 (Cauchy-Schwarz), so the statistic's
        noncentrality is at least 4 d^2 samples. Shifts within a merged bin are not detected. 1: no bias surely fails.
        """
        return min(math.sqrt(noncentrality(self.freedom) / max(self.samples, 1)) / 2, 1.0)


def compare(counts: Tensor, expected: Tensor) -> Comparison:
    """Compare counts with expected counts of the same shape and total."""
    seen, wanted = counts.flatten().double(), expected.flatten().double()
    samples = float(seen.sum())
    impossible = bool(seen[wanted == 0].any())
    small = wanted < MIN_EXPECTED
    merged = torch.stack([seen[small].sum(), wanted[small].sum()])
    seen, wanted = torch.cat([seen[~small], merged[:1]]), torch.cat([wanted[~small], merged[1:]])
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    statistic = math.inf if impossible else float(((seen - wanted).square() / wanted).sum())
    return Comparison(statistic, max(len(wanted) - 1, 1), samples)


@cache
def quantile(freedom: int) -> float:
    """Return the value that a chi-square statistic exceeds with probability `FALSE_ALARM`."""
    return _root(lambda value: FALSE_ALARM - passing(freedom, 0.0, value), freedom)


@cache
def noncentrality(freedom: int) -> float:
    """Return samples * sum (q - p)^2 / p at which the statistic exceeds the threshold with probability `POWER`."""
    threshold = quantile(freedom)
    return _root(lambda value: passing(freedom, value, threshold) - POWER, threshold)


def passing(freedom: int, noncentrality: float, value: float) -> float:
    """Return the probability that a noncentral chi-square exceeds `value`, as a Poisson mixture of central ones."""
    mean = noncentrality / 2
    terms = torch.arange(int(mean + 12 * math.sqrt(mean) + 30), dtype=torch.float64)
    weights = torch.exp(terms * math.log(mean) - mean - torch.lgamma(terms + 1)) if mean else (terms == 0).double()
    tails = torch.special.gammaincc(terms + freedom / 2, torch.full_like(terms, value / 2))
    return float((weights * tails).sum())


def _root(rising: Callable[[float], float], start: float) -> float:
    """Find the root of an increasing function that is negative at 0."""
    low, high = 0.0, max(start, 1.0)
    while rising(high) < 0:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return high
