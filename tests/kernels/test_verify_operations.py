"""Verification: hand-made vectors, placeholders, synthetic rates, refusal of invalid inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from outrider.kernels import Kernels, SamplingMetadata, VerifyInputs, VerifyOutput, cpu, philox, reference
from outrider.kernels.cases import inputs
from outrider.kernels.cases.verification import CHAINS, TREES, make_drafts, rows_of, take_drafts

Tokens = list[list[int]]


def chains(tokens: Tokens) -> VerifyInputs:
    """Requests that have drafted these tokens, each after the one before."""
    return make_drafts([[*range(-1, len(each))] for each in tokens], [[-1, *each] for each in tokens])


def integers(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def sampling_for(drafts: VerifyInputs, seed: int = 0, **settings: float) -> SamplingMetadata:
    """A choice for each request."""
    sampling = inputs.make_sampling([settings] * (len(drafts.starts) - 1), seed)
    return replace(sampling, epochs=sampling.positions + 3)


def peaked(tokens: list[int], vocabulary: int) -> Tensor:
    """Rows whose largest logit is at these ids: [R, V]."""
    logits = inputs.normal(inputs.generator(1), len(tokens), vocabulary)
    logits[torch.arange(len(tokens)), tokens] = 100.0
    return logits


# Drafted tokens of each request; the target's choice in each of their rows; what is kept.
GREEDY: dict[str, tuple[Tokens, Tokens, Tokens]] = {
    "perfect match": ([[1, 2, 3]], [[1, 2, 3, 4]], [[1, 2, 3, 4]]),
    "early mismatch": ([[1, 2, 3]], [[1, 5, 3, 4]], [[1, 5, -1, -1]]),
    "two lengths": ([[1, 2], [3]], [[1, 2, 5], [3, 7]], [[1, 2, 5], [3, 7, -1]]),
    "single token": ([[1]], [[1, 2]], [[1, 2]]),
    "empty draft": ([[]], [[5]], [[5]]),
    "mismatches in both": ([[1, 2, 3], [4, 5, 6]], [[1, 2, 7, 6], [4, 8, 6, 9]], [[1, 2, 7, -1], [4, 8, -1, -1]]),
    "an empty one between": ([[1], [], [2, 3]], [[1, 9], [8], [2, 3, 4]], [[1, 9, -1], [8, -1, -1], [2, 3, 4]]),
    "wrong at once": ([[1, 2, 3]], [[0, 2, 3, 4]], [[0, -1, -1, -1]]),
    "a placeholder": ([[1, -1, 3]], [[1, 2, 3, 4]], [[1, 2, -1, -1]]),
    "beyond the vocabulary": ([[1, 1000]], [[1, 2, 3]], [[1, 2, -1]]),
}


@pytest.mark.parametrize("name", GREEDY)
@pytest.mark.parametrize("verifier", ["match", "token", "block"])
def test_greedy_vectors(ops: Kernels, name: str, verifier: str) -> None:
    drafted, chosen, expected = GREEDY[name]
    drafts, flat = chains(drafted), [token for each in chosen for token in each]
    if verifier == "match":
        kept = ops.verify_exact(integers(flat), drafts)
    else:
        sampling = ops.expand_sampling(sampling_for(drafts, temperature=0.0), drafts)
        kept = ops.verify_rejection(peaked(flat, 1000), drafts, sampling, verifier == "block")
    assert kept.tokens.tolist() == expected
    assert kept.counts.tolist() == [sum(token >= 0 for token in row) for row in expected]
    assert kept.rows.tolist() == [[at if token >= 0 else -1 for at, token in enumerate(row)] for row in expected]


def test_a_tree_is_followed_from_child_to_child(ops: Kernels) -> None:
    #        row 0 ─┬─ 1: token 5 ─── 3: token 7
    #               └─ 2: token 6 ─┬─ 4: token 8
    #                              └─ 5: token 9 ── 6: token 9
    drafts = make_drafts([[-1, 0, 0, 1, 2, 2, 5]], [[-1, 5, 6, 7, 8, 9, 9]])
    for sampled, tokens, rows in [
        ([6, 0, 9, 0, 0, 9, 3], [6, 9, 9, 3], [0, 2, 5, 6]),
        ([6, 0, 8, 0, 1, 0, 0], [6, 8, 1], [0, 2, 4]),
        ([5, 9, 9, 0, 0, 9, 3], [5, 9], [0, 1]),
        ([4, 9, 9, 0, 0, 9, 3], [4], [0]),
    ]:
        kept = ops.verify_exact(integers(sampled), drafts)
        count = len(tokens)
        assert kept.tokens.tolist() == [tokens + [-1] * (7 - count)]
        assert kept.rows.tolist() == [rows + [-1] * (7 - count)]
        assert kept.counts.tolist() == [count]


def test_the_first_of_equal_children_is_followed(ops: Kernels) -> None:
    drafts = make_drafts([[-1, 0, 0, 1, 2]], [[-1, 5, 5, 1, 2]])
    kept = ops.verify_exact(integers([5, 2, 2, 0, 0]), drafts)
    assert kept.tokens.tolist() == [[5, 2, -1, -1, -1]]
    assert kept.rows.tolist() == [[0, 1, -1, -1, -1]]


def test_expand_repeats_settings_and_counts_ancestors(ops: Kernels) -> None:
    drafts = make_drafts([[-1, 0, 0, 1, 2, 2, 5], [-1], [-1, 0]], [[-1] * 7, [-1], [-1] * 2])
    sampling = inputs.make_sampling([{"top_k": 3}, {"temperature": 0.5}, {"min_p": 0.25}], seed=4)
    sampling = replace(sampling, positions=integers([10, 20, 30]), epochs=integers([1, 2, 3]), stream=philox.DRAFT)
    wide = ops.expand_sampling(sampling, drafts)
    assert wide.positions.tolist() == [10, 11, 11, 12, 12, 12, 13, 20, 30, 31]
    assert wide.stream == philox.DRAFT
    owners = [0] * 7 + [1] + [2] * 2
    for name in ("temperature", "top_k", "top_p", "min_p", "seeds", "epochs"):
        found, given = getattr(wide, name), getattr(sampling, name)
        assert found.dtype == given.dtype
        assert torch.equal(found, given[owners])
    assert ops.expand_sampling(replace(sampling, epochs=None), drafts).epochs is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_synthetic_rates_of_one_and_zero(ops: Kernels, temperature: float) -> None:
    drafts = chains([[1, 2, 3], [4], [], [5, -1, 6]])
    sampled = integers([10, 11, 12, 13, 20, 21, 30, 40, 41, 42, 43])
    sampling = ops.expand_sampling(sampling_for(drafts, temperature=temperature), drafts)
    every = ops.verify_synthetic(sampled, drafts, torch.ones(3), sampling)
    assert every.tokens.tolist() == [[1, 2, 3, 13], [4, 21, -1, -1], [30, -1, -1, -1], [5, 41, -1, -1]]
    none = ops.verify_synthetic(sampled, drafts, torch.zeros(3), sampling)
    assert none.tokens.tolist() == [[10, -1, -1, -1], [20, -1, -1, -1], [30, -1, -1, -1], [40, -1, -1, -1]]
    assert none.counts.tolist() == [1] * 4


def test_synthetic_rates_are_met(ops: Kernels) -> None:
    count, rates = 4000, torch.tensor([0.8, 0.5, 0.25])
    drafts = chains([[1, 2, 3]] * count)
    sampling = ops.expand_sampling(sampling_for(drafts, seed=11), drafts)
    kept = ops.verify_synthetic(torch.zeros(4 * count, dtype=torch.int32), drafts, rates, sampling)
    reached = 1.0
    for depth, rate in enumerate(rates.tolist()):
        before, after = (int((kept.counts > depth + more).sum()) for more in (0, 1))
        assert abs(after / before - rate) < 4 * (rate * (1 - rate) / before) ** 0.5
        reached *= rate
    assert abs(int((kept.counts == 4).sum()) / count - reached) < 4 * (reached / count) ** 0.5


@pytest.mark.parametrize("vocabulary", [100, 8193, 151_936])
@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("drawn", [False, True])
def test_ids_stay_in_the_vocabulary(ops: Kernels, vocabulary: int, block: bool, drawn: bool) -> None:
    """The last id is the only one left once the draft is rejected: nothing beyond it may win."""
    drafts = chains([[0, 0]])
    logits = torch.full((3, vocabulary), -torch.inf)
    logits[:, -1] = 1.0
    draft_logits = torch.zeros(3, vocabulary)
    draft_logits[:, 0] = 30.0
    if drawn:
        drafts = replace(drafts, logits=draft_logits, drawn=torch.ones(3, dtype=torch.uint8))
    kept = ops.verify_rejection(logits, drafts, ops.expand_sampling(sampling_for(drafts), drafts), block)
    assert kept.tokens.tolist() == [[vocabulary - 1, -1, -1]]


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("hurt", ["target", "draft", "both"])
def test_rows_of_nan_stay_in_range(ops: Kernels, block: bool, hurt: str) -> None:
    drafts = chains([[1, 2, 3]] * 40)
    logits, draft_logits = (inputs.normal(inputs.generator(at), 160, 50) for at in (1, 2))
    if hurt != "draft":
        logits[::3] = torch.nan
    if hurt != "target":
        draft_logits[1::3] = torch.nan
    drafts = replace(drafts, logits=draft_logits, drawn=torch.ones(160, dtype=torch.uint8))
    kept = ops.verify_rejection(logits, drafts, ops.expand_sampling(sampling_for(drafts), drafts), block)
    filled = torch.arange(4) < kept.counts[:, None]
    assert (kept.tokens[filled] >= 0).all() and (kept.tokens < 50).all()
    assert (kept.tokens[~filled] == -1).all()
    greedy = ops.verify_rejection(
        logits, drafts, ops.expand_sampling(sampling_for(drafts, temperature=0.0), drafts), block
    )
    assert (greedy.tokens < 50).all() and (greedy.tokens[:, 0] >= 0).all()


def test_banned_rows_give_token_0(ops: Kernels) -> None:
    drafts = chains([[1, 2], []])
    banned = torch.full((4, 9), -torch.inf)
    kept = ops.verify_rejection(banned, drafts, ops.expand_sampling(sampling_for(drafts), drafts), False)
    assert kept.tokens.tolist() == [[0, -1, -1], [0, -1, -1]]


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("top", [{"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.3}], ids=str)
def test_excluded_tokens_are_never_emitted(ops: Kernels, block: bool, top: dict[str, float]) -> None:
    random = inputs.generator(3)
    drafts = chains([[0, 0, 0]] * 30)
    logits = 2 * inputs.normal(random, 120, 99)
    draft_logits = logits.roll(1, 0) + inputs.normal(random, 120, 99)
    tokens = torch.multinomial(torch.softmax(draft_logits, -1), 1, generator=random)[:, 0].int()
    tokens = torch.where(drafts.parents < 0, -1, tokens)
    drafts = replace(drafts, tokens=tokens, logits=draft_logits, drawn=torch.ones(120, dtype=torch.uint8))
    kept = ops.verify_rejection(logits, drafts, ops.expand_sampling(sampling_for(drafts, **top), drafts), block)
    order = torch.sort(logits, dim=-1, descending=True, stable=True)[1]
    shares = torch.softmax(logits, -1).gather(1, order)
    allowed = {
        "top_k": torch.arange(99).expand(120, 99) < 5,
        "top_p": shares.cumsum(1) - shares < 0.5,
        "min_p": shares >= 0.3 * shares[:, :1],
    }[next(iter(top))]
    for request, (found, count) in enumerate(zip(kept.tokens.tolist(), kept.counts.tolist(), strict=True)):
        for at, token in enumerate(found[:count]):
            row = 4 * request + at
            assert token in order[row][allowed[row]].tolist()


@pytest.mark.parametrize("block", [False, True])
def test_a_placeholder_ends_the_chain(ops: Kernels, block: bool) -> None:
    """What stands behind it does not matter, and what comes in its place is the target's own choice."""
    vocabulary, count = 20, 200
    logits, draft_logits = (inputs.normal(inputs.generator(at), 4 * count, vocabulary) for at in (5, 6))
    drawn = torch.ones(4 * count, dtype=torch.uint8)
    seen: list[VerifyOutput] = []
    for placeholder, behind in ((-1, 3), (vocabulary, 7), (-1, -1)):
        drafts = replace(chains([[2, placeholder, behind]] * count), logits=draft_logits, drawn=drawn)
        sampling = ops.expand_sampling(sampling_for(drafts), drafts)
        seen.append(ops.verify_rejection(logits, drafts, sampling, block))
    short = take_rows(logits, draft_logits, [[2]] * count, 4)
    alone = ops.verify_rejection(short[0], short[1], ops.expand_sampling(sampling_for(short[1]), short[1]), block)
    plain = ops.sample(logits, replace(sampling, epochs=None, stream=philox.TARGET))
    for kept in seen:
        assert torch.equal(kept.tokens[:, :2], alone.tokens) and (kept.tokens[:, 2:] == -1).all()
        ended = kept.counts == 2
        assert 0 < int(ended.sum()) < count
        assert torch.equal(kept.tokens[ended, 1], plain[1::4][ended])


