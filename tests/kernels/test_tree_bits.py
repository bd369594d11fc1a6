"""Tree attention: a token has the bits of its path as a chain, for branches at any position of a chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from outrider.kernels import Batch, LayerPages, Weight, cpu
from outrider.kernels.cases import inputs
from outrider.kernels.cases.inputs import PAGE, Shape
from outrider.kernels.cpu import _native

# At the borders of blocks and chunks, and anywhere.
CONTEXTS = (0, 1, 7, 14, 15, 16, 31, 40, 47, 48, 49, 55, 61, 62, 63, 64, 65, 90, 111, 112, 126, 127, 128, 150, 191)


class Form(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype  # of the pages
    window: int = 0
    skip: int = 0


FORMS = [
    Form(9, 3, 64, torch.float16),
    Form(3, 3, 64, torch.bfloat16, window=3),
    Form(4, 2, 8, torch.float32, window=17),
    Form(6, 1, 20, torch.float16, window=60),
    Form(5, 1, 34, torch.bfloat16, skip=30),
    Form(2, 2, 50, torch.float32, skip=5),
    Form(8, 2, 16, torch.float16, window=64, skip=64),
    Form(1, 1, 130, torch.bfloat16),
]


@pytest.fixture
def threads() -> Iterator[None]:
    before = cpu.facts()["threads"]
    yield
    _native.set_thread_count(before)


def random_tree(random: torch.Generator, nodes: int, reach: int) -> list[int]:
    """A node follows one of the latest `reach`, or the cache."""
    back = [int(torch.randint(1, min(reach, node + 1) + 1, (), generator=random)) for node in range(nodes)]
    return [max(node - step, -1) for node, step in enumerate(back)]


class Trees:
    """A row for each context, and an attention whose output shows the bits of every head."""

    def __init__(self, form: Form, seed: int) -> None:
        random = inputs.generator(seed)
        whole = form.heads * form.head_dim
        shape = Shape(width=whole, heads=form.heads, kv_heads=form.kv_heads, head_dim=form.head_dim)
        weights = inputs.attention_weights(random, "f32", shape, (), form.window, skip=form.skip)
        self.layer = cpu.attention_layer(replace(weights, output=Weight("f32", (whole, whole), torch.eye(whole))))
        sizes = torch.randint(1, 40, (len(CONTEXTS),), generator=random).tolist()
        rows = [(context, random_tree(random, sizes[row], 1 + row % 9)) for row, context in enumerate(CONTEXTS)]
        self.batch = self.scattered(random, inputs.random_trees(random, rows))
        self.pages = inputs.random_pages(random, self.batch, shape, form.dtype)
        self.queries = 3 * inputs.normal(random, len(self.batch.tokens), whole)  # [T, H * D]

    def scattered(self, random: torch.Generator, batch: Batch) -> Batch:
        """Every third row has its keys in another order, and of every other such row the last token has no slot."""
        slots = batch.slots.clone()
        for row in range(0, len(CONTEXTS), 3):
            begin, end = batch.query_starts[row : row + 2].tolist()
            slots[begin:end] = slots[begin:end][torch.randperm(end - begin, generator=random)]
            if row % 2:
                slots[end - 1] = -1
        return replace(batch, slots=slots)

    def attend(self, batch: Batch, tokens: Sequence[int], pages: LayerPages) -> Tensor:
        out = torch.zeros(len(tokens), self.queries.shape[1])  # [T, E]
        cpu.attend(self.queries[list(tokens)], self.layer, batch, pages, out)
        return out

    def tokens(self, row: int) -> list[int]:
        return list(range(*self.batch.query_starts[row : row + 2].tolist()))

    def leaves(self, row: int) -> list[int]:
        assert self.batch.parents is not None
        inner = set(self.batch.parents.tolist())
        return [token for token in self.tokens(row) if token not in inner]

    def chain(self, row: int, path: Sequence[int]) -> Tensor:
        """The path as a plain step, its keys and values where their positions say."""
        at = self.batch.positions[list(path)].long()
        natural = self.batch.page_tables[row].long()[at // PAGE] * PAGE + at % PAGE
        pages = inputs.copy_pages(self.pages)
        slots = self.batch.slots[list(path)]
        found = inputs.stored(self.pages, torch.where(slots < 0, natural, slots))
        for storage, rows in zip((pages.keys, pages.values), found, strict=True):
            storage[natural // PAGE, :, natural % PAGE] = rows
        step = inputs.take_tokens(self.batch, path)
        return self.attend(replace(step, slots=natural.to(torch.int32), parents=None), path, pages)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_path_equals_a_chain(form: Form, level: str, threads: None) -> None:
    for seed in (1, 2):
        trees = Trees(form, seed)
        whole = trees.attend(trees.batch, range(len(trees.batch.tokens)), trees.pages)  # [T, E]
        assert whole.isfinite().all()
        for row, context in enumerate(CONTEXTS):
            for leaf in trees.leaves(row):
                path = inputs.with_ancestors(trees.batch, [leaf])
                assert torch.equal(trees.chain(row, path), whole[path]), f"the path {path} after {context}"
        for count in (1, 2, 3):
            _native.set_thread_count(count)
            for row in range(len(CONTEXTS)):
                own = trees.tokens(row)
                alone = trees.attend(inputs.take_tokens(trees.batch, own), own, trees.pages)
                assert torch.equal(alone, whole[own]), f"the tree after {CONTEXTS[row]} on {count} threads"
