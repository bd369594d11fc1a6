"""The law of short answers: how likely the target says each, by its own log-probabilities, and how often each came.

What the tests of distribution and `outrider verify` share. Answers are drawn among few tokens (`top_k`, or
`allowed_token_ids`), so that all of them can be listed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ..llm import LLM
from ..types import SamplingParams, SpecStats
from .chi_square import Comparison, compare

Text = tuple[int, ...]
LENGTH = 3  # tokens of an answer that count
# Which of them are counted together: each by itself, neighbours, all.
TOGETHER: tuple[tuple[int, ...], ...] = ((0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2))
MOST = 100  # log-probabilities that can be asked for


@dataclass
class Drawn:
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


def draw(llm: LLM, prompt: Sequence[int], params: SamplingParams, samples: int) -> Drawn:
    """Answers of the engine as it is, each with a seed of its own.

    One token more than count: else there would be no room to draft the last one.
    """
    first = params.seed or 0
    each = [replace(params, max_tokens=LENGTH + 1, seed=first + n, ignore_eos=True) for n in range(samples)]
    drawn = Drawn()
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
