"""Random inputs for cases: weights of every format, batches over scattered pages, sampling metadata."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Generator, Tensor

from ..kv_quantization import LARGEST, dequantize_heads, quantize_heads
from ..protocol import Kernels
from ..quantization import FORMATS, dequantize, row_bytes
from ..structures import (
    Activation,
    AttentionLora,
    AttentionWeights,
    Batch,
    LayerPages,
    LogitsProcessors,
    MlpLora,
    MlpWeights,
    MoeWeights,
    SamplingMetadata,
    Weight,
)

PAGE = 16  # slots in a page
SPARE = 3  # pages that no row uses

# Where the halves of a block lie, and how large each is beside the first: minima offset their unsigned quants.
HALVES = {
    "q4_0": {0: 1.0},
    "q4_1": {0: 1.0, 2: -7.5},
    "q5_0": {0: 1.0},
    "q5_1": {0: 1.0, 2: -15.5},
    "q8_0": {0: 1.0},
    "q4_k": {0: 1.0, 2: 7.5},
    "q5_k": {0: 1.0, 2: 15.5},
    "q6_k": {208: 1.0},
    "iq4_nl": {0: 1.0},
    "q4_z": {0: 1.0},
    "q8_z": {0: 1.0},
}


def generator(seed: int) -> Generator:
    return Generator().manual_seed(seed)


def normal(random: Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=random)


def random_weight(random: Generator, kind: str, rows: int, columns: int) -> Weight:
    """[N, K] numbers of about 1 / sqrt(K), so that products keep the size of the activations."""
    block = FORMATS[kind]
    if block.dtype is not None:
        values = normal(random, rows, columns) / math.sqrt(columns)
        return Weight(kind, (rows, columns), values.to(block.dtype))
    packed = torch.randint(0, 256, (rows, row_bytes(kind, columns)), dtype=torch.uint8, generator=random)
    blocks = packed.view(-1, block.bytes)  # [X, bytes], the same memory
    weight = Weight(kind, (rows, columns), packed)
    if kind == "fp8":
        return _random_fp8(random, weight)
    spread = torch.rand(blocks.shape[0], 1, generator=random) + 0.5  # [X, 1]
    _write_halves(blocks, kind, spread)
    size = dequantize(weight).square().mean().sqrt() * math.sqrt(columns)
    _write_halves(blocks, kind, spread / size)
    return weight


def _random_fp8(random: Generator, weight: Weight) -> Weight:
    """Give random blocks of e4m3 finite numbers and scales: of whole rows, or a scale for each block."""
    rows, columns = weight.shape
    blocks = weight.data.view(rows, -1, FORMATS["fp8"].bytes)  # [N, blocks of a row, bytes], the same memory
    numbers = blocks[:, :, 4:]
    numbers[(numbers & 0x7F) == 0x7F] = 0  # not a number
    scales = torch.rand(rows, 1 if rows % 2 else blocks.shape[1], 1, generator=random) + 0.5
    blocks[:, :, :4] = scales.view(torch.uint8)
    size = dequantize(weight).square().mean().sqrt() * math.sqrt(columns)
    blocks[:, :, :4] = (scales / size).view(torch.uint8)
    return weight


def _write_halves(blocks: Tensor, kind: str, scale: Tensor) -> None:
    if kind == "mxfp4":  # its scale is a power of two, of which the exponent is stored
        blocks[:, :1] = (scale.log2().round() + 128).to(torch.uint8)
        return
    if kind.endswith("_z"):  # a zero point is a small whole number
        blocks[:, 2:4] = torch.arange(len(blocks)).remainder(16).half().unsqueeze(1).view(torch.uint8)
    for at, factor in HALVES[kind].items():
        blocks[:, at : at + 2] = (scale * factor).half().view(torch.uint8)


@dataclass(frozen=True)
class Shape:
    """The sizes of a layer: model width, heads, key/value heads, head width, inner width of the MLP."""

    width: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    inner: int = 512
    states: int = 1  # that attention reads side by side

    @property
    def input_width(self) -> int:
        return self.states * self.width

    def attention_bytes(self, keys: int, kind: str, pages: torch.dtype) -> int:
        """Return the bytes that attention over `keys` reads: keys, values, and its output matrix of this kind."""
        cached = 2 * keys * self.kv_heads * self.head_dim * pages.itemsize
        return cached + self.width * row_bytes(kind, self.heads * self.head_dim)


SMALL = Shape()
MODEL = Shape(width=768, heads=12, kv_heads=4, head_dim=64, inner=2048)  # about a small model's layer
REQUEST_SETTINGS: list[dict[str, float]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 0.0},
    {"top_k": 40, "top_p": 0.95},
    {"temperature": 1.3, "top_p": 0.8},
    {"min_p": 0.05, "temperature": 0.9},
    {"top_k": 3, "min_p": 0.2},
]
BIASES = ("query_bias", "key_bias", "value_bias")
HEAD_NORMS = ("query_norm", "key_norm")


def attention_weights(
    random: Generator,
    kind: str,
    shape: Shape,
    options: Sequence[str] = (),
    window: int = 0,
    positions: int = 64,
    skip: int = 0,
    causal: bool = True,
    anchored: bool = False,
    soft_cap: float = 0.0,
) -> AttentionWeights:
    """`options` names the optional weights that are present: norm, query_bias, ..., gate and rotary.

    whole_norms: the norms of queries and keys are over all heads together.
    """
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {"norm": shape.input_width, "post_norm": shape.width, "output_bias": shape.width, "query_bias": query}
    sizes |= {"key_bias": key, "value_bias": key, "query_norm": shape.head_dim, "key_norm": shape.head_dim}
    sizes["sinks"] = shape.heads
    if "whole_norms" in options:
        sizes |= {"query_norm": query, "key_norm": key}
    angles = 6.3 * torch.rand(positions, shape.head_dim // 2, generator=random)
    rotary = "rotary" in options
    return AttentionWeights(
        query=random_weight(random, kind, query, shape.input_width),
        key=random_weight(random, kind, key, shape.input_width),
        value=random_weight(random, kind, key, shape.input_width),
        output=random_weight(random, kind, shape.width, query),
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        scale=shape.head_dim**-0.5,
        eps=1e-5,
        window=window,
        skip=skip,
        causal=causal,
        anchored=anchored,
        soft_cap=soft_cap,
        cos=angles.cos() if rotary else None,
        sin=angles.sin() if rotary else None,
        gate=random_weight(random, kind, query, shape.input_width) if "gate" in options else None,
        **_vectors(random, sizes, [option for option in options if option in sizes]),
    )


def mlp_weights(
    random: Generator, kind: str, shape: Shape, activation: Activation, options: Sequence[str] = ()
) -> MlpWeights:
    sizes = {"norm": shape.width, "post_norm": shape.width, "down_bias": shape.width}
    sizes |= {"gate_bias": shape.inner, "up_bias": shape.inner}
    return MlpWeights(
        gate=random_weight(random, kind, shape.inner, shape.width),
        up=random_weight(random, kind, shape.inner, shape.width),
        down=random_weight(random, kind, shape.width, shape.inner),
        activation=activation,
        eps=1e-6,
        **_vectors(random, sizes, options),
    )


def moe_weights(
    random: Generator,
    kind: str,
    shape: Shape,
    experts: int,
    top_k: int,
    activation: Activation = "silu",
    options: Sequence[str] = (),
) -> MoeWeights:
    """`options` names what is present: norm, post_norm, router_bias, gate_bias, ..., shared, normalized."""
    each = [mlp_weights(random, kind, shape, activation) for _ in range(experts)]
    sizes: dict[str, tuple[int, ...]] = {"norm": (shape.width,), "post_norm": (shape.width,), "router_bias": (experts,)}
    sizes |= {"gate_bias": (experts, shape.inner), "up_bias": (experts, shape.inner)}
    sizes |= {"down_bias": (experts, shape.width)}
    shared = "shared" in options
    return MoeWeights(
        router=normal(random, experts, shape.width) / math.sqrt(shape.width),
        gate=tuple(one.gate for one in each),
        up=tuple(one.up for one in each),
        down=tuple(one.down for one in each),
        top_k=top_k,
        normalized="normalized" in options,
        activation=each[0].activation,
        eps=1e-5,
        shared=mlp_weights(random, kind, replace(shape, inner=2 * shape.inner), activation) if shared else None,
        shared_gate=normal(random, shape.width) / math.sqrt(shape.width) if shared else None,
        **{name: normal(random, *size) for name, size in sizes.items() if name in options},
    )


def _vectors(random: Generator, sizes: dict[str, int], names: Sequence[str]) -> dict[str, Any]:
    return {name: 1 + 0.3 * normal(random, sizes[name]) for name in names}


LORA_RANKS = (3, 16, 0, 40)  # of the adapters in each slot; 0: empty


def _random_lora(random: Generator, ops: Kernels, weight: Weight) -> object:
    """Fill slots with adapters whose product is about as large as the matrix's."""
    rows, columns = weight.shape
    slots = ops.lora_slots(len(LORA_RANKS), max(LORA_RANKS), (rows, columns))
    for slot, rank in enumerate(LORA_RANKS):
        first, second = _random_pair(random, rows, columns, 17), _random_pair(random, rows, columns, max(rank, 1))
        ops.set_lora(slots, slot, *first)  # a slot that is used again holds the second adapter only
        ops.set_lora(slots, slot, *(second if rank else (None, None)))
    return slots


