"""Sibling drafts keep the target's distribution: by enumeration of the maths, and by chi-square of the kernels."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from backends import every_kernels
from laws.tables import PAIRS, Table, Text, continued, distribution, largest_error, random_table
from outrider.diagnostics.distribution import compare
from outrider.kernels import Kernels, SamplingMetadata, VerifyInputs, philox
from outrider.kernels.cases import inputs
from outrider.kernels.reference.verification import attempt, without

OPS = pytest.mark.parametrize("ops", every_kernels())
REPLACEMENT = pytest.mark.parametrize(
    "with_replacement", [False, True], ids=["without replacement", "with replacement"]
)
# The children of a node in order: drawn, or certain (the most probable unused token of a third table).
SIBLINGS = {
    "one": ["drawn"],
    "two": ["drawn", "drawn"],
    "three": ["drawn"] * 3,
    "certain": ["certain"] * 2,
    "certain first": ["certain", "drawn", "drawn"],
    "certain between": ["drawn", "certain", "drawn"],
    "certain last": ["drawn", "drawn", "certain"],
}
THIRD = random_table(99, 4)


class Siblings:
    """The distribution of the tokens of one step with a tree of such siblings, and the mean number accepted."""

    def __init__(self, p: Table, q: Table, children: list[str], depth: int, with_replacement: bool) -> None:
        self.p, self.q, self.children, self.depth, self.with_replacement = p, q, children, depth, with_replacement
        self.probs: dict[Text, float] = {}
        self.mean = 0.0
        self.visit((), 1.0)

    def visit(self, text: Text, probability: float) -> None:
        self.mean += probability if text else 0.0
        left, known = self.p(text), [0.0] * len(self.p(text))
        self.attempt(
            text, probability, left, torch.tensor(known) > 0, 0 if len(text) < self.depth else len(self.children)
        )

    def attempt(self, text: Text, probability: float, left: Tensor, taken: Tensor, index: int) -> None:
        """Try every token for child `index`; `taken` [V] bool: the tokens of drawn siblings."""
        drawn = self.proposals(text, taken, index)
        if not float(drawn.sum()):  # no child, or no token left for it: a placeholder
            for token, share in enumerate(left.tolist()):
                self.probs[*text, token] = self.probs.get((*text, token), 0.0) + probability * share
            return
        certain = self.children[index] == "certain"
        for token in drawn.nonzero()[:, 0].tolist():
            share = probability * float(drawn[token])
            kept, rest = attempt(left, drawn, torch.tensor(token))
            if float(kept):
                self.visit((*text, token), share * float(kept))
            gone = taken.clone()
            gone[token] |= not certain and not self.with_replacement
            if float(kept) < 1:
                self.attempt(text, share * (1 - float(kept)), rest, gone, index + 1)

    def proposals(self, text: Text, taken: Tensor, index: int) -> Tensor:
        if index == len(self.children):
            return torch.zeros(len(taken))
        if self.children[index] == "drawn":
            return without(self.q(text), taken)
        order = THIRD(text)[: len(taken)].argsort(descending=True)
        rank = self.children[:index].count("certain") % len(taken)
        return torch.nn.functional.one_hot(order[rank], len(taken)).double()


SINGLE = torch.ones(1, dtype=torch.float64)
TABLES = {**PAIRS, "one token": (lambda _: SINGLE, lambda _: SINGLE)}


@REPLACEMENT
@pytest.mark.parametrize("siblings", SIBLINGS)
@pytest.mark.parametrize("name", TABLES)
def test_emitted_tokens_have_the_targets_joint_distribution(name: str, siblings: str, with_replacement: bool) -> None:
    p, q = TABLES[name]
    depth = 1 if len(SIBLINGS[siblings]) > 2 else 2
    observed = Siblings(p, q, SIBLINGS[siblings], depth, with_replacement)
    assert sum(observed.probs.values()) == pytest.approx(1, abs=1e-12)
    assert largest_error(observed.probs, p, depth + 1) < 1e-12


def test_deep_and_wide_trees_have_the_targets_joint_distribution() -> None:
    p, q = PAIRS["three tokens"]
    observed = Siblings(p, q, ["drawn", "certain", "drawn"], 2, with_replacement=False)
    assert largest_error(observed.probs, p, 3) < 1e-12


@pytest.mark.parametrize("siblings", ["two", "certain between"])
def test_the_enumeration_detects_siblings_verified_with_the_wrong_probs(
    siblings: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawn without replacement, verified as if drawn from all of q."""
    p, q = random_table(58, 6), random_table(59, 6)
    honest = attempt
    monkeypatch.setitem(
        globals(), "attempt", lambda left, drawn, token: honest(left, q(()) if drawn.max() < 1 else drawn, token)
    )
    assert largest_error(Siblings(p, q, SIBLINGS[siblings], 1, with_replacement=False).probs, p, 2) > 1e-3


