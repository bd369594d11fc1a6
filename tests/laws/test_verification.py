"""The distribution is the target's: by enumeration of the maths, and by chi-square of the operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from backends import every_kernels
from laws.tables import PAIRS, Table, Text, constant, continued, distribution, largest_error, random_table
from outrider.diagnostics.distribution import compare
from outrider.kernels import Kernels, SamplingMetadata, VerifyInputs, cpu, philox
from outrider.kernels.cases import inputs
from outrider.kernels.reference.verification import acceptance, block_acceptance, block_weights, residual

OPS = pytest.mark.parametrize("ops", every_kernels())
BLOCK = pytest.mark.parametrize("block", [False, True], ids=["token", "block"])


def stops(p: Tensor, q: Tensor, tokens: Text, block: bool) -> tuple[list[float], Tensor]:
    """Return the probabilities of accepting 0 .. n of n tokens, and the residual weights. p, q [n, V]."""
    index = torch.tensor(tokens, dtype=torch.long)[:, None]
    p_token, q_token = p.gather(1, index)[:, 0], q.gather(1, index)[:, 0]
    if not block:
        kept = torch.cat([torch.ones(1), acceptance(p_token, q_token).cumprod(0)]).double()
        return (kept - torch.cat([kept[1:], torch.zeros(1)])).tolist(), torch.ones(len(tokens) + 1, dtype=torch.float64)
    # An extra row, as in a batch of longer chains, must not matter.
    more = [torch.cat([rows, rows[:1].flip(-1)]) for rows in (p_token, q_token, p, q)]
    weights = block_weights(more[0], more[1])
    passes = block_acceptance(more[2], more[3], weights, torch.tensor(len(tokens))).tolist()
    probs, later = [0.0] * (len(tokens) + 1), 1.0
    for depth in range(len(tokens), 0, -1):
        probs[depth] = later * passes[depth - 1]
        later *= 1 - passes[depth - 1]
    probs[0] = later
    return probs, weights


def emitted(p: Table, q: Table, width: int, block: bool, admits: Callable[[Text], bool] = lambda _: True):
    """Return the distribution of the text that one step emits, and the mean number of accepted tokens.

    `admits(drafted)` says whether another token is drafted after these; the rest are placeholders.
    """
    probs: dict[Text, float] = {}
    mean = 0.0

    def verify(tokens: Text, probability: float) -> None:
        nonlocal mean
        rows = [p(tokens[:depth]) for depth in range(len(tokens) + 1)]
        drafts = [q(tokens[:depth]) for depth in range(len(tokens))]
        ends, weights = [1.0], torch.ones(1, dtype=torch.float64)
        if tokens:
            ends, weights = stops(torch.stack(rows[:-1]), torch.stack(drafts), tokens, block)
        for depth, share in enumerate(ends):
            last = rows[depth] if depth == len(tokens) else residual(rows[depth], drafts[depth], weights[depth])
            mean += probability * share * depth
            for token, part in enumerate(last.tolist()):
                text = (*tokens[:depth], token)
                probs[text] = probs.get(text, 0.0) + probability * share * part

    def draft(tokens: Text, probability: float) -> None:
        if len(tokens) == width or not admits(tokens):
            verify(tokens, probability)
            return
        for token, share in enumerate(q(tokens).tolist()):
            if share > 0:
                draft((*tokens, token), probability * share)

    draft((), 1.0)
    return probs, mean


@BLOCK
@pytest.mark.parametrize("width", [0, 1, 2, 3])
@pytest.mark.parametrize("name", PAIRS)
def test_emitted_tokens_have_the_targets_joint_distribution(name: str, width: int, block: bool) -> None:
    p, q = PAIRS[name]
    probs, _ = emitted(p, q, width, block)
    assert sum(probs.values()) == pytest.approx(1, abs=1e-12)
    assert largest_error(probs, p, width + 1) < 1e-12


@BLOCK
@pytest.mark.parametrize("admits", [lambda text: len(text) < 2, lambda text: text[-1:] != (1,)], ids=["two", "not 1"])
def test_placeholders_do_not_change_the_distribution(block: bool, admits: Callable[[Text], bool]) -> None:
    """A draft may end anywhere, if the decision does not depend on the token left out."""
    p, q = PAIRS["random"]
    probs, _ = emitted(p, q, 3, block, admits)
    assert largest_error(probs, p, 4) < 1e-12


@BLOCK
def test_the_enumeration_detects_a_wrong_residual(block: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "residual", lambda p, q, weight: p)
    p, q = PAIRS["random"]
    assert largest_error(emitted(p, q, 2, block)[0], p, 3) > 1e-3


def test_expected_lengths_are_the_papers() -> None:
    p, q = constant(1 / 3, 2 / 3), constant(2 / 3, 1 / 3)
    assert emitted(p, q, 2, block=False)[1] == pytest.approx(10 / 9, abs=1e-12)
    assert emitted(p, q, 2, block=True)[1] == pytest.approx(11 / 9, abs=1e-12)


@pytest.mark.parametrize("seed", range(20, 30))
def test_block_verification_accepts_at_least_as_much(seed: int) -> None:
    p, q = random_table(seed, 3), random_table(seed + 100, 3)
    assert emitted(p, q, 3, block=True)[1] >= emitted(p, q, 3, block=False)[1] - 1e-12


def test_block_verification_of_certain_drafts_accepts_as_much_as_token_verification() -> None:
    p, q = PAIRS["one-hot q"]
    assert emitted(p, q, 3, block=True)[1] == pytest.approx(emitted(p, q, 3, block=False)[1], abs=1e-12)


# The kernels, with drafts drawn by `sample`: two drafted tokens, so three are compared.
VOCABULARY, POSITION, EPOCH = 5, 7, 6
TARGETS = [1.3 * inputs.normal(inputs.generator(depth), *[VOCABULARY] * (depth + 1)) for depth in (0, 1, 2)]
BLURS = [1.7 * inputs.normal(inputs.generator(9 + depth), *[VOCABULARY] * (depth + 1)) for depth in (0, 1)]
DRAFTS = [target + blur for target, blur in zip(TARGETS, BLURS, strict=False)]
SETTINGS: dict[str, dict[str, float]] = {
    "plain": {"temperature": 1.0},
    "cool": {"temperature": 0.7},
    "top-k": {"temperature": 1.0, "top_k": 3},
    "top-p": {"temperature": 0.7, "top_p": 0.8},
}
Admission = Callable[[Tensor, Tensor], Tensor]  # drafted tokens [N, 2], their q [N, 2] -> [N, 2] bool


def counts_of(ops: Kernels) -> int:
    return 40_000 if ops is cpu else 20_000


def distributions(tables: list[Tensor], settings: dict[str, float]) -> list[Tensor]:
    """Return each row of each table as a distribution."""
    return [
        torch.stack([distribution(row, settings) for row in table.reshape(-1, VOCABULARY)]).reshape(table.shape)
        for table in tables
    ]


def draft(ops: Kernels, sampling: SamplingMetadata, stream: int) -> Tensor:
    """Return two tokens of each request, sampled from DRAFTS at the request's temperature: [N, 2]."""
    count = len(sampling.seeds)
    free = replace(
        sampling, top_k=torch.zeros_like(sampling.top_k), top_p=torch.ones_like(sampling.top_p), stream=stream
    )
    first = ops.sample(DRAFTS[0].repeat(count, 1), free)
    second = ops.sample(DRAFTS[1][first.long()], replace(free, positions=free.positions + 1))
    return torch.stack([first, second], 1)


