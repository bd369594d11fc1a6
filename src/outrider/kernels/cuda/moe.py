"""Mixtures of experts: a router in fp32, and grouped matmuls that read each expert once for all its rows.

A pair is a token and one of its experts: pair p belongs to token p // top_k. A group holds the pairs of one expert.
There are as many groups as pairs or as experts, whichever are fewer, so that no shape depends on data; some are empty.
The kernels multiply [outputs, columns] of an expert with [columns, rows of its group], as matmul.py does. Letter X:
experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..structures import Activation, MoeWeights
from .device import DEVICE, INTERPRETED, LAUNCH, loop_bound, on_device, rounded, wait
from .epilogue import ROWS, Tiling, add_matmul, fitting_stages
from .matmul import DTYPES, Operation, gated_matmul, matmul
from .matmul import read_tile as read_floats
from .matrices import PADDED, Matrix, pack
from .pointwise import apply_gate
from .quantized_matmul import Words, enlarged, format_of, read_tile, true_size

ROUTED = 16  # experts per program of the router
ROUTER_COLUMNS = 256  # columns per iteration of its loop
PAIRS = 1024  # pairs that a program of `group_pairs` reads at a time
EMULATED = Tiling(128, 128, 4, 1)  # in the interpreter a tile costs the same whatever its size
FEW = Tiling(32, 128, 4, 4)  # up to ROWS tokens: narrow tiles, so that a few experts fill the GPU
MANY = Tiling(64, 64, 4, 3)
WIDE_ROWS = 64  # rows per program for more than ROWS tokens


class ExpertBiases(NamedTuple):
    """Argument of the kernel: [X, outputs] f32 each, or None. `up` is used by a gated matmul alone, after its gate."""

    first: Tensor | None
    up: Tensor | None


class Groups(NamedTuple):
    """Argument of the kernels: the pairs of each expert, Z groups."""

    experts: Tensor  # [Z] int32
    counts: Tensor  # [Z] int32; 0: no group
    pairs: Tensor  # [Z, T] int32; an expert has at most one pair of each token


@dataclass(frozen=True)
class MoeLayer:
    router: Tensor  # [X, E] f32; one more row with a shared expert: its gate
    router_bias: Tensor | None  # [X] f32
    gate_up: Matrix  # [X * 2 * N, E]: gate above up for each expert
    down: Matrix  # [X * E, N]
    experts: int
    top_k: int
    normalized: bool
    activation: Activation
    eps: float
    norm: Tensor | None  # [E] f32
    post_norm: Tensor | None  # [E] f32
    gate_bias: Tensor | None  # [X, N] f32
    up_bias: Tensor | None  # [X, N] f32
    down_bias: Tensor | None  # [X, E] f32
    shared_gate_up: Matrix | None  # [2 * S, E]
    shared_down: Matrix | None  # [E, S]


def moe_layer(weights: MoeWeights, *, batch_invariant: bool = False) -> MoeLayer:
    gates = [part for pair in zip(weights.gate, weights.up, strict=True) for part in pair]
    shared = weights.shared
    router = weights.router.to(DEVICE, torch.float32)
    if weights.shared_gate is not None:
        router = torch.cat([router, weights.shared_gate.to(DEVICE, torch.float32)[None]])
    return MoeLayer(
        router=router.contiguous(),
        router_bias=on_device(weights.router_bias),
        gate_up=pack(gates, batch_invariant, expand=False),
        down=pack(weights.down, batch_invariant, expand=False),
        experts=len(weights.gate),
        top_k=weights.top_k,
        normalized=weights.normalized,
        activation=weights.activation,
        eps=weights.eps,
        norm=on_device(weights.norm),
        post_norm=on_device(weights.post_norm),
        gate_bias=on_device(weights.gate_bias),
        up_bias=on_device(weights.up_bias),
        down_bias=on_device(weights.down_bias),
        shared_gate_up=None if shared is None else pack([shared.gate, shared.up], batch_invariant),
        shared_down=None if shared is None else pack([shared.down], batch_invariant),
    )


def moe(x: Tensor, layer: MoeLayer) -> None:
    tokens, width = x.shape
    if tokens == 0:
        return
    states, logits = _route(x, layer)  # [T, E] in the compute dtype, [T, X]
    chosen, scores = _choose(logits, layer)  # [T, top_k] int32 and f32
    groups = _group(chosen, layer.experts)
    inner_width = layer.gate_up.shape[0] // layer.experts // 2
    pairs = tokens * layer.top_k
    inner = torch.empty(pairs, inner_width, dtype=layer.down.compute, device=x.device)  # [pairs, N]
    _grouped(
        states,
        layer.gate_up,
        ExpertBiases(layer.gate_bias, layer.up_bias),
        groups,
        layer.top_k,
        layer.activation,
        inner,
    )
    product = torch.empty(pairs, width, device=x.device)  # [pairs, E]
    _grouped(inner, layer.down, ExpertBiases(layer.down_bias, None), groups, 1, None, product)
    shared = None
    if layer.shared_gate_up is not None and layer.shared_down is not None:
        hidden = gated_matmul(
            states,
            layer.shared_gate_up,
            norm=None,
            eps=layer.eps,
            gate_bias=None,
            up_bias=None,
            activation=layer.activation,
        )  # [T, S]
        shared = matmul(hidden, layer.shared_down)  # [T, E]
    block = triton.next_power_of_2(width)
    _add_up[(tokens,)](
        product,
        scores,
        shared,
        logits,
        layer.post_norm,
        x,
        width,
        layer.eps,
        experts=layer.experts,
        top_k=layer.top_k,
        block=block,
        num_warps=min(max(block // 256, 1), 16),
        **LAUNCH,
    )


def _route(x: Tensor, layer: MoeLayer) -> tuple[Tensor, Tensor]:
    """Return the normed states, in the compute dtype of the experts, and the router logits."""
    tokens, width = x.shape
    rows = layer.router.shape[0]
    states = torch.empty(tokens, width, dtype=layer.gate_up.compute, device=x.device)
    logits = torch.empty(tokens, rows, device=x.device)
    _router_logits[(tokens, triton.cdiv(rows, ROUTED))](
        x.contiguous(),
        layer.norm,
        layer.router,
        layer.router_bias,
        states,
        logits,
        rows,
        layer.experts,
        layer.eps,
        width=width,
        block=triton.next_power_of_2(width),
        experts_block=ROUTED,
        columns_block=ROUTER_COLUMNS,
        **LAUNCH,
    )
    return states, logits


def _choose(logits: Tensor, layer: MoeLayer) -> tuple[Tensor, Tensor]:
    """Return the experts of each token, the best first, and their scores."""
    tokens, rows = logits.shape
    chosen = torch.empty(tokens, layer.top_k, dtype=torch.int32, device=logits.device)
    scores = torch.empty(tokens, layer.top_k, device=logits.device)
    _choose_experts[(tokens,)](
        logits,
        chosen,
        scores,
        rows,
        layer.experts,
        top_k=layer.top_k,
        normalized=layer.normalized,
        block=triton.next_power_of_2(layer.experts),
        slots=triton.next_power_of_2(layer.top_k),
        num_warps=1,
        **LAUNCH,
    )
    return chosen, scores


def _group(chosen: Tensor, experts: int) -> Groups:
    """Group the pairs by expert: by their first pairs if these are fewer than the experts."""
    tokens, pairs = chosen.shape[0], chosen.numel()
    by_pair = pairs <= experts
    count = pairs if by_pair else experts
    numbers = torch.empty(2, count, dtype=torch.int32, device=chosen.device)
    found = torch.empty(count, tokens, dtype=torch.int32, device=chosen.device)
    block = min(triton.next_power_of_2(pairs), PAIRS)
    _group_pairs[(count,)](
        chosen, numbers[0], numbers[1], found, pairs, tokens, by_pair=by_pair, block=block, num_warps=4, **LAUNCH
    )
    return Groups(numbers[0], numbers[1], found)


def _grouped(
    x: Tensor,
    matrix: Matrix,
    biases: ExpertBiases,
    groups: Groups,
    share: int,
    activation: Activation | None,
    out: Tensor,
) -> None:
    """Multiply the rows x[pair // share] of each group by its expert, into out[pair] [pairs, outputs]."""
    tokens, outputs = groups.pairs.shape[1], out.shape[1]
    # A batch-invariant matrix always has the same tiling: its sums have one order for any T.
    few = tokens <= ROWS or matrix.batch_invariant
    tile = EMULATED if INTERPRETED else FEW if few else MANY
    rows = ROWS if few else WIDE_ROWS
    grid = (triton.cdiv(tokens, rows), triton.cdiv(outputs, tile.outputs), groups.counts.shape[0])
    columns = tile.columns if matrix.kind == "float" else PADDED
    tile = replace(tile, rows=rows, columns=columns)
    grouped_tile[grid](
        x,
        Words(matrix.data, matrix.scales, matrix.channel),
        biases,
        groups,
        out,
        tokens,
        outputs,
        matrix.data.shape[1],
        0 if matrix.scales is None else matrix.scales.stride(0),
        share=share,
        operation=Operation(matrix.shape[1], DTYPES[matrix.compute], activation, False),
        format=format_of(matrix),
        chunks=1 if matrix.kind == "float" else columns // matrix.chunk,
        row_block=rows,
        output_block=tile.outputs,
        column_block=columns,
        num_warps=tile.warps,
        num_stages=fitting_stages(tile, matrix, x.dtype, activation is not None),
        **LAUNCH,
    )


@triton.jit
def _router_logits(
    x,
    norm,  # [width] f32, or None
    router,  # [rows, width] f32
    bias,  # [experts] f32, or None
    states,
    logits,
    rows,
    experts,
    eps,
    width: tl.constexpr,
    block: tl.constexpr,
    experts_block: tl.constexpr,
    columns_block: tl.constexpr,
):
    wait()
    token = tl.program_id(0).to(tl.int64)
    scale = 1.0
    if norm is not None:
        whole = tl.arange(0, block)
        state = tl.load(x + token * width + whole, mask=whole < width, other=0)
        scale = tl.rsqrt(tl.sum(state * state, 0) / width + eps)
    expert = tl.program_id(1) * experts_block + tl.arange(0, experts_block)
    total = tl.zeros([experts_block], tl.float32)
    for first in range(0, width, columns_block):
        column = first + tl.arange(0, columns_block)
        inside = column < width
        value = tl.load(x + token * width + column, mask=inside, other=0)
        if norm is not None:
            value = value * scale * tl.load(norm + column, mask=inside, other=0)
        if tl.program_id(1) == 0:
            tl.store(states + token * width + column, rounded(value, states.dtype.element_ty), mask=inside)
        known = (expert < rows)[:, None] & inside[None, :]
        tile = tl.load(router + expert[:, None].to(tl.int64) * width + column[None, :], mask=known, other=0)
        total += tl.sum(tile * value[None, :], 1)
    if bias is not None:
        total += tl.load(bias + expert, mask=expert < experts, other=0)
    tl.store(logits + token * rows + expert, total, mask=expert < rows)


@triton.jit
def _choose_experts(
    logits,
    chosen,
    scores,
    rows,
    experts,
    top_k: tl.constexpr,
    normalized: tl.constexpr,
    block: tl.constexpr,
    slots: tl.constexpr,
):
    wait()
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, block)
    logit = tl.load(logits + token * rows + expert, mask=expert < experts, other=-float("inf"))
    most = tl.max(logit, 0)
    total = tl.sum(tl.exp(logit - most), 0)
    left = tl.where(expert < experts, tl.where(logit == logit, logit, -float("inf")), -float("inf"))
    is_left = expert < experts
    slot = tl.arange(0, slots)
    ids = tl.zeros([slots], tl.int32)
    found = tl.zeros([slots], tl.float32)
    for index in tl.static_range(top_k):
        best = tl.max(left, 0)
        # The lowest index among equals, also if all that are left are -inf.
        candidate = is_left & (left == best)
        one = tl.min(tl.where(candidate, expert, block), 0)
        ids = tl.where(slot == index, one, ids)
        found = tl.where(slot == index, tl.exp(best - most) / total, found)
        is_left = is_left & (expert != one)
        left = tl.where(is_left, left, -float("inf"))
    if normalized:
        found = found / tl.sum(found, 0)
    kept = slot < top_k
    tl.store(chosen + token * top_k + slot, ids, mask=kept)
    tl.store(scores + token * top_k + slot, found, mask=kept)


