"""Positions, page tables, slots, rows and tokens that point outside of memory: refused before anything is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from outrider.kernels import Batch, LogitsProcessors, cpu
from outrider.kernels.cases import inputs
from outrider.kernels.cases.inputs import Shape
from outrider.kernels.cpu import _native

SHAPE = Shape(width=64, heads=4, kv_heads=2, head_dim=16, inner=64)
ROWS = [(20, 3), (0, 5), (40, 1)]  # context and new tokens of each row
POSITIONS = 64  # of the rope tables
HUGE = 2**31 - 1

# A change of the batch, and the sentence that names it.
WRONG: dict[str, tuple[str, int, int, str]] = {
    "a position after the rope tables": ("positions", 2, POSITIONS, "token 2 has position 64, outside the rope tables"),
    "a huge position": ("positions", 0, HUGE, f"token 0 has position {HUGE}"),
    "a negative position": ("positions", 8, -1, "token 8 has position -1"),
    "a slot after the storage": ("slots", 4, HUGE, f"token 4 has its key at slot {HUGE}, outside the storage"),
    "a negative slot": ("slots", 4, -2, "token 4 has its key at slot -2"),
    "rows that end after the tokens": ("query_starts", 3, 10, "`query_starts` must rise from 0 to at most 9"),
    "rows that begin before the tokens": ("query_starts", 0, -1, "`query_starts` must rise"),
    "rows that overlap": ("query_starts", 1, 9, "`query_starts` must rise"),
}
WRONG_TABLES: dict[str, tuple[str, int, int, str]] = {
    "a huge page": ("page_tables", 1, HUGE, "the page table of row 0 leads outside the storage"),
    "a negative page": ("page_tables", 0, -1, "the page table of row 0 leads outside the storage"),
    "a position after the page table": ("positions", 8, 63, "row 2 reads position 63, outside its page table of 3"),
}


class Layer:
    def __init__(self, window: int = 0, causal: bool = True) -> None:
        random = inputs.generator(1)
        weights = inputs.attention_weights(
            random, "f32", SHAPE, ["norm", "rotary"], positions=POSITIONS, window=window, causal=causal
        )
        self.attention = cpu.attention_layer(weights)
        self.mlp = cpu.mlp_layer(inputs.mlp_weights(random, "f32", SHAPE, "silu", ["norm"]))
        self.batch = inputs.random_batch(random, ROWS)
        self.pages = inputs.random_pages(random, self.batch, SHAPE, torch.float32)
        self.x = inputs.normal(random, len(self.batch.tokens), SHAPE.width)
        self.queries = inputs.normal(random, len(self.batch.tokens), SHAPE.heads * SHAPE.head_dim)

    def calls(self) -> dict[str, Callable[[Batch], object]]:
        stack = cpu.layer_stack([(self.attention, self.mlp)], [self.pages])
        return {
            "run_layers": lambda batch: cpu.run_layers(self.x, stack, batch),
            "project_qkv": lambda batch: cpu.project_qkv(self.x, self.attention, batch, self.pages),
            "project_kv": lambda batch: cpu.project_kv(self.x, self.attention, batch, self.pages),
            "attend": lambda batch: cpu.attend(self.queries, self.attention, batch, self.pages, self.x),
        }

    def changed(self, name: str, index: int, value: int) -> Batch:
        tensor: Tensor = getattr(self.batch, name).clone()
        tensor.view(-1)[index] = value
        return replace(self.batch, **{name: tensor})

    def check(self, call: str, name: str, index: int, value: int, message: str) -> None:
        before = self.x.clone(), self.pages.keys.clone(), self.pages.values.clone()
        with pytest.raises(ValueError, match=message):
            self.calls()[call](self.changed(name, index, value))
        if call != "run_layers":  # which has stored the keys when `attend` refuses
            after = self.x, self.pages.keys, self.pages.values
            assert all(torch.equal(left, right) for left, right in zip(before, after, strict=True))


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("call", ["run_layers", "project_qkv", "project_kv"])
def test_a_batch_outside_of_memory_is_refused(level: str, call: str, name: str) -> None:
    Layer().check(call, *WRONG[name])


@pytest.mark.parametrize("name", WRONG_TABLES)
@pytest.mark.parametrize("call", ["run_layers", "attend"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_page_table_outside_of_memory_is_refused(level: str, call: str, name: str, causal: bool) -> None:
    Layer(causal=causal).check(call, *WRONG_TABLES[name])


@pytest.mark.parametrize("name", [name for name in WRONG if name.startswith("rows")])
def test_attention_refuses_rows_outside_the_tokens(level: str, name: str) -> None:
    Layer().check("attend", *WRONG[name])


def test_pages_before_the_window_are_not_read(level: str) -> None:
    layer = Layer(window=4)
    _, index, value, _ = WRONG_TABLES["a negative page"]
    out = layer.x.clone()
    cpu.attend(layer.queries, layer.attention, layer.batch, layer.pages, out)
    layer.calls()["attend"](layer.changed("page_tables", index, value))
    assert torch.equal(layer.x, out)


@pytest.mark.parametrize("starts", [[0, 3, 2], [-1, 1, 2], [0, 1, 3], [0, HUGE, 2]])
def test_logits_processors_outside_their_entries_are_refused(level: str, starts: list[int]) -> None:
    numbers = torch.ones(2)
    processors = LogitsProcessors(
        starts=torch.tensor(starts, dtype=torch.int32),
        tokens=torch.tensor([1, 2], dtype=torch.int32),
        scale=numbers,
        bias=numbers,
        only=torch.zeros(2, dtype=torch.uint8),
    )
    with pytest.raises(ValueError, match="`starts` must rise from 0 to at most 2 entries"):
        cpu.process_logits(torch.zeros(2, 8), processors)


@pytest.mark.parametrize("token", [-1, 8, HUGE])
def test_tokens_outside_the_vocabulary_are_refused(level: str, token: int) -> None:
    tokens = torch.tensor([1, token], dtype=torch.int32)
    table = cpu.matrix(inputs.random_weight(inputs.generator(1), "f32", 8, 64))
    with pytest.raises(ValueError, match=f"token {token} lies outside the vocabulary of 8"):
        cpu.embed(table, tokens, 1.0)
    with pytest.raises(ValueError, match="a token lies outside the vocabulary"):
        cpu.top_logprobs(torch.zeros(2, 8), tokens, 1)


@pytest.mark.parametrize("column", [-1, 8])
def test_a_recorded_scatter_outside_its_matrix_is_refused(column: int) -> None:
    target, source = torch.zeros(1, 8), torch.ones(1, 2)
    columns = torch.tensor([0, column])
    with pytest.raises(ValueError, match=f"column {column} lies outside a matrix of 8 columns"):
        _native.Recording().scatter(target.data_ptr(), source.data_ptr(), columns.data_ptr(), 1, 2, 8)
