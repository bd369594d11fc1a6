"""Counter-based noise: a function of (seed, position, token, stream, epoch) alone.

Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011). One block gives four words, so
four neighbouring tokens share a block: key (seed's low half, seed's high half), counter (token // 4, position,
stream, epoch), word token % 4. Streams separate the noise of different purposes; epochs separate repeated drafts and
verifications of one position.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
# Streams. Drafts for exact verification share the target's; drafts for rejection sampling must not.
TARGET, DRAFT, ACCEPT, RESIDUAL = range(4)
NONE = torch.tensor(0)  # the epoch of noise that is used once per position


def block(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return four 32-bit words in int64; the arguments broadcast."""
    a, b, c, d = counter
    low, high = key
    for _ in range(ROUNDS):
        # The product wraps modulo 2^64: its two halves are the right bits whatever the sign.
        first, second = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b, c, d = (
            ((second >> 32) & MASK) ^ b ^ low,
            second & MASK,
            ((first >> 32) & MASK) ^ d ^ high,
            first & MASK,
        )
        low, high = (low + KEY_STEPS[0]) & MASK, (high + KEY_STEPS[1]) & MASK
    return a, b, c, d


def philox(seeds: Tensor, positions: Tensor, tokens: Tensor, stream: int = TARGET, epochs: Tensor = NONE) -> Tensor:
    """Return the 32-bit word of each (seed, position, token, epoch), in int64; the arguments broadcast."""
    zero = torch.zeros_like(seeds.long() + positions + tokens + epochs)
    counter = (zero + tokens // 4, positions.long() & MASK, zero + stream, zero + (epochs.long() & MASK))
    words = torch.stack(block(counter, (seeds & MASK, (seeds >> 32) & MASK)))  # [4, ...]
    return words.gather(0, (zero + tokens % 4)[None])[0]


def uniform(seeds: Tensor, positions: Tensor, tokens: Tensor, stream: int = TARGET, epochs: Tensor = NONE) -> Tensor:
    """Return float64 uniforms in (0, 1), never 0 or 1: 24 bits and a half."""
    return ((philox(seeds, positions, tokens, stream, epochs) >> 8).double() + 0.5) * 2.0**-24


def gumbel(seeds: Tensor, positions: Tensor, tokens: Tensor, stream: int = TARGET, epochs: Tensor = NONE) -> Tensor:
    """Return -log(-log(u)), computed in float64 and rounded once to fp32, so that all devices agree."""
    return -torch.log(-torch.log(uniform(seeds, positions, tokens, stream, epochs))).to(torch.float32)
