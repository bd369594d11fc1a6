"""DSpark: DFlash with a bias on each prediction by the token before it, and an estimate of its acceptance."""

from __future__ import annotations

from ..drafters.block import BlockDrafter, BlockOptions, build_block
from ..interface import Target

Options = BlockOptions


def build(options: Options, target: Target) -> BlockDrafter:
    return build_block("dspark", options, target)
