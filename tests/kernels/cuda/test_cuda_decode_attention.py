"""Attention of decode steps: what separate kernels for rope and attention return, and the bits that they store."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from test_cuda_rope_attention import (
    FACTORS,
    HEADS,
    ONE,
    SINKS,
    Rows,
    carried,
    random_projected,
    random_rope,
    random_storage,
)
from torch import Tensor
from triton.runtime.interpreter import interpreter_builder

from outrider.config import EngineConfig
from outrider.device import graphs
from outrider.kernels import Batch, LayerPages, cuda
from outrider.kernels.cases import inputs
from outrider.kernels.cases.case import difference
from outrider.kernels.cases.inputs import PAGE, Shape
from outrider.kernels.cuda import decode_attention, layers, paged_attention
from outrider.kernels.cuda.decode_attention import SHORT, share_counters
from outrider.kernels.cuda.device import DEVICE
from outrider.kernels.cuda.paged_attention import Heads
from outrider.kernels.cuda.rope import rotate_and_store

FAST, FAST_ONE = replace(HEADS, batch_invariant=False), replace(ONE, batch_invariant=False)
FEW: Rows = ((0, 1), (15, 1), (16, 1), (100, 1))
LONG: Rows = ((130, 1), (0, 1), (511, 1), (128, 1), (129, 1))  # several tiles of keys, shared by programs
MANY: Rows = tuple((3 * row, 1) for row in range(80))  # more rows than are read at a time
UNEVEN: Rows = ((7, 2), (0, 0), (200, 3), (0, 0), (3, 0), (9, 1))  # as many tokens as rows
CASES: dict[str, tuple[Heads, torch.dtype, Rows]] = {
    "few": (FAST, torch.bfloat16, FEW),
    "three heads of 64": (replace(FAST_ONE, size=64), torch.float16, FEW),
    "heads of 128": (replace(FAST, size=128), torch.bfloat16, LONG),
    "heads of 80": (replace(FAST, size=80), torch.float16, LONG),
    "narrow heads": (replace(FAST_ONE, size=6), torch.float32, FEW),
    "twenty heads": (replace(FAST, count=20, kv=1), torch.float16, LONG),
    "fp32": (replace(FAST, size=128), torch.float32, LONG),
    "long": (FAST, torch.float16, LONG),
    "many": (FAST_ONE, torch.float16, MANY),
    "rows of several tokens": (FAST, torch.float16, UNEVEN),
    "rows of several tokens, window": (replace(FAST, window=2), torch.float16, UNEVEN),
    "soft cap": (replace(FAST, soft_cap=1.5), torch.float16, LONG),
    "sinks": (replace(FAST, sinks=SINKS), torch.float16, LONG),
    "window": (replace(FAST, window=20), torch.float16, LONG),
    "window 1": (replace(FAST, window=1), torch.float16, LONG),
    "window of two tiles": (replace(FAST, window=200), torch.float16, LONG),
    "hidden": (replace(FAST, skip=8), torch.float16, LONG),
    "the first position hidden": (replace(FAST, skip=1), torch.float16, UNEVEN),
    "int8": (replace(FAST, sinks=SINKS), torch.int8, LONG),
    "int8, divided keys": (replace(FAST, key_factors=FACTORS), torch.int8, UNEVEN),
    "fp8": (replace(FAST, size=80), torch.float8_e4m3fn, LONG),
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # of others: 2e-3


@pytest.fixture(params=["forwards", "backwards"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let interpreted programs run in both orders: any of those that share a text may be the last one."""
    if request.param == "forwards":
        return
    forwards = interpreter_builder.set_grid_idx

    def set_grid_idx(*index: int) -> None:
        forwards(*(size - 1 - at for size, at in zip(interpreter_builder.grid_dim, index, strict=True)))

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", set_grid_idx)


def run(projected: Tensor, heads: Heads, batch: Batch, before: LayerPages) -> tuple[Tensor, ...]:
    """Return outputs and pages. The second launch finds the counters that the first one has left."""
    pages, counters = inputs.copy_pages(before, DEVICE), share_counters()
    rope = replace(random_rope(heads.size), key_factors=heads.key_factors)
    for _ in range(2):
        states, on_device = projected.to(DEVICE), carried(batch)
        found = decode_attention.decode_attention(states, heads, on_device, pages, torch.float32, rope, counters)
        assert not counters.any()
    return found.cpu(), *(part.cpu() for part in pages.tensors)


def meant(projected: Tensor, heads: Heads, batch: Batch, before: LayerPages) -> tuple[Tensor, ...]:
    pages, on_device = inputs.copy_pages(before, DEVICE), carried(batch)
    rope = replace(random_rope(heads.size), key_factors=heads.key_factors)
    queries = rotate_and_store(projected.to(DEVICE), heads.count, rope, on_device, pages)
    found = paged_attention.paged_attention(queries, replace(heads, batch_invariant=True), on_device, pages)
    return found.cpu(), *(part.cpu() for part in pages.tensors)


