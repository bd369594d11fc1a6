"""Attention, rope and KV copies on CUDA agree with the reference, with the same bits for any split of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.device import graphs
from outrider.kernels import Batch, LayerPages, reference
from outrider.kernels.cases import inputs
from outrider.kernels.cases.attention import BUSH, CHAIN, DEEP, ROOTS
from outrider.kernels.cases.case import STEPS, difference
from outrider.kernels.cases.inputs import PAGE, Shape
from outrider.kernels.cuda import kv_copy, layers, paged_attention, prompt_attention
from outrider.kernels.cuda.device import DEVICE
from outrider.kernels.cuda.paged_attention import Heads
from outrider.kernels.reference.layers import gather, visible_slots
from outrider.warm_up import PREFIXES

HEADS = Heads(4, 2, 16, 0.25, window=0, skip=0, causal=True, anchored=False, batch_invariant=True)
ONE = replace(HEADS, count=3, kv=1)  # five tokens in a tile
MIXED = ((0, 1), (61, 6), (257, 2), (5, 1))
TREES = ((0, BUSH), (5, CHAIN), (60, ROOTS), (250, DEEP), (33, (-1,)))
SINKS = torch.tensor([-3.0, 0.5, 2.0, 9.0], device=DEVICE)
FP8 = torch.float8_e4m3fn
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}  # halves are multiplied as halves
TOLERANCE |= {torch.int8: 5e-3, FP8: 5e-3}  # quantized numbers too


def storage(batch: Batch, heads: Heads, dtype: torch.dtype = torch.float32, seed: int = 3) -> LayerPages:
    shape = Shape(heads=heads.count, kv_heads=heads.kv, head_dim=heads.size)
    return inputs.random_pages(inputs.generator(seed), batch, shape, dtype)


def random_queries(batch: Batch, heads: Heads) -> Tensor:
    return 3 * inputs.normal(inputs.generator(4), len(batch.positions), heads.count * heads.size)  # [T, H * D]


def carried(batch: Batch) -> Batch:
    fields = {name: value.to(DEVICE) for name, value in vars(batch).items() if isinstance(value, Tensor)}
    return replace(batch, **fields)


def run(queries: Tensor, heads: Heads, batch: Batch, pages: LayerPages) -> Tensor:
    on_device = inputs.copy_pages(pages, DEVICE)
    return paged_attention.paged_attention(queries.to(DEVICE), heads, carried(batch), on_device).cpu()


def meant(queries: Tensor, heads: Heads, batch: Batch, pages: LayerPages) -> Tensor:
    out = torch.zeros_like(queries)
    for token, slots in enumerate(visible_slots(batch, heads, PAGE)):  # type: ignore[arg-type]
        keys, values = gather(pages, slots)  # [G, keys, D]
        query = queries[token].reshape(heads.kv, -1, heads.size)  # [G, H / G, D]
        scores = query @ keys.transpose(1, 2) * heads.scale
        scores = heads.soft_cap * torch.tanh(scores / heads.soft_cap) if heads.soft_cap else scores
        if heads.sinks is not None:
            scores = torch.cat([scores, heads.sinks.cpu().view(heads.kv, -1, 1)], -1)
        out[token] = (torch.softmax(scores, -1)[..., : len(slots)] @ values).flatten()
    return out


def cut(batch: Batch, count: int) -> Batch:
    """The last tokens of each row (but never the first) stand at position 0, without a slot."""
    positions, slots = batch.positions.clone(), batch.slots.clone()
    for begin, end in zip(batch.query_starts.tolist(), batch.query_starts.tolist()[1:], strict=False):
        first = max(end - count, begin + 1)
        positions[first:end], slots[first:end] = 0, -1
    return replace(batch, positions=positions, slots=slots)


SEEN = {
    "plain": HEADS,
    "fast": replace(HEADS, batch_invariant=False),
    "window": replace(HEADS, window=20),
    "window 1": replace(HEADS, window=1),
    "soft cap": replace(HEADS, soft_cap=1.5),
    "sinks": replace(HEADS, sinks=SINKS),
    "sinks, window 1": replace(HEADS, window=1, sinks=SINKS),
    "hidden": replace(HEADS, skip=240, window=400),
    "anchored": replace(HEADS, window=5, anchored=True),
    "blocks": replace(HEADS, causal=False),
    "blocks, anchored, hidden": replace(HEADS, causal=False, window=30, skip=1, anchored=True),
    "three heads of 80": replace(HEADS, count=3, kv=1, size=80),
    "no shared heads": replace(HEADS, count=3, kv=3, size=8),
    "twenty heads": replace(HEADS, count=20, kv=1),
}


@pytest.mark.parametrize("name", SEEN)
def test_attention_is_that_of_the_reference(name: str) -> None:
    heads = SEEN[name]
    batch = inputs.random_batch(inputs.generator(1), MIXED)
    batch = cut(batch, 0 if heads.causal else 2)
    pages, queries = storage(batch, heads), random_queries(batch, heads)
    found = run(queries, heads, batch, pages)
    assert difference(found, meant(queries, heads, batch, pages)) < 1e-5


@pytest.mark.parametrize("name", ["fast", "window", "three heads of 80"])
@pytest.mark.parametrize("many", [1, 1 << 20], ids=["small tiles", ""])
def test_many_rows_some_of_them_without_tokens(name: str, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than are read at a time, and texts of several tiles of keys."""
    monkeypatch.setattr(paged_attention, "MANY_PROGRAMS", many)
    heads = replace(SEEN[name], batch_invariant=False)
    batch = inputs.random_batch(inputs.generator(6), [(0 if row % 10 else 150, row % 3) for row in range(70)])
    pages, queries = storage(batch, heads, torch.bfloat16), random_queries(batch, heads)
    found = run(queries, heads, batch, pages)
    assert difference(found, meant(queries, heads, batch, pages)) < 2 * TOLERANCE[torch.bfloat16]


