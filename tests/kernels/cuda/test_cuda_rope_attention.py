"""Fused rope, KV storage and attention: the bits of separate kernels, in outputs and in pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import interpreter_builder

from outrider.kernels import Batch, LayerPages, cuda
from outrider.kernels.cases import inputs
from outrider.kernels.cases.inputs import PAGE, Shape
from outrider.kernels.cuda import layers, paged_attention
from outrider.kernels.cuda.device import DEVICE
from outrider.kernels.cuda.paged_attention import Heads
from outrider.kernels.cuda.rope import RopeWeights, rotate_and_store

Rows = Sequence[tuple[int, int]]

HEADS = Heads(4, 2, 16, 0.25, window=0, skip=0, causal=True, anchored=False, batch_invariant=True)
ONE = replace(HEADS, count=3, kv=1)  # five tokens in a tile
SINKS = torch.tensor([-3.0, 0.5, 2.0, 9.0], device=DEVICE)
DECODING = ((0, 1), (15, 1), (16, 1), (256, 1))
FACTORS = torch.tensor([2.0, 1.0, 4.0, 64.0]).to(DEVICE).repeat(2, HEADS.size // 4)  # [G, D]
CHAINS = ((0, 5), (126, 5), (254, 5))
MIXED = ((0, 1), (61, 12), (257, 2))
LONG = ((0, 1), (530, 7))  # three chunks of keys, each in a program of its own
CASES: dict[str, tuple[Heads, torch.dtype, Rows]] = {
    "decoding": (replace(HEADS, count=2), torch.float32, DECODING),
    "decoding, three heads of 64": (replace(ONE, size=64), torch.float16, DECODING),
    "decoding, four heads of 128": (replace(HEADS, kv=1, size=128), torch.float16, DECODING[-2:]),
    "chains": (replace(HEADS, kv=1), torch.float16, CHAINS),
    "chains, three heads of 64": (replace(ONE, size=64), torch.float16, CHAINS),
    "chains, heads of 80": (replace(HEADS, count=2, kv=2, size=80), torch.float32, CHAINS),
    "chains, narrow heads": (replace(ONE, size=6), torch.bfloat16, CHAINS),
    "chains, twenty heads": (replace(HEADS, count=20, kv=1), torch.float16, CHAINS[1:2]),
    "mixed": (replace(ONE, batch_invariant=False), torch.float16, MIXED),
    "soft cap": (replace(ONE, soft_cap=1.5), torch.float16, MIXED),
    "sinks": (replace(HEADS, sinks=SINKS), torch.float16, MIXED),
    "long, sinks": (replace(HEADS, sinks=SINKS), torch.float16, LONG),
    "window": (replace(ONE, window=20), torch.float16, MIXED),
    "window within the step": (replace(ONE, window=3), torch.float32, MIXED),
    "hidden": (replace(HEADS, skip=8), torch.float16, MIXED),
    "long": (ONE, torch.float16, LONG),
    "decoding, int8": (replace(HEADS, count=2), torch.int8, DECODING),
    "chains, int8, divided keys": (replace(HEADS, key_factors=FACTORS), torch.int8, CHAINS),
    "long, int8, divided keys": (replace(ONE, key_factors=FACTORS[:1]), torch.int8, LONG),
    "chains, heads of 80, fp8": (replace(HEADS, count=2, kv=2, size=80), torch.float8_e4m3fn, CHAINS),
    "long, fp8": (ONE, torch.float8_e4m3fn, LONG),
    "long, window": (replace(ONE, window=300), torch.float32, LONG),
    "long, hidden": (replace(ONE, skip=1), torch.float16, LONG),  # the first token sees nothing, and is stored
}


@pytest.fixture(autouse=True)
def backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted programs run from the last to the first: none finds what an earlier one of its row has stored."""
    forwards = interpreter_builder.set_grid_idx

    def set_grid_idx(*index: int) -> None:
        forwards(*(size - 1 - at for size, at in zip(interpreter_builder.grid_dim, index, strict=True)))

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", set_grid_idx)


