"""The law of short answers: how likely the target says each, by its own log-probabilities, and how often each came.

What the tests of distribution and `outrider verify` share. Answers are drawn among few tokens (`top_k`, or
`allowed_token_ids`), so that all of them can be listed.
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
LENGTH = 3  # tokens of an answer that count
# Which of them are counted together: each by itself, neighbours, all.
TOGETHER: tuple[tuple[int, ...], ...] = ((0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2))
MOST = 100  # log-probabilities that can be asked for


@dataclass
class SampledAnswers:
    counts: Counter[Text] = field(default_factory=Counter)
    spec_stats: SpecStats = field(default_factory=SpecStats)


def expected(llm: LLM, prompt: Sequence[int], params: SamplingParams) -> dict[Text, float]:
    """The probability of every answer, by plain decoding."""
    law: dict[Text, float] = {(): 1.0}
    for _ in range(LENGTH):
        found = followers(llm, [[*prompt, *text] for text in law], params)
        law = {
            (*text, token): chance * share
            for (text, chance), shares in zip(law.items(), found, strict=True)
            for token, share in shares.items()
        }
    return law


def followers(llm: LLM, texts: Sequence[Sequence[int]], params: SamplingParams) -> list[dict[int, float]]:
    """The target's distribution after each text, over the tokens that `params` leave."""
    allowed = params.allowed_token_ids
    asked = SamplingParams(max_tokens=1, temperature=0, logprobs=params.top_k or MOST, speculate=False)
    distributions = []
    for output in llm.generate(list(texts), asked):
        told = output.completions[0].logprobs
        assert told is not None, "they were asked for"
        listed = dict(told[0].top)
        chosen = listed if allowed is None else {token: listed[token] for token in allowed}
        weights = {token: math.exp(logprob / params.temperature) for token, logprob in chosen.items()}
        distributions.append({token: weight / sum(weights.values()) for token, weight in weights.items()})
    return distributions


def draw(llm: LLM, prompt: Sequence[int], params: SamplingParams, samples: int) -> SampledAnswers:
    """Answers of the engine as it is, each with a seed of its own.

    One token more than count: else there would be no room to draft the last one.
    """
    first = params.seed or 0
    each = [replace(params, max_tokens=LENGTH + 1, seed=first + n, ignore_eos=True) for n in range(samples)]
    drawn = SampledAnswers()
    for output in llm.generate([list(prompt)] * samples, each):
        drawn.counts[tuple(output.completions[0].token_ids[:LENGTH])] += 1
        if output.stats is not None:
            drawn.spec_stats.add(output.stats.speculation)
    return drawn


def comparisons(counts: Mapping[Text, int], law: Mapping[Text, float]) -> dict[tuple[int, ...], Comparison]:
    """By which of the tokens are looked at."""
    total = sum(counts.values())
    found: dict[tuple[int, ...], Comparison] = {}
    for places in TOGETHER:
        seen, meant = project(counts, places), project(law, places)
        texts = [*meant, *(text for text in seen if text not in meant)]
        found[places] = compare(
            torch.tensor([seen.get(text, 0.0) for text in texts]),
            torch.tensor([total * meant.get(text, 0.0) for text in texts], dtype=torch.float64),
        )
    return found


def project(weights: Mapping[Text, float], places: Sequence[int]) -> dict[Text, float]:
    """What the weights add up to where only these tokens are looked at."""
    found: dict[Text, float] = {}
    for text, weight in weights.items():
        part = tuple(text[place] for place in places if place < len(text))  # an answer that broke off has fewer
        found[part] = found.get(part, 0.0) + weight
    return found


SMALL = 5.0  # bins that expect fewer are merged
FALSE_ALARM = 1e-6  # how often counts that follow the law pass the threshold
POWER = 0.9  # how often a departure of the size that `detectable` names passes it


@dataclass(frozen=True)
class Comparison:
    statistic: float  # infinite where something came that cannot come
    freedom: int
    samples: float

    @property
    def threshold(self) -> float:
        return quantile(self.freedom)

    @property
    def excess(self) -> float:
        """Above 1 the law is broken."""
        return self.statistic / self.threshold

    @property
    def holds(self) -> bool:
        return self.excess < 1

    @property
    def detectable(self) -> float:
        """The total variation from which on any bias, however it is spread over the bins, fails with chance POWER.

        A law q with sum |q - p| = 2 d has sum (q - p)^2 / p >= (2 d)^2, by Cauchy and Schwarz, so the statistic's
        noncentrality is at least 4 d^2 samples. Moves within a merged bin are not seen. 1: nothing surely is.
        """
        return min(math.sqrt(noncentrality(self.freedom) / max(self.samples, 1)) / 2, 1.0)


def compare(counts: Tensor, expected: Tensor) -> Comparison:
    """Of any shape; both have the same total."""
    seen, meant = counts.flatten().double(), expected.flatten().double()
    samples = float(seen.sum())
    impossible = bool(seen[meant == 0].any())
    small = meant < SMALL
    rest = torch.stack([seen[small].sum(), meant[small].sum()])
    seen, meant = torch.cat([seen[~small], rest[:1]]), torch.cat([meant[~small], rest[1:]])
    seen, meant = seen[meant > 0], meant[meant > 0]
    found = math.inf if impossible else float(((seen - meant).square() / meant).sum())
    return Comparison(found, max(len(meant) - 1, 1), samples)


@cache
def quantile(freedom: int) -> float:
    """What the statistic passes with the chance of a false alarm."""
    return _root(lambda value: FALSE_ALARM - passing(freedom, 0.0, value), freedom)


@cache
def noncentrality(freedom: int) -> float:
    """samples * sum (q - p)^2 / p, from which on the statistic passes the threshold with chance POWER."""
    threshold = quantile(freedom)
    return _root(lambda value: passing(freedom, value, threshold) - POWER, threshold)


def passing(freedom: int, noncentrality: float, value: float) -> float:
    """The chance that a noncentral chi-square passes a value: a Poisson mixture of central ones."""
    mean = noncentrality / 2
    terms = torch.arange(int(mean + 12 * math.sqrt(mean) + 30), dtype=torch.float64)
    weights = torch.exp(terms * math.log(mean) - mean - torch.lgamma(terms + 1)) if mean else (terms == 0).double()
    tails = torch.special.gammaincc(terms + freedom / 2, torch.full_like(terms, value / 2))
    return float((weights * tails).sum())


def _root(rising: Callable[[float], float], start: float) -> float:
    """Where a function that rises from below 0 reaches it."""
    low, high = 0.0, max(start, 1.0)
    while rising(high) < 0:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return high
