"""The noise of kernels/philox.py, bit for bit, in Triton. Arguments are scalars or tensors that broadcast."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def philox_word(seed, position, token, stream, epoch):
    """Return the 32-bit word of each token id, uint32. The seed is int64, the rest int32."""
    first, second, third, fourth = _blocks(seed, position, (token // 4).to(tl.uint32), stream, epoch)
    word = token % 4
    return tl.where(word < 2, tl.where(word == 0, first, second), tl.where(word == 2, third, fourth))


@triton.jit
def uniform(seed, position, token, stream, epoch):
    """Return float64 uniforms in (0, 1), never 0 or 1: 24 bits and a half."""
    return as_uniform(philox_word(seed, position, token, stream, epoch))


@triton.jit
def gumbel(seed, position, token, stream, epoch):
    """Return -log(-log(u)), computed in float64 and rounded once to fp32."""
    return as_gumbel(philox_word(seed, position, token, stream, epoch))


@triton.jit
def philox_run(seed, position, first, stream, epoch, count: tl.constexpr):
    """Return the words of tokens first .. first + count, both multiples of 4: a quarter of the work of philox_word."""
    blocks = (first // 4 + tl.arange(0, count // 4)).to(tl.uint32)
    one, two, three, four = _blocks(seed, position, blocks, stream, epoch)
    return tl.interleave(tl.interleave(one, three), tl.interleave(two, four))


@triton.jit
def as_uniform(word):
    return ((word >> 8).to(tl.float64) + 0.5) * (1.0 / 16777216)


@triton.jit
def as_gumbel(word):
    return (-tl.log(-tl.log(as_uniform(word)))).to(tl.float32)


@triton.jit
def _blocks(seed, position, block, stream, epoch):
    zero = block * 0
    return tl.philox(
        seed,
        block,
        (zero + position).to(tl.uint32),
        (zero + stream).to(tl.uint32),
        (zero + epoch).to(tl.uint32),
    )
