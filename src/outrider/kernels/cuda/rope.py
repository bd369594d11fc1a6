"""Between projections and attention: per-head norms, rope, KV storage.

`rotate_and_store` is a kernel of its own. For rows with few tokens the attention kernel does the same work with
`rotated`, `store_kv` and `store_row_kv`: a program stores the new keys and values of its row up to its own last token
and reads them back, so that it needs no store of another program. Operations and their order are the same, hence bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kv_quantization import LARGEST
from ..structures import Batch, LayerPages
from .device import LAUNCH, loop_bound, rounded, wait

LINES = 8  # heads per program


@dataclass(frozen=True)
class RopeWeights:
    """Norms and rope tables for the heads of queries and keys."""

    eps: float
    query_norm: Tensor | None  # [D] f32
    key_norm: Tensor | None  # [D] f32
    cos: Tensor | None  # [positions, D / 2] f32; None: no rotation
    sin: Tensor | None
    key_factors: Tensor | None = None  # [G, D] f32, see kv_quantization.py; only for int8 pages


class KvPages(NamedTuple):
    """Argument of kernels: the pages of a layer, or of one of its heads. Triton reserves the name `values`."""

    k: Tensor  # [pages, G, page, D]
    v: Tensor
    k_scales: Tensor  # [pages, G, page] f32; placeholders if the pages have none
    v_scales: Tensor


class RopeTables(NamedTuple):
    """Argument of kernels: see RopeWeights."""

    cos: Tensor
    sin: Tensor


class Tokens(NamedTuple):
    """Argument of kernels: the tokens of a batch, see Batch. Fields that a kernel does not read may be placeholders."""

    positions: Tensor
    slots: Tensor
    parents: Tensor
    query_starts: Tensor
    page_tables: Tensor


class NewTokens(NamedTuple):
    """Tokens of this step whose keys and values a program rotates."""

    token: tl.tensor  # [n]
    slot: tl.tensor  # -1: not stored, or beyond the last token
    cosine: tl.tensor  # [n, D]
    sine: tl.tensor


class Keys(NamedTuple):
    """Keys and values of one head, as they are stored."""

    k: tl.tensor  # [n, D]
    v: tl.tensor
    k_scale: tl.tensor  # [n] f32; 1 or 0 if pages have no scales
    v_scale: tl.tensor


class HeadShape(NamedTuple):
    """Constants of a kernel: the heads of a layer and its pages."""

    heads: int  # H
    kv_heads: int  # G
    size: int  # D
    padded: int  # the power of two that covers D
    page: int  # slots in a page
    scaled: bool  # pages are quantized and have scales


def kv_pages(pages: LayerPages) -> KvPages:
    """Return the pages as an argument of kernels."""
    keys, values, key_scales, value_scales = pages.keys, pages.values, pages.key_scales, pages.value_scales
    assert (key_scales is None) == (value_scales is None) == (keys.dtype not in LARGEST)
    return KvPages(
        keys, values, keys if key_scales is None else key_scales, values if value_scales is None else value_scales
    )


def rotate_and_store(projected: Tensor, heads: int, rope: RopeWeights, batch: Batch, pages: LayerPages) -> Tensor:
    """Store keys and values of `projected` [T, (H + 2 * G) * D] f32; return queries [T, H * D] f32. H may be 0."""
    tokens, width = projected.shape
    _, kv_heads, page, size = pages.keys.shape
    assert width == (heads + 2 * kv_heads) * size
    queries = torch.empty(tokens, heads * size, dtype=torch.float32, device=projected.device)
    cos, sin, query_norm, key_norm = rope.cos, rope.sin, rope.query_norm, rope.key_norm
    if tokens:
        _rotate_and_store[(tokens, triton.cdiv(heads + 2 * kv_heads, LINES))](
            projected,
            projected if query_norm is None else query_norm,
            projected if key_norm is None else key_norm,
            projected if cos is None else cos,
            projected if sin is None else sin,
            batch.positions,
            batch.slots,
            kv_pages(pages),
            rope.key_factors if pages.keys.dtype is torch.int8 else None,
            queries,
            1 if cos is None else cos.shape[0],
            rope.eps,
            heads=heads,
            kv_heads=kv_heads,
            size=size,
            half=size // 2,
            padded=triton.next_power_of_2(size // 2),
            page=page,
            lines=LINES,
            norm_queries=query_norm is not None,
            norm_keys=key_norm is not None,
            rotate=cos is not None,
            scaled=pages.key_scales is not None,
            num_warps=4,
            enable_fp_fusion=False,  # the same roundings as in the fused attention kernel
            **LAUNCH,
        )
    return queries


@triton.jit(do_not_specialize=["limit"])
def _rotate_and_store(
    projected,
    query_norm,
    key_norm,
    cos,
    sin,
    positions,
    slots,
    pages,
    key_factors,  # or None
    queries,
    limit,
    eps,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    size: tl.constexpr,
    half: tl.constexpr,
    padded: tl.constexpr,
    page: tl.constexpr,
    lines: tl.constexpr,
    norm_queries: tl.constexpr,
    norm_keys: tl.constexpr,
    rotate: tl.constexpr,
    scaled: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    line = tl.program_id(1) * lines + tl.arange(0, lines)  # queries, then keys, then values
    dim = tl.arange(0, padded)
    present = dim < half
    inside = (line < heads + 2 * kv_heads)[:, None] & present[None, :]
    is_query = line < heads
    is_key = (line >= heads) & (line < heads + kv_heads)
    slot = tl.load(slots + token)
    if rotate:
        index = tl.minimum(tl.load(positions + token), limit - 1) * half + dim
        cosine = tl.load(cos + index, mask=present, other=0.0)[None, :]
        sine = tl.load(sin + index, mask=present, other=0.0)[None, :]
    wait()  # no kernel of a pass writes what was read so far
    source = projected + (token * (heads + 2 * kv_heads) + line)[:, None] * size + dim[None, :]
    left = tl.load(source, mask=inside, other=0.0)  # [lines, D / 2]
    right = tl.load(source + half, mask=inside, other=0.0)
    if norm_queries or norm_keys:
        root = tl.rsqrt((tl.sum(left * left, 1) + tl.sum(right * right, 1)) / size + eps)  # [lines]
        if norm_queries:
            left, right = _normed(left, right, root, is_query, query_norm, dim, present, half)
        if norm_keys:
            left, right = _normed(left, right, root, is_key, key_norm, dim, present, half)
    if rotate:
        rotated = (is_query | is_key)[:, None]
        before = left
        left = tl.where(rotated, left * cosine - right * sine, left)
        right = tl.where(rotated, right * cosine + before * sine, right)
    if heads > 0:
        target = queries + (token * heads + line)[:, None] * size + dim[None, :]
        asked = inside & is_query[:, None]
        tl.store(target, left, mask=asked)
        tl.store(target + half, right, mask=asked)
    kv_head = (line - heads) % kv_heads
    row = (slot // page).to(tl.int64) * (kv_heads * page) + kv_head * page + slot % page  # [lines]
    offset = row * size
    stored = inside & (slot >= 0)
    is_value = (line >= heads + kv_heads) & (line < heads + 2 * kv_heads)
    if key_factors is not None:
        factors = key_factors + kv_head[:, None] * size + dim[None, :]
        divided = inside & is_key[:, None]
        left = left / tl.load(factors, mask=divided, other=1.0)
        right = right / tl.load(factors + half, mask=divided, other=1.0)
    if scaled:
        top = tl.maximum(tl.max(tl.abs(left), 1), tl.max(tl.abs(right), 1))
        scale, factor = kv_scale(top, tl.sum(left * 0.0, 1) + tl.sum(right * 0.0, 1), pages.k.dtype.element_ty)
        tl.store(pages.k_scales + row, scale, mask=is_key & (slot >= 0))
        tl.store(pages.v_scales + row, scale, mask=is_value & (slot >= 0))
        left = kv_number(left, factor, pages.k.dtype.element_ty)
        right = kv_number(right, factor, pages.k.dtype.element_ty)
    _store(pages.k + offset[:, None] + dim[None, :], left, right, stored & is_key[:, None], half)
    _store(pages.v + offset[:, None] + dim[None, :], left, right, stored & is_value[:, None], half)


@triton.jit
def kv_scale(top, zeros, dtype: tl.constexpr):
    """Return the scales of heads and the factors that quantize them: see kv_quantization.py.

    top [n]: their largest magnitudes. zeros [n]: 0, or NaN for a head with a value that is not finite.
    """
    limit: tl.constexpr = 127.0 if dtype == tl.int8 else 448.0
    usable = (top >= 1e-30) & (zeros == 0.0)
    return top / limit + zeros, tl.where(usable, limit / tl.where(usable, top, 1.0), 0.0)


@triton.jit
def kv_number(heads, factor, dtype: tl.constexpr):
    """Quantize heads [n, D] with factors [n]."""
    number = tl.where(factor[:, None] > 0, heads * factor[:, None], 0.0)
    if dtype == tl.int8:
        number = (number + 12582912.0) - 12582912.0  # round to nearest even
    return rounded(number, dtype)


@triton.jit
def store_heads(target, scales, row, heads, inside, kept, dim, size: tl.constexpr, scaled: tl.constexpr):
    """Store heads [n, D] at rows [n] of the pages, quantized if `scaled`; return what is stored, and the scales."""
    scale = kept.to(tl.float32)
    if scaled:
        scale, factor = kv_scale(tl.max(tl.abs(heads), 1), tl.sum(heads * 0.0, 1), target.dtype.element_ty)
        tl.store(scales + row, scale, mask=kept)
        heads = kv_number(heads, factor, target.dtype.element_ty)
    stored = heads.to(target.dtype.element_ty)
    tl.store(target + row[:, None] * size + dim[None, :], stored, mask=inside)
    return stored, scale


@triton.jit
def _normed(left, right, root, chosen, weight, dim, present, half: tl.constexpr):
    """Apply the RMS norm to the chosen lines: times their root, times the weight."""
    first = tl.load(weight + dim, mask=present, other=0.0)[None, :]
    second = tl.load(weight + half + dim, mask=present, other=0.0)[None, :]
    left = tl.where(chosen[:, None], left * root[:, None] * first, left)
    return left, tl.where(chosen[:, None], right * root[:, None] * second, right)


@triton.jit
def _store(target, left, right, mask, half: tl.constexpr):
    tl.store(target, left.to(target.dtype.element_ty), mask=mask)
    tl.store(target + half, right.to(target.dtype.element_ty), mask=mask)


@triton.jit
def load_angles(tables, positions, token, valid, limit, shape: tl.constexpr):
    """Load cosines and sines of tokens [n]: [n, D] each, both halves equal. Needs no projected states."""
    half: tl.constexpr = shape.size // 2
    dim = tl.arange(0, shape.padded)
    inside = valid[:, None] & (dim < shape.size)[None, :]
    position = tl.minimum(tl.load(positions + token, mask=valid, other=0), limit - 1)
    index = position[:, None] * half + tl.where(dim < half, dim, dim - half)[None, :]
    return tl.load(tables.cos + index, mask=inside, other=0.0), tl.load(tables.sin + index, mask=inside, other=0.0)


@triton.jit
def rotated(projected, line, valid, cosine, sine, shape: tl.constexpr):
    """Return heads [n, D] of `projected`, rotated: each element is paired with that of the other half."""
    half: tl.constexpr = shape.size // 2
    dim = tl.arange(0, shape.padded)
    inside = valid[:, None] & (dim < shape.size)[None, :]
    first = dim < half
    offset = projected + line.to(tl.int64)[:, None] * shape.size
    number = tl.load(offset + dim[None, :], mask=inside, other=0.0)
    partner = tl.load(offset + tl.where(first, dim + half, dim - half)[None, :], mask=inside, other=0.0)
    straight, crossed = number * cosine, partner * sine
    return tl.where(first[None, :], straight - crossed, straight + crossed)


@triton.jit
def load_new_tokens(tables, batch, first, end, limit, shape: tl.constexpr, count: tl.constexpr):
    """Load what is known of the tokens from `first` to `end`, at most `count`, without their projected states."""
    token = first + tl.arange(0, count)
    valid = token < end
    cosine, sine = load_angles(tables, batch.positions, token, valid, limit, shape)
    slot = tl.load(batch.slots + token, mask=valid, other=-1)
    return NewTokens(token, slot, cosine, sine)


@triton.jit
def store_kv(projected, pages, key_factors, new, kv_head, stores, shape: tl.constexpr):
    """Store one head's rotated keys and values of new tokens if `stores`; return them as they are stored.

    Tokens without a slot are not read.
    """
    heads: tl.constexpr = shape.heads
    kv_heads: tl.constexpr = shape.kv_heads
    size: tl.constexpr = shape.size
    page: tl.constexpr = shape.page
    dim = tl.arange(0, shape.padded)
    known = new.slot >= 0
    inside = known[:, None] & (dim < size)[None, :]
    line = new.token.to(tl.int64) * (heads + 2 * kv_heads) + heads + kv_head  # queries, then keys, then values
    value = tl.load(projected + (line + kv_heads)[:, None] * size + dim[None, :], mask=inside, other=0.0)
    key = rotated(projected, line, known, new.cosine, new.sine, shape)
    if key_factors is not None:
        key = key / tl.load(key_factors + kv_head * size + dim, mask=dim < size, other=1.0)[None, :]
    row = (new.slot // page).to(tl.int64) * (kv_heads * page) + kv_head * page + new.slot % page  # [n]
    kept, stored = known & stores, inside & stores
    key, k_scale = store_heads(pages.k, pages.k_scales, row, key, stored, kept, dim, size, shape.scaled)
    value, v_scale = store_heads(pages.v, pages.v_scales, row, value, stored, kept, dim, size, shape.scaled)
    return Keys(key, value, k_scale, v_scale)


@triton.jit
def store_row_kv(
    projected,
    pages,
    key_factors,
    tables,
    batch,
    begin,
    end,
    limit,
    kv_head,
    shape: tl.constexpr,
    step: tl.constexpr,
):
    """Call `store_kv` for all tokens from `begin` to `end`, `step` at a time."""
    for each in range(loop_bound(begin), loop_bound(end), step):
        new = load_new_tokens(tables, batch, each, end, limit, shape, step)
        store_kv(projected, pages, key_factors, new, kv_head, True, shape)
