"""Rejection sampling on trees: order of siblings, residuals, placeholders, independence of rows."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from outrider.kernels import Kernels, SamplingMetadata, VerifyInputs, VerifyOutput, cpu, philox, reference
from outrider.kernels.cases import inputs
from outrider.kernels.cases.verification import BUSH, TREES, make_drafts
from outrider.kernels.cpu import _native
from outrider.kernels.cpu.sampling import native_drafts, native_sampling

AGAIN = pytest.mark.parametrize("with_replacement", [False, True], ids=["without", "with"])
COUNT = 200


def sampling_for(drafts: VerifyInputs, seed: int = 0, **settings: float) -> SamplingMetadata:
    """A choice for each logit row."""
    sampling = inputs.make_sampling([settings] * (len(drafts.starts) - 1), seed)
    return cpu.expand_sampling(replace(sampling, epochs=sampling.positions + 3), drafts)


def draw(trees: list[list[int]], vocabulary: int, seed: int = 1, noise: float = 1.0) -> tuple[Tensor, VerifyInputs]:
    """Logits [R, V] and drafts, siblings drawn without replacement; placeholders where the vocabulary is too small."""
    random = inputs.generator(seed)
    drafts = make_drafts(trees, [[-1] * len(each) for each in trees])
    logits = 2 * inputs.normal(random, len(drafts.tokens), vocabulary)
    blurred = logits + noise * inputs.normal(random, *logits.shape)
    parents = drafts.parents.clamp(min=0) + torch.repeat_interleave(drafts.starts[:-1], drafts.starts.diff())
    tokens, children = drafts.tokens.clone(), dict[int, list[int]]()
    for row, parent in enumerate(parents.tolist()):
        children.setdefault(parent, []).extend([row] if drafts.parents[row] >= 0 else [])
    for parent, rows in children.items():
        some = rows[:vocabulary]
        if some:
            tokens[some] = torch.multinomial(blurred[parent].softmax(-1), len(some), generator=random).int()
    drawn = torch.ones(len(tokens), dtype=torch.uint8)
    return logits, replace(drafts, tokens=tokens, logits=blurred[parents.long()], drawn=drawn)


def same(found: VerifyOutput, meant: VerifyOutput) -> bool:
    names = ["tokens", "rows", "counts"]
    if meant.nonfinite is not None:  # exact verification has none
        names.append("nonfinite")
    return all(torch.equal(getattr(found, name), getattr(meant, name)) for name in names)


def plain(ops: Kernels, logits: Tensor, sampling: SamplingMetadata) -> Tensor:
    return ops.sample(logits, replace(sampling, epochs=None, stream=philox.TARGET))


@AGAIN
@pytest.mark.parametrize("drawn", [True, False])
def test_a_tree_of_one_branch_equals_the_chain(ops: Kernels, with_replacement: bool, drawn: bool) -> None:
    """A second child that is a placeholder is never tried, but makes a tree of the chain."""
    logits, drafts = draw([[-1, 0, 1, 2, 0]] * COUNT, 150)
    drafts.tokens[4::5] = -1
    if not drawn:
        drafts = replace(drafts, logits=None, drawn=None)
    tree = ops.verify_rejection(
        logits, drafts, sampling_for(drafts, temperature=0.8, top_p=0.95), False, with_replacement
    )
    rows = [row for row in range(5 * COUNT) if row % 5 < 4]
    chains = make_drafts([[-1, 0, 1, 2]] * COUNT, drafts.tokens[rows].view(COUNT, 4).tolist())
    if drafts.logits is not None and drafts.drawn is not None:
        chains = replace(chains, logits=drafts.logits[rows], drawn=drafts.drawn[rows])
    chain = ops.verify_rejection(
        logits[rows], chains, sampling_for(chains, temperature=0.8, top_p=0.95), False, with_replacement
    )
    assert torch.equal(tree.tokens[:, :4], chain.tokens) and torch.equal(tree.rows[:, :4], chain.rows)
    assert torch.equal(tree.counts, chain.counts)
    assert set(chain.counts.tolist()) == ({1, 2, 3, 4} if drawn else {1, 2})


@AGAIN
@pytest.mark.parametrize("drawn", [True, False])
def test_greedy_rows_are_verified_exactly(ops: Kernels, with_replacement: bool, drawn: bool) -> None:
    logits, drafts = draw([*TREES, BUSH] * 20, 4)
    sampling = sampling_for(drafts, temperature=0.0)
    drafts = drafts if drawn else replace(drafts, logits=None, drawn=None)
    meant = ops.verify_exact(ops.sample(logits, sampling), drafts)
    assert same(ops.verify_rejection(logits, drafts, sampling, False, with_replacement), meant)
    assert int(meant.counts.max()) > 3


@cache
def random_trees(seed: int, noise: float) -> tuple[Tensor, VerifyInputs]:
    logits, drafts = draw([TREES[3], TREES[5], BUSH] * 60, 130, seed, noise)
    assert drafts.drawn is not None
    drafts.drawn[::5] = 0
    drafts.tokens[17::31] = -1
    return logits, drafts


@cache
def expected_on_random_trees(seed: int, noise: float, settings: str, with_replacement: bool) -> VerifyOutput:
    """Return the reference's output, once for all levels."""
    logits, drafts = random_trees(seed, noise)
    sampling = sampling_for(drafts, seed, **SETTINGS[settings])
    return reference.verify_rejection(logits, drafts, sampling, False, with_replacement)


