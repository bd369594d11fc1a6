"""Tree attention: a token has the bits of its path as a chain. And KV copies and skipped positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from outrider.kernels import AttentionWeights, Batch, Kernels, LayerPages
from outrider.kernels.cases import inputs
from outrider.kernels.cases.attention import BUSH, CHAIN, DEEP, HEAD, PROMPT, TILE
from outrider.kernels.cases.inputs import PAGE, Shape

SHAPE = Shape(width=64, heads=4, kv_heads=2, head_dim=16, inner=64)
Rows = Sequence[tuple[int, Sequence[int]]]
CONTEXTS = (0, 1, 9, 15, 16, 47, 50, 63, 64, 70, 120, 128, 250, 256, 300)


class Kind(NamedTuple):
    dtype: torch.dtype = torch.float32  # of the pages
    window: int = 0
    skip: int = 0
    weights: str = "f32"


KINDS = [
    Kind(),
    Kind(torch.float16, skip=1, weights="q8_0"),
    Kind(torch.bfloat16, window=20),
    Kind(torch.float16, window=70, skip=37, weights="f16"),
]


def random_parents(seed: int, nodes: int) -> list[int]:
    """Now deep, now wide: a node follows one of the latest, or any."""
    random = inputs.generator(seed)
    parents = [-1]
    for node in range(1, nodes):
        reach = 2 if seed % 2 else node + 1
        parents.append(node - 1 - int(torch.randint(0, min(reach, node + 1), (), generator=random)))
    return parents


def attention_weights(random: torch.Generator, kind: Kind) -> AttentionWeights:
    return inputs.attention_weights(
        random, kind.weights, SHAPE, ["norm", "rotary"], kind.window, positions=512, skip=kind.skip
    )


def random_rows(seed: int) -> Rows:
    """Trees of many sizes over many contexts, beside a chain, a prompt and a decoded token."""
    random = inputs.generator(seed)
    contexts = [CONTEXTS[at] for at in torch.randint(0, len(CONTEXTS), (4,), generator=random).tolist()]
    trees: list[Sequence[int]] = [random_parents(seed, 16), random_parents(seed + 1, 21), TILE, DEEP]
    return [*zip(contexts, trees, strict=True), (17, CHAIN), (3, PROMPT), (100, (-1,))]


class Layers:
    """Two layers, the tokens of a tree, and what both start from."""

    def __init__(self, ops: Kernels, rows: Rows, kind: Kind = KINDS[0], seed: int = 1) -> None:
        random = inputs.generator(seed)
        self.ops, self.batch = ops, inputs.random_trees(random, rows)
        self.layers = []
        for _ in range(2):
            mlp = inputs.mlp_weights(random, kind.weights, SHAPE, "silu", ["norm"])
            self.layers.append((ops.attention_layer(attention_weights(random, kind)), ops.mlp_layer(mlp)))
        self.storage = [inputs.random_pages(random, self.batch, SHAPE, kind.dtype) for _ in self.layers]
        self.x = 2 * inputs.normal(random, len(self.batch.tokens), SHAPE.width)  # [T, E]

    def copied(self) -> list[LayerPages]:
        return [LayerPages(kept.keys.clone(), kept.values.clone()) for kept in self.storage]

    def run(self, batch: Batch, tokens: Sequence[int], pages: list[LayerPages]) -> Tensor:
        out = self.x[list(tokens)]
        self.ops.run_layers(out, self.ops.layer_stack(self.layers, pages), batch)
        return out

    def path(self, token: int) -> list[int]:
        return inputs.with_ancestors(self.batch, [token])

    def leaves(self) -> list[int]:
        assert self.batch.parents is not None
        inner = set(self.batch.parents.tolist())
        return [token for token in range(len(self.batch.tokens)) if token not in inner]

    def natural(self, path: Sequence[int]) -> Tensor:
        """The slots of a path where it stands alone: by position."""
        table, at = self.batch.page_tables[self.row(path[0])].long(), self.batch.positions[list(path)].long()
        return (table[at // PAGE] * PAGE + at % PAGE).to(torch.int32)

    def row(self, token: int) -> int:
        starts = self.batch.query_starts.tolist()
        return next(row for row, (begin, end) in enumerate(pairwise(starts)) if begin <= token < end)

    def chain(self, path: Sequence[int], sizes: Sequence[int]) -> tuple[Tensor, list[LayerPages]]:
        """The path as plain steps of these sizes."""
        pages, found, slots = self.copied(), [], self.natural(path)
        for first, last in pairwise([sum(sizes[:count]) for count in range(len(sizes) + 1)]):
            tokens = list(path[first:last])
            step = Batch(
                tokens=self.batch.tokens[tokens],
                positions=self.batch.positions[tokens],
                slots=slots[first:last],
                query_starts=torch.tensor([0, len(tokens)], dtype=torch.int32),
                page_tables=self.batch.page_tables[[self.row(path[0])]],
            )
            found.append(self.run(step, tokens, pages))
        return torch.cat(found), pages


def everything(layers: Layers) -> range:
    return range(len(layers.batch.tokens))


@pytest.mark.parametrize("seed, kind", list(enumerate(KINDS)), ids=str)
def test_a_path_of_a_tree_equals_a_chain(ops: Kernels, seed: int, kind: Kind) -> None:
    layers = Layers(ops, random_rows(seed), kind, seed)
    whole = layers.run(layers.batch, everything(layers), layers.copied())  # [T, E]
    assert whole.isfinite().all()
    for leaf in layers.leaves():
        path = layers.path(leaf)
        sizes = [1] * len(path) if leaf % 2 else [len(path)]
        assert torch.equal(layers.chain(path, sizes)[0], whole[path]), f"the path {path} in steps of {sizes}"


@pytest.mark.parametrize("context", [5, 62, 300])
def test_swapped_ancestors_change_the_result(ops: Kernels, context: int) -> None:
    layers = Layers(ops, [(context, DEEP)])
    attention, _ = layers.layers[0]
    pages, swapped = layers.copied()[0], replace(layers.batch, slots=layers.batch.slots.clone())
    queries = ops.project_qkv(layers.x, attention, layers.batch, pages)
    right, wrong = layers.x.clone(), layers.x.clone()
    ops.attend(queries, attention, layers.batch, pages, right)
    swapped.slots[[6, 7]] = swapped.slots[[7, 6]]
    ops.attend(queries, attention, swapped, pages, wrong)
    below = [token for token in everything(layers) if 6 in layers.path(token)]
    others = [token for token in everything(layers) if token not in below]
    # Only order tells the trees apart from token 7 on: rounding may hide it here and there.
    noticed = (right[below] != wrong[below]).any(1)
    assert noticed[0] and noticed.sum() > 3
    assert torch.equal(right[others], wrong[others])


def test_other_branches_are_ignored(ops: Kernels) -> None:
    layers = Layers(ops, [(60, BUSH)])
    attention, _ = layers.layers[0]
    pages, path = layers.copied()[0], layers.path(9)
    queries = ops.project_qkv(layers.x, attention, layers.batch, pages)
    before, after = layers.x.clone(), layers.x.clone()
    ops.attend(queries, attention, layers.batch, pages, before)
    for token, slot in enumerate(layers.batch.slots.tolist()):
        if token not in path:
            for storage in (pages.keys, pages.values):
                storage[slot // PAGE, :, slot % PAGE] = torch.nan
    ops.attend(queries, attention, layers.batch, pages, after)
    assert torch.equal(before[path], after[path])
    assert after[[token for token in everything(layers) if token not in path]].isnan().any(1).all()


def test_a_compacted_path_continues_as_a_chain(ops: Kernels) -> None:
    layers = Layers(ops, [(58, DEEP), (20, BUSH)], KINDS[1])
    pages = layers.copied()
    layers.run(layers.batch, everything(layers), pages)
    for leaf in (15, 17, len(DEEP) + 9):
        path, moved = layers.path(leaf), [LayerPages(kept.keys.clone(), kept.values.clone()) for kept in pages]
        ops.copy_kv(moved, layers.batch.slots[path], layers.natural(path))
        _, expected = layers.chain(path, [len(path)])
        slots = layers.natural(path).long()
        for found, meant in zip(moved, expected, strict=True):
            for left, right in ((found.keys, meant.keys), (found.values, meant.values)):
                assert torch.equal(left[slots // PAGE, :, slots % PAGE], right[slots // PAGE, :, slots % PAGE])


def test_kv_copies_are_ordered_and_bounded(ops: Kernels) -> None:
    keys = torch.arange(32.0).reshape(2, 1, PAGE, 1).expand(2, 2, PAGE, 2).contiguous()
    pages = [LayerPages(keys.clone(), -keys), LayerPages(keys.half(), keys.half() + 1)]
    sources, targets = torch.tensor([[20, 3, 7], [3, 5, 7]], dtype=torch.int32)
    ops.copy_kv(pages, sources.contiguous(), targets.contiguous())
    for layer, (first, step) in zip(pages, ((0, -1), (1, 1)), strict=True):
        expected = list(range(32))
        expected[3] = expected[5] = 20  # slot 5 takes what slot 3 has just got
        assert layer.keys[:, 1, :, 1].flatten().tolist() == expected
        assert layer.values[:, 1, :, 1].flatten().tolist() == [first + step * number for number in expected]
    before = pages[0].keys.clone()
    for wrong in (-1, 32):
        for pair in ((wrong, 0), (0, wrong)):
            with pytest.raises(ValueError, match=f"slot {wrong} lies outside the storage of 32 slots"):
                ops.copy_kv(pages, *(torch.tensor([1, slot], dtype=torch.int32) for slot in pair))
    assert torch.equal(pages[0].keys, before)


BROKEN = [
    ({"parents": {3: 5}}, "token 3 follows token 5"),
    ({"parents": {3: 3}}, "token 3 follows token 3"),
    ({"parents": {12: 9}}, "token 12 follows token 9"),
    ({"parents": {3: -2}}, "token 3 follows token -2"),
    ({"parents": {9: 2}}, "token 9 stands at position 24: expected 22"),
    ({"positions": {1: 20}}, "token 1 stands at position 20: expected 21"),
    ({"positions": {10: -1}}, "token 10 stands at position -1"),
    ({"slots": {4: 10**6}}, "1000000"),
    ({"slots": {4: -2}}, "-2"),
]


@pytest.mark.parametrize("changes, message", BROKEN, ids=[message for _, message in BROKEN])
def test_invalid_trees_are_refused(ops: Kernels, changes: dict[str, dict[int, int]], message: str) -> None:
    layers = Layers(ops, [(20, BUSH), (0, CHAIN)])
    attention, _ = layers.layers[0]
    broken = {name: getattr(layers.batch, name).clone() for name in changes}
    for name, entries in changes.items():
        for index, value in entries.items():
            broken[name][index] = value
    queries = inputs.normal(inputs.generator(1), len(layers.x), SHAPE.heads * SHAPE.head_dim)
    with pytest.raises(ValueError, match=message):
        ops.attend(queries, attention, replace(layers.batch, **broken), layers.copied()[0], layers.x)


def test_a_token_without_a_slot_uses_the_stored_key(ops: Kernels) -> None:
    layers = Layers(ops, [(30, CHAIN), (62, CHAIN)])
    pages = layers.copied()
    first = layers.run(layers.batch, everything(layers), pages)
    with_replacement = replace(layers.batch, slots=torch.full_like(layers.batch.slots, -1))
    before = [storage.clone() for kept in pages for storage in (kept.keys, kept.values)]
    for batch in (with_replacement, replace(with_replacement, parents=None)):
        assert torch.equal(layers.run(batch, everything(layers), pages), first)
    after = [storage for kept in pages for storage in (kept.keys, kept.values)]
    assert all(torch.equal(left, right) for left, right in zip(before, after, strict=True))


@pytest.mark.parametrize("slot", [-2, 10**6])
def test_a_slot_outside_the_storage_is_refused(ops: Kernels, slot: int) -> None:
    layers = Layers(ops, [(30, CHAIN)])
    batch = replace(layers.batch, slots=layers.batch.slots.clone(), parents=None)
    batch.slots[2] = slot
    with pytest.raises(ValueError, match="outside the storage"):
        ops.project_qkv(layers.x, layers.layers[0][0], batch, layers.copied()[0])


@pytest.mark.parametrize("skip", [1, 5, 70, 500])
@pytest.mark.parametrize("window", [0, 9])
def test_skipped_positions_are_ignored(ops: Kernels, skip: int, window: int) -> None:
    """A token before them has no keys, so that only the residual remains."""
    layers = Layers(ops, [(0, PROMPT), (3, CHAIN), (64, BUSH), (70, (-1,))], Kind(window=window, skip=skip))
    attention, _ = layers.layers[0]
    chain = replace(layers.batch, parents=None, query_starts=torch.tensor([0, len(PROMPT)], dtype=torch.int32))
    chain = replace(chain, positions=chain.positions[: len(PROMPT)], slots=chain.slots[: len(PROMPT)])
    chain = replace(chain, page_tables=chain.page_tables[:1])
    for batch in (layers.batch, chain):
        pages, x = layers.copied()[0], layers.x[: len(batch.positions)]
        queries = ops.project_qkv(x, attention, batch, pages)
        for row in range(len(batch.page_tables)):
            for position in range(min(skip, int(batch.positions[int(batch.query_starts[row])]))):
                pages.values[batch.page_tables[row, position // PAGE], :, position % PAGE] = torch.nan
        out = x.clone()
        ops.attend(queries, attention, batch, pages, out)
        blind = batch.positions < skip
        assert out.isfinite().all() and torch.equal(out[blind], x[blind])
        assert not (out[~blind] == x[~blind]).all(1).any()


def test_a_stack_of_two_widths_is_refused(ops: Kernels) -> None:
    random = inputs.generator(1)
    attention = ops.attention_layer(inputs.attention_weights(random, "f32", HEAD))
    mlp = ops.mlp_layer(inputs.mlp_weights(random, "f32", HEAD, "silu"))
    pages = inputs.random_pages(random, inputs.random_batch(random, [(0, 1)]), HEAD, torch.float32)
    with pytest.raises(ValueError, match=r"different widths: \[256, 512\]"):
        ops.layer_stack([(attention, mlp)], [pages])