@pytest.mark.parametrize("seed", range(30, 36))
def test_more_siblings_raise_acceptance_most_without_replacement(seed: int) -> None:
    p, q = random_table(seed, 4), random_table(seed + 100, 4)
    one, two = (Siblings(p, q, ["drawn"] * count, 1, with_replacement=False).mean for count in (1, 2))
    with_replacement = Siblings(p, q, ["drawn"] * 2, 1, with_replacement=True).mean
    assert one == pytest.approx(float(torch.minimum(p(()), q(())).sum()), abs=1e-12)
    assert one < with_replacement < two


def test_certain_siblings_are_accepted_with_their_target_probability() -> None:
    p, q = PAIRS["random"]
    best = THIRD(()).argsort(descending=True)[:2]
    assert Siblings(p, q, ["certain"] * 2, 1, with_replacement=False).mean == pytest.approx(
        float(p(())[best].sum()), abs=1e-12
    )


# The kernels: siblings at two depths, so that three tokens are compared.
VOCABULARY, POSITION, EPOCH = 5, 11, 9
# By `distribution.noncentrality` 200 requests show siblings that are verified with the wrong replacement in the joint
# distribution with probability 0.9, and 5000 in the second token alone.
REQUESTS = 5_000
TARGETS = [1.3 * inputs.normal(inputs.generator(20 + depth), *[VOCABULARY] * (depth + 1)) for depth in (0, 1, 2)]
DRAFTS = [TARGETS[depth] + 1.5 * inputs.normal(inputs.generator(30 + depth), *TARGETS[depth].shape) for depth in (0, 1)]
SETTINGS: dict[str, dict[str, float]] = {
    "plain": {"temperature": 1.0},
    "top-k": {"temperature": 0.8, "top_k": 3},
    "top-p": {"temperature": 1.2, "top_p": 0.8},
}


def draw(
    ops: Kernels, logits: Tensor, sampling: SamplingMetadata, children: list[str], with_replacement: bool
) -> Tensor:
    """Return the siblings of each row [N, children]; certain ones are the third and fourth most probable tokens."""
    free = replace(sampling, top_k=torch.zeros_like(sampling.top_k), top_p=torch.ones_like(sampling.top_p))
    free = replace(free, stream=philox.DRAFT)
    count = children.count("drawn")
    drawn = ops.sample_children(logits, free, max(count, 1)).tokens
    if with_replacement:
        drawn = torch.stack(
            [ops.sample(logits, replace(free, stream=free.stream + 256 * index)) for index in range(3)], 1
        )
    certain = logits.argsort(-1, descending=True)[:, 2:].int()
    left = {"drawn": list(drawn.unbind(1)), "certain": list(certain.unbind(1))}
    return torch.stack([left[kind].pop(0) for kind in children], 1)