@triton.jit(do_not_specialize=["pairs", "tokens"])
def _group_pairs(
    chosen,  # [pairs] int32
    experts,
    counts,
    found,  # [groups, tokens]
    pairs,
    tokens,
    by_pair: tl.constexpr,  # group z is led by pair z; else it is that of expert z
    block: tl.constexpr,
):
    wait()
    group = tl.program_id(0)
    own = tl.load(chosen + group) if by_pair else group
    count = tl.zeros([], tl.int32)
    earlier = tl.zeros([], tl.int32)
    for first in range(0, loop_bound(pairs), block):
        pair = first + tl.arange(0, block)
        match = (tl.load(chosen + pair, mask=pair < pairs, other=-1) == own).to(tl.int32)
        index = count + tl.cumsum(match, 0) - 1
        tl.store(found + group.to(tl.int64) * tokens + index, pair, mask=match != 0)
        count += tl.sum(match, 0)
        if by_pair:
            earlier += tl.sum(tl.where(pair < group, match, 0), 0)
    tl.store(experts + group, own)
    tl.store(counts + group, tl.where(earlier > 0, 0, count))


@triton.jit(do_not_specialize=["tokens"])
def grouped_tile(
    x,
    words,
    biases,
    groups,
    out,  # [pairs, outputs]
    tokens,
    outputs,
    stride,  # elements of a row of the matrix
    scale_stride,  # entries of a chunk of all rows
    share: tl.constexpr,
    operation: tl.constexpr,
    format: tl.constexpr,
    chunks: tl.constexpr,
    row_block: tl.constexpr,
    output_block: tl.constexpr,
    column_block: tl.constexpr,
):
    columns: tl.constexpr = operation.columns
    activation: tl.constexpr = operation.activation
    even: tl.constexpr = columns % column_block == 0  # loads need no column mask
    wait()
    group = tl.program_id(2)
    count = tl.load(groups.counts + group)
    row = tl.program_id(0) * row_block + tl.arange(0, row_block)
    if tl.program_id(0) * row_block < count:
        expert = tl.load(groups.experts + group).to(tl.int64)
        pair = tl.load(groups.pairs + group.to(tl.int64) * tokens + row, mask=row < count, other=0).to(tl.int64)
        output = tl.program_id(1) * output_block + tl.arange(0, output_block)
        # Programs at the edge read the last row again, so that loads need no row mask.
        line = tl.minimum(output, outputs - 1).to(tl.int64)
        parts: tl.constexpr = 1 if activation is None else 2
        line += expert * outputs * parts
        total = tl.zeros([output_block, row_block], tl.float32)
        other_total = tl.zeros([output_block, row_block], tl.float32)
        for first in range(0, columns, column_block):
            if format.kind == "float":
                tile = read_floats(words.data, line, first, column_block, operation)
                other = tile
                if activation is not None:
                    other = read_floats(words.data, line + outputs, first, column_block, operation)
            else:
                step = first // column_block
                tile = read_tile(words, line, step, stride, scale_stride, chunks, format)
                other = tile
                if activation is not None:
                    other = read_tile(words, line + outputs, step, stride, scale_stride, chunks, format)
            column = first + tl.arange(0, column_block)
            known = (row < count)[None, :] & ((column < columns) | even)[:, None]
            states = tl.load(x + (pair // share)[None, :] * columns + column[:, None], mask=known, other=0)
            states = enlarged(states, words.channel, format)
            total = add_matmul(tile, states, total, 1)
            if activation is not None:
                other_total = add_matmul(other, states, other_total, 1)
        total, other_total = true_size(total, format), true_size(other_total, format)
        if words.channel is not None:
            total *= tl.load(words.channel + line)[:, None]
            if activation is not None:
                other_total *= tl.load(words.channel + line + outputs)[:, None]
        total = _biased(total, biases.first, expert, output, outputs)
        if activation is not None:
            total = apply_gate(total, _biased(other_total, biases.up, expert, output, outputs), activation)
        kept = (row < count)[None, :] & (output < outputs)[:, None]
        tl.store(out + pair[None, :] * outputs + output[:, None], rounded(total, out.dtype.element_ty), mask=kept)


@triton.jit
def _biased(total, bias, expert, output, outputs):
    if bias is not None:
        total += tl.load(bias + expert * outputs + output, mask=output < outputs, other=0)[:, None]
    return total


@triton.jit
def _add_up(
    product,  # [pairs, width]
    scores,  # [tokens, top_k]
    shared,  # [tokens, width], or None
    logits,  # [tokens, experts + 1] if there is a shared expert
    post_norm,
    x,
    width,
    eps,
    experts: tl.constexpr,
    top_k: tl.constexpr,
    block: tl.constexpr,
):
    wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < width
    total = tl.zeros([block], tl.float32)
    for slot in tl.static_range(top_k):
        pair = token * top_k + slot
        total += tl.load(scores + pair) * tl.load(product + pair * width + column, mask=inside, other=0)
    if shared is not None:
        score = tl.sigmoid(tl.load(logits + token * (experts + 1) + experts))
        total += score * tl.load(shared + token * width + column, mask=inside, other=0)
    if post_norm is not None:
        total *= tl.rsqrt(tl.sum(total * total, 0) / width + eps)
        total *= tl.load(post_norm + column, mask=inside, other=0)
    target = x + token * width + column
    tl.store(target, tl.load(target, mask=inside, other=0) + total, mask=inside)
