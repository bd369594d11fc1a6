"""Non-causal blocks: each token has the bits of a causal layer's last token. And project_kv."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from outrider.kernels import AttentionWeights, Batch, Kernels, LayerPages, Weight, cpu
from outrider.kernels.cases import inputs
from outrider.kernels.cases.attention import take_rows
from outrider.kernels.cases.inputs import PAGE, Shape

SHAPE = Shape(width=64, heads=4, kv_heads=2, head_dim=16, inner=64)
ROWS = ((0, 1), (0, 5), (9, 16), (15, 2), (47, 17), (60, 8), (63, 1), (64, 3), (120, 9), (300, 16))
BIASES = ("query_bias", "key_bias", "value_bias")


class Kind(NamedTuple):
    dtype: torch.dtype = torch.float32  # of the pages
    window: int = 0
    skip: int = 0
    weights: str = "f32"
    shape: Shape = SHAPE


KINDS = [
    Kind(),
    Kind(torch.float16, skip=1, weights="q8_0"),
    Kind(torch.bfloat16, window=20),
    Kind(torch.float16, window=1),
    Kind(torch.float16, window=70, skip=37, weights="f16"),
    Kind(window=5, shape=Shape(width=40, heads=6, kv_heads=1, head_dim=10, inner=8)),
]
EACH = pytest.mark.parametrize("kind", KINDS, ids=str)


class Block:
    """A layer that is not causal, and queries over full pages."""

    def __init__(self, ops: Kernels, kind: Kind, seed: int = 1) -> None:
        random = inputs.generator(seed)
        self.weights = inputs.attention_weights(
            random, kind.weights, kind.shape, ["rotary"], kind.window, 512, kind.skip, causal=False
        )
        self.ops, self.batch = ops, inputs.random_batch(random, ROWS)
        self.pages = inputs.random_pages(random, self.batch, kind.shape, kind.dtype)
        count = len(self.batch.tokens)
        self.queries = 3 * inputs.normal(random, count, kind.shape.heads * kind.shape.head_dim)  # [T, H * D]
        self.x = inputs.normal(random, count, kind.shape.width)  # [T, E]

    def attend(self, weights: AttentionWeights, batch: Batch, tokens: list[int]) -> Tensor:
        out = self.x[tokens]
        self.ops.attend(self.queries[tokens], self.ops.attention_layer(weights), batch, self.pages, out)
        return out

    def last(self, row: int) -> Batch:
        """The last token of a row, alone."""
        return inputs.take_tokens(self.batch, [int(self.batch.query_starts[row + 1]) - 1])


@EACH
def test_a_block_equals_the_last_token_of_a_causal_layer(ops: Kernels, kind: Kind) -> None:
    block = Block(ops, kind)
    whole = block.attend(block.weights, block.batch, list(range(len(block.x))))  # [T, E]
    assert whole.isfinite().all()
    for row, (begin, end) in enumerate(pairwise(block.batch.query_starts.tolist())):
        for token in {begin, (begin + end) // 2, end - 1}:
            window = kind.window + end - 1 - token if kind.window else 0  # from the last token back to the same key
            causal = replace(block.weights, causal=True, window=window)
            assert torch.equal(block.attend(causal, block.last(row), [token])[0], whole[token])


@EACH
def test_a_row_of_one_token_is_causal(ops: Kernels, kind: Kind) -> None:
    block = Block(ops, kind)
    for row in (0, 6):
        tokens, part = take_rows(block.batch, [row])
        causal = block.attend(replace(block.weights, causal=True), part, tokens)
        assert torch.equal(block.attend(block.weights, part, tokens), causal)


@EACH
def test_rows_do_not_see_their_neighbours(ops: Kernels, kind: Kind) -> None:
    block = Block(ops, kind)
    whole = block.attend(block.weights, block.batch, list(range(len(block.x))))
    for rows in ([4], [2, 5, 9], [0, 1], list(range(1, len(ROWS)))):
        tokens, part = take_rows(block.batch, rows)
        assert torch.equal(block.attend(block.weights, part, tokens), whole[tokens])


def test_keys_after_a_block_are_ignored(ops: Kernels) -> None:
    block = Block(ops, KINDS[0])
    everything = list(range(len(block.x)))
    before = block.attend(block.weights, block.batch, everything)
    for kept in (block.pages.keys, block.pages.values):
        seen = torch.zeros(kept.shape[0], PAGE, dtype=torch.bool)
        for row, (context, count) in enumerate(ROWS):
            at = torch.arange(context + count)
            seen[block.batch.page_tables[row, at // PAGE].long(), at % PAGE] = True
        kept.transpose(1, 2)[~seen] = torch.nan
    assert torch.equal(block.attend(block.weights, block.batch, everything), before)


def test_each_key_of_a_block_is_seen_by_all_of_it(ops: Kernels) -> None:
    for position in (60, 63, 64, 67):
        block = Block(ops, KINDS[0])
        tokens, part = take_rows(block.batch, [5])
        slot = int(part.slots[position - 60])
        block.pages.values[slot // PAGE, :, slot % PAGE] = torch.nan
        assert block.attend(block.weights, part, tokens).isnan().any(1).all()


@pytest.mark.parametrize("window", [0, 4])
def test_tokens_beyond_the_limit_change_nothing(ops: Kernels, window: int) -> None:
    """They stand at position 0 without a slot, as block_inputs leaves them."""
    block = Block(ops, Kind(window=window))
    for row, kept in ((2, 1), (5, 5), (9, 15)):
        tokens, part = take_rows(block.batch, [row])
        positions, slots = part.positions.clone(), part.slots.clone()
        positions[kept:], slots[kept:] = 0, -1
        padded = block.attend(block.weights, replace(part, positions=positions, slots=slots), tokens)
        own = tokens[:kept]
        alone = inputs.take_tokens(block.batch, own)
        assert torch.equal(padded[:kept], block.attend(block.weights, alone, own))
        assert padded.isfinite().all()


def test_blocks_without_slots_do_not_crash(ops: Kernels) -> None:
    block = Block(ops, KINDS[0])
    tokens, part = take_rows(block.batch, [5])
    nowhere = replace(part, positions=torch.zeros_like(part.positions), slots=torch.full_like(part.slots, -1))
    assert block.attend(block.weights, nowhere, tokens).isfinite().all()
    no_rows = Batch(*[torch.empty(0, dtype=torch.int32)] * 3, part.query_starts[:1], part.page_tables[:0])
    assert block.attend(block.weights, no_rows, []).shape == (0, SHAPE.width)
    between = replace(part, query_starts=torch.tensor([0, 0, 8, 8], dtype=torch.int32))
    between = replace(between, page_tables=part.page_tables.repeat(3, 1))  # rows without tokens about the block
    assert torch.equal(block.attend(block.weights, between, tokens), block.attend(block.weights, part, tokens))


def test_trees_are_refused_where_a_layer_is_not_causal(ops: Kernels) -> None:
    block = Block(ops, KINDS[0])
    tokens, part = take_rows(block.batch, [1])
    tree = replace(part, parents=torch.arange(-1, 4, dtype=torch.int32))
    with pytest.raises(ValueError, match="a layer that is not causal sees no trees"):
        block.attend(block.weights, tree, tokens)
    layer = ops.attention_layer(block.weights)
    mlp = ops.mlp_layer(inputs.mlp_weights(inputs.generator(1), "f32", SHAPE, "silu"))
    with pytest.raises(ValueError, match="a layer that is not causal sees no trees"):
        ops.run_layers(block.x[tokens], ops.layer_stack([(layer, mlp)], [block.pages]), tree)
    block.attend(replace(block.weights, causal=True), tree, tokens)


@pytest.mark.parametrize("count", [1, 3, 17, 40])
@pytest.mark.parametrize("weights, dtype", [("f32", torch.float32), ("bf16", torch.bfloat16), ("q4_1", torch.float16)])
@pytest.mark.parametrize("options", [(), ("rotary", "key_norm", "query_norm", *BIASES)], ids=["plain", "everything"])
def test_project_kv_stores_what_project_qkv_stores(
    ops: Kernels, count: int, weights: str, dtype: torch.dtype, options: tuple[str, ...]
) -> None:
    random = inputs.generator(count)
    without = inputs.attention_weights(random, weights, SHAPE, options)
    batch = inputs.random_batch(random, [(7, count)])
    start = inputs.random_pages(random, batch, SHAPE, dtype)
    x = inputs.normal(random, count, SHAPE.width)  # [T, E]
    stored = []
    for norm in (None, 2 * torch.ones(SHAPE.width)):  # the norm at the beginning is not project_kv's
        layer, pages = ops.attention_layer(replace(without, norm=norm)), copied(start)
        before = x.clone()
        ops.project_kv(x, layer, batch, pages)
        assert torch.equal(x, before)
        stored.append(pages)
    expected = copied(start)
    ops.project_qkv(x, ops.attention_layer(without), batch, expected)
    assert not torch.equal(expected.keys, start.keys)
    for pages in stored:
        assert torch.equal(pages.keys, expected.keys) and torch.equal(pages.values, expected.values)


def copied(pages: LayerPages) -> LayerPages:
    return LayerPages(pages.keys.clone(), pages.values.clone())


def test_project_kv_writes_only_slots_and_reads_nothing_of_rejected_tokens(ops: Kernels) -> None:
    random = inputs.generator(3)
    layer = ops.attention_layer(inputs.attention_weights(random, "f32", SHAPE, ["rotary"]))
    batch = inputs.random_batch(random, [(0, 9), (30, 4)])
    batch.slots[[4, 5, 6, 7, 8, 12]] = -1
    batch.positions[[8, 12]] = 2**31 - 1  # no rotary table reaches so far
    pages = inputs.random_pages(random, batch, SHAPE, torch.float16)
    before = copied(pages)
    x = inputs.normal(random, 13, SHAPE.width)
    x[[4, 12]] = torch.nan
    ops.project_kv(x, layer, batch, pages)
    slots = batch.slots[batch.slots >= 0].long()
    for found, meant in ((pages.keys, before.keys), (pages.values, before.values)):
        assert not torch.equal(found, meant) and found.isfinite().all()
        meant[slots // PAGE, :, slots % PAGE] = found[slots // PAGE, :, slots % PAGE]
        assert torch.equal(found, meant)


@pytest.mark.parametrize("slot", [-2, 10**6])
@pytest.mark.parametrize("count", [1, 20])
def test_project_kv_refuses_a_slot_outside_the_storage(ops: Kernels, slot: int, count: int) -> None:
    random = inputs.generator(3)
    layer = ops.attention_layer(inputs.attention_weights(random, "f32", SHAPE))
    batch = inputs.random_batch(random, [(0, count)])
    pages = inputs.random_pages(random, batch, SHAPE, torch.float32)
    batch.slots[count // 2] = slot
    with pytest.raises(ValueError, match="outside the storage"):
        ops.project_kv(inputs.normal(random, count, SHAPE.width), layer, batch, pages)


def guarded(tensor: Tensor) -> Tensor:
    """A copy that ends where memory ends: the page behind it may not be touched."""
    size = mmap.PAGESIZE
    length = (tensor.nbytes + size - 1) // size * size
    memory = mmap.mmap(-1, length + size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + length), size, 0) == 0
    flat = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=length - tensor.nbytes)
    return flat.reshape(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [6, 16, 40])
def test_nothing_is_read_or_written_past_the_end(level: str, dtype: torch.dtype, head_dim: int) -> None:
    shape = Shape(width=20, heads=2, kv_heads=1, head_dim=head_dim)
    random = inputs.generator(head_dim)
    weights = inputs.attention_weights(random, "f32", shape, ["rotary", "key_norm", *BIASES], 9, causal=False)
    present = {name: guarded(value) for name, value in vars(weights).items() if isinstance(value, Tensor)}
    matrices = {
        name: replace(value, data=guarded(value.data)) for name, value in vars(weights).items() if type(value) is Weight
    }
    layer = cpu.attention_layer(replace(weights, **present, **matrices))
    pages = LayerPages(*[guarded(inputs.normal(random, 4, 1, PAGE, head_dim).to(dtype)) for _ in range(2)])
    numbers = [
        [1, 2, 3, 4, 5, 6],
        [46, 47, 48, 61, 62, 63],
        [14, 15, 16, 61, 62, 63],
        [0, 3, 6],
        [[0, 1, 0, 1], [0, 1, 2, 3]],
    ]
    batch = Batch(*[guarded(torch.tensor(values, dtype=torch.int32)) for values in numbers])
    x, queries = inputs.normal(random, 6, 20), inputs.normal(random, 6, 2 * head_dim)
    states = guarded(x)
    cpu.project_kv(states, layer, batch, pages)
    cpu.attend(guarded(queries), layer, batch, pages, states)
    assert states.isfinite().all() and not torch.equal(states, x)
