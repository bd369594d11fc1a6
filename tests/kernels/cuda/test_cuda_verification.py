"""Verification on CUDA equals the reference token for token, with any padding."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, inf, nan

from carried import Carried
from outrider.kernels import SamplingMetadata, VerifyInputs, VerifyOutput, reference
from outrider.kernels.cases import CASES, inputs
from outrider.kernels.cases.case import Case, difference
from outrider.kernels.cases.verification import BUSH, CHAINS, TREES, make_drafts
from outrider.kernels.cuda import verification
from outrider.kernels.cuda.device import DEVICE, INTERPRETED
from outrider.kernels.reference.sampling import MAX_LOGIT, is_allowed, without_nan
from poison import GARBAGE

rejection = import_module("outrider.kernels.cuda.rejection")  # the package has an operation of that name
FOUND = SimpleNamespace(
    expand_sampling=verification.expand_sampling,
    verify_exact=verification.verify_exact,
    verify_synthetic=verification.verify_synthetic,
    verify_rejection=rejection.verify_rejection,
    sample=reference.sample,
)
OPS: Any = Carried(FOUND, DEVICE)
pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture
def quick_thresholds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take thresholds from the reference if the kernel for them, which has its own tests, is interpreted."""
    if INTERPRETED:
        monkeypatch.setattr(rejection, "find_thresholds", find_thresholds)


def find_thresholds(logits: Tensor, sampling: SamplingMetadata) -> tuple[Tensor, Tensor]:
    clean = without_nan(logits)
    warm = torch.where(sampling.temperature > 0, sampling.temperature, 1.0)
    chosen = is_allowed(clean, replace(sampling, temperature=warm))
    bits = torch.where(clean == 0, 0.0, clean.clamp(max=MAX_LOGIT)).view(torch.int32)
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    threshold = torch.where(chosen, keys, 2**31 - 1).amin(1)
    last = torch.where(chosen & (keys == threshold[:, None]), torch.arange(logits.shape[1]), -1).amax(1)
    return threshold.int(), last.int()


def same(found: VerifyOutput, meant: VerifyOutput) -> bool:
    names = [name for name, each in vars(meant).items() if each is not None]
    return all(torch.equal(getattr(found, name), getattr(meant, name)) for name in names)


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.op in ("expand_sampling", "verify_exact", "verify_synthetic")],
    ids=lambda case: f"{case.op}: {case.name}",
)
def test_cases_of_exact_and_synthetic_verification(case: Case) -> None:
    found, meant = case.build(OPS, 1), case.build(reference, 1)
    for items in (None, [case.items - 1, 0]):
        for part, expected in zip(found(items), meant(items), strict=True):
            assert difference(part, expected) == 0.0


SMALL = (
    "token, drawn, 4 of 100",
    "block, drawn, 4 of 100",
    "token, nonfinite, 4 of 100",
    "block, nonfinite, 4 of 100",
    "trees without replacement, nonfinite, 8 of 65",
    "trees with replacement, nonfinite, 8 of 65",
)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.op == "verify_rejection" and case.name in SMALL], ids=lambda case: case.name
)
def test_cases_of_rejection(case: Case) -> None:
    """With the thresholds that the kernel finds itself."""
    for part, expected in zip(case.build(OPS, 1)(None), case.build(reference, 1)(None), strict=True):
        assert difference(part, expected) == 0.0


def test_the_small_cases_exist() -> None:
    assert set(SMALL) <= {case.name for case in CASES}