NONFINITE = {"one nan": (7, torch.nan), "one inf": (49, torch.inf), "nan": (..., torch.nan), "none": (..., -torch.inf)}


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("wrong", NONFINITE)
def test_a_nonfinite_distribution_ends_the_chain(ops: Kernels, block: bool, wrong: str) -> None:
    """Its token is not accepted, and the one in its place is the target's own choice."""
    vocabulary, count, (at, value) = 50, 200, NONFINITE[wrong]
    logits = inputs.normal(inputs.generator(5), 4 * count, vocabulary)
    logits[1::4, 3] = 20.0  # so that the token would be accepted
    draft_logits = logits.roll(1, 0)
    drawn = torch.ones(4 * count, dtype=torch.uint8)
    drafts = replace(chains([[2, 3, 4]] * count), logits=draft_logits, drawn=drawn)
    sampling = ops.expand_sampling(sampling_for(drafts), drafts)
    assert int(ops.verify_rejection(logits, drafts, sampling, block).counts.min()) > 2
    draft_logits[2::4, at] = value
    kept = ops.verify_rejection(logits, drafts, sampling, block)
    plain = ops.sample(logits, replace(sampling, epochs=None, stream=philox.TARGET))
    assert kept.counts.tolist() == [2] * count and torch.equal(kept.tokens[:, 1], plain[1::4])
    assert kept.nonfinite is not None and kept.nonfinite.tolist() == [1] * count
    greedy = ops.expand_sampling(sampling_for(drafts, temperature=0.0), drafts)
    ignored = ops.verify_rejection(logits, drafts, greedy, block).nonfinite  # at temperature 0 nothing is sampled
    assert ignored is not None and not ignored.any()


