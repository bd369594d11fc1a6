"""Logits processors of texts that grow on the device: a dense pass over the logits, with the marks of each token."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .. import structures
from ..structures import DecodeProcessors
from .device import LAUNCH, loop_bound, wait

BLOCK = 1024  # tokens of a program
COUNT: tl.constexpr = tl.constexpr(structures.MARK_COUNT)
PROMPT: tl.constexpr = tl.constexpr(structures.MARK_PROMPT)
BIAS: tl.constexpr = tl.constexpr(structures.MARK_BIAS)
BANNED: tl.constexpr = tl.constexpr(structures.MARK_BANNED)
END: tl.constexpr = tl.constexpr(structures.MARK_END)
ALLOWED: tl.constexpr = tl.constexpr(structures.MARK_ALLOWED)
PROCESSED: tl.constexpr = tl.constexpr(structures.PROCESSED)
COUNTED: tl.constexpr = tl.constexpr(structures.COUNTED)
ONLY: tl.constexpr = tl.constexpr(structures.ONLY_ALLOWED)


def process_decode_logits(logits: Tensor, processors: DecodeProcessors, drafts: Tensor, positions: Tensor) -> None:
    rows, vocabulary = logits.shape
    if rows:
        _process[(rows, triton.cdiv(vocabulary, BLOCK))](
            logits,
            logits.stride(0),
            vocabulary,
            processors.marks,
            processors.bias,
            processors.penalties,
            processors.min_lengths,
            processors.kinds,
            drafts,
            positions,
            drafts.shape[1],
            block=BLOCK,
            num_warps=4,
            enable_fp_fusion=False,  # as on the host: a product is rounded before the next term is added
            **LAUNCH,
        )


@triton.jit(
    do_not_specialize=["width"],
    do_not_specialize_on_alignment=["marks", "bias", "penalties", "min_lengths", "kinds", "drafts", "positions"],
)
def _process(
    logits,
    stride,
    vocabulary,
    marks,
    bias,
    penalties,
    min_lengths,
    kinds,
    drafts,
    positions,
    width,
    block: tl.constexpr,
):
    wait()
    row = tl.program_id(0).to(tl.int64)
    text = row // (width + 1)
    depth = (row % (width + 1)).to(tl.int32)
    kind = tl.load(kinds + text)
    if (kind & PROCESSED) != 0:
        token = tl.program_id(1) * block + tl.arange(0, block)
        inside = token < vocabulary
        mark = tl.load(marks + text * vocabulary + token, mask=inside, other=0)
        count = mark & COUNT
        if (kind & COUNTED) != 0:
            for index in range(loop_bound(depth)):
                count += (token == tl.load(drafts + text * width + index)).to(tl.int32)
        repetition = tl.load(penalties + text * 3).to(tl.float32)
        presence, frequency = tl.load(penalties + text * 3 + 1), tl.load(penalties + text * 3 + 2)
        penalty = 0.0 - presence - frequency * count.to(tl.float64)
        has_bias = (mark & BIAS) != 0
        change = tl.load(bias + text * vocabulary + token, mask=inside & has_bias, other=0.0)
        change = tl.where(count > 0, penalty, 0.0) + change
        is_early = tl.load(positions + text) + 1 + depth < tl.load(min_lengths + text)
        banned = ((mark & BANNED) != 0) | (((mark & END) != 0) & is_early)
        change = tl.where(banned, -float("inf"), change.to(tl.float32))
        before = tl.load(logits + row * stride + token, mask=inside, other=0.0)
        scale = tl.where((count > 0) | ((mark & PROMPT) != 0), repetition, 1.0)
        after = tl.where(before > 0, tl.div_rn(before, scale), before * scale) + change
        allowed = (mark & ALLOWED) != 0
        listed = (count > 0) | ((mark & (PROMPT | BIAS)) != 0) | banned | allowed
        rest = before
        if (kind & ONLY) != 0:
            listed = allowed
            rest = tl.full([block], -float("inf"), tl.float32)
        tl.store(logits + row * stride + token, tl.where(listed, after, rest), mask=inside)


def count_tokens(processors: DecodeProcessors, tokens: Tensor) -> None:
    texts, count = tokens.shape
    if texts:
        vocabulary = processors.marks.shape[1]
        _count[(texts,)](
            processors.marks,
            vocabulary,
            processors.kinds,
            tokens,
            tokens.stride(0),
            count,
            padded=triton.next_power_of_2(count),
            num_warps=1,
            **LAUNCH,
        )


@triton.jit(do_not_specialize=["stride", "count"], do_not_specialize_on_alignment=["marks", "kinds", "tokens"])
def _count(marks, vocabulary, kinds, tokens, stride, count, padded: tl.constexpr):
    wait()
    text = tl.program_id(0).to(tl.int64)
    if (tl.load(kinds + text) & COUNTED) != 0:
        index = tl.arange(0, padded)
        token = tl.load(tokens + text * stride + index, mask=index < count, other=-1)
        known = (token >= 0) & (token < vocabulary)
        tl.atomic_add(marks + text * vocabulary + token, 1, mask=known)