def sampling_of(
    count: int, seed: int, settings: list[dict[str, float]] = inputs.REQUEST_SETTINGS, epochs: bool = True
) -> SamplingMetadata:
    sampling = inputs.make_sampling([settings[at % len(settings)] for at in range(count)], seed)
    return replace(sampling, epochs=sampling.positions // 3 + 1 if epochs else None)


def draw(
    trees: list[list[int]], vocabulary: int, seed: int, with_replacement: bool = False, noise: float = 0.8
) -> tuple[Tensor, VerifyInputs]:
    """Return logits [R, V] and drafts whose siblings are sampled from one distribution near the target's."""
    random = inputs.generator(seed)
    drafts = make_drafts(trees, [[-1] * len(each) for each in trees])
    logits = 2.5 * inputs.normal(random, len(drafts.tokens), vocabulary)
    blurred = logits + noise * inputs.normal(random, *logits.shape)
    draft_logits, tokens = blurred.clone(), drafts.tokens.clone()
    for first, tree in zip(drafts.starts.tolist(), trees, strict=False):
        for parent in set(tree) - {-1}:
            own = [first + row for row, each in enumerate(tree) if each == parent]
            draft_logits[own] = blurred[first + parent]
            count = len(own) if with_replacement else min(len(own), vocabulary)
            share = torch.softmax(blurred[first + parent], -1)
            tokens[own[:count]] = torch.multinomial(share, count, with_replacement, generator=random).int()
    return logits, replace(drafts, tokens=tokens, logits=draft_logits, drawn=torch.ones_like(tokens, dtype=torch.uint8))


def check(
    logits: Tensor,
    drafts: VerifyInputs,
    sampling: SamplingMetadata,
    block: bool = False,
    with_replacement: bool = False,
) -> VerifyOutput:
    """Expand `sampling` [B] to the rows, and check the result of both backends."""
    wide = reference.expand_sampling(sampling, drafts)
    meant = reference.verify_rejection(logits, drafts, wide, block, with_replacement)
    assert same(OPS.verify_rejection(logits, drafts, wide, block, with_replacement), meant)
    return meant


@pytest.mark.parametrize(
    ("trees", "vocabulary", "with_replacement"),
    [(TREES, 5, False), (TREES[3:], 33, True), ([BUSH, TREES[5]], 1500, False)],
)
def test_trees(quick_thresholds: None, trees: list[list[int]], vocabulary: int, with_replacement: bool) -> None:
    logits, drafts = draw(trees, vocabulary, 2, with_replacement)
    check(logits, drafts, sampling_of(len(trees), 2, epochs=vocabulary != 5), with_replacement=with_replacement)


def test_siblings_that_are_rejected_one_after_another(quick_thresholds: None) -> None:
    """Three children of one node, half of them at a temperature at which the first takes nearly all of q."""
    logits, drafts = draw([[-1, 0, 0, 0]] * 11, 12, 5, noise=3.0)
    children = check(logits, drafts, sampling_of(11, 5, [{"temperature": 0.15}, {"temperature": 1.3}])).rows[:, 1]
    assert set(children.tolist()) == {-1, 1, 2, 3}


def test_each_sibling_has_a_coin_of_its_own(quick_thresholds: None) -> None:
    """Two of three equally probable tokens are drafted, so that the coins alone decide."""
    drafts = make_drafts([[-1, 0, 0]] * 4, [[-1, 0, 1]] * 4)
    children = check(torch.zeros(12, 3), drafts, sampling_of(4, 4, [{}])).rows[:, 1]
    assert set(children.tolist()) == {-1, 1, 2}


def test_blocks_that_are_accepted_in_part(quick_thresholds: None) -> None:
    """The first token has covered two fifths of p, which changes what is left of p at the second."""
    count = 6
    logits = torch.tensor([[0.3, 0.3, 0.4], [0.5, 0.4, 0.1], [0.2, 0.3, 0.5]]).log().repeat(count, 1)
    draft_logits = torch.tensor([[1.0, 1.0, 1.0], [0.75, 0.15, 0.1], [0.02, 0.15, 0.83]]).log().repeat(count, 1)
    drafts = make_drafts([[-1, 0, 1]] * count, [[-1, 0, 2]] * count)
    drafts = replace(drafts, logits=draft_logits, drawn=torch.ones(3 * count, dtype=torch.uint8))
    assert set(check(logits, drafts, sampling_of(count, 9, [{}]), block=True).counts.tolist()) == {1, 2, 3}


@pytest.mark.parametrize("block", [False, True])
def test_a_residual_that_is_rounded_away_leaves_p(quick_thresholds: None, block: bool) -> None:
    """p and q are equal but for a banned token that q hardly ever draws, and has drawn."""
    logits = inputs.normal(inputs.generator(8), 1, 10).repeat(8, 1)
    draft_logits = logits.clone()
    logits[:, 4], draft_logits[:, 4] = -inf, -60.0
    drafts = make_drafts([[-1, 0]] * 4, [[-1, 4]] * 4)
    drafts = replace(drafts, logits=draft_logits, drawn=torch.ones(8, dtype=torch.uint8))
    found = check(logits, drafts, sampling_of(4, 8, [{}]), block)
    assert found.counts.tolist() == [1] * 4 and len(set(found.tokens[:, 0].tolist())) > 1


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("kind", ["certain", "mixed", "placeholders"])
def test_chains(quick_thresholds: None, block: bool, kind: str) -> None:
    chains = CHAINS[:4]
    logits, drafts = draw(chains, 60, 7)
    if kind == "certain":
        drafts = replace(drafts, logits=None, drawn=None)
    elif kind == "mixed":
        drafts.drawn[2::3] = 0  # type: ignore[index]
    else:
        drafts.tokens[4::7], drafts.tokens[6::11] = -1, 60
    check(logits, drafts, sampling_of(len(chains), 7), block)


@pytest.mark.parametrize("block", [False, True])
def test_drafts_with_q_equal_to_p_are_accepted(quick_thresholds: None, block: bool) -> None:
    chains = [[-1, 0, 1, 2]] * 3
    logits, drafts = draw(chains, 1030, 9, noise=0.0)
    assert check(logits, drafts, sampling_of(3, 9, [{"temperature": 0.7}]), block).counts.tolist() == [4, 4, 4]


@pytest.mark.parametrize("block", [False, True])
def test_infinite_and_nan_logits(quick_thresholds: None, block: bool) -> None:
    """Bans, rows that ban everything, infinite logits, NaN; in the target and in the draft."""
    chains = [[-1, 0, 1, 2]] * 7
    logits, drafts = draw(chains, 30, 11)
    assert drafts.logits is not None
    logits[:8, 3:] = -inf
    logits[9], logits[13] = -inf, nan
    logits[17, 4], logits[22, :9] = inf, nan
    drafts.logits[6, 2:], drafts.logits[18], drafts.logits[25, 1], drafts.logits[26] = -inf, -inf, inf, nan
    check(logits, drafts, sampling_of(7, 11, [{}, {"temperature": 0.0}, {"top_k": 4}]), block)


@pytest.mark.parametrize("block", [False, True])
def test_padding(quick_thresholds: None, block: bool) -> None:
    """Requests without rows keep nothing; rows without a request change nothing, whatever they hold."""
    trees = CHAINS[2:5] if block else [TREES[3], TREES[0], TREES[5]]
    logits, drafts = draw(trees, 20, 13)
    sampling = sampling_of(len(trees), 13)
    meant = check(logits, drafts, sampling, block)
    assert drafts.logits is not None and drafts.drawn is not None
    longer = replace(
        drafts,
        starts=torch.cat([drafts.starts, drafts.starts[-1:], drafts.starts[-1:]]),
        tokens=pad(drafts.tokens, 3, GARBAGE),
        parents=pad(drafts.parents, 3, GARBAGE),
        logits=pad(drafts.logits, 3, nan),
        drawn=pad(drafts.drawn, 3, 1),
    )
    wide = OPS.expand_sampling(sampling_of(len(trees) + 2, 13), longer)
    rows = len(drafts.tokens)
    for name, each in vars(reference.expand_sampling(sampling, drafts)).items():
        assert not isinstance(each, Tensor) or torch.equal(getattr(wide, name)[:rows], each)
    assert wide.temperature[rows:].tolist() == [0.0] * 3 and wide.positions[rows:].tolist() == [0] * 3
    sampled = reference.sample(pad(logits, 3, 0.0), wide)
    assert_padded(OPS.verify_rejection(pad(logits, 3, nan), longer, wide, block), meant)
    assert_padded(OPS.verify_exact(sampled, longer), reference.verify_exact(sampled[:rows], drafts))
    rates = torch.tensor([0.7] * drafts.width)
    forced = reference.verify_synthetic(sampled[:rows], drafts, rates, reference.expand_sampling(sampling, drafts))
    assert_padded(OPS.verify_synthetic(sampled, longer, rates, wide), forced)


def pad(values: Tensor, count: int, junk: float) -> Tensor:
    return torch.cat([values, torch.full((count, *values.shape[1:]), junk, dtype=values.dtype)])


def assert_padded(found: VerifyOutput, meant: VerifyOutput) -> None:
    assert torch.equal(found.tokens, pad(meant.tokens, 2, -1)) and torch.equal(found.rows, pad(meant.rows, 2, -1))
    assert torch.equal(found.counts, pad(meant.counts, 2, 0))


def test_random_trees_match() -> None:
    """Up to 64 rows a request, few ids, so that many drafts are right and siblings repeat each other."""
    random = inputs.generator(17)
    trees = []
    for _ in range(12):
        rows = int(torch.randint(1, 65, (1,), generator=random))
        trees.append([-1, *[int(torch.randint(0, row, (1,), generator=random)) for row in range(1, rows)]])
    drafts = make_drafts(
        trees, [[-1, *torch.randint(0, 2, (len(tree) - 1,), generator=random).tolist()] for tree in trees]
    )
    drafts.tokens[9::17] = -1
    sampled = torch.randint(0, 2, drafts.tokens.shape, dtype=torch.int32, generator=random)
    meant = reference.verify_exact(sampled, drafts)
    assert same(OPS.verify_exact(sampled, drafts), meant) and int(meant.counts.max()) > 3
    sampling = sampling_of(len(trees), 17)
    wide, expected = OPS.expand_sampling(sampling, drafts), reference.expand_sampling(sampling, drafts)
    assert torch.equal(wide.positions, expected.positions) and torch.equal(wide.seeds, expected.seeds)


def test_too_few_rates_are_refused() -> None:
    drafts = make_drafts([[-1, 0, 1]], [[-1, 4, 5]])
    sampling = reference.expand_sampling(sampling_of(1, 1), drafts)
    with pytest.raises(AssertionError, match="1 rates cannot serve drafts of 2 tokens"):
        OPS.verify_synthetic(drafts.tokens, drafts, torch.tensor([0.5]), sampling)
