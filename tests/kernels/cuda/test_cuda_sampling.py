"""Sampling on CUDA: noise, tokens and log-probabilities are those of the reference."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor, inf, nan

from carried import Carried
from outrider.kernels import LogitsProcessors, SamplingMetadata, philox, reference
from outrider.kernels.cases import CASES, Case, difference, inputs
from outrider.kernels.cuda import noise
from outrider.kernels.cuda.device import DEVICE, INTERPRETED
from outrider.kernels.cuda.processors import count_tokens, process_decode_logits
from outrider.kernels.cuda.sampling import mask_logits, process_logits, sample, sample_children, top_logprobs

OWN_OPS = {
    "sample": sample,
    "sample_children": sample_children,
    "top_logprobs": top_logprobs,
    "process_logits": process_logits,
    "mask_logits": mask_logits,
    "process_decode_logits": process_decode_logits,
    "count_tokens": count_tokens,
}
OPS = Carried(SimpleNamespace(**OWN_OPS), DEVICE)
# What the interpreter works on for seconds, and others show as well.
LONG = (
    "1000 of",
    "63 of",
    "64 of",
    "78 of",
    "of 8x49152",
    "s, 1 of",
    "banned, 1 of",
    "mixture, 8 of",
    "greedy, 8 of 14",
)
OWN = [case for case in CASES if case.op in OWN_OPS]
CHOSEN = [case for case in OWN if not (INTERPRETED and any(part in case.name for part in LONG))]


@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: f"{case.op}, {case.name}")
def test_cases_agree_with_the_reference(case: Case) -> None:
    found, meant = case.build(OPS, 3)(None), case.build(reference, 3)(None)  # type: ignore[arg-type]
    assert max(map(difference, found, meant)) <= case.tolerance


def test_greedy_rows_need_no_thresholds(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = 3 * inputs.normal(inputs.generator(6), 5, 5000)  # [R, V]
    logits[:, 4100] = logits[:, 77] = 20.0  # the lowest among equals, in another part of the row
    logits[3, 77] = nan
    sampling = inputs.make_sampling([{"temperature": 0.0}] * 5, seed=8)
    meant = reference.sample_children(logits, sampling, 2)
    monkeypatch.setattr(sys.modules[sample.__module__], "find_thresholds", None)  # the function hides its module
    known = replace(sampling, greedy=True)
    assert OPS.sample(logits, known).tolist() == [77, 77, 77, 4100, 77] == meant.tokens[:, 0].tolist()
    found = OPS.sample_children(logits, known, 2)
    assert found.tokens.tolist() == meant.tokens.tolist()
    assert torch.allclose(found.logprobs, meant.logprobs, atol=1e-5)


@triton.jit
def _noises(seeds, positions, epochs, words, uniforms, gumbels, runs, purpose, tokens: tl.constexpr):
    row = tl.program_id(0)
    token = tl.arange(0, tokens)
    seed, position, epoch = tl.load(seeds + row), tl.load(positions + row), tl.load(epochs + row)
    at = row * tokens + token
    tl.store(words + at, noise.philox_word(seed, position, token * 1021, purpose, epoch).to(tl.int64))
    tl.store(uniforms + at, noise.uniform(seed, position, token * 1021, purpose, epoch))
    tl.store(gumbels + at, noise.gumbel(seed, position, token * 1021, purpose, epoch))
    tl.store(runs + at, noise.philox_run(seed, position, 4096, purpose, epoch, tokens).to(tl.int64))


@pytest.mark.parametrize("stream", [philox.TARGET, philox.DRAFT, philox.ACCEPT, philox.RESIDUAL])
def test_noise_equals_philox(stream: int) -> None:
    seeds = torch.tensor([0, -1, -(2**63), 2**63 - 1, 0x1234_5678_9ABC_DEF0, -77])
    positions = torch.tensor([0, 2**31 - 1, 5, -1, 100_000, 3], dtype=torch.int32)
    epochs = torch.tensor([0, 1, 2**31 - 1, -5, 9, 0], dtype=torch.int32)
    words, runs = torch.empty((2, 6, 256), dtype=torch.int64, device=DEVICE)
    uniforms, gumbels = words.double(), words.float()
    keys = [each.to(DEVICE) for each in (seeds, positions, epochs)]
    _noises[(6,)](*keys, words, uniforms, gumbels, runs, stream, tokens=256)
    tokens = torch.arange(256)
    arguments = (seeds[:, None], positions[:, None], tokens * 1021, stream, epochs[:, None])
    assert torch.equal(words.cpu(), philox.philox(*arguments))
    assert torch.equal(uniforms.cpu(), philox.uniform(*arguments))
    assert torch.equal(gumbels.cpu(), philox.gumbel(*arguments))
    assert torch.equal(
        runs.cpu(), philox.philox(seeds[:, None], positions[:, None], 4096 + tokens, stream, epochs[:, None])
    )


def index(sampling: SamplingMetadata) -> SamplingMetadata:
    return replace(
        sampling, **{name: value.to(DEVICE) for name, value in vars(sampling).items() if isinstance(value, Tensor)}
    )


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    random = inputs.generator(3)
    logits = 3 * inputs.normal(random, 4, 2500)  # [R, V], in two parts
    sampling = inputs.make_sampling(
        [{}, {"top_p": 0.7}, {"temperature": 0.0}, {"top_k": 20, "temperature": 0.3}], seed=8
    )
    whole = OPS.sample_children(logits, sampling, 2)
    for order in ([2], [3, 1, 0]):
        part = OPS.sample_children(logits[order], sampling.take(order), 2)
        assert torch.equal(part.tokens, whole.tokens[order]) and torch.equal(part.logprobs, whole.logprobs[order])
        assert torch.equal(OPS.sample(logits[order], sampling.take(order)), whole.tokens[order, 0])


def test_streams_and_epochs_key_the_noise() -> None:
    flat, everything = torch.zeros(8, 2100), torch.arange(2100)
    sampling = inputs.make_sampling([{}] * 8, seed=1)
    for stream, epochs in ((philox.DRAFT, None), (257, torch.arange(8, dtype=torch.int32) * 1000 - 7)):
        tokens = OPS.sample(flat, replace(sampling, stream=stream, epochs=epochs))
        keys = philox.NONE if epochs is None else epochs[:, None]
        scores = philox.gumbel(sampling.seeds[:, None], sampling.positions[:, None], everything, stream, keys)
        assert torch.equal(tokens, scores.argmax(-1).int())


def test_scores_are_rounded_as_the_references() -> None:
    """Beside logits this large a unit in the last place outweighs the noise."""
    logits = 3e6 + 2 * inputs.normal(inputs.generator(9), 30, 64)  # [R, V]
    sampling = inputs.make_sampling([{"temperature": 0.3 + 0.017 * row} for row in range(30)], seed=7)
    assert torch.equal(OPS.sample(logits, sampling), reference.sample(logits, sampling))


@pytest.mark.filterwarnings("ignore:overflow")  # a logit over a low temperature becomes infinite
def test_more_children_than_tokens() -> None:
    logits = torch.tensor([[1.0, 5.0, -inf, 4.0], [0.0, nan, -inf, 3.0], [-inf] * 4, [inf, 0.0, inf, nan]])
    sampling = inputs.make_sampling([{"top_k": 2}, {}, {}, {"temperature": 0.01}], seed=0)
    found, meant = OPS.sample_children(logits, sampling, 6), reference.sample_children(logits, sampling, 6)
    assert torch.equal(found.tokens, meant.tokens)
    assert difference(found.logprobs, meant.logprobs) < 1e-6


def test_strided_rows_are_read_and_written() -> None:
    wide = 3 * inputs.normal(inputs.generator(2), 3, 3000).to(DEVICE)  # [R, more than V]
    sampling = index(inputs.make_sampling([{}, {"temperature": 0.0}, {"top_k": 4}], seed=5))
    out = torch.full((3, 2), -7, dtype=torch.int32, device=DEVICE)
    returned = sample(wide[:, :2500], sampling, out[:, 1])
    meant = sample(wide[:, :2500].contiguous(), sampling)
    assert returned.data_ptr() == out[:, 1].data_ptr()
    assert torch.equal(out[:, 1], meant) and (out[:, 0] == -7).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's arithmetic on padding
def test_padding_does_no_harm() -> None:
    """Padding rows may hold any numbers."""
    random = inputs.generator(6)
    logits = 3 * inputs.normal(random, 6, 2100)  # [R, V], more than a pool holds
    sampling = inputs.make_sampling([{"top_p": 0.8}, {}] + [{}] * 4, seed=2)
    before = OPS.sample_children(logits[:2], sampling.take([0, 1]), 2)
    logits[2], logits[3], logits[3, ::2], logits[4] = nan, inf, -inf, -inf
    sampling.temperature[2:] = torch.tensor([nan, inf, -1.0, 1e-38])
    sampling.top_k[2:] = torch.tensor([-5, 2**31 - 1, 7, 3])
    sampling.top_p[2:] = torch.tensor([nan, -inf, 0.5, -1.0])
    sampling.min_p[2:] = torch.tensor([inf, nan, 3.0, 0.1])
    sampling.seeds[2:], sampling.positions[2:] = -(2**63), -(2**31)
    after = OPS.sample_children(logits, sampling, 2)
    assert torch.equal(after.tokens[:2], before.tokens) and torch.equal(after.logprobs[:2], before.logprobs)
    assert (after.tokens < 2100).all() and (after.tokens >= -1).all() and (after.tokens[:, 0] >= 0).all()
    top = OPS.top_logprobs(logits, torch.tensor([4, 5, -1, 2**31 - 1, 2100, -(2**31)], dtype=torch.int32), 2)
    meant = reference.top_logprobs(logits[:2], torch.tensor([4, 5], dtype=torch.int32), 2)
    assert torch.equal(top.rank[:2], meant.rank) and torch.equal(top.tokens[:2], meant.tokens)
    assert difference(top.values[:2], meant.values) < 1e-6 and difference(top.chosen[:2], meant.chosen) < 1e-6


def test_long_lists_of_processors() -> None:
    """Of more entries, and more tokens, than a program works on at once."""
    random = inputs.generator(7)
    lists = [torch.randperm(2500, generator=random)[:count].tolist() for count in (1500, 1100, 0, 3)]
    processors = inputs.make_processors(
        [(row % 2 == 1, dict.fromkeys(tokens, (1.3, -0.25))) for row, tokens in enumerate(lists)]
    )
    logits = inputs.normal(random, 4, 2500)  # [R, V]
    found, meant = logits.clone(), logits.clone()
    OPS.process_logits(found, processors)
    reference.process_logits(meant, processors)
    assert difference(found, meant) < 1e-6


def test_processors_skip_ids_outside_the_vocabulary() -> None:
    table = torch.zeros(3, 10, device=DEVICE)  # [R, more than V]
    processors = LogitsProcessors(
        starts=torch.tensor([-3, 3, 900, 7], dtype=torch.int32, device=DEVICE),
        tokens=torch.tensor([-1, 4, 8, 8, 2**31 - 1, -(2**31)], dtype=torch.int32, device=DEVICE),
        scale=torch.ones(6, device=DEVICE),
        bias=torch.ones(6, device=DEVICE),
        only=torch.zeros(3, dtype=torch.uint8, device=DEVICE),
    )
    process_logits(table[:, :8], processors)
    assert table.nonzero().tolist() == [[0, 4]]


def test_masks_of_missing_rows_are_ignored() -> None:
    table = torch.zeros(3, 10, device=DEVICE)  # [R, more than V]
    masks = torch.tensor([[0b101], [0], [0]], dtype=torch.int32, device=DEVICE)
    mask_logits(table[1:2, :8], masks, torch.tensor([0, -1, 1], dtype=torch.int32, device=DEVICE))
    assert table.isinf().nonzero().tolist() == [[1, token] for token in (1, 3, 4, 5, 6, 7)]