SETTINGS: dict[str, dict[str, float]] = {
    "plain": {},
    "top-k": {"temperature": 0.6, "top_k": 20},
    "top-p, min-p": {"temperature": 1.5, "top_p": 0.9, "min_p": 0.01},
}


@AGAIN
def test_backends_agree_on_many_random_trees(level: str, with_replacement: bool) -> None:
    for seed, noise in enumerate((0.0, 0.5, 2.0)):
        logits, drafts = random_trees(seed, noise)
        for name, settings in SETTINGS.items():
            sampling = sampling_for(drafts, seed, **settings)
            meant = expected_on_random_trees(seed, noise, name, with_replacement)
            assert same(cpu.verify_rejection(logits, drafts, sampling, False, with_replacement), meant)
            assert len(set(meant.counts.tolist())) > 2


def test_an_accepted_later_sibling_continues_its_branch(ops: Kernels) -> None:
    """The first child is impossible, the second certain; so is the child of the second."""
    drafts = make_drafts([[-1, 0, 0, 1, 2]], [[-1, 3, 5, 5, 7]])
    logits = torch.full((5, 9), -torch.inf)
    logits[[0, 1, 2, 3, 4], [5, 5, 7, 1, 2]] = 0.0
    draft_logits = torch.zeros(5, 9)
    certain = ops.verify_rejection(logits, drafts, sampling_for(drafts), False)
    drawn = replace(drafts, logits=draft_logits, drawn=torch.ones(5, dtype=torch.uint8))
    for kept in (
        certain,
        *(
            ops.verify_rejection(logits, drawn, sampling_for(drafts), False, with_replacement)
            for with_replacement in (False, True)
        ),
    ):
        assert kept.tokens.tolist() == [[5, 7, 2, -1, -1]]
        assert kept.rows.tolist() == [[0, 2, 4, -1, -1]]
        assert kept.counts.tolist() == [3]


def test_coins_are_keyed_by_the_child(ops: Kernels) -> None:
    """Certain children: child j is kept when its coin is at most its part of what is left."""
    drafts = make_drafts([[-1, 0, 0, 0, 0, 0]] * COUNT, [[-1, 0, 1, 2, 3, 4]] * COUNT)
    sampling = sampling_for(drafts, seed=5)
    first = sampling.take(slice(0, None, 6))
    assert first.epochs is not None
    coins = [
        philox.uniform(first.seeds, first.positions, torch.tensor(child), philox.ACCEPT, first.epochs)
        for child in range(5)
    ]
    passed = torch.stack([coin <= 1 / (8 - child) for child, coin in enumerate(coins)], 1)  # [N, 5]
    meant = torch.where(passed.any(1), passed.int().argmax(1), -1)
    kept = ops.verify_rejection(torch.zeros(6 * COUNT, 8), drafts, sampling, False)
    assert torch.equal(torch.where(kept.counts == 2, kept.tokens[:, 0], -1), meant.int())
    assert len(set(meant.tolist())) == 6
    assert (kept.tokens[kept.counts == 1, 0] >= 5).all()  # what was rejected does not come out