def take_rows(logits: Tensor, draft_logits: Tensor, drafted: Tokens, stride: int) -> tuple[Tensor, VerifyInputs]:
    """The same requests with shorter drafts: the first rows of each run of `stride`."""
    drafts = chains(drafted)
    rows = [request * stride + at for request, each in enumerate(drafted) for at in range(len(each) + 1)]
    return logits[rows], replace(drafts, logits=draft_logits[rows], drawn=torch.ones(len(rows), dtype=torch.uint8))


@pytest.mark.parametrize("block", [False, True])
def test_rejection_without_a_draft_equals_sample(ops: Kernels, block: bool) -> None:
    drafts = chains([[]] * 50)
    logits = inputs.normal(inputs.generator(8), 50, 300)
    sampling = ops.expand_sampling(sampling_for(drafts, top_p=0.9), drafts)
    kept = ops.verify_rejection(logits, drafts, sampling, block)
    assert torch.equal(kept.tokens[:, 0], ops.sample(logits, replace(sampling, epochs=None)))


def test_a_draft_with_q_equal_to_p_is_accepted(ops: Kernels) -> None:
    """p is q: every coin is passed, and nothing is left to draw from."""
    logits = inputs.normal(inputs.generator(9), 80, 500)
    tokens = [[3, 400, 77]] * 20
    drafts = replace(chains(tokens), logits=logits.roll(1, 0), drawn=torch.ones(80, dtype=torch.uint8))
    for block in (False, True):
        kept = ops.verify_rejection(logits, drafts, ops.expand_sampling(sampling_for(drafts), drafts), block)
        assert kept.counts.tolist() == [4] * 20
        assert kept.tokens[:, :3].tolist() == tokens


