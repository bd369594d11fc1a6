"""DSpark: DFlash with a bias on each guess by the token before it, and a confidence that says how far to trust it."""

from __future__ import annotations

from ..drafters.block import BlockDrafter, BlockOptions, build_block
from ..interface import Target

Options = BlockOptions


def build(options: Options, target: Target) -> BlockDrafter:
    return build_block("dspark", options, target)
