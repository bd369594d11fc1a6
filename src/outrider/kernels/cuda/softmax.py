"""A softmax that is taken block by block, for Triton kernels: largest scores, sums of weights, weighted values."""

from __future__ import annotations

import triton
import triton.language as tl

from .rounding import multiply


@triton.jit
def step(
    query,
    keys,
    values,
    slot,
    needed,
    seen,
    top,
    total,
    mixed,
    kv_heads: tl.constexpr,
    size: tl.constexpr,
    padded: tl.constexpr,
    page: tl.constexpr,
    tile: tl.constexpr,
    block: tl.constexpr,
):
    """One block of keys: what no line sees is not read; to a line that sees none of them nothing changes."""
    dim = tl.arange(0, padded)
    number = tl.maximum(slot // page, 0).to(tl.int64)
    place = number * (kv_heads * page * size) + slot % page * size  # [block]
    at = place[:, None] + dim[None, :]
    inside = needed[:, None] & (dim < size)[None, :]
    key = tl.load(keys + at, mask=inside, other=0.0)  # [block, D]
    score = tl.where(seen, multiply(query, tl.trans(key), tl.zeros([tile, block], tl.float32)), float("-inf"))
    higher = tl.maximum(top, tl.max(score, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    kept = tl.exp2(top - base)
    weight = tl.exp2(score - base[:, None])
    value = tl.load(values + at, mask=inside, other=0.0)  # [block, D]
    mixed = multiply(weight.to(value.dtype), value, mixed * kept[:, None])
    return higher, total * kept + tl.sum(weight, 1), mixed


@triton.jit
def merge(top, total, mixed, part_top, part_total, part_mixed):
    """Two parts of a row's keys as one. An empty part, on either side, leaves the bits of the other."""
    higher = tl.maximum(top, part_top)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    kept, added = tl.exp2(top - base), tl.exp2(part_top - base)
    mixed = mixed * kept[:, None] + part_mixed * added[:, None]
    return higher, total * kept + part_total * added, mixed


@triton.jit
def mean(total, mixed):
    """0 where no key was seen."""
    return mixed / tl.where(total > 0, total, 1.0)[:, None]