def test_epochs_and_seeds_change_the_coins(ops: Kernels) -> None:
    drafts = chains([[1]] * 500)
    logits = torch.zeros(1000, 2)
    sampling = ops.expand_sampling(sampling_for(drafts), drafts)
    assert sampling.epochs is not None
    first = ops.verify_rejection(logits, drafts, sampling, False)
    for other in (replace(sampling, epochs=sampling.epochs + 1), replace(sampling, seeds=sampling.seeds + 1)):
        assert (ops.verify_rejection(logits, drafts, other, False).counts != first.counts).sum() > 100
    assert torch.equal(ops.verify_rejection(logits, drafts, sampling, False).tokens, first.tokens)


BROKEN: dict[str, Callable[[VerifyInputs], VerifyInputs]] = {
    "starts that fall": lambda drafts: replace(drafts, starts=integers([0, 5, 3, 7])),
    "an empty request": lambda drafts: replace(drafts, starts=integers([0, 3, 3, 7])),
    "starts that end early": lambda drafts: replace(drafts, starts=integers([0, 3, 5, 6])),
    "starts that begin late": lambda drafts: replace(drafts, starts=integers([1, 3, 5, 7])),
    "starts beyond the rows": lambda drafts: replace(drafts, starts=integers([0, 3, 9, 7])),
    "more rows than the width": lambda drafts: replace(drafts, width=1),
    "a parent ahead": lambda drafts: replace(drafts, parents=integers([-1, 2, 0, -1, 0, -1, 0])),
    "its own parent": lambda drafts: replace(drafts, parents=integers([-1, 1, 0, -1, 0, -1, 0])),
    "a parent outside": lambda drafts: replace(drafts, parents=integers([-1, 0, -7, -1, 0, -1, 0])),
    "a second root": lambda drafts: replace(drafts, parents=integers([-1, 0, -1, -1, 0, -1, 0])),
    "no root": lambda drafts: replace(drafts, parents=integers([0, 0, 1, -1, 0, -1, 0])),
}