def speculate(
    ops: Kernels,
    settings: dict[str, float],
    block: bool,
    stream: int = philox.DRAFT,
    admit: Admission | None = None,
    drawn: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return three tokens of each of N requests [N, 3] and how many of them one speculative step emitted [N]."""
    count = counts_of(ops)
    sampling = inputs.make_sampling([settings], seed=0).take([0] * count)
    position = torch.full((count,), POSITION, dtype=torch.int32)
    sampling = replace(
        sampling, seeds=torch.arange(count) + 10**9, positions=position, epochs=position - POSITION + EPOCH
    )
    drafts = draft(ops, sampling, stream)
    one, two = drafts.long().unbind(1)
    if admit is not None:
        q = distributions(DRAFTS, {"temperature": settings["temperature"]})
        draft_probs = torch.stack([q[0][one], q[1][one, two]], 1)
        drafts = torch.where(admit(drafts, draft_probs), drafts, -1)
    chains = torch.tensor([-1, 0, 1], dtype=torch.int32).repeat(count)
    drafts = VerifyInputs(
        starts=3 * torch.arange(count + 1, dtype=torch.int32),
        tokens=torch.cat([torch.full((count, 1), -1, dtype=torch.int32), drafts], 1).flatten(),
        parents=chains,
        width=2,
        logits=_rows(DRAFTS[0].repeat(count, 1), DRAFTS[0].repeat(count, 1), DRAFTS[1][one]) if drawn else None,
        drawn=torch.ones_like(chains, dtype=torch.uint8) if drawn else None,
    )
    logits = _rows(TARGETS[0].repeat(count, 1), TARGETS[1][one], TARGETS[2][one, two])
    kept = ops.verify_rejection(logits, drafts, ops.expand_sampling(sampling, drafts), block)
    return continued(ops, kept, TARGETS, sampling), kept.counts


def _rows(*columns: Tensor) -> Tensor:
    """Join columns [N, V] request by request: [3 * N, V]."""
    return torch.stack(columns, 1).reshape(-1, VOCABULARY).contiguous()


def histogram(tokens: Tensor) -> Tensor:
    """Return tokens [N, n] as counts [V ** n]."""
    strides = VOCABULARY ** torch.arange(tokens.shape[1] - 1, -1, -1)
    return torch.bincount((tokens.long() * strides).sum(1), minlength=VOCABULARY ** tokens.shape[1])


def check(tokens: Tensor, counts: Tensor, settings: dict[str, float]) -> None:
    """Compare each position, the joints of two and of three, and each position given that the step emitted it."""
    first, second, third = distributions(TARGETS, settings)
    pair = first[:, None] * second  # [V, V]
    triple = pair[..., None] * third  # [V, V, V]
    total = len(tokens)
    expectations = [
        (tokens[:, :1], first),
        (tokens[:, 1:2], pair.sum(0)),
        (tokens[:, 2:], triple.sum((0, 1))),
        (tokens[:, :2], pair),
        (tokens[:, 1:], triple.sum(0)),
        (tokens, triple),
    ]
    for columns, probs in expectations:
        assert compare(histogram(columns), total * probs).holds
    given = histogram(tokens[counts > 1, :1]).double()
    assert compare(histogram(tokens[counts > 1, :2]), given[:, None] * second).holds
    given = histogram(tokens[counts > 2, :2]).reshape(VOCABULARY, VOCABULARY, 1).double()
    assert compare(histogram(tokens[counts > 2]), given * third).holds


@OPS
@BLOCK
@pytest.mark.parametrize("name", SETTINGS)
def test_the_kernels_keep_the_targets_distribution(ops: Kernels, block: bool, name: str) -> None:
    tokens, counts = speculate(ops, SETTINGS[name], block)
    check(tokens, counts, SETTINGS[name])
    if not block:
        p, q = (
            distributions(TARGETS[:1], SETTINGS[name])[0],
            distributions(DRAFTS[:1], {"temperature": SETTINGS[name]["temperature"]})[0],
        )
        share = float(torch.minimum(p, q).sum())
        sigma = math.sqrt(share * (1 - share) / len(counts))
        assert abs(float((counts > 1).double().mean()) - share) < 4 * sigma


@OPS
@BLOCK
def test_drafts_verified_as_certain_keep_the_distribution(ops: Kernels, block: bool) -> None:
    tokens, counts = speculate(ops, SETTINGS["top-p"], block, drawn=False)
    check(tokens, counts, SETTINGS["top-p"])


@OPS
@BLOCK
def test_admission_by_earlier_tokens_keeps_the_distribution(ops: Kernels, block: bool) -> None:
    def admit(drafts: Tensor, _: Tensor) -> Tensor:
        return torch.stack([torch.ones(len(drafts), dtype=torch.bool), drafts[:, 0] % 2 == 0], 1)

    tokens, counts = speculate(ops, SETTINGS["plain"], block, admit=admit)
    check(tokens, counts, SETTINGS["plain"])


@OPS
def test_block_verification_kernels_accept_at_least_as_much(ops: Kernels) -> None:
    mean = [float(speculate(ops, SETTINGS["plain"], block)[1].double().mean()) for block in (False, True)]
    assert mean[1] > mean[0] - 0.01


@OPS
@BLOCK
def test_noise_shared_by_draft_and_residual_is_detected(ops: Kernels, block: bool) -> None:
    tokens, counts = speculate(ops, SETTINGS["plain"], block, stream=philox.RESIDUAL)
    with pytest.raises(AssertionError, match=r"\.holds"):
        check(tokens, counts, SETTINGS["plain"])


@OPS
@BLOCK
def test_admission_by_the_admitted_token_is_detected(ops: Kernels, block: bool) -> None:
    """Drop a draft token after sampling if its own probability is low."""
    tokens, counts = speculate(
        ops, SETTINGS["plain"], block, admit=lambda _, draft_probs: (draft_probs > 0.3).cumprod(1).bool()
    )
    with pytest.raises(AssertionError, match=r"\.holds"):
        check(tokens, counts, SETTINGS["plain"])
