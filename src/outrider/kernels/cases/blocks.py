"""Cases of block drafters (DFlash): non-causal layers, project_kv, block_inputs. See case.py.

Items are rows if the tokens of a row attend to each other.
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
from .case import TOLERANCE, Case, Run, beside, listed, pick
from .inputs import BIASES, HEAD_NORMS, MODEL, PAGE, SMALL, Shape

Rows = Sequence[tuple[int, int]]
# Rows of (tokens in the cache, tokens in the block): blocks cross blocks of 16 keys and chunks of 64, or stand alone.
BLOCKS = ((0, 4), (5, 3), (13, 9), (33, 1), (60, 8), (47, 17), (63, 2), (0, 1))
LONG = ((700, 8), (250, 16), (256, 5), (120, 33), (20, 8))


def attend(
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

    return Case("project_kv", name, sum(count for _, count in BLOCKS), beside(kind, dtype), build)


def block_inputs(name: str, width: int, limit: int = 1000, page_size: int = PAGE) -> Case:
    """Contexts that end around the ends of pages, of the page table and of `limit`; rejected tokens; a missing page."""
    # Rows of (first position, tokens in the step, rejected among them).
    steps = ((0, 1, 0), (0, 7, 3), (3, 5, 4), (page_size - 1, 2, 1), (44, 6, 0), (90, 9, 2), (30, 1, 0), (99, 4, 3))
    longest = max(length for _, length, _ in steps)

    def build(ops: Kernels, seed: int) -> Run:
        random = make.generator(seed)
        tables = torch.randperm(len(steps) * 8, generator=random).reshape(-1, 8).to(torch.int32)  # [B, P]
        tables[6, 2] = tables[:, 7] = -1
        newest = torch.randint(0, 1000, (len(steps),), dtype=torch.int32, generator=random)  # [B]

        def run(items: Sequence[int] | None) -> tuple[Tensor, ...]:
            rows = listed(items, len(steps))
            own = [steps[row] for row in rows]
            starts = torch.tensor([0] + [length for _, length, _ in own]).cumsum(0).to(torch.int32)  # [B + 1]
            positions = torch.cat([torch.arange(first, first + length) for first, length, _ in own]).to(torch.int32)
            ends = starts[1:] - 1 - torch.tensor([rejected for *_, rejected in own], dtype=torch.int32)
            found = ops.block_inputs(positions, starts, ends, newest[rows], tables[rows], page_size, width, 999, limit)
            context = torch.full((len(rows), longest), -2, dtype=torch.int32)
            for row, (begin, end) in enumerate(pairwise(starts.tolist())):
                context[row, : end - begin] = found.context_slots[begin:end]
            block = [part.reshape(len(rows), width + 1) for part in (found.tokens, found.positions, found.slots)]
            return context, *block, found.query_starts.diff()

        return run

    return Case("block_inputs", name, len(steps), 0.0, build)


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


def _all() -> list[Case]:
    half, brain = torch.float16, torch.bfloat16
    return [
        attend("blocks"),
        attend("blocks, f16 pages", dtype=half),
        attend("blocks, bf16 pages", dtype=brain),
        attend("blocks, window 1", window=1),
        attend("blocks, window 20", window=20, dtype=half),
        attend("blocks, the first position hidden", skip=1),
        attend("blocks, 50 positions hidden, window 30", skip=50, window=30, dtype=half),
        attend("blocks, cut off", cut=2, dtype=half),
        attend("blocks, cut off, window 5", cut=3, window=5),
        attend("blocks, anchored window 5", window=5, anchored=True),
        attend("blocks, anchored window 20, cut off", window=20, cut=2, anchored=True, dtype=half),
        attend("causal blocks, anchored window 5", window=5, causal=True, anchored=True),
        attend("causal blocks, anchored window 30", window=30, skip=1, causal=True, anchored=True, dtype=half),
        attend("causal blocks, long, anchored window 300", rows=LONG, window=300, causal=True, anchored=True),
        attend("blocks, long", rows=LONG),
        attend("blocks, long, f16 pages", rows=LONG, dtype=half),
        attend("blocks, long, window 300", rows=LONG, window=300, dtype=brain),
        attend("blocks, one key/value head", shape=Shape(heads=6, kv_heads=1, head_dim=32)),
        attend("blocks, narrow heads", shape=Shape(heads=4, kv_heads=2, head_dim=8, width=32)),
        attend("blocks, post norm, bias", options=["post_norm", "output_bias"]),
        attend("blocks, q8_0", "q8_0", half),
        attend("block of 16, 1024 keys", "q8_0", half, [(1008, 16)], MODEL, timed=True),
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
        project_kv("bf16", ["rotary"], "bf16", brain),
        project_kv("q4_1", ["rotary"], "q4_1", half),
        project_kv("q8_0", ["rotary", "key_norm", *BIASES], "q8_0", half, hidden=2),
        block_inputs("fifteen masks", width=15),
        block_inputs("no masks", width=0),
        block_inputs("short limit", width=7, limit=100),
        block_inputs("one slot in a page", width=3, page_size=1),
    ]


BLOCK_CASES = _all()
