"""KV copies between slots: they compact the accepted path of a tree."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ..structures import LayerPages
from .device import loop_bound
from .rope import kv_pages

AT_ONCE = 32  # copies that a program resolves at once, a power of two


def copy_kv(pages: Sequence[LayerPages], sources: Tensor, targets: Tensor) -> None:
    """Copy the KV of slots in order; copies from or to a slot outside the storage are skipped."""
    steps = sources.shape[0]
    for layer in pages if steps else ():
        count, kv_heads, page, size = layer.keys.shape
        _copy[(kv_heads,)](
            kv_pages(layer),
            sources,
            targets,
            steps,
            count * page,
            kv_heads=kv_heads,
            page=page,
            size=size,
            padded=triton.next_power_of_2(size),
            at_once=AT_ONCE,
            jumps=AT_ONCE.bit_length() - 1,  # each doubles the copies that are followed back
            scaled=layer.key_scales is not None,
            num_warps=4,
        )


@triton.jit(do_not_specialize=["steps", "slots"], do_not_specialize_on_alignment=["sources", "targets"])
def _copy(
    pages,
    sources,
    targets,
    steps,
    slots,
    kv_heads: tl.constexpr,
    page: tl.constexpr,
    size: tl.constexpr,
    padded: tl.constexpr,
    at_once: tl.constexpr,
    jumps: tl.constexpr,
    scaled: tl.constexpr,
):
    """Copy one head. A batch of copies reads all sources before it writes, with the result of copying one by one."""
    base = tl.program_id(0) * page
    step, dim = tl.arange(0, at_once), tl.arange(0, padded)
    for begin in range(0, loop_bound(steps), at_once):
        source = tl.load(sources + begin + step, mask=begin + step < steps, other=-1)
        target = tl.load(targets + begin + step, mask=begin + step < steps, other=-1)
        valid = (source >= 0) & (source < slots) & (target >= 0) & (target < slots)
        source, last = _resolved(tl.where(valid, source, -1), tl.where(valid, target, -1), step, jumps)
        moved = valid & last
        inside = moved[:, None] & (dim < size)[None, :]
        source_row = (source // page).to(tl.int64) * (kv_heads * page) + source % page + base  # [steps]
        target_row = (target // page).to(tl.int64) * (kv_heads * page) + target % page + base
        source_offsets = source_row[:, None] * size + dim[None, :]  # [steps, D]
        target_offsets = target_row[:, None] * size + dim[None, :]
        key = tl.load(pages.k + source_offsets, mask=inside)
        value = tl.load(pages.v + source_offsets, mask=inside)
        if scaled:
            key_scale = tl.load(pages.k_scales + source_row, mask=moved)
            value_scale = tl.load(pages.v_scales + source_row, mask=moved)
        tl.debug_barrier()
        tl.store(pages.k + target_offsets, key, mask=inside)
        tl.store(pages.v + target_offsets, value, mask=inside)
        if scaled:
            tl.store(pages.k_scales + target_row, key_scale, mask=moved)
            tl.store(pages.v_scales + target_row, value_scale, mask=moved)
        tl.debug_barrier()


@triton.jit
def _resolved(source, target, step, jumps: tl.constexpr):
    """Return the original source of each copy, and whether it is the last one that writes its target.

    A copy that reads a slot written by an earlier copy takes that copy's source instead (pointer jumping).
    """
    earlier = (source[:, None] == target[None, :]) & (step[None, :] < step[:, None]) & (source >= 0)[:, None]
    writer = tl.max(tl.where(earlier, step[None, :], -1), 1)
    for _ in tl.static_range(jumps):
        same = step[None, :] == writer[:, None]
        found = tl.sum(tl.where(same, source[None, :], 0), 1)
        before = tl.sum(tl.where(same, writer[None, :], 0), 1)
        source, writer = tl.where(writer >= 0, found, source), tl.where(writer >= 0, before, writer)
    later = (target[:, None] == target[None, :]) & (step[None, :] > step[:, None])
    return source, tl.max(later.to(tl.int32), 1) == 0
