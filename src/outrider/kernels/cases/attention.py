"""Cases of attention beyond plain decoding. See case.py.

Trees, and draft heads: skipped positions, two widths, tokens without a slot, KV copies. Block drafters (DFlash):
non-causal layers, project_kv; their items are rows if the tokens of a row attend to each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from ..protocol import Kernels
from ..structures import Batch
from . import inputs as make
from .case import STEPS, TOLERANCE, Case, Run, Tolerance, beside, listed, pick
from .inputs import BIASES, HEAD_NORMS, MODEL, PAGE, SMALL, Shape

HEAD = Shape(states=2)
# Parents, counted in the row.
CHAIN = (-1, 0, 1, 2, 3)
PROMPT = tuple(range(-1, 18))
ROOTS = (-1, -1, 0, 1, 1, 2)
BUSH = (-1, 0, 0, 0, 1, 1, 2, 4, 4, 7)
DEEP = (-1, 0, 1, 2, 3, 2, 5, 6, 7, 8, 9, 10, 11, 0, 13, 14, 12, 16)  # branches that end in other blocks
TILE = (-1, 0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 5, 5, 8, 11, 14)  # a root and fifteen nodes
# Rows of (tokens in the cache, parents): branches cross blocks of 16 and chunks of 64, beside chains and prompts.
TREES = ((0, BUSH), (5, CHAIN), (13, ROOTS), (33, (-1,)), (60, DEEP), (0, PROMPT), (51, DEEP))
LONG_TREES = (
    (700, BUSH),
    (250, DEEP),
    (256, CHAIN),
    (127, TILE),
    (20, tuple(max(node // 3, -1) for node in range(-1, 39))),
)
Rows = Sequence[tuple[int, int]]
# Rows of (tokens in the cache, tokens in the block): blocks cross blocks of 16 keys and chunks of 64, or stand alone.
BLOCKS = ((0, 4), (5, 3), (13, 9), (33, 1), (60, 8), (47, 17), (63, 2), (0, 1))
LONG_BLOCKS = ((700, 8), (250, 16), (256, 5), (120, 33), (20, 8))


def _count_tokens(rows: Sequence[tuple[int, Sequence[int]]]) -> int:
    return sum(len(parents) for _, parents in rows)


def attend_trees(
    name: str,
    kind: str = "f32",
    dtype: torch.dtype = torch.float32,
    rows: Sequence[tuple[int, Sequence[int]]] = TREES,
    shape: Shape = SMALL,
    window: int = 0,
    skip: int = 0,
    soft_cap: float = 0.0,
    options: Sequence[str] = (),
    timed: bool = False,
) -> Case:
    def build(ops: Kernels, seed: int) -> Run:
        random = make.generator(seed)
        weights = make.attention_weights(random, kind, shape, options, window, skip=skip, soft_cap=soft_cap)
        layer = ops.attention_layer(weights)
        batch = make.random_trees(random, rows)
        pages = make.random_pages(random, batch, shape, dtype)
        # Large queries, so that attention is sharp and a wrong key shows.
        queries = 3 * make.normal(random, len(batch.tokens), shape.heads * shape.head_dim)  # [T, H * D]
        x = make.normal(random, len(batch.tokens), shape.width)  # [T, E]

        def run(items: Sequence[int] | None) -> tuple[Tensor, ...]:
            tokens, part, own = _take_with_ancestors(batch, items)
            out = x[tokens]
            ops.attend(queries[tokens], layer, part, pages, out)
            return (out[own],)

        return run

    keys = sum(min(context + len(parents), window or context + len(parents)) for context, parents in rows)
    size = shape.attention_bytes(keys, kind, dtype)
    return Case("attend", name, _count_tokens(rows), beside(kind, dtype), build, size, timed)


def _take_with_ancestors(batch: Batch, items: Sequence[int] | None) -> tuple[list[int], Batch, list[int]]:
    """Return the tokens that these items need, the batch of them, and the indices of the items in it."""
    wanted = listed(items, len(batch.tokens))
    tokens = wanted if items is None else make.with_ancestors(batch, wanted)
    part = batch if items is None else make.take_tokens(batch, tokens)
    return tokens, part, [tokens.index(item) for item in wanted]


def tree_layer(
    name: str,
    options: Sequence[str],
    kind: str,
    shape: Shape,
    skip: int = 0,
    op: str = "attend",
    dtype: torch.dtype = torch.float16,
) -> Case:
    """Projections, then attention over the stored keys and values."""

    def build(ops: Kernels, seed: int) -> Run:
        random = make.generator(seed)
        weights = make.attention_weights(random, kind, shape, options, positions=128, skip=skip)
        handle, batch = ops.attention_layer(weights), make.random_trees(random, TREES)
        storage = make.random_pages(random, batch, shape, dtype)
        states = make.normal(random, len(batch.tokens), shape.input_width)  # [T, E] or [T, 2 * E]
        x = make.normal(random, len(batch.tokens), shape.width)  # [T, E]

        def run(items: Sequence[int] | None) -> tuple[Tensor, ...]:
            tokens, part, own = _take_with_ancestors(batch, items)
            pages, out = make.copy_pages(storage), x[tokens]
            queries = ops.project_qkv(states[tokens], handle, part, pages)
            ops.attend(queries, handle, part, pages, out)
            return queries[own], out[own]

        return run

    # Stored halves and bytes may fall on either side of a rounding.
    exact = max(1e-3, STEPS.get(dtype, 0.0))
    tolerance = Tolerance(exact, max(exact, beside(kind, dtype).loose), max(exact, TOLERANCE[kind].coarse))
    return Case(op, name, _count_tokens(TREES), tolerance, build)


def project_qkv(name: str, options: Sequence[str], kind: str, shape: Shape, hidden: int) -> Case:
    """Every `hidden`-th token has no slot: the contents at its position must stay."""

    def build(ops: Kernels, seed: int) -> Run:
        random = make.generator(seed)
        handle = ops.attention_layer(make.attention_weights(random, kind, shape, options))
        whole = replace(make.random_trees(random, [(0, CHAIN), (5, PROMPT), (33, (-1,))]), parents=None)
        batch = replace(whole, slots=whole.slots.clone())
        batch.slots[::hidden] = -1
        storage = make.random_pages(random, batch, shape, torch.float16)
        states = make.normal(random, len(batch.tokens), shape.input_width)  # [T, E] or [T, 2 * E]

        def run(items: Sequence[int] | None) -> tuple[Tensor, ...]:
            part = batch if items is None else make.take_tokens(batch, items)
            pages = make.copy_pages(storage)
            queries = ops.project_qkv(pick(states, items), handle, part, pages)
            return queries, *make.stored(pages, pick(whole.slots, items))

        return run

    return Case("project_qkv", name, len(CHAIN) + len(PROMPT) + 1, TOLERANCE[kind], build)


def copy_kv(dtype: torch.dtype) -> Case:
    """Compact the accepted path of a tree in two layers: slots 40, 41, ... of the row receive later slots."""
    kept = (40, 42, 43, 47, 52, 61, 62)

    def build(ops: Kernels, seed: int) -> Run:
        random = make.generator(seed)
        table = torch.randperm(6, generator=random)  # [P]
        at = torch.tensor(kept)
        sources = (table[at // PAGE] * PAGE + at % PAGE).to(torch.int32)
        at = 40 + torch.arange(len(kept))
        targets = (table[at // PAGE] * PAGE + at % PAGE).to(torch.int32)
        sizes = (2, 6, SMALL.kv_heads, PAGE, SMALL.head_dim)
        keys, values = make.normal(random, *sizes), make.normal(random, *sizes)
        storage = [make.make_pages(*pair, dtype) for pair in zip(keys, values, strict=True)]

        def run(items: Sequence[int] | None) -> tuple[Tensor, ...]:
            layers = [make.copy_pages(kept) for kept in storage]
            into = pick(targets, items)
            ops.copy_kv(layers, pick(sources, items), into)
            return tuple(found for layer in layers for found in make.stored(layer, into))

        return run

    return Case("copy_kv", str(dtype).removeprefix("torch."), len(kept), 0.0, build)


def _tree_cases() -> list[Case]:
    half, brain, int8, fp8 = torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn
    wide = ["norm", "rotary", "post_norm", "output_bias"]
    return [
        attend_trees("trees"),
        attend_trees("trees, f16 pages", dtype=half),
        attend_trees("trees, bf16 pages", dtype=brain),
        attend_trees("trees, int8 pages", dtype=int8),
        attend_trees("trees, fp8 pages", dtype=fp8),
        attend_trees("trees, soft cap", soft_cap=2.0),
        attend_trees("trees, sinks", options=["sinks"]),
        attend_trees("trees, long, sinks", rows=LONG_TREES, dtype=half, options=["sinks"], window=100),
        attend_trees("trees, long, soft cap", rows=LONG_TREES, dtype=half, soft_cap=2.0),
        attend_trees("trees, window 3", window=3),
        attend_trees("trees, window 20", window=20, dtype=half),
        attend_trees("trees, the first position hidden", skip=1),
        attend_trees("trees, 53 positions hidden", skip=53, dtype=half),
        attend_trees("trees, 200 positions hidden, window 100", rows=LONG_TREES, skip=200, window=100),
        attend_trees("trees, long", rows=LONG_TREES),
        attend_trees("trees, long, f16 pages", rows=LONG_TREES, dtype=half),
        attend_trees("trees, long, int8 pages, soft cap", rows=LONG_TREES, dtype=int8, soft_cap=2.0),
        attend_trees("trees, window 20, int8 pages", window=20, dtype=int8),
        attend_trees("trees, long, window 300", rows=LONG_TREES, window=300, dtype=brain),
        attend_trees("trees, one key/value head", shape=Shape(heads=6, kv_heads=1, head_dim=32)),
        attend_trees("trees, narrow heads", shape=Shape(heads=4, kv_heads=2, head_dim=8, width=32)),
        attend_trees("trees, q8_0", "q8_0", half),
        attend_trees("tree of 16, 1024 keys", "q8_0", half, [(1008, TILE)], MODEL, timed=True),
        tree_layer("trees, stored and seen", ["norm", "rotary"], "f32", SMALL),
        tree_layer("trees, stored and seen, int8 pages", ["norm", "rotary"], "f32", SMALL, dtype=int8),
        tree_layer("trees, stored and seen, fp8 pages", ["norm", "rotary"], "f32", SMALL, dtype=fp8),
        tree_layer("two states wide", wide, "f32", HEAD, op="attention_layer"),
        tree_layer("two states wide, the first position hidden", ["norm", "rotary"], "q8_0", HEAD, skip=1),
        project_qkv("two states wide", ["norm", "rotary"], "f32", HEAD, 2),
        project_qkv("no slot", ["rotary"], "q4_0", SMALL, 3),
        *[copy_kv(dtype) for dtype in (torch.float32, half, brain, int8, fp8)],
    ]


def attend_blocks(
    name: str,
    kind: str = "f32",
    dtype: torch.dtype = torch.float32,
    rows: Rows = BLOCKS,
    shape: Shape = SMALL,
    options: Sequence[str] = (),
    window: int = 0,
    skip: int = 0,
    cut: int = 0,
    causal: bool = False,
    anchored: bool = False,
    timed: bool = False,
) -> Case:
    """`cut`: this many tokens at the end of each row (never the first) are beyond the limit."""

    def build(ops: Kernels, seed: int) -> Run:
        random = make.generator(seed)
        weights = make.attention_weights(
            random, kind, shape, options, window, skip=skip, causal=causal, anchored=anchored
        )
        layer = ops.attention_layer(weights)
        batch = _cut(make.random_batch(random, rows), cut)
        pages = make.random_pages(random, batch, shape, dtype)
        # Large queries, so that attention is sharp and a wrong key shows.
        queries = 3 * make.normal(random, len(batch.tokens), shape.heads * shape.head_dim)  # [T, H * D]
        x = make.normal(random, len(batch.tokens), shape.width)  # [T, E]

        def run(items: Sequence[int] | None) -> tuple[Tensor, ...]:
            tokens, part = take_rows(batch, items)
            out = x[tokens]
            ops.attend(queries[tokens], layer, part, pages, out)
            return (_pad(out, part.query_starts, rows),)

        return run

    keys = sum(context + count - max(context - window + 1 if window else 0, skip, 0) for context, count in rows)
    size = shape.attention_bytes(keys, kind, dtype)
    return Case("attend", name, len(rows), beside(kind, dtype), build, size, timed)


def run_layers(name: str, kind: str, causal: Sequence[bool], cut: int = 0) -> Case:
    """Layers that attend to the whole block, mixed with causal layers."""

    def build(ops: Kernels, seed: int) -> Run:
        random = make.generator(seed)
        layers = []
        for flag in causal:
            attention = make.attention_weights(random, kind, SMALL, ["norm", "rotary", "key_norm"], causal=flag)
            mlp = make.mlp_weights(random, kind, SMALL, "silu", ["norm"])
            layers.append((ops.attention_layer(attention), ops.mlp_layer(mlp)))
        batch = _cut(make.random_batch(random, [(min(context, 40), count) for context, count in BLOCKS]), cut)
        storage = [make.random_pages(random, batch, SMALL, torch.float32) for _ in layers]
        x = make.normal(random, len(batch.tokens), SMALL.width)  # [T, E]

        def run(items: Sequence[int] | None) -> tuple[Tensor, ...]:
            tokens, part = take_rows(batch, items)
            out = x[tokens]
            pages = [make.copy_pages(kept) for kept in storage]
            ops.run_layers(out, ops.layer_stack(layers, pages), part)
            return (_pad(out, part.query_starts, BLOCKS),)

        return run

    return Case("run_layers", name, len(BLOCKS), len(causal) * TOLERANCE[kind], build)


def project_kv(
    name: str,
    options: Sequence[str] = (),
    kind: str = "f32",
    dtype: torch.dtype = torch.float32,
    shape: Shape = SMALL,
    hidden: int = 0,
) -> Case:
    """Every `hidden`-th token has no slot: the contents at its position must stay. Items are tokens."""

    def build(ops: Kernels, seed: int) -> Run:
        random = make.generator(seed)
        layer = ops.attention_layer(make.attention_weights(random, kind, shape, options))
        whole = make.random_batch(random, [(min(context, 40), count) for context, count in BLOCKS])
        batch = replace(whole, slots=whole.slots.clone())
        if hidden:
            batch.slots[::hidden] = -1
        storage = make.random_pages(random, batch, shape, dtype)
        states = make.normal(random, len(batch.tokens), shape.input_width)  # [T, E]

        def run(items: Sequence[int] | None) -> tuple[Tensor, ...]:
            part = batch if items is None else make.take_tokens(batch, items)
            pages = make.copy_pages(storage)
            ops.project_kv(pick(states, items), layer, part, pages)
            return make.stored(pages, pick(whole.slots, items))

        return run

    return Case("project_kv", name, sum(count for _, count in BLOCKS), beside(kind, dtype, stores=True), build)


def take_rows(batch: Batch, rows: Sequence[int] | None) -> tuple[list[int], Batch]:
    """Return the tokens of these rows, and the batch of them alone."""
    if rows is None:
        return list(range(len(batch.tokens))), batch
    starts = batch.query_starts.tolist()
    tokens = [token for row in rows for token in range(starts[row], starts[row + 1])]
    return tokens, make.take_tokens(batch, tokens)


def _cut(batch: Batch, count: int) -> Batch:
    """Put the last tokens of each row at position 0 without a slot, as block_inputs does beyond the limit."""
    positions, slots = batch.positions.clone(), batch.slots.clone()
    for begin, end in pairwise(batch.query_starts.tolist()):
        first = max(end - count, begin + 1)
        positions[first:end], slots[first:end] = 0, -1
    return replace(batch, positions=positions, slots=slots)


def _pad(values: Tensor, starts: Tensor, rows: Rows) -> Tensor:
    """Ragged rows of [tokens, E] side by side: [B, the longest of any batch, E]."""
    out = torch.zeros(starts.shape[0] - 1, max(count for _, count in rows), values.shape[1])
    for row, (begin, end) in enumerate(pairwise(starts.tolist())):
        out[row, : end - begin] = values[begin:end]
    return out


def _block_cases() -> list[Case]:
    half, brain, int8, fp8 = torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn
    return [
        attend_blocks("blocks"),
        attend_blocks("blocks, int8 pages", dtype=int8),
        attend_blocks("blocks, fp8 pages, anchored window 5", dtype=fp8, window=5, anchored=True),
        attend_blocks("blocks, f16 pages", dtype=half),
        attend_blocks("blocks, bf16 pages", dtype=brain),
        attend_blocks("blocks, window 1", window=1),
        attend_blocks("blocks, window 20", window=20, dtype=half),
        attend_blocks("blocks, the first position hidden", skip=1),
        attend_blocks("blocks, 50 positions hidden, window 30", skip=50, window=30, dtype=half),
        attend_blocks("blocks, cut off", cut=2, dtype=half),
        attend_blocks("blocks, cut off, window 5", cut=3, window=5),
        attend_blocks("blocks, anchored window 5", window=5, anchored=True),
        attend_blocks("blocks, anchored window 20, cut off", window=20, cut=2, anchored=True, dtype=half),
        attend_blocks("causal blocks, anchored window 5", window=5, causal=True, anchored=True),
        attend_blocks("causal blocks, anchored window 30", window=30, skip=1, causal=True, anchored=True, dtype=half),
        attend_blocks(
            "causal blocks, long, anchored window 300", rows=LONG_BLOCKS, window=300, causal=True, anchored=True
        ),
        attend_blocks("blocks, long", rows=LONG_BLOCKS),
        attend_blocks("blocks, long, f16 pages", rows=LONG_BLOCKS, dtype=half),
        attend_blocks("blocks, long, window 300", rows=LONG_BLOCKS, window=300, dtype=brain),
        attend_blocks("blocks, one key/value head", shape=Shape(heads=6, kv_heads=1, head_dim=32)),
        attend_blocks("blocks, narrow heads", shape=Shape(heads=4, kv_heads=2, head_dim=8, width=32)),
        attend_blocks("blocks, post norm, bias", options=["post_norm", "output_bias"]),
        attend_blocks("blocks, q8_0", "q8_0", half),
        attend_blocks("block of 16, 1024 keys", "q8_0", half, [(1008, 16)], MODEL, timed=True),
        run_layers("blocks", "f32", [False, False]),
        run_layers("blocks, the second layer causal", "f32", [False, True]),
        run_layers("blocks, cut off", "f32", [False, True, False], cut=3),
        project_kv("plain"),
        project_kv("rotary, bias", ["rotary", *BIASES]),
        project_kv("head norms, the input norm unused", ["norm", "rotary", *HEAD_NORMS]),
        project_kv("one key/value head", ["rotary"], shape=Shape(heads=6, kv_heads=1, head_dim=32)),
        project_kv("narrow heads", ["rotary"], shape=Shape(heads=4, kv_heads=2, head_dim=6, width=40)),
        project_kv("two states wide", ["rotary"], shape=Shape(states=2)),
        project_kv("no slot", ["rotary", "key_norm"], dtype=half, hidden=3),
        project_kv("int8 pages, no slot", ["rotary", "key_norm"], dtype=int8, hidden=3),
        project_kv("fp8 pages", ["rotary"], dtype=fp8),
        project_kv(
            "narrow heads, int8 pages", ["rotary"], "f32", int8, Shape(heads=4, kv_heads=2, head_dim=6, width=40)
        ),
        project_kv("bf16", ["rotary"], "bf16", brain),
        project_kv("q4_1", ["rotary"], "q4_1", half),
        project_kv("q8_0", ["rotary", "key_norm", *BIASES], "q8_0", half, hidden=2),
    ]


ATTENTION_CASES = [*_block_cases(), *_tree_cases()]