def _random_pair(random: Generator, rows: int, columns: int, rank: int) -> tuple[Tensor, Tensor]:
    return normal(random, rank, columns) / math.sqrt(columns), normal(random, rows, rank) / math.sqrt(rank)


def with_attention_lora(random: Generator, ops: Kernels, weights: AttentionWeights) -> AttentionWeights:
    matrices = weights.query, weights.key, weights.value, weights.output
    return replace(weights, lora=AttentionLora(*(_random_lora(random, ops, matrix) for matrix in matrices)))


def with_mlp_lora(random: Generator, ops: Kernels, weights: MlpWeights) -> MlpWeights:
    matrices = weights.gate, weights.up, weights.down
    return replace(weights, lora=MlpLora(*(_random_lora(random, ops, matrix) for matrix in matrices)))


def random_adapters(random: Generator, tokens: int) -> Tensor:
    """Return a slot for each token, -1 among them, in runs of several lengths: [T] int32."""
    slots = torch.randint(-1, len(LORA_RANKS), (tokens,), dtype=torch.int32, generator=random)
    keeps = torch.rand(tokens, generator=random) < 0.5
    for token in range(1, tokens):
        if keeps[token]:
            slots[token] = slots[token - 1]
    return slots


def random_batch(random: Generator, rows: Sequence[tuple[int, int]]) -> Batch:
    """Rows of (tokens in the cache before this step, tokens in this step), over pages in random order."""
    used = [(context + queries + PAGE - 1) // PAGE for context, queries in rows]
    order = torch.randperm(sum(used) + SPARE, generator=random).tolist()
    tables = torch.zeros(len(rows), max(used), dtype=torch.int32)  # [B, P]
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    for row, (context, queries) in enumerate(rows):
        pages = [order.pop() for _ in range(used[row])]
        tables[row, : used[row]] = torch.tensor(pages)
        here = range(context, context + queries)
        positions += here
        slots += [pages[position // PAGE] * PAGE + position % PAGE for position in here]
        starts.append(len(positions))
    return Batch(
        tokens=torch.randint(0, 100, (len(positions),), dtype=torch.int32, generator=random),
        positions=torch.tensor(positions, dtype=torch.int32),
        slots=torch.tensor(slots, dtype=torch.int32),
        query_starts=torch.tensor(starts, dtype=torch.int32),
        page_tables=tables,
    )


def random_trees(random: Generator, rows: Sequence[tuple[int, Sequence[int]]]) -> Batch:
    """Rows of (tokens in the cache before this step, parents of its tokens, counted in the row; -1: the cache)."""
    batch = random_batch(random, [(context, len(parents)) for context, parents in rows])
    positions: list[int] = []
    found: list[int] = []
    for context, parents in rows:
        begin = len(found)
        for parent in parents:
            found.append(-1 if parent < 0 else begin + parent)
            positions.append(context if parent < 0 else positions[begin + parent] + 1)
    return replace(
        batch,
        positions=torch.tensor(positions, dtype=torch.int32),
        parents=torch.tensor(found, dtype=torch.int32),
    )


def with_ancestors(batch: Batch, tokens: Sequence[int]) -> list[int]:
    """Return these tokens and their ancestors in the step, ascending."""
    assert batch.parents is not None
    found: set[int] = set()
    for token in tokens:
        while token >= 0:
            found.add(token)
            token = int(batch.parents[token])
    return sorted(found)


def random_pages(random: Generator, batch: Batch, shape: Shape, dtype: torch.dtype) -> LayerPages:
    """Return enough pages for the batch, filled with random numbers outside its rows too."""
    count = int(batch.page_tables.max()) + 1 + SPARE
    sizes = (count, shape.kv_heads, PAGE, shape.head_dim)
    return make_pages(normal(random, *sizes), normal(random, *sizes), dtype)


def make_pages(keys: Tensor, values: Tensor, dtype: torch.dtype) -> LayerPages:
    """Return pages with these keys and values [pages, G, S, D] f32."""
    if dtype not in LARGEST:
        return LayerPages(keys.to(dtype), values.to(dtype))
    (keys, key_scales), (values, value_scales) = quantize_heads(keys, dtype), quantize_heads(values, dtype)
    return LayerPages(keys, values, key_scales, value_scales)


def copy_pages(pages: LayerPages, device: torch.device | None = None) -> LayerPages:
    return LayerPages(*(part.to(device, copy=True) for part in pages.tensors))


def stored(pages: LayerPages, slots: Tensor) -> tuple[Tensor, ...]:
    """Return the keys and values in these slots, [T, G, D] each; of quantized ones their scales too, [T, G]."""
    page, line = slots.long() // PAGE, slots.long() % PAGE
    parts = [part[page, :, line] for part in pages.tensors]
    if pages.key_scales is None:
        return tuple(parts)
    numbers, scales = parts[:2], parts[2:]
    return *(dequantize_heads(*pair) for pair in zip(numbers, scales, strict=True)), *scales


def take_tokens(batch: Batch, tokens: Sequence[int]) -> Batch:
    """Return the batch of these tokens (ascending) only; rows without one are dropped.

    A token of a tree needs its ancestors.
    """
    starts = batch.query_starts.tolist()
    owned = [[token for token in tokens if begin <= token < end] for begin, end in pairwise(starts)]
    rows = [row for row, own in enumerate(owned) if own]
    counts = torch.tensor([0] + [len(owned[row]) for row in rows])
    indices = {token: index for index, token in enumerate(tokens)} | {-1: -1}
    parents = None if batch.parents is None else [indices[parent] for parent in batch.parents[list(tokens)].tolist()]
    return Batch(
        tokens=batch.tokens[list(tokens)],
        positions=batch.positions[list(tokens)],
        slots=batch.slots[list(tokens)],
        query_starts=counts.cumsum(0).to(torch.int32),
        page_tables=batch.page_tables[rows],
        adapters=None if batch.adapters is None else batch.adapters[list(tokens)],
        parents=None if parents is None else torch.tensor(parents, dtype=torch.int32),
    )


def make_processors(rows: Sequence[tuple[bool, dict[int, tuple[float, float]]]]) -> LogitsProcessors:
    """Rows of (only the listed tokens, {token: (scale, bias)})."""
    counts = torch.tensor([0] + [len(listed) for _, listed in rows])
    entries = [(token, *change) for _, listed in rows for token, change in listed.items()]
    return LogitsProcessors(
        starts=counts.cumsum(0).to(torch.int32),
        tokens=torch.tensor([token for token, _, _ in entries], dtype=torch.int32),
        scale=torch.tensor([scale for _, scale, _ in entries], dtype=torch.float32),
        bias=torch.tensor([bias for _, _, bias in entries], dtype=torch.float32),
        only=torch.tensor([only for only, _ in rows], dtype=torch.uint8),
    )


def make_sampling(rows: Sequence[dict[str, float]], seed: int) -> SamplingMetadata:
    """Rows of settings by name; a setting that is absent does nothing."""

    def column(name: str, default: float, dtype: torch.dtype) -> Tensor:
        return torch.tensor([row.get(name, default) for row in rows], dtype=dtype)

    count = len(rows)
    return SamplingMetadata(
        temperature=column("temperature", 1.0, torch.float32),
        top_k=column("top_k", 0, torch.int32),
        top_p=column("top_p", 1.0, torch.float32),
        min_p=column("min_p", 0.0, torch.float32),
        seeds=torch.arange(count, dtype=torch.int64) * 0x1_0000_0001 + seed,
        positions=torch.arange(count, dtype=torch.int32) * 37,
    )