def speculate(
    ops: Kernels, settings: dict[str, float], children: list[str], with_replacement: bool, verified: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Return three tokens of each of N requests [N, 3] and how many of them one speculative step emitted [N]."""
    count, size = REQUESTS, len(children)
    sampling = inputs.make_sampling([settings], seed=0).take([0] * count)
    position = torch.full((count,), POSITION, dtype=torch.int32)
    sampling = replace(
        sampling, seeds=torch.arange(count) + 10**9, positions=position, epochs=position - POSITION + EPOCH
    )
    first = draw(ops, DRAFTS[0].repeat(count, 1), sampling, children, with_replacement)  # [N, size]
    later = replace(sampling, positions=position + 1)
    second = torch.stack(
        [draw(ops, DRAFTS[1][own.long()], later, children, with_replacement) for own in first.unbind(1)], 1
    )
    one = first.long()
    owner = one.repeat_interleave(size, 1)  # [N, size * size]
    two = second.reshape(count, -1).long()
    tree = torch.tensor([-1, *[0] * size, *[1 + index // size for index in range(size * size)]], dtype=torch.int32)
    flags = torch.tensor([kind == "drawn" for kind in ["drawn", *children * (size + 1)]], dtype=torch.uint8)
    drafts = VerifyInputs(
        starts=len(tree) * torch.arange(count + 1, dtype=torch.int32),
        tokens=torch.cat([torch.full((count, 1), -1), one, two], 1).int().flatten(),
        parents=tree.repeat(count),
        width=len(tree) - 1,
        logits=_rows(DRAFTS[0].expand(count, 1 + size, -1), DRAFTS[1][owner]),
        drawn=flags.repeat(count),
    )
    logits = _rows(TARGETS[0].expand(count, 1, -1), TARGETS[1][one], TARGETS[2][owner, two])
    kept = ops.verify_rejection(
        logits, drafts, ops.expand_sampling(sampling, drafts), False, with_replacement if verified is None else verified
    )
    return continued(ops, kept, TARGETS, sampling), kept.counts


def _rows(*columns: Tensor) -> Tensor:
    """Join columns [N, rows, V] request by request: [R, V]."""
    return torch.cat(columns, 1).reshape(-1, VOCABULARY).contiguous()


def check(tokens: Tensor, counts: Tensor, settings: dict[str, float]) -> None:
    """Compare the joint of three tokens, and each token given that the step emitted it."""
    probs = [
        torch.stack([distribution(row, settings) for row in table.reshape(-1, VOCABULARY)]).reshape(table.shape)
        for table in TARGETS
    ]
    triple = probs[0][:, None, None] * probs[1][..., None] * probs[2]  # [V, V, V]
    seen = torch.zeros(3, VOCABULARY, VOCABULARY, VOCABULARY, dtype=torch.float64)
    for least in range(3):
        one, two, three = tokens[counts > least].long().unbind(1)
        seen[least].view(-1).index_add_(
            0, (one * VOCABULARY + two) * VOCABULARY + three, torch.ones(len(one), dtype=torch.float64)
        )
    comparisons = [(seen[0], len(tokens) * triple)]
    comparisons.append((seen[1].sum(2), seen[1].sum((1, 2))[:, None] * probs[1]))
    comparisons.append((seen[2], seen[2].sum(2, keepdim=True) * probs[2]))
    for observed, expected in comparisons:
        assert compare(observed, expected).holds


@OPS
@REPLACEMENT
@pytest.mark.parametrize("siblings", ["two", "certain between"])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_kernels_keep_the_targets_distribution(
    ops: Kernels, name: str, siblings: str, with_replacement: bool
) -> None:
    settings = SETTINGS[name]
    tokens, counts = speculate(ops, settings, SIBLINGS[siblings], with_replacement)
    check(tokens, counts, settings)
    if siblings == "two":
        p, q = distribution(TARGETS[0], settings), distribution(DRAFTS[0], {"temperature": settings["temperature"]})
        share = Siblings(lambda _: p, lambda _: q, SIBLINGS[siblings], 1, with_replacement).mean
        assert abs(float((counts > 1).double().mean()) - share) < 4 * math.sqrt(share * (1 - share) / len(counts))


@OPS
@REPLACEMENT
def test_siblings_verified_with_the_wrong_replacement_are_detected(ops: Kernels, with_replacement: bool) -> None:
    """Drawn one way, verified the other."""
    tokens, counts = speculate(
        ops, SETTINGS["plain"], SIBLINGS["three"], with_replacement, verified=not with_replacement
    )
    with pytest.raises(AssertionError, match=r"\.holds"):
        check(tokens, counts, SETTINGS["plain"])