@pytest.mark.parametrize("placeholder", [-1, 20])
def test_a_placeholder_ends_the_siblings(ops: Kernels, placeholder: int) -> None:
    logits, drafts = draw([[-1, 0, 0, 0, 1]] * COUNT, 20)
    tokens = drafts.tokens.view(COUNT, 5).clone()
    tokens[:, 2] = placeholder
    sampling = sampling_for(drafts)
    ended = ops.verify_rejection(logits, replace(drafts, tokens=tokens.flatten()), sampling, False)
    tokens[:, 3] = placeholder  # what stands behind it does not matter
    assert same(ended, ops.verify_rejection(logits, replace(drafts, tokens=tokens.flatten()), sampling, False))
    assert set(ended.rows[:, 1].tolist()) == {-1, 1}
    tokens[:, 1] = placeholder  # no child at all: the target's own choice
    none = ops.verify_rejection(logits, replace(drafts, tokens=tokens.flatten()), sampling, False)
    assert none.counts.tolist() == [1] * COUNT
    assert torch.equal(none.tokens[:, 0], plain(ops, logits, sampling)[::5])


@AGAIN
def test_a_fully_accepted_path_ends_with_the_targets_token(ops: Kernels, with_replacement: bool) -> None:
    logits, drafts = draw([TREES[3]] * COUNT, 60, noise=0.3)
    sampling = sampling_for(drafts)
    kept, own = (
        ops.verify_rejection(logits, drafts, sampling, False, with_replacement),
        plain(ops, logits, sampling).view(COUNT, 7),
    )
    whole = (kept.counts == 3).nonzero()[:, 0]
    assert len(whole) > COUNT // 4
    last = kept.rows[whole, 2].long()
    assert torch.equal(kept.tokens[whole, 2], own[whole, last])


@AGAIN
def test_a_first_child_with_q_equal_to_p_is_accepted(ops: Kernels, with_replacement: bool) -> None:
    logits, drafts = draw([TREES[3]] * COUNT, 500, noise=0.0)
    kept = ops.verify_rejection(logits, drafts, sampling_for(drafts), False, with_replacement)
    assert kept.counts.tolist() == [3] * COUNT
    assert (kept.rows[:, 1] == 1).all() and (kept.rows[:, 2] == 3).all()


def test_siblings_after_a_dominant_token_keep_their_precision(level: str) -> None:
    """Without replacement q of the second is what the first leaves, however little that is."""
    vocabulary = 300
    drafts = make_drafts([[-1, 0, 0]] * COUNT, [[-1, 7, 1 + at % 5] for at in range(COUNT)])
    logits = inputs.normal(inputs.generator(3), 3 * COUNT, vocabulary)
    logits[:, 7] = -torch.inf
    draft_logits = logits + inputs.normal(inputs.generator(4), 3 * COUNT, vocabulary)
    draft_logits[:, 7] = 100.0
    drafts = replace(drafts, logits=draft_logits, drawn=torch.ones(3 * COUNT, dtype=torch.uint8))
    sampling = sampling_for(drafts)
    found, meant = (each.verify_rejection(logits, drafts, sampling, False) for each in (cpu, reference))
    assert same(found, meant)
    assert 10 < int((meant.rows[:, 1] == 2).sum()) < COUNT - 10


@AGAIN
@pytest.mark.parametrize("hurt", ["target", "draft", "both"])
def test_rows_of_nan_stay_in_range(ops: Kernels, with_replacement: bool, hurt: str) -> None:
    logits, drafts = draw([BUSH] * 40, 50)
    assert drafts.logits is not None
    if hurt != "draft":
        logits[::3] = torch.nan
    if hurt != "target":
        drafts.logits[1::3] = torch.nan
    for temperature in (0.0, 1.0):
        kept = ops.verify_rejection(
            logits, drafts, sampling_for(drafts, temperature=temperature), False, with_replacement
        )
        filled = torch.arange(16) < kept.counts[:, None]
        assert ((kept.tokens >= 0) == filled).all() and (kept.tokens < 50).all()
        assert ((kept.rows >= 0) == filled).all()


@AGAIN
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_children_of_nonfinite_distributions_are_ignored(ops: Kernels, with_replacement: bool, wrong: float) -> None:
    """Siblings with another distribution are tried as if they were alone."""
    logits, drafts = draw([[-1, 0, 0, 0, 1, 2, 3]] * COUNT, 60)
    assert drafts.logits is not None
    drafts.logits[1::7, 59] = wrong  # the first child, and by that its own child
    kept = ops.verify_rejection(logits, drafts, sampling_for(drafts), False, with_replacement)
    alone = [row for row in range(7 * COUNT) if row % 7 not in (1, 4)]
    without = replace(
        make_drafts([[-1, 0, 0, 1, 2]] * COUNT, [[-1] * 5] * COUNT),
        tokens=drafts.tokens[alone],
        logits=drafts.logits[alone],
        drawn=torch.ones(5 * COUNT, dtype=torch.uint8),
    )
    meant = ops.verify_rejection(logits[alone], without, sampling_for(without), False, with_replacement)
    assert torch.equal(kept.tokens[:, :3], meant.tokens[:, :3]) and torch.equal(kept.counts, meant.counts)
    assert kept.nonfinite is not None and kept.nonfinite.tolist() == [1] * COUNT
    assert set(kept.counts.tolist()) == {1, 2, 3}


