"""Sampling of draft tokens: argmax, the target's random numbers, or random numbers of their own."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_target import choose

from outrider.device import Cpu
from outrider.kernels import Kernels, load
from outrider.kernels.philox import DRAFT, gumbel
from outrider.request import Request
from outrider.speculation import DraftContext
from outrider.speculation.drafters.draft_sampler import DraftSampler
from outrider.types import SamplingParams

LOGITS = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))  # [B, V]


@pytest.fixture(scope="module", params=["cpu", "reference"])
def ops(request: pytest.FixtureRequest) -> Kernels:
    return load(request.param)


class ContextSampler(DraftSampler):
    """Sample for contexts, each with its own sampling metadata."""

    def sample(self, logits: Any, contexts: Any, depth: int) -> Any:
        return super().sample(logits, self.sampling(contexts), depth)

    def sample_children(self, logits: Any, contexts: Any, depth: int, count: int) -> Any:
        return super().sample_children(
            logits, self.sampling(contexts) if isinstance(contexts, list) else contexts, depth, count
        )

    def sample_with_confidence(self, logits: Any, contexts: Any, depth: int) -> Any:
        return super().sample_with_confidence(logits, self.sampling(contexts), depth)


def sampler(ops: Kernels, sampled: bool = True, coupled: bool = True, replacement: bool = False) -> DraftSampler:
    target: Any = SimpleNamespace(ops=ops, device=Cpu(), sampled=sampled, coupled=coupled, replacement=replacement)
    return ContextSampler(target)


def contexts(length: int = 7, **params: Any) -> list[DraftContext]:
    """Return a context for each row of logits; the last two tokens are new."""
    requests = [Request(f"{seed}", [1] * (length - 2), SamplingParams(**params), seed) for seed in range(len(LOGITS))]
    return [DraftContext(request, 0, length - 1, [1, 1], 4, 0) for request in requests]


def test_drafts_that_are_not_sampled_are_the_argmax(ops: Kernels) -> None:
    for coupled in (True, False):
        found = sampler(ops, sampled=False, coupled=coupled).sample(LOGITS, contexts(temperature=2.0), 1)
        assert found.dtype is torch.int32
        assert found.tolist() == LOGITS.argmax(-1).tolist()


def test_drafts_without_noise_are_known_to_be_greedy(ops: Kernels) -> None:
    assert sampler(ops, sampled=False).greedy_sampling(3).greedy


def test_requests_at_temperature_zero_get_the_argmax(ops: Kernels) -> None:
    for coupled in (True, False):
        assert (
            sampler(ops, coupled=coupled).sample(LOGITS, contexts(temperature=0.0), 1).tolist()
            == LOGITS.argmax(-1).tolist()
        )


@pytest.mark.parametrize("shape", [{}, {"top_k": 3}, {"top_p": 0.3}, {"min_p": 0.4}])
def test_coupled_drafts_roll_the_targets_dice(ops: Kernels, shape: dict[str, Any]) -> None:
    rows = contexts(temperature=1.5, **shape)
    for depth in range(4):
        expected = [
            choose(ops, context.request, 7 + depth, logits) for context, logits in zip(rows, LOGITS, strict=True)
        ]
        assert sampler(ops).sample(LOGITS, rows, depth).tolist() == expected


def test_other_drafts_roll_dice_of_their_own(ops: Kernels) -> None:
    own = sampler(ops, coupled=False)
    draws = [own.sample(LOGITS, contexts(length, temperature=1.5), 9 - length).tolist() for length in (7, 8, 9)]
    coupled = sampler(ops).sample(LOGITS, contexts(9, temperature=1.5), 0).tolist()
    # One position, drafted for from three texts, and chosen by the target: four independent draws.
    assert len({tuple(draw) for draw in [*draws, coupled]}) == 4
    seeds, epochs = torch.arange(len(LOGITS))[:, None], torch.tensor([[7]])
    noise = gumbel(seeds, torch.tensor([[9]]), torch.arange(LOGITS.shape[1]), DRAFT, epochs)  # [B, V]
    assert draws[0] == (LOGITS / 1.5 + noise).argmax(-1).tolist()


def test_other_drafts_are_drawn_from_the_whole_distribution(ops: Kernels) -> None:
    own = sampler(ops, coupled=False)
    for shape in ({"top_k": 1}, {"top_p": 0.01}, {"min_p": 1.0}):
        draws = torch.stack(
            [own.sample(LOGITS, contexts(length, temperature=1.5, **shape), 0) for length in range(4, 12)]
        )
        assert (draws != LOGITS.argmax(-1)).sum() > 20


def test_only_drafts_with_dice_of_their_own_keep_logits(ops: Kernels) -> None:
    kept = {(s, c): sampler(ops, s, c).keeps_logits for s in (True, False) for c in (True, False)}
    assert kept == {(True, False): True, (True, True): False, (False, True): False, (False, False): False}


@pytest.mark.parametrize("mode", [(False, True), (True, True), (True, False)])
def test_the_first_of_several_is_the_one_that_is_drawn(ops: Kernels, mode: tuple[bool, bool]) -> None:
    own = sampler(ops, *mode)
    for heat in (0.0, 0.7):
        rows = contexts(temperature=heat)
        single, (tokens, _), (drafted, probs) = (
            own.sample(LOGITS, rows, 2),
            own.sample_children(LOGITS, rows, 2, 4),
            own.sample_with_confidence(LOGITS, rows, 2),
        )
        assert torch.equal(tokens[:, 0], single) and torch.equal(drafted, single) and drafted.dtype is torch.int32
        assert all(len(set(row)) == 4 for row in tokens.tolist())
        assert ((probs > 0) & (probs <= 1)).all()


def test_confidence_is_the_probability_at_the_drafts_temperature(ops: Kernels) -> None:
    for own, heat, warm in (
        (sampler(ops, False), 0.7, 1.0),
        (sampler(ops), 0.0, 1.0),
        (sampler(ops, True, False), 0.7, 0.7),
    ):
        tokens, logprobs = own.sample_children(LOGITS, contexts(temperature=heat), 1, 3)
        expected = torch.log_softmax(LOGITS / warm, -1).gather(1, tokens.long())
        torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
        _, probs = own.sample_with_confidence(LOGITS, contexts(temperature=heat), 1)
        torch.testing.assert_close(probs, expected[:, 0].exp(), atol=1e-5, rtol=0)


def test_the_targets_dice_say_more_than_probabilities(ops: Kernels) -> None:
    """Between two models that nearly agree: tokens drawn with one noise are kept about as often as said."""
    generator = torch.Generator().manual_seed(1)
    rows = [context for length in range(5, 155) for context in contexts(length, temperature=1.0)]
    theirs = torch.randn(len(rows), 50, generator=generator) * 2.5
    mine = theirs + torch.randn(theirs.shape, generator=generator)
    tokens, logprobs = sampler(ops).sample_children(mine, rows, 0, 3)
    target = sampler(ops).sample(theirs, rows, 0)
    kept, said = (tokens == target[:, None]).float().mean(0), logprobs.exp().mean(0)
    assert (kept - said).abs().max() < 0.12
    assert (logprobs.diff(dim=1) < 0).all()  # however likely each is
    assert (torch.log_softmax(mine, -1).gather(1, tokens.long()).diff(dim=1) > 0).any()
    cut, none = sampler(ops).sample_children(LOGITS, contexts(temperature=1.0, top_k=2), 0, 3)
    assert (cut[:, 2] == -1).all() and (none[:, 2] == -torch.inf).all() and (cut[:, :2] >= 0).all()


def test_siblings_drawn_again_have_dice_of_their_own(ops: Kernels) -> None:
    again = sampler(ops, coupled=False, replacement=True)
    heats = [0.8] * 5 + [0.0]
    rows = [
        replace(context, request=replace(context.request, params=SamplingParams(temperature=heat)))
        for context, heat in zip(contexts(), heats, strict=True)
    ]
    tokens, logprobs = again.sample_children(LOGITS, rows, 1, 3)
    seeds, everything = torch.arange(len(LOGITS))[:, None], torch.arange(LOGITS.shape[1])
    for sibling in range(3):
        noise = gumbel(seeds, torch.tensor([[8]]), everything, DRAFT + 256 * sibling, torch.tensor([[7]]))
        assert tokens[:5, sibling].tolist() == (LOGITS / 0.8 + noise).argmax(-1)[:5].tolist()
    assert tokens[5].tolist() == LOGITS[5].argsort(descending=True)[:3].tolist()
    warm = torch.tensor([0.8] * 5 + [1.0])[:, None]
    torch.testing.assert_close(logprobs, torch.log_softmax(LOGITS / warm, -1).gather(1, tokens.long()))