def random_rope(size: int, positions: int = 400) -> RopeWeights:
    """Fewer positions than some tokens stand at: the last one holds from there on."""
    angles = 6.3 * torch.rand(positions, size // 2, generator=inputs.generator(7))
    return RopeWeights(1e-5, None, None, angles.cos().to(DEVICE), angles.sin().to(DEVICE))


def random_storage(batch: Batch, heads: Heads, dtype: torch.dtype) -> LayerPages:
    """What the step is to store is not there yet."""
    shape = Shape(heads=heads.count, kv_heads=heads.kv, head_dim=heads.size)
    pages = inputs.random_pages(inputs.generator(3), batch, shape, dtype)
    slots = batch.slots[batch.slots >= 0].long()
    for kept in (pages.keys, pages.values) if pages.key_scales is None else pages.tensors[2:]:
        kept[slots // PAGE, :, slots % PAGE] = torch.nan
    return pages


def random_projected(batch: Batch, heads: Heads) -> Tensor:
    return 3 * inputs.normal(inputs.generator(4), len(batch.slots), (heads.count + 2 * heads.kv) * heads.size)


def carried(batch: Batch) -> Batch:
    fields = {name: value.to(DEVICE) for name, value in vars(batch).items() if isinstance(value, Tensor)}
    return replace(batch, **fields)


def run(fused: bool, projected: Tensor, heads: Heads, batch: Batch, before: LayerPages) -> tuple[Tensor, ...]:
    """Outputs, keys and values after them."""
    pages = inputs.copy_pages(before, DEVICE)
    states, batch = projected.to(DEVICE), carried(batch)
    rope = replace(random_rope(heads.size), key_factors=heads.key_factors)
    if fused:
        found = paged_attention.paged_attention(states, heads, batch, pages, rope=rope)
    else:
        found = paged_attention.paged_attention(
            rotate_and_store(states, heads.count, rope, batch, pages), heads, batch, pages
        )
    return found.cpu(), *(part.cpu() for part in pages.tensors)


def same(found: Tensor, expected: Tensor) -> bool:
    """To the bit: NaN, too, where the pages have some left."""
    return torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def agree(projected: Tensor, heads: Heads, batch: Batch, pages: LayerPages, tokens: int | None = None) -> None:
    found = run(True, projected, heads, batch, pages)
    expected = run(False, projected, heads, batch, pages)
    assert not expected[0][:tokens].isnan().any()
    for ours, theirs in zip((found[0][:tokens], *found[1:]), (expected[0][:tokens], *expected[1:]), strict=True):
        assert same(ours, theirs)


@pytest.mark.parametrize("name", CASES)
def test_fused_rope_attention_has_the_bits_of_two_kernels(name: str) -> None:
    heads, dtype, rows = CASES[name]
    batch = inputs.random_batch(inputs.generator(1), rows)
    agree(random_projected(batch, heads), heads, batch, random_storage(batch, heads, dtype))


def test_bits_do_not_depend_on_the_programs_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = inputs.random_batch(inputs.generator(1), LONG)
    projected, pages = random_projected(batch, ONE), random_storage(batch, ONE, torch.float16)
    expected = run(False, projected, ONE, batch, pages)
    for busy in (0, 4):  # one program for all chunks; two that share them
        monkeypatch.setattr(paged_attention, "BUSY", busy)
        for ours, theirs in zip(run(True, projected, ONE, batch, pages), expected, strict=True):
            assert same(ours, theirs)


# Rows of padding divide what was in the memory before; their results are not read.
@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero|All-NaN slice) encountered:RuntimeWarning")
@pytest.mark.parametrize("rows", [MIXED, LONG], ids=["mixed", "long"])
def test_padding_is_harmless(rows: Rows) -> None:
    batch = inputs.random_batch(inputs.generator(1), rows)
    for begin, end in pairwise(batch.query_starts.tolist()):  # the last tokens of a row, but never its first
        dropped = slice(max(end - 2, begin + 1), end)
        batch.positions[dropped], batch.slots[dropped] = 0, -1
    projected, pages = random_projected(batch, ONE), random_storage(batch, ONE, torch.float16)
    tokens, ends = len(projected), batch.query_starts[-1:]
    padded = replace(
        batch,
        positions=torch.cat([batch.positions, torch.zeros(5, dtype=torch.int32)]),
        slots=torch.cat([batch.slots, torch.full((5,), -1, dtype=torch.int32)]),
        query_starts=torch.cat(
            [batch.query_starts, ends + 2, ends + 2, ends + 2]
        ),  # the first has tokens, without slots
        page_tables=torch.cat(
            [batch.page_tables, torch.tensor([[-1], [-1], [10**9]]).expand(3, batch.page_tables.shape[1])]
        ),
    )
    poisoned = torch.cat([projected, torch.full((5, projected.shape[1]), torch.nan)])
    agree(poisoned, ONE, padded, pages, tokens)


def test_a_token_without_a_slot_uses_the_key_of_the_page_table() -> None:
    batch = inputs.random_batch(inputs.generator(1), MIXED)
    batch.slots[::3] = -1
    agree(random_projected(batch, ONE), ONE, batch, random_storage(batch, ONE, torch.float16))


def test_chains_in_any_steps_have_the_same_bits() -> None:
    batch = inputs.random_batch(inputs.generator(1), ((251, 9), (3, 9)))
    projected, pages = random_projected(batch, ONE), random_storage(batch, ONE, torch.float16)
    whole = run(True, projected, ONE, batch, pages)
    for sizes in ((4, 5), (1, 8)):
        begin, kept = 0, pages
        for size in sizes:
            tokens = [*range(begin, begin + size), *range(9 + begin, 9 + begin + size)]
            found, *stored = run(True, projected[tokens], ONE, inputs.take_tokens(batch, tokens), kept)
            kept, begin = LayerPages(*stored), begin + size
            assert same(found, whole[0][tokens])
        assert same(kept.keys, whole[1]) and same(kept.values, whole[2])


SHAPE = Shape(width=64, heads=6, kv_heads=2, head_dim=16, inner=64)
CHAIN = ((20, 6), (0, 1))
KINDS: dict[str, tuple[bool, Rows, Sequence[str], dict[str, bool]]] = {
    "plain": (True, CHAIN, ("rotary",), {}),
    "much else": (True, CHAIN, ("rotary", "norm", "post_norm", "query_bias", "value_bias", "output_bias"), {}),
    "no rotation": (False, CHAIN, ("norm",), {}),
    "norms of queries": (False, CHAIN, ("rotary", "query_norm"), {}),
    "norms over all heads": (True, CHAIN, ("rotary", "whole_norms", "query_norm", "key_norm"), {}),
    "norms of keys": (False, CHAIN, ("rotary", "key_norm"), {}),
    "blocks": (False, CHAIN, ("rotary",), {"causal": False}),
    "anchored": (False, CHAIN, ("rotary",), {"anchored": True}),
    "a prompt": (False, ((20, 7), (0, 1)), ("rotary",), {}),
    "trees": (False, CHAIN, ("rotary",), {}),
}


@pytest.mark.parametrize("name", KINDS)
def test_layers_are_fused_where_they_can_be(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fusable, rows, options, sees = KINDS[name]
    random = inputs.generator(1)
    weights = inputs.attention_weights(random, "f32", SHAPE, options, window=9, **sees)
    layer = layers.attention_layer(weights, batch_invariant=name != "plain")
    pairs = [(layer, cuda.mlp_layer(inputs.mlp_weights(random, "f32", SHAPE, "silu")))]
    batch = inputs.random_batch(random, rows)
    if name == "trees":
        chain = torch.arange(-1, len(batch.slots) - 1, dtype=torch.int32)
        chain[batch.query_starts[:-1].long()] = -1
        batch = replace(batch, parents=chain)
    before = inputs.random_pages(random, batch, SHAPE, torch.float16)
    states = inputs.normal(random, len(batch.slots), SHAPE.width)  # [T, E]
    rotations: list[int] = []

    def counted(*arguments: object) -> Tensor:
        rotations.append(1)
        return rotate_and_store(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(layers, "rotate_and_store", counted)

    def result() -> tuple[Tensor, ...]:
        x = states.to(DEVICE, copy=True)
        pages = inputs.copy_pages(before, DEVICE)
        cuda.run_layers(x, cuda.layer_stack(pairs, [pages]), carried(batch))
        return x.cpu(), pages.keys.cpu(), pages.values.cpu()

    monkeypatch.setattr(layers, "SURPLUS", 5)
    found = result()
    assert len(rotations) == (0 if fusable else 1)
    if fusable:
        monkeypatch.setattr(layers, "SURPLUS", -1000)
        for ours, theirs in zip(found, result(), strict=True):
            assert same(ours, theirs)
        assert len(rotations) == 1