def test_banned_rows_give_token_0(ops: Kernels) -> None:
    drafts = make_drafts([[-1, 0, 0], [-1, 0, 0]], [[-1, 1, 2], [-1, 0, 1]])
    drawn = replace(drafts, logits=torch.zeros(6, 9), drawn=torch.ones(6, dtype=torch.uint8))
    for each in (drafts, drawn):
        kept = ops.verify_rejection(torch.full((6, 9), -torch.inf), each, sampling_for(drafts), False)
        assert kept.tokens[:, 0].tolist() == [0, 0] and kept.counts.tolist() == [1, 1]


def test_more_siblings_than_tokens(ops: Kernels) -> None:
    """A vocabulary of one: the first is kept; of two, the second is certain once the first is rejected."""
    for vocabulary in (1, 2):
        drafts = make_drafts([[-1, 0, 0, 0]] * COUNT, [[-1, 0, vocabulary - 1, -1]] * COUNT)
        random = inputs.normal(inputs.generator(2), 2, 4 * COUNT, vocabulary)
        drafts = replace(drafts, logits=random[0].contiguous(), drawn=torch.ones(4 * COUNT, dtype=torch.uint8))
        kept = ops.verify_rejection(random[1].contiguous(), drafts, sampling_for(drafts), False)
        assert kept.counts.tolist() == [2] * COUNT
        assert set(kept.rows[:, 1].tolist()) == ({1} if vocabulary == 1 else {1, 2})


@pytest.mark.parametrize("vocabulary", [1, 15, 63, 65, 4097])
def test_nothing_is_read_or_written_outside(level: str, vocabulary: int) -> None:
    """Huge logits stand before and after the target's and the draft's, and around the results is a mark."""
    logits, drafts = draw([BUSH, TREES[3], TREES[0]] * 3, vocabulary)
    assert drafts.logits is not None
    sampling = sampling_for(drafts)
    buffers = [torch.full((logits.numel() + 128,), 1e30) for _ in range(2)]
    for buffer, values in zip(buffers, (logits, drafts.logits), strict=True):
        buffer[64:-64] = values.flatten()
    inner, draft_logits = (buffer[64:-64].view_as(logits) for buffer in buffers)
    meant = cpu.verify_rejection(logits, drafts, sampling, False)
    columns = drafts.width + 1
    results = [torch.full((9 * size + 32,), -77, dtype=torch.int32) for size in (columns, columns, 1, 1)]
    _native.verify_rejection(
        inner.data_ptr(),
        vocabulary,
        native_drafts(replace(drafts, logits=draft_logits), vocabulary),
        native_sampling(sampling, len(logits)),
        False,
        False,
        *[each.data_ptr() + 64 for each in results],
    )
    for each, whole in zip(results, (meant.tokens, meant.rows, meant.counts, meant.nonfinite), strict=True):
        assert (each[:16] == -77).all() and (each[-16:] == -77).all()
        assert torch.equal(each[16:-16].view_as(whole), whole)


def test_chains_do_not_depend_on_trees_in_the_batch(ops: Kernels) -> None:
    trees = [[-1, 0, 1, 2], TREES[3], [-1], BUSH, [-1, 0, 1]] * 20
    logits, drafts = draw(trees, 90)
    sampling = sampling_for(drafts)
    whole = ops.verify_rejection(logits, drafts, sampling, False)
    chains = [at for at, tree in enumerate(trees) if tree == [*range(-1, len(tree) - 1)]]
    starts = drafts.starts.tolist()
    rows = [row for at in chains for row in range(starts[at], starts[at + 1])]
    assert drafts.logits is not None and drafts.drawn is not None
    alone = make_drafts(
        [trees[at] for at in chains], [drafts.tokens[starts[at] : starts[at + 1]].tolist() for at in chains]
    )
    alone = replace(alone, logits=drafts.logits[rows], drawn=drafts.drawn[rows])
    kept = ops.verify_rejection(logits[rows], alone, sampling.take(rows), False)
    assert torch.equal(whole.tokens[chains, :4], kept.tokens) and torch.equal(whole.counts[chains], kept.counts)