def agree(projected: Tensor, heads: Heads, batch: Batch, pages: LayerPages, tokens: int | None = None) -> None:
    found, *stored = run(projected, heads, batch, pages)
    expected, *kept = meant(projected, heads, batch, pages)
    assert not expected[:tokens].isnan().any()
    assert difference(found[:tokens], expected[:tokens]) < TOLERANCE.get(pages.keys.dtype, 2e-3)
    for ours, theirs in zip(stored, kept, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("name", CASES)
def test_decode_attention_is_that_of_separate_kernels(name: str) -> None:
    heads, dtype, rows = CASES[name]
    batch = inputs.random_batch(inputs.generator(1), rows)
    assert len(batch.slots) == len(rows)
    agree(random_projected(batch, heads), heads, batch, random_storage(batch, heads, dtype))


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_results_do_not_depend_on_the_programs_of_a_text(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_attention, "PARTS", parts)
    batch = inputs.random_batch(inputs.generator(1), LONG)
    agree(random_projected(batch, FAST), FAST, batch, random_storage(batch, FAST, torch.float16))


# Padding divides what was in the memory before; its results are not read.
@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero|All-NaN slice) encountered:RuntimeWarning")
def test_padding_is_harmless() -> None:
    """Tokens that belong to no row, and the last tokens of a row, at position 0 and without slots."""
    batch = inputs.random_batch(inputs.generator(1), UNEVEN)
    for begin, end in pairwise(batch.query_starts.tolist()):
        dropped = slice(max(end - 1, begin + 1), end)
        batch.positions[dropped], batch.slots[dropped] = 0, -1
    projected, pages = random_projected(batch, FAST), random_storage(batch, FAST, torch.float16)
    padded = replace(
        batch,
        positions=torch.cat([batch.positions, torch.full((2,), 0x7FFFFF00, dtype=torch.int32)]),
        slots=torch.cat([batch.slots, torch.full((2,), -1, dtype=torch.int32)]),
        query_starts=torch.cat([batch.query_starts, batch.query_starts[-1:].repeat(2)]),
        page_tables=torch.cat([batch.page_tables, torch.tensor([[-1], [10**9]]).expand(2, batch.page_tables.shape[1])]),
    )
    poisoned = torch.cat([projected, torch.full((2, projected.shape[1]), torch.nan)])
    agree(poisoned, FAST, padded, pages, len(projected))


@pytest.mark.parametrize("rows", [FEW, LONG, UNEVEN], ids=["few", "long", "rows of several tokens"])
def test_a_token_without_a_slot_uses_the_key_of_the_page_table(rows: Rows) -> None:
    batch = inputs.random_batch(inputs.generator(1), rows)
    batch.slots[::2] = -1
    agree(random_projected(batch, FAST), FAST, batch, random_storage(batch, FAST, torch.float16))


def test_it_serves_short_decode_steps_alone() -> None:
    def serves(rows: Rows, width: int = SHORT, heads: Heads = FAST) -> bool:
        batch = inputs.random_batch(inputs.generator(1), rows)
        pages = random_storage(batch, heads, torch.float16)
        tables = torch.zeros(len(rows), width // PAGE, dtype=torch.int32)
        return decode_attention.serves(heads, replace(batch, page_tables=tables), pages)

    assert serves(FEW)
    assert not serves(FEW, heads=HEADS)  # its results depend on the cached keys of a step
    assert not serves(((5, 2), (6, 1)))
    assert not serves(FEW, SHORT + PAGE)
    wide = replace(FAST, size=128)
    assert serves(FEW, heads=wide)
    assert not serves(MANY, heads=wide)
    assert EngineConfig().page_size * graphs.MIN_PAGES == SHORT  # of captured steps


SHAPE = Shape(width=64, heads=6, kv_heads=2, head_dim=16, inner=64)


@pytest.mark.parametrize("name", ["fast", "norms of queries", "batch-invariant"])
def test_layers_use_it_where_they_can(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    random = inputs.generator(1)
    options = ("rotary", "query_norm") if name == "norms of queries" else ("rotary", "norm")
    weights = inputs.attention_weights(random, "f32", SHAPE, options)
    layer = layers.attention_layer(weights, batch_invariant=name == "batch-invariant")
    pairs = [(layer, cuda.mlp_layer(inputs.mlp_weights(random, "f32", SHAPE, "silu")))]
    batch = inputs.random_batch(random, FEW)
    before = inputs.random_pages(random, batch, SHAPE, torch.float16)
    states = inputs.normal(random, len(batch.slots), SHAPE.width)  # [T, E]

    def result() -> Tensor:
        x = states.to(DEVICE, copy=True)
        cuda.run_layers(x, cuda.layer_stack(pairs, [inputs.copy_pages(before, DEVICE)]), carried(batch))
        return x.cpu()

    launched: list[int] = []
    original = decode_attention.decode_attention

    def counted(*arguments: object) -> Tensor:
        launched.append(1)
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(decode_attention, "decode_attention", counted)
    found = result()
    assert len(launched) == (1 if name == "fast" else 0)
    monkeypatch.setattr(decode_attention, "serves", lambda *_: False)
    assert difference(found, result()) < 2e-3
