"""DFlash: a head that reads the target's states as its context and fills a block of masks in one pass."""

from __future__ import annotations

from ..drafters.block import BlockDrafter, BlockOptions, build_block
from ..interface import Target

Options = BlockOptions


def build(options: Options, target: Target) -> BlockDrafter:
    return build_block("dflash", options, target)