def test_tiles_of_few_keys_are_those_of_steps_that_are_always_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm-up compiles kernels in captured steps; longer ones with prompts are not captured."""
    assert paged_attention.MOST_TOKENS <= graphs.MAX_TOKENS
    monkeypatch.setattr(paged_attention, "MANY_PROGRAMS", 1)
    heads = replace(HEADS, batch_invariant=False)
    found: list[int] = []

    def launch(*given: object, variant: paged_attention.Variant, **options: object) -> None:
        found.append(variant.block)

    monkeypatch.setattr(paged_attention, "_attend", defaultdict(lambda: launch))
    for count in (4, 5):
        batch = carried(inputs.random_batch(inputs.generator(6), [(0, count)] * 64))
        pages = inputs.copy_pages(storage(batch, heads, torch.bfloat16), DEVICE)
        paged_attention.paged_attention(random_queries(batch, heads).to(DEVICE), heads, batch, pages)
    assert found[0] == paged_attention.FEW_KEYS < found[1]


@pytest.mark.parametrize("name", ["fast", "soft cap", "sinks", "hidden", "blocks", "anchored", "three heads of 80"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
@pytest.mark.parametrize("long", [1024, 64], ids=["", "widest tiles"])
def test_prompts_with_and_without_masked_tiles(
    name: str, dtype: torch.dtype, long: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys that all tokens of a tile attend to are not masked: the first row has them, the second has few."""
    monkeypatch.setattr(paged_attention, "LONG", long)
    heads = replace(SEEN[name], batch_invariant=False)
    batch = inputs.random_batch(inputs.generator(6), ((300, 130), (0, 70)))
    pages, queries = storage(batch, heads, dtype), random_queries(batch, heads)
    found = run(queries, heads, batch, pages)
    assert difference(found, meant(queries, heads, batch, pages)) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("name", ["fast", "three heads of 80"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("prefix", "lengths"), [(63, []), (64, [64]), (333, [128, 128, 64])])
def test_a_chunk_of_a_prompt_over_slices_of_earlier_keys(
    prefix: int, lengths: list[int], dtype: torch.dtype, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found_lengths, dense = [], prompt_attention._dense

    def counted(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        found_lengths.append(keys.shape[2])
        return dense(queries, keys, values, scale)

    for constant, value in {"SHORTEST": 64, "LONGEST": 128, "LONG": 64, "_dense": counted}.items():
        monkeypatch.setattr(prompt_attention, constant, value)
    heads = replace(SEEN[name], batch_invariant=False)
    batch = inputs.random_batch(inputs.generator(6), ((prefix, 64),))
    pages, queries = storage(batch, heads, dtype), random_queries(batch, heads)
    given = replace(carried(batch), prefix=prefix), inputs.copy_pages(pages, DEVICE)
    found = prompt_attention.prompt_attention(queries.to(DEVICE), heads, *given).cpu()
    assert found_lengths == lengths
    assert difference(found, meant(queries, heads, batch, pages)) < 2 * TOLERANCE[dtype]  # slices are rounded too


def test_the_warm_up_has_slices_of_all_lengths() -> None:
    warm = {end - begin for prefix in PREFIXES for begin, end in prompt_attention.slices(prefix)}
    assert warm == {end - begin for prefix in range(0, 1 << 18, 4096) for begin, end in prompt_attention.slices(prefix)}


@pytest.mark.parametrize("name", ["plain", "window", "soft cap", "sinks", "hidden", "blocks", "no shared heads"])
def test_other_chunks_have_no_slices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layers with other attention ranges, and of heads that cuDNN does not take."""
    for constant in ("SHORTEST", "LONGEST", "LONG"):
        monkeypatch.setattr(prompt_attention, constant, 64)
    heads = replace(SEEN[name], batch_invariant=name == "plain", size=12 if name == "no shared heads" else 16)
    batch = inputs.random_batch(inputs.generator(6), ((300, 64),))
    pages, queries = storage(batch, heads, torch.float16), random_queries(batch, heads)
    given = replace(carried(batch), prefix=300), inputs.copy_pages(pages, DEVICE)
    monkeypatch.setattr(prompt_attention, "_dense", None)
    found = prompt_attention.prompt_attention(queries.to(DEVICE), heads, *given).cpu()
    assert difference(found, meant(queries, heads, batch, pages)) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8, FP8])
@pytest.mark.parametrize("rows", [MIXED, ((250, 70),)], ids=["mixed", "prompt"])
def test_small_pages_and_wide_tiles(dtype: torch.dtype, rows: Sequence[tuple[int, int]]) -> None:
    heads = replace(HEADS, batch_invariant=False, window=50)
    batch = inputs.random_batch(inputs.generator(2), rows)
    pages, queries = storage(batch, heads, dtype), random_queries(batch, heads)
    found = run(queries, heads, batch, pages)
    assert difference(found, meant(queries, heads, batch, pages)) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    "heads",
    [
        HEADS,
        replace(HEADS, window=20, skip=3),
        replace(HEADS, count=6, kv=1, soft_cap=1.5),
        replace(HEADS, sinks=SINKS),
    ],
    ids=["plain", "window", "soft cap", "sinks"],
)
@pytest.mark.parametrize("dtype", [torch.float32, FP8])
def test_trees_are_those_of_the_reference(heads: Heads, dtype: torch.dtype) -> None:
    batch = inputs.random_trees(inputs.generator(1), TREES)
    batch.slots[::7] = -1  # these have the key that their position has in the page table
    pages, queries = storage(batch, heads, dtype), random_queries(batch, heads)
    found = run(queries, heads, batch, pages)
    assert difference(found, meant(queries, heads, batch, pages)) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", ["fast", "window", "soft cap", "sinks", "hidden", "blocks", "twenty heads"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
@pytest.mark.parametrize("strips", [2, 5])
def test_long_rows_have_one_chunk_for_each_strip(
    name: str, dtype: torch.dtype, strips: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = replace(SEEN[name], batch_invariant=False, window=SEEN[name].window and 900)
    batch = inputs.random_batch(inputs.generator(7), ((1400, 5), (700, 1), (20, 7), (1023, 1)))
    launched = []
    attend = paged_attention._attend

    class Noted:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            launched.append(grid)
            return attend[grid]

    monkeypatch.setattr(paged_attention, "_attend", Noted())
    pages, queries = storage(batch, heads, dtype), random_queries(batch, heads)
    run(queries, heads, batch, pages)
    monkeypatch.setattr(paged_attention, "BUSY", strips * launched[0][0])
    found = run(queries, heads, batch, pages)
    assert launched[1][2] == strips
    assert difference(found, meant(queries, heads, batch, pages)) < TOLERANCE[dtype]


# Rows of padding divide what was in the memory before; their results are not read.
@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero|All-NaN slice) encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("heads", "dtype"),
    [(ONE, torch.float16), (ONE, FP8), (replace(ONE, causal=False, window=80), torch.float16)],
    ids=["causal", "causal, fp8", "blocks"],
)
def test_batch_tables_padding_and_splits_change_no_bit(
    heads: Heads, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = ((0, 1), (61, 6), (530, 2), (5, 1))
    batch = inputs.random_batch(inputs.generator(1), rows)
    pages, queries = storage(batch, heads, dtype), random_queries(batch, heads)
    whole = run(queries, heads, batch, pages)
    wider = torch.full((len(rows), 70), -1, dtype=torch.int32)
    wider[:, : batch.page_tables.shape[1]] = batch.page_tables
    assert torch.equal(run(queries, heads, replace(batch, page_tables=wider), pages), whole)

    with monkeypatch.context() as patch:
        patch.setattr(paged_attention, "BUSY", 0)  # one program walks all chunks
        assert torch.equal(run(queries, heads, batch, pages), whole)
        patch.setattr(paged_attention, "BUSY", 14)  # two share them
        assert torch.equal(run(queries, heads, replace(batch, page_tables=wider), pages), whole)

    for row, (begin, end) in enumerate(zip(batch.query_starts.tolist(), batch.query_starts.tolist()[1:], strict=False)):
        count = (int(batch.positions[end - 1])) // PAGE + 1  # pages of this row
        alone = inputs.take_tokens(batch, range(begin, end))
        alone = replace(alone, page_tables=batch.page_tables[row : row + 1, :count])
        assert torch.equal(run(queries[begin:end], heads, alone, pages), whole[begin:end])

    ends, tokens = batch.query_starts[-1:], len(queries)
    padded = replace(
        batch,
        positions=torch.cat([batch.positions, torch.zeros(3, dtype=torch.int32)]),
        slots=torch.cat([batch.slots, torch.full((3,), -1, dtype=torch.int32)]),
        query_starts=torch.cat([batch.query_starts, ends, ends]),
        page_tables=torch.cat([batch.page_tables, torch.full_like(batch.page_tables[:2], 10**9)]),
    )
    poisoned = torch.cat([queries, torch.full((3, queries.shape[1]), torch.nan)])
    assert torch.equal(run(poisoned, heads, padded, pages)[:tokens], whole)


@pytest.mark.parametrize("heads", [ONE, replace(ONE, window=20)], ids=str)
def test_chains_in_any_steps_have_the_same_bits(heads: Heads) -> None:
    rows = ((251, 9), (3, 9))
    batch = inputs.random_batch(inputs.generator(1), rows)
    pages, queries = storage(batch, heads, torch.bfloat16), random_queries(batch, heads)
    whole = run(queries, heads, batch, pages)
    for sizes in ((1,) * 4 + (5,), (4, 5)):
        begin = 0
        for size in sizes:
            tokens = [*range(begin, begin + size), *range(9 + begin, 9 + begin + size)]
            found = run(queries[tokens], heads, inputs.take_tokens(batch, tokens), pages)
            assert torch.equal(found, whole[tokens])
            begin += size
    order = torch.arange(-1, 17, dtype=torch.int32)
    order[9] = -1
    assert torch.equal(run(queries, heads, replace(batch, parents=order), pages), whole)


@pytest.mark.parametrize(
    ("heads", "dtype"), [(ONE, torch.float16), (ONE, torch.int8), (replace(ONE, window=9), torch.float16)], ids=str
)
def test_a_path_of_a_tree_has_the_bits_of_a_chain(heads: Heads, dtype: torch.dtype) -> None:
    batch = inputs.random_trees(inputs.generator(1), [(60, DEEP), (250, DEEP), (14, BUSH)])
    assert batch.parents is not None
    pages, queries = storage(batch, heads, dtype), random_queries(batch, heads)
    whole = run(queries, heads, batch, pages)
    for leaf in (15, len(DEEP) + 17, 2 * len(DEEP) + 9):
        path = inputs.with_ancestors(batch, [leaf])
        chain = replace(inputs.take_tokens(batch, path), parents=None)
        at = chain.positions.long()
        own = chain.page_tables[0].long()[at // PAGE]
        closed = inputs.copy_pages(pages)
        for kept, before in zip(closed.tensors, pages.tensors, strict=True):
            slots = batch.slots[path].long()
            kept[own, :, at % PAGE] = before[slots // PAGE, :, slots % PAGE]
        assert torch.equal(run(queries[path], heads, chain, closed), whole[path])


def test_padding_tokens_of_no_row_are_not_combined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their chunks are whatever the memory held: bits of floats, whose difference as integers overflows."""
    batch = inputs.random_batch(
        inputs.generator(1), ((0, 1), (530, 2))
    )  # three chunks of keys, each in its own program
    padding = 4
    padded = replace(
        batch,
        positions=torch.cat([batch.positions, torch.zeros(padding, dtype=torch.int32)]),
        slots=torch.cat([batch.slots, torch.full((padding,), -1, dtype=torch.int32)]),
    )
    empty = torch.empty

    def of_floats(*shape: int, **options: Any) -> Tensor:
        made = empty(*shape, **options)
        if made.dtype is torch.int32:
            return made.copy_(torch.tensor([1.0, -0.5]).view(torch.int32))
        return made.fill_(torch.nan)

    queries, pages = random_queries(padded, ONE), storage(batch, ONE)
    expected = run(queries[:-padding], ONE, batch, pages)
    monkeypatch.setattr(torch, "empty", of_floats)
    found = run(queries, ONE, padded, pages)
    assert torch.equal(found[:-padding], expected)
    assert found[-padding:].isnan().all()


def test_unused_pages_may_hold_nan() -> None:
    heads = replace(HEADS, skip=5)
    batch = inputs.random_trees(inputs.generator(1), [(20, BUSH), (3, CHAIN), (64, (-1,))])
    pages, queries = storage(batch, heads), random_queries(batch, heads)
    before = [run(queries, heads, part, pages) for part in (batch, replace(batch, parents=None))]
    for row in range(3):
        pages.keys[batch.page_tables[row, 0], :, :5] = torch.nan
        pages.values[batch.page_tables[row, 0], :, :5] = torch.nan
    unused = set(range(len(pages.keys))) - set(batch.page_tables.flatten().tolist())
    pages.values[list(unused)] = torch.nan
    for part, expected in zip((batch, replace(batch, parents=None)), before, strict=True):
        found = run(queries, heads, part, pages)
        assert torch.equal(found, expected) and (found[part.positions < 5] == 0).all()


SHAPES = {"plain": Shape(width=64, heads=4, kv_heads=2, head_dim=16), "narrow": Shape(width=40, kv_heads=1, head_dim=6)}
EVERYTHING = ("norm", "post_norm", "output_bias", "rotary", "query_bias", "value_bias", "query_norm", "key_norm")
LAYERS = [
    ("plain", (), torch.float32),
    ("plain", ("norm", "rotary"), torch.float16),
    ("narrow", ("rotary", "key_norm"), torch.bfloat16),
    ("plain", ("norm", "rotary"), FP8),
    ("narrow", ("rotary", "key_norm"), torch.int8),
    ("plain", ("rotary", "query_bias", "key_bias"), torch.int8),
    ("plain", EVERYTHING, torch.float32),
    ("plain", (*EVERYTHING, "whole_norms"), torch.float32),
]


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["fast", "batch-invariant"])
@pytest.mark.parametrize("shape, options, dtype", LAYERS, ids=str)
def test_a_layer_is_that_of_the_reference(
    batch_invariant: bool, shape: str, options: Sequence[str], dtype: torch.dtype
) -> None:
    random, step = inputs.generator(1), STEPS.get(dtype, 0.0)
    weights = inputs.attention_weights(random, "f32", SHAPES[shape], options)
    batch = inputs.random_batch(random, ((0, 3), (5, 2), (40, 1)))
    batch.slots[1::3] = -1
    pages = inputs.random_pages(random, batch, SHAPES[shape], dtype)
    states = inputs.normal(random, len(batch.slots), SHAPES[shape].width)  # [T, E]
    ours = inputs.copy_pages(pages, DEVICE)
    layer, oracle = layers.attention_layer(weights, batch_invariant), reference.attention_layer(weights)
    x, expected = states.to(DEVICE, copy=True), states.clone()
    queries = layers.project_qkv(x, layer, carried(batch), ours)
    assert difference(queries.cpu(), reference.project_qkv(expected, oracle, batch, pages)) < 1e-5
    layers.attend(queries, layer, carried(batch), ours, x)
    reference.attend(queries.cpu(), oracle, batch, pages, expected)
    assert difference(x.cpu(), expected) < max(TOLERANCE[dtype], step)
    layers.project_kv(states.to(DEVICE), layer, carried(batch), ours)
    reference.project_kv(states, oracle, batch, pages)
    slots = torch.arange(len(pages.keys) * PAGE)
    found, expected = inputs.stored(inputs.copy_pages(ours, torch.device("cpu")), slots), inputs.stored(pages, slots)
    for ours_stored, theirs in zip(found, expected, strict=True):
        assert difference(ours_stored, theirs) < max(1e-5, step)


def test_rotary_tables_on_the_device_are_not_copied() -> None:
    weights = inputs.attention_weights(inputs.generator(1), "f32", SHAPES["plain"], ["rotary"])
    assert weights.cos is not None and weights.sin is not None
    weights = replace(weights, cos=weights.cos.to(DEVICE), sin=weights.sin.to(DEVICE))
    assert layers.attention_layer(weights).rope.cos is weights.cos


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, FP8])
def test_kv_copies_are_ordered(dtype: torch.dtype) -> None:
    random = inputs.generator(1)
    pages = [inputs.make_pages(*inputs.normal(random, 2, 6, 2, PAGE, 6), dtype) for _ in range(2)]
    ours = [inputs.copy_pages(kept, DEVICE) for kept in pages]
    # Many read what an earlier one has written, and many write where another has.
    sources, targets = torch.randint(0, 40, (2, 75), generator=random, dtype=torch.int32)
    sources[20:40], targets[20:40] = torch.arange(20), torch.arange(1, 21)  # one number goes all the way
    reference.copy_kv(pages, sources, targets)
    nowhere = torch.tensor([-1, 3, 6 * PAGE, 5], dtype=torch.int32)  # padding, among the steps
    sources = torch.cat([sources[:25], nowhere, sources[25:]])
    targets = torch.cat([targets[:25], nowhere.roll(1), targets[25:]])
    kv_copy.copy_kv(ours, sources.to(DEVICE), targets.to(DEVICE))
    for found, expected in zip(ours, pages, strict=True):
        for ours_copied, copied in zip(found.tensors, expected.tensors, strict=True):
            assert torch.equal(ours_copied.cpu().view(torch.uint8), copied.view(torch.uint8))
