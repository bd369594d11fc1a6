"""Several guesses after one token: by enumeration of the maths, and by chi-square of the operations."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from backends import every_kernels
from laws.tables import PAIRS, Table, Text, continued, distribution, largest_error, random_table
from outrider.diagnostics.distribution import compare
from outrider.kernels import Kernels, SamplingMetadata, VerifyInputs, cpu, philox
from outrider.kernels.cases import inputs
from outrider.kernels.reference.verification import attempt, without

OPS = pytest.mark.parametrize("ops", every_kernels())
AGAIN = pytest.mark.parametrize("again", [False, True], ids=["without replacement", "with replacement"])
# The children of a node, in order: drawn, or certain (the likeliest of a third table that no sibling is).
FAMILIES = {
    "one": ["drawn"],
    "two": ["drawn", "drawn"],
    "three": ["drawn"] * 3,
    "certain": ["certain"] * 2,
    "certain first": ["certain", "drawn", "drawn"],
    "certain between": ["drawn", "certain", "drawn"],
    "certain last": ["drawn", "drawn", "certain"],
}
THIRD = random_table(99, 4)


class Family:
    """The law of what one step emits with a tree of such families, and the mean number of kept guesses."""

    def __init__(self, p: Table, q: Table, children: list[str], depth: int, again: bool) -> None:
        self.p, self.q, self.children, self.depth, self.again = p, q, children, depth, again
        self.law: dict[Text, float] = {}
        self.mean = 0.0
        self.visit((), 1.0)

    def visit(self, text: Text, chance: float) -> None:
        self.mean += chance if text else 0.0
        left, known = self.p(text), [0.0] * len(self.p(text))
        self.attempt(text, chance, left, torch.tensor(known) > 0, 0 if len(text) < self.depth else len(self.children))

    def attempt(self, text: Text, chance: float, left: Tensor, taken: Tensor, turn: int) -> None:
        """Child number `turn`, with every token that it may be; `taken` [V] bool: those of siblings that were drawn."""
        drawn = self.proposals(text, taken, turn)
        if not float(drawn.sum()):  # no child, or nothing left that it could be: a placeholder
            for token, share in enumerate(left.tolist()):
                self.law[*text, token] = self.law.get((*text, token), 0.0) + chance * share
            return
        certain = self.children[turn] == "certain"
        for token in drawn.nonzero()[:, 0].tolist():
            share = chance * float(drawn[token])
            kept, rest = attempt(left, drawn, torch.tensor(token))
            if float(kept):
                self.visit((*text, token), share * float(kept))
            gone = taken.clone()
            gone[token] |= not certain and not self.again
            if float(kept) < 1:
                self.attempt(text, share * (1 - float(kept)), rest, gone, turn + 1)

    def proposals(self, text: Text, taken: Tensor, turn: int) -> Tensor:
        if turn == len(self.children):
            return torch.zeros(len(taken))
        if self.children[turn] == "drawn":
            return without(self.q(text), taken)
        order = THIRD(text)[: len(taken)].argsort(descending=True)
        place = self.children[:turn].count("certain") % len(taken)
        return torch.nn.functional.one_hot(order[place], len(taken)).double()


SINGLE = torch.ones(1, dtype=torch.float64)
TABLES = {**PAIRS, "one token": (lambda _: SINGLE, lambda _: SINGLE)}


@AGAIN
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", TABLES)
def test_emitted_tokens_have_the_targets_joint_law(name: str, family: str, again: bool) -> None:
    p, q = TABLES[name]
    depth = 1 if len(FAMILIES[family]) > 2 else 2
    found = Family(p, q, FAMILIES[family], depth, again)
    assert sum(found.law.values()) == pytest.approx(1, abs=1e-12)
    assert largest_error(found.law, p, depth + 1) < 1e-12


def test_deep_and_wide_trees_have_the_targets_joint_law() -> None:
    p, q = PAIRS["three tokens"]
    found = Family(p, q, ["drawn", "certain", "drawn"], 2, again=False)
    assert largest_error(found.law, p, 3) < 1e-12


@pytest.mark.parametrize("family", ["two", "certain between"])
def test_the_enumeration_sees_siblings_that_come_back(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn without replacement, taken as if drawn from the whole of q."""
    p, q = random_table(58, 6), random_table(59, 6)
    honest = attempt
    monkeypatch.setitem(
        globals(), "attempt", lambda left, drawn, token: honest(left, q(()) if drawn.max() < 1 else drawn, token)
    )
    assert largest_error(Family(p, q, FAMILIES[family], 1, again=False).law, p, 2) > 1e-3


@pytest.mark.parametrize("seed", range(30, 36))
def test_more_siblings_keep_more_and_most_without_replacement(seed: int) -> None:
    p, q = random_table(seed, 4), random_table(seed + 100, 4)
    one, two = (Family(p, q, ["drawn"] * count, 1, again=False).mean for count in (1, 2))
    again = Family(p, q, ["drawn"] * 2, 1, again=True).mean
    assert one == pytest.approx(float(torch.minimum(p(()), q(())).sum()), abs=1e-12)
    assert one < again < two


def test_certain_siblings_keep_what_they_cover() -> None:
    p, q = PAIRS["random"]
    best = THIRD(()).argsort(descending=True)[:2]
    assert Family(p, q, ["certain"] * 2, 1, again=False).mean == pytest.approx(float(p(())[best].sum()), abs=1e-12)


