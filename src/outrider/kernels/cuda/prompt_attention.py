"""Attention of a long chunk of a prompt over the keys before it: dense attention of cuDNN over gathered pages.

On an H200 cuDNN multiplies 1.7 times as fast as the paged kernel. The keys before the chunk are cut into slices, the
largest first. cuDNN attends to each slice, the paged kernel to all later keys, those of the chunk included, and the
results are merged by their sums of weights. cuDNN builds a plan for each shape, so that there are few: the lengths of
slices are powers of two. For other layers, batches and GPUs the paged kernel attends to everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..structures import Batch, LayerPages
from .device import shared_memory
from .paged_attention import HOPPER_MEMORY, LARGE, LONG, Heads, paged_attention

# Positions in a slice. A shorter one gains less than a merge costs, a longer one takes more memory: 128 MiB of keys and
# values for 8 heads of 128.
SHORTEST, LONGEST = 4096, 32768


def prompt_attention(
    queries: Tensor, heads: Heads, batch: Batch, pages: LayerPages, result: torch.dtype = torch.float32
) -> Tensor:
    """Return the attention of queries [T, H * D] f32 over the pages: [T, H * D] of the dtype `result`."""
    if batch.prefix < SHORTEST or not _is_dense(queries, heads, batch, pages):
        return paged_attention(queries, heads, batch, pages, result)
    tokens, group, page = queries.shape[0], heads.count // heads.kv, pages.keys.shape[2]
    sliced = batch.prefix // SHORTEST * SHORTEST
    log_sums = torch.empty(tokens, heads.count, device=queries.device)
    out = paged_attention(queries, replace(heads, skip=sliced), batch, pages, log_sums=log_sums)
    # The query heads of a KV head are rows of one matrix: [G, T, H / G, D]
    grouped = queries.view(tokens, heads.kv, group, heads.size).transpose(0, 1).to(pages.keys.dtype).contiguous()
    folded = grouped.view(1, heads.kv, tokens * group, heads.size)
    mixed, log_sums = out.view(tokens, heads.kv, group, heads.size), log_sums.view(tokens, heads.kv, group)
    for begin, end in slices(sliced):
        table = batch.page_tables[0, begin // page : end // page]
        part, part_sums = _dense(folded, _gathered(pages.keys, table), _gathered(pages.values, table), heads.scale)
        part = part.view(heads.kv, tokens, group, heads.size).transpose(0, 1)  # [T, G, H / G, D]
        part_sums = part_sums.view(heads.kv, tokens, group).transpose(0, 1)  # [T, G, H / G]
        torch.lerp(mixed, part.float(), torch.sigmoid(part_sums - log_sums)[..., None], out=mixed)
        log_sums = torch.logaddexp(log_sums, part_sums)
    return out.to(result)


def slices(length: int) -> Iterator[tuple[int, int]]:
    """Cut `length` positions, a multiple of SHORTEST, into slices: yield the begin and the end of each."""
    begin, size = 0, LONGEST
    while begin < length:
        while size > length - begin:
            size //= 2
        yield begin, begin + size
        begin += size


def _is_dense(queries: Tensor, heads: Heads, batch: Batch, pages: LayerPages) -> bool:
    """Return whether all tokens attend to all positions before them, in a shape that comes again."""
    plain = heads.causal and not (heads.window or heads.skip or heads.anchored or heads.soft_cap)
    plain = plain and heads.sinks is None and not heads.batch_invariant
    one_row = batch.parents is None and batch.page_tables.shape[0] == 1 and queries.shape[0] % LONG == 0
    halves = pages.keys.dtype in (torch.float16, torch.bfloat16) and SHORTEST % pages.keys.shape[2] == 0
    fits = heads.size % 8 == 0 and heads.size <= LARGE
    return plain and one_row and halves and fits and shared_memory() >= HOPPER_MEMORY


def _gathered(stored: Tensor, table: Tensor) -> Tensor:
    """Copy keys or values [pages, G, S, D] of the pages in `table` [N]: [1, G, N * S, D]."""
    count, kv_heads, page, size = stored.shape
    rows = table[None, :] * kv_heads + torch.arange(kv_heads, dtype=table.dtype, device=table.device)[:, None]  # [G, N]
    found = stored.view(count * kv_heads, page * size).index_select(0, rows.flatten())
    return found.view(1, kv_heads, table.shape[0] * page, size)


def _dense(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Let all queries [1, G, N, D] attend to all keys [1, G, M, D]: return [1, G, N, D] and the logarithms of sums."""
    if queries.device.type == "cpu":  # in the interpreter
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(queries, keys, values, scale=scale)
    else:
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(
            queries, keys, values, None, compute_log_sumexp=True, scale=scale
        )
    return found[0], found[1].contiguous()