@pytest.mark.parametrize("name", BROKEN)
def test_invalid_forests_are_refused(ops: Kernels, name: str) -> None:
    drafts = BROKEN[name](make_drafts([[-1, 0, 1], [-1, 0], [-1, 0]], [[-1, 1, 2], [-1, 3], [-1, 4]]))
    sampled, logits = torch.zeros(7, dtype=torch.int32), torch.zeros(7, 9)
    narrow = inputs.make_sampling([{}] * 3, 0)
    wide = inputs.make_sampling([{}] * 7, 0)
    for call in (
        lambda: ops.expand_sampling(narrow, drafts),
        lambda: ops.verify_exact(sampled, drafts),
        lambda: ops.verify_synthetic(sampled, drafts, torch.ones(4), wide),
        lambda: ops.verify_rejection(logits, drafts, wide, True),
    ):
        with pytest.raises(ValueError, match=r"`starts`|parent"):
            call()


def test_blocks_refuse_trees(ops: Kernels) -> None:
    drafts = make_drafts([[-1, 0], [-1, 0, 0]], [[-1, 1], [-1, 1, 2]])
    with pytest.raises(ValueError, match=r"rows 2 \.\. 4 is no chain: `block`"):
        ops.verify_rejection(torch.zeros(5, 9), drafts, inputs.make_sampling([{}] * 5, 0), True)


def test_too_few_rates_are_refused(ops: Kernels) -> None:
    drafts = chains([[1, 2]])
    with pytest.raises(ValueError, match="rates"):
        ops.verify_synthetic(
            torch.zeros(3, dtype=torch.int32), drafts, torch.ones(1), inputs.make_sampling([{}] * 3, 0)
        )


def test_parts_of_a_batch_give_the_same_output(ops: Kernels) -> None:
    drafts = make_drafts(TREES, [[-1] * len(tree) for tree in TREES])
    assert rows_of(drafts, [1, 3]) == [1, 2, *range(7, 14)]
    part = take_drafts(drafts, [3, 1])
    assert part.starts.tolist() == [0, 7, 9]
    assert part.parents.tolist() == [*TREES[3], *TREES[1]]
    assert part.width == drafts.width == max(map(len, TREES)) - 1 and len(CHAINS[0]) == 5


@pytest.mark.parametrize("block", [False, True])
def test_backends_agree_on_many_random_requests(level: str, block: bool) -> None:
    random = inputs.generator(12)
    count, vocabulary = 300, 130
    logits = 2 * inputs.normal(random, 4 * count, vocabulary)
    draft_logits = logits.roll(1, 0) + inputs.normal(random, 4 * count, vocabulary)
    tokens = torch.multinomial(torch.softmax(draft_logits, -1), 1, generator=random)[:, 0].int()
    drafts = chains([[0, 0, 0]] * count)
    drawn = (torch.rand(4 * count, generator=random) < 0.8).to(torch.uint8)
    drafts = replace(drafts, tokens=torch.where(drafts.parents < 0, -1, tokens), logits=draft_logits, drawn=drawn)
    sampling = cpu.expand_sampling(sampling_for(drafts, temperature=0.9, top_p=0.97), drafts)
    found, meant = (each.verify_rejection(logits, drafts, sampling, block) for each in (cpu, reference))
    assert torch.equal(found.tokens, meant.tokens) and torch.equal(found.rows, meant.rows)
    assert torch.equal(found.counts, meant.counts)
    assert len(set(meant.counts.tolist())) == 4
