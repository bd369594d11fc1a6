"""DFlash: a head that reads the target's hidden states as context and fills a block of mask tokens in one pass."""

from __future__ import annotations

from ..drafters.block import BlockDrafter, BlockOptions, build_block
from ..interface import Target

Options = BlockOptions


def build(options: Options, target: Target) -> BlockDrafter:
    return build_block("dflash", options, target)
