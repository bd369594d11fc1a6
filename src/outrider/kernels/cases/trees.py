"""Cases of tree attention and of draft heads: skipped positions, two widths, tokens without a slot. See case.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..protocol import Kernels
from ..structures import Batch, LayerPages
from . import inputs as make
from .case import TOLERANCE, Case, Run, Tolerance, beside, listed, pick
from .inputs import MODEL, PAGE, SMALL, Shape

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
LONG = ((700, BUSH), (250, DEEP), (256, CHAIN), (127, TILE), (20, tuple(max(node // 3, -1) for node in range(-1, 39))))


def _count(rows: Sequence[tuple[int, Sequence[int]]]) -> int:
    return sum(len(parents) for _, parents in rows)


def attend(
    name: str,
    kind: str = "f32",
    dtype: torch.dtype = torch.float32,
    rows: Sequence[tuple[int, Sequence[int]]] = TREES,
    shape: Shape = SMALL,
    window: int = 0,
    skip: int = 0,
    timed: bool = False,
) -> Case:
    def build(ops: Kernels, seed: int) -> Run:
        random = make.generator(seed)
        layer = ops.attention_layer(make.attention_weights(random, kind, shape, (), window, skip=skip))
        batch = make.random_trees(random, rows)
        pages = make.random_pages(random, batch, shape, dtype)
        # Large queries, so that attention is sharp and a wrong key shows.
        queries = 3 * make.normal(random, len(batch.tokens), shape.heads * shape.head_dim)  # [T, H * D]
        x = make.normal(random, len(batch.tokens), shape.width)  # [T, E]

        def run(items: Sequence[int] | None) -> tuple[Tensor, ...]:
            tokens, part, own = _step(batch, items)
            out = x[tokens]
            ops.attend(queries[tokens], layer, part, pages, out)
            return (out[own],)

        return run

    keys = sum(min(context + len(parents), window or context + len(parents)) for context, parents in rows)
    size = shape.attention_bytes(keys, kind, dtype)
    return Case("attend", name, _count(rows), beside(kind, dtype), build, size, timed)


def _step(batch: Batch, items: Sequence[int] | None) -> tuple[list[int], Batch, list[int]]:
    """Return the tokens that these items need, the batch of them, and the indices of the items in it."""
    wanted = listed(items, len(batch.tokens))
    tokens = wanted if items is None else make.with_ancestors(batch, wanted)
    part = batch if items is None else make.take_tokens(batch, tokens)
    return tokens, part, [tokens.index(item) for item in wanted]


def layer(name: str, options: Sequence[str], kind: str, shape: Shape, skip: int = 0, op: str = "attend") -> Case:
    """Projections, then attention over the stored keys and values."""

    def build(ops: Kernels, seed: int) -> Run:
        random = make.generator(seed)
        weights = make.attention_weights(random, kind, shape, options, positions=128, skip=skip)
        handle, batch = ops.attention_layer(weights), make.random_trees(random, TREES)
        storage = make.random_pages(random, batch, shape, torch.float16)
        states = make.normal(random, len(batch.tokens), shape.input_width)  # [T, E] or [T, 2 * E]
        x = make.normal(random, len(batch.tokens), shape.width)  # [T, E]

        def run(items: Sequence[int] | None) -> tuple[Tensor, ...]:
            tokens, part, own = _step(batch, items)
            pages, out = make.copy_pages(storage), x[tokens]
            queries = ops.project_qkv(states[tokens], handle, part, pages)
            ops.attend(queries, handle, part, pages, out)
            return queries[own], out[own]

        return run

    # Stored halves may fall on either side of a rounding.
    tolerance = Tolerance(1e-3, beside(kind, torch.float16).loose, max(1e-3, TOLERANCE[kind].coarse))
    return Case(op, name, _count(TREES), tolerance, build)


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
        keys, values = make.normal(random, *sizes).to(dtype), make.normal(random, *sizes).to(dtype)

        def run(items: Sequence[int] | None) -> tuple[Tensor, ...]:
            layers = [LayerPages(*pair) for pair in zip(keys.clone(), values.clone(), strict=True)]
            into = pick(targets, items)
            ops.copy_kv(layers, pick(sources, items), into)
            return tuple(found for layer in layers for found in make.stored(layer, into))

        return run

    return Case("copy_kv", str(dtype).removeprefix("torch."), len(kept), 0.0, build)


def _all() -> list[Case]:
    half, brain = torch.float16, torch.bfloat16
    wide = ["norm", "rotary", "post_norm", "output_bias"]
    return [
        attend("trees"),
        attend("trees, f16 pages", dtype=half),
        attend("trees, bf16 pages", dtype=brain),
        attend("trees, window 3", window=3),
        attend("trees, window 20", window=20, dtype=half),
        attend("trees, the first position hidden", skip=1),
        attend("trees, 53 positions hidden", skip=53, dtype=half),
        attend("trees, 200 positions hidden, window 100", rows=LONG, skip=200, window=100),
        attend("trees, long", rows=LONG),
        attend("trees, long, f16 pages", rows=LONG, dtype=half),
        attend("trees, long, window 300", rows=LONG, window=300, dtype=brain),
        attend("trees, one key/value head", shape=Shape(heads=6, kv_heads=1, head_dim=32)),
        attend("trees, narrow heads", shape=Shape(heads=4, kv_heads=2, head_dim=8, width=32)),
        attend("trees, q8_0", "q8_0", half),
        attend("tree of 16, 1024 keys", "q8_0", half, [(1008, TILE)], MODEL, timed=True),
        layer("trees, stored and seen", ["norm", "rotary"], "f32", SMALL),
        layer("two states wide", wide, "f32", HEAD, op="attention_layer"),
        layer("two states wide, the first position hidden", ["norm", "rotary"], "q8_0", HEAD, skip=1),
        project_qkv("two states wide", ["norm", "rotary"], "f32", HEAD, 2),
        project_qkv("no slot", ["rotary"], "q4_0", SMALL, 3),
        *[copy_kv(dtype) for dtype in (torch.float32, half, brain)],
    ]


TREE_CASES = _all()
