"""Turning and storing inside the attention kernel, for rows with few tokens: one kernel less in every layer.

A program turns and stores the keys and values of its row's tokens, from the first up to its own last, and reads them
back among the older ones. So it needs no store of another program; where several store one token, their bits are the
same. They are those of rotary.py, too: the same operations in the same order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .bounds import bound


@triton.jit
def angles(cos, sin, positions, token, valid, limit, size: tl.constexpr, padded: tl.constexpr):
    """Cosines and sines of tokens [n]: [n, D] each, both halves alike. Known before the tokens are projected."""
    half: tl.constexpr = size // 2
    dim = tl.arange(0, padded)
    inside = valid[:, None] & (dim < size)[None, :]
    position = tl.minimum(tl.load(positions + token, mask=valid, other=0), limit - 1)
    at = position[:, None] * half + tl.where(dim < half, dim, dim - half)[None, :]
    return tl.load(cos + at, mask=inside, other=0.0), tl.load(sin + at, mask=inside, other=0.0)


@triton.jit
def turned(projected, line, valid, cosine, sine, size: tl.constexpr, padded: tl.constexpr):
    """Heads [n, D] of `projected`, turned. Each number meets its partner of the other half."""
    half: tl.constexpr = size // 2
    dim = tl.arange(0, padded)
    inside = valid[:, None] & (dim < size)[None, :]
    first = dim < half
    place = projected + line.to(tl.int64)[:, None] * size
    number = tl.load(place + dim[None, :], mask=inside, other=0.0)
    partner = tl.load(place + tl.where(first, dim + half, dim - half)[None, :], mask=inside, other=0.0)
    straight, crossed = number * cosine, partner * sine
    return tl.where(first[None, :], straight - crossed, straight + crossed)


@triton.jit
def store(
    projected,
    keys,
    values,
    token,
    slot,
    cosine,
    sine,
    kv_head,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    size: tl.constexpr,
    padded: tl.constexpr,
    page: tl.constexpr,
):
    """One head's keys, turned, and values of tokens [n] to their slots; whoever has none is not read either."""
    dim = tl.arange(0, padded)
    kept = slot >= 0
    inside = kept[:, None] & (dim < size)[None, :]
    line = token.to(tl.int64) * (heads + 2 * kv_heads) + heads + kv_head  # queries, then keys, then values
    key = turned(projected, line, kept, cosine, sine, size, padded)
    value = tl.load(projected + (line + kv_heads)[:, None] * size + dim[None, :], mask=inside, other=0.0)
    place = (slot // page).to(tl.int64) * (kv_heads * page * size) + (kv_head * page + slot % page) * size  # [n]
    at = place[:, None] + dim[None, :]
    tl.store(keys + at, key.to(keys.dtype.element_ty), mask=inside)
    tl.store(values + at, value.to(values.dtype.element_ty), mask=inside)


@triton.jit
def store_all(
    projected,
    cos,
    sin,
    positions,
    slots,
    keys,
    values,
    begin,
    end,
    limit,
    kv_head,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    size: tl.constexpr,
    padded: tl.constexpr,
    page: tl.constexpr,
    fresh: tl.constexpr,
):
    """`store` for all tokens from `begin` to `end`, `fresh` at a time."""
    for each in range(bound(begin), bound(end), fresh):
        token = each + tl.arange(0, fresh)
        valid = token < end
        cosine, sine = angles(cos, sin, positions, token, valid, limit, size, padded)
        slot = tl.load(slots + token, mask=valid, other=-1)
        store(projected, keys, values, token, slot, cosine, sine, kv_head, heads, kv_heads, size, padded, page)
