"""Small distributions of a target and of a draft, after each text, and the error of a law against the target's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from outrider.kernels import Kernels, SamplingMetadata, VerifyOutput
from outrider.kernels.cases import inputs

Text = tuple[int, ...]
Table = Callable[[Text], Tensor]  # the distribution after a text: [V] f64


def random_table(seed: int, vocabulary: int, zeros: float = 0.0) -> Table:
    """A distribution for each text; about `zeros` of its entries are 0."""
    known: dict[Text, Tensor] = {}

    def table(text: Text) -> Tensor:
        if text not in known:
            random = inputs.generator(hash((seed, text)) % 2**31)
            weights = torch.rand(vocabulary, generator=random, dtype=torch.float64) + 0.02
            weights[torch.rand(vocabulary, generator=random) < zeros] = 0
            weights[int(torch.randint(vocabulary, (1,), generator=random))] += 0.3
            known[text] = weights / weights.sum()
        return known[text]

    return table


def certain(table: Table) -> Table:
    return lambda text: torch.nn.functional.one_hot(table(text).argmax(), len(table(text))).double()


def halves(first: bool, vocabulary: int = 4) -> Table:
    """All mass on one half of the ids."""
    side = torch.arange(vocabulary) < vocabulary // 2
    return lambda text: (
        torch.where(side == first, 1.0 + len(text), 0.0).double() / ((side == first).sum() * (1 + len(text)))
    )


def constant(*shares: float) -> Table:
    return lambda _: torch.tensor(shares, dtype=torch.float64)


def largest_error(law: dict[Text, float], p: Table, length: int) -> float:
    """Of the joint law of the first `length` tokens, where plain decoding goes on after what was emitted."""
    vocabulary, worst = len(p(())), 0.0
    for text in product(range(vocabulary), repeat=length):
        steps = [float(p(text[:at])[text[at]]) for at in range(length)]
        found = sum(law.get(text[:cut], 0.0) * math.prod(steps[cut:]) for cut in range(1, length + 1))
        worst = max(worst, abs(found - math.prod(steps)))
    return worst


def distribution(logits: Tensor, settings: dict[str, float]) -> Tensor:
    """By the words of the protocol: [V] f64."""
    order = sorted(range(len(logits)), key=lambda token: (-float(logits[token]), token))
    order = order[: int(settings.get("top_k", 0)) or None]
    weights = {token: math.exp(float(logits[token]) / settings["temperature"]) for token in order}
    total, reached, out = sum(weights.values()), 0.0, torch.zeros(len(logits), dtype=torch.float64)
    for token in order:
        if reached < settings.get("top_p", 1.0) * total:
            out[token] = weights[token]
        reached += weights[token]
    return out / out.sum()


PAIRS: dict[str, tuple[Table, Table]] = {
    "random": (random_table(1, 4), random_table(2, 4)),
    "three tokens": (random_table(3, 3), random_table(4, 3)),
    "zeros in q": (random_table(5, 4), random_table(6, 4, 0.5)),
    "zeros in p": (random_table(7, 4, 0.5), random_table(8, 4)),
    "zeros in both": (random_table(9, 4, 0.5), random_table(10, 4, 0.5)),
    "p is q": (random_table(11, 4), random_table(11, 4)),
    "disjoint": (halves(True), halves(False)),
    "one-hot q": (random_table(12, 4), certain(random_table(13, 4))),
    "one-hot p": (certain(random_table(14, 4)), random_table(15, 4)),
}


def continued(ops: Kernels, kept: VerifyOutput, targets: Sequence[Tensor], choice: SamplingMetadata) -> Tensor:
    """What a step kept and what plain decoding then says after it: [N, len(targets)] int32.

    targets: the logits of each place, by all tokens before it. choice: of the first place.
    """
    tokens = kept.tokens[:, : len(targets)].clone()
    for depth in range(1, len(targets)):
        before = tokens[:, :depth].long().unbind(1)
        more = ops.sample(targets[depth][before], replace(choice, epochs=None, positions=choice.positions + depth))
        tokens[:, depth] = torch.where(kept.counts > depth, tokens[:, depth], more)
    return tokens
