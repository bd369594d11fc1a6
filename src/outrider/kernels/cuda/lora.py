"""Low-rank adapters (LoRA): add B (A x) to the rows that have one, several adapters in one launch.

All slots of a matrix lie in one tensor, padded to the largest rank, so that CUDA graphs stay valid when an adapter is
loaded. A program takes 16 rows and goes over the slots: rows of other slots count as 0, so a row's sums have one order
whatever its neighbours are. `_shrink` splits K into parts of a fixed size, which `_expand` adds in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device import DEVICE, LAUNCH, multiply, wait

ROWS = 16  # rows per program: the smallest that `tl.dot` takes
MIN_RANK = 16  # ranks are padded to a power of 2, at least this, for `tl.dot`
PART = 1024  # columns of A per program: enough programs for the GPU in decoding, where one block of rows runs
TILE = 4096  # weights of A or B that a program loads at a time


@dataclass(frozen=True)
class LoraSlots:
    a: Tensor  # [slots, R, K] f32
    b: Tensor  # [slots, N, R] f32
    ranks: Tensor  # [slots] int32; 0: empty


def lora_slots(slots: int, rank: int, shape: tuple[int, int]) -> LoraSlots:
    outputs, columns = shape
    padded = max(triton.next_power_of_2(rank), MIN_RANK)
    return LoraSlots(
        torch.zeros(slots, padded, columns, device=DEVICE),
        torch.zeros(slots, outputs, padded, device=DEVICE),
        torch.zeros(slots, dtype=torch.int32, device=DEVICE),
    )


def set_lora(lora_slots: LoraSlots, slot: int, a: Tensor | None, b: Tensor | None) -> None:
    lora_slots.a[slot].zero_()
    lora_slots.b[slot].zero_()
    lora_slots.ranks[slot] = 0
    if a is not None and b is not None:
        rank = a.shape[0]
        lora_slots.a[slot, :rank] = a.to(DEVICE)
        lora_slots.b[slot, :, :rank] = b.to(DEVICE)
        lora_slots.ranks[slot] = rank


def add_lora(x: Tensor, matrices: Sequence[LoraSlots], adapters: Tensor, out: Tensor) -> None:
    """Add the adapters' products with x [T, K] to out [T, N]: the outputs of one matrix after another.

    adapters [T] int32: slots; -1: none.
    """
    tokens, columns = x.shape
    if not tokens:
        return
    slots, rank, _ = matrices[0].a.shape
    outputs = [matrix.b.shape[1] for matrix in matrices]
    parts, blocks, count = triton.cdiv(columns, PART), triton.cdiv(tokens, ROWS), len(matrices)
    side = max(TILE // rank, 16)
    low = torch.empty(count, parts, tokens, rank, device=x.device)
    ranks = tuple(matrix.ranks for matrix in matrices)
    _shrink[(blocks, parts, count)](
        x.contiguous(),
        tuple(matrix.a for matrix in matrices),
        ranks,
        adapters,
        low,
        tokens,
        columns,
        slots=slots,
        rank=rank,
        part=PART,
        row_block=ROWS,
        column_block=side,
        count=count,
        **LAUNCH,
    )
    _expand[(blocks, triton.cdiv(max(outputs), side), count)](
        low,
        tuple(matrix.b for matrix in matrices),
        ranks,
        adapters,
        out,
        tokens,
        out.shape[1],
        outputs=tuple(outputs),
        parts=parts,
        slots=slots,
        rank=rank,
        row_block=ROWS,
        output_block=side,
        count=count,
        **LAUNCH,
    )


# One binary for any number of rows, so that a row's result does not depend on it.
@triton.jit(do_not_specialize=["tokens"])
def _shrink(
    x,  # [tokens, columns]
    matrices,  # A of each matrix: [slots, rank, columns]
    ranks,  # [slots] of each matrix
    adapters,  # [tokens]
    low,  # [matrices, parts, tokens, rank]
    tokens,
    columns,
    slots: tl.constexpr,
    rank: tl.constexpr,
    part: tl.constexpr,
    row_block: tl.constexpr,
    column_block: tl.constexpr,
    count: tl.constexpr,  # matrices
):
    wait()
    row = tl.program_id(0) * row_block + tl.arange(0, row_block)
    adapter = tl.load(adapters + row, mask=row < tokens, other=-1)
    lane = tl.arange(0, rank)
    total = tl.zeros([row_block, rank], tl.float32)
    for number in tl.static_range(count):
        if tl.program_id(2) == number:
            for slot in range(slots):
                own = adapter == slot
                if (tl.max(own.to(tl.int32), 0) > 0) & (tl.load(ranks[number] + slot) > 0):
                    for step in range(0, part, column_block):
                        column = tl.program_id(1) * part + step + tl.arange(0, column_block)
                        known = column < columns
                        at = row.to(tl.int64)[:, None] * columns + column[None, :]
                        states = tl.load(x + at, mask=own[:, None] & known[None, :], other=0).to(tl.float32)
                        line = slot * rank + lane.to(tl.int64)
                        weights = tl.load(
                            matrices[number] + line[None, :] * columns + column[:, None], mask=known[:, None], other=0
                        )
                        total = multiply(states, weights, total)
    first = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * tokens
    tl.store(low + (first + row)[:, None] * rank + lane[None, :], total, mask=(row < tokens)[:, None])


@triton.jit(do_not_specialize=["tokens"])
def _expand(
    low,  # [matrices, parts, tokens, rank]
    matrices,  # B of each matrix: [slots, outputs, rank]
    ranks,  # [slots] of each matrix
    adapters,  # [tokens]
    out,  # [tokens, stride]
    tokens,
    stride,
    outputs: tl.constexpr,  # of each matrix
    parts: tl.constexpr,
    slots: tl.constexpr,
    rank: tl.constexpr,
    row_block: tl.constexpr,
    output_block: tl.constexpr,
    count: tl.constexpr,  # matrices
):
    wait()
    row = tl.program_id(0) * row_block + tl.arange(0, row_block)
    adapter = tl.load(adapters + row, mask=row < tokens, other=-1)
    target = out + row.to(tl.int64) * stride  # [row_block]
    for number in tl.static_range(count):
        if (tl.program_id(2) == number) & (tl.program_id(1) * output_block < outputs[number]):
            factors = tl.zeros([row_block, rank], tl.float32)
            for part in tl.static_range(parts):
                line = (number * parts + part) * tokens.to(tl.int64) + row
                at = line[:, None] * rank + tl.arange(0, rank)[None, :]
                factors += tl.load(low + at, mask=(row < tokens)[:, None], other=0)
            _add_products(
                factors, matrices[number], ranks[number], adapter, target, outputs[number], slots, output_block
            )
        target += outputs[number]


@triton.jit
def _add_products(
    factors,  # [row_block, rank]
    matrix,  # [slots, outputs, rank]
    ranks,  # [slots]
    adapter,  # [row_block]
    target,  # [row_block] pointers: the first output of each row
    outputs: tl.constexpr,
    slots: tl.constexpr,
    output_block: tl.constexpr,
):
    """Add the product of each row with B of its slot to a block of its outputs."""
    row_block: tl.constexpr = factors.shape[0]
    rank: tl.constexpr = factors.shape[1]
    output = tl.program_id(1) * output_block + tl.arange(0, output_block)
    total = tl.zeros([row_block, output_block], tl.float32)
    changed = adapter < -1  # none
    for slot in range(slots):
        own = adapter == slot
        if (tl.max(own.to(tl.int32), 0) > 0) & (tl.load(ranks + slot) > 0):
            line = slot * outputs + output.to(tl.int64)
            at = line[None, :] * rank + tl.arange(0, rank)[:, None]
            weights = tl.load(matrix + at, mask=(output < outputs)[None, :], other=0)
            total = multiply(tl.where(own[:, None], factors, 0.0), weights, total)
            changed = changed | own
    kept = changed[:, None] & (output < outputs)[None, :]
    at = target[:, None] + output[None, :]
    tl.store(at, tl.load(at, mask=kept, other=0) + total, mask=kept)