# The operations themselves: two levels of siblings, so that three tokens are compared.
VOCABULARY, POSITION, EPOCH = 5, 11, 9
TARGETS = [1.3 * inputs.normal(inputs.generator(20 + depth), *[VOCABULARY] * (depth + 1)) for depth in (0, 1, 2)]
GUESSES = [
    TARGETS[depth] + 1.5 * inputs.normal(inputs.generator(30 + depth), *TARGETS[depth].shape) for depth in (0, 1)
]
SETTINGS: dict[str, dict[str, float]] = {
    "plain": {"temperature": 1.0},
    "top-k": {"temperature": 0.8, "top_k": 3},
    "top-p": {"temperature": 1.2, "top_p": 0.8},
}


def draw(ops: Kernels, logits: Tensor, choice: SamplingMetadata, children: list[str], again: bool) -> Tensor:
    """The siblings of each row: [N, children]. Certain ones are the third and the fourth likeliest, say."""
    free = replace(choice, top_k=torch.zeros_like(choice.top_k), top_p=torch.ones_like(choice.top_p))
    free = replace(free, stream=philox.DRAFT)
    count = children.count("drawn")
    drawn = ops.sample_children(logits, free, max(count, 1)).tokens
    if again:
        drawn = torch.stack([ops.sample(logits, replace(free, stream=free.stream + 256 * at)) for at in range(3)], 1)
    certain = logits.argsort(-1, descending=True)[:, 2:].int()
    left = {"drawn": list(drawn.unbind(1)), "certain": list(certain.unbind(1))}
    return torch.stack([left[kind].pop(0) for kind in children], 1)


def speculate(
    ops: Kernels, settings: dict[str, float], children: list[str], again: bool, verified: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Three tokens of each of N requests [N, 3], and how many of them one step of speculation gave [N]."""
    count, size = 40_000 if ops is cpu else 10_000, len(children)
    choice = inputs.make_sampling([settings], seed=0).take([0] * count)
    position = torch.full((count,), POSITION, dtype=torch.int32)
    choice = replace(choice, seeds=torch.arange(count) + 10**9, positions=position, epochs=position - POSITION + EPOCH)
    first = draw(ops, GUESSES[0].repeat(count, 1), choice, children, again)  # [N, size]
    later = replace(choice, positions=position + 1)
    second = torch.stack([draw(ops, GUESSES[1][own.long()], later, children, again) for own in first.unbind(1)], 1)
    one = first.long()
    owner = one.repeat_interleave(size, 1)  # [N, size * size]
    two = second.reshape(count, -1).long()
    tree = torch.tensor([-1, *[0] * size, *[1 + at // size for at in range(size * size)]], dtype=torch.int32)
    flags = torch.tensor([kind == "drawn" for kind in ["drawn", *children * (size + 1)]], dtype=torch.uint8)
    drafts = VerifyInputs(
        starts=len(tree) * torch.arange(count + 1, dtype=torch.int32),
        tokens=torch.cat([torch.full((count, 1), -1), one, two], 1).int().flatten(),
        parents=tree.repeat(count),
        width=len(tree) - 1,
        logits=_rows(GUESSES[0].expand(count, 1 + size, -1), GUESSES[1][owner]),
        drawn=flags.repeat(count),
    )
    logits = _rows(TARGETS[0].expand(count, 1, -1), TARGETS[1][one], TARGETS[2][owner, two])
    kept = ops.verify_rejection(
        logits, drafts, ops.expand_sampling(choice, drafts), False, again if verified is None else verified
    )
    return continued(ops, kept, TARGETS, choice), kept.counts


def _rows(*columns: Tensor) -> Tensor:
    """[N, rows, V] each, request by request: [R, V]."""
    return torch.cat(columns, 1).reshape(-1, VOCABULARY).contiguous()


def check(tokens: Tensor, counts: Tensor, settings: dict[str, float]) -> None:
    """The joint of three, and each token given that the step emitted it."""
    laws = [
        torch.stack([distribution(row, settings) for row in table.reshape(-1, VOCABULARY)]).reshape(table.shape)
        for table in TARGETS
    ]
    triple = laws[0][:, None, None] * laws[1][..., None] * laws[2]  # [V, V, V]
    seen = torch.zeros(3, VOCABULARY, VOCABULARY, VOCABULARY, dtype=torch.float64)
    for least in range(3):
        one, two, three = tokens[counts > least].long().unbind(1)
        seen[least].view(-1).index_add_(
            0, (one * VOCABULARY + two) * VOCABULARY + three, torch.ones(len(one), dtype=torch.float64)
        )
    comparisons = [(seen[0], len(tokens) * triple)]
    comparisons.append((seen[1].sum(2), seen[1].sum((1, 2))[:, None] * laws[1]))
    comparisons.append((seen[2], seen[2].sum(2, keepdim=True) * laws[2]))
    for found, meant in comparisons:
        assert compare(found, meant).holds


@OPS
@AGAIN
@pytest.mark.parametrize("family", ["two", "certain between"])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_operations_keep_the_targets_law(ops: Kernels, name: str, family: str, again: bool) -> None:
    settings = SETTINGS[name]
    tokens, counts = speculate(ops, settings, FAMILIES[family], again)
    check(tokens, counts, settings)
    if family == "two":
        p, q = distribution(TARGETS[0], settings), distribution(GUESSES[0], {"temperature": settings["temperature"]})
        share = Family(lambda _: p, lambda _: q, FAMILIES[family], 1, again).mean
        assert abs(float((counts > 1).double().mean()) - share) < 4 * math.sqrt(share * (1 - share) / len(counts))


@OPS
@AGAIN
def test_the_wrong_kind_of_siblings_is_seen(ops: Kernels, again: bool) -> None:
    """Drawn one way, verified the other."""
    tokens, counts = speculate(ops, SETTINGS["plain"], FAMILIES["three"], again, verified=not again)
    with pytest.raises(AssertionError):
        check(tokens, counts, SETTINGS["plain"])
