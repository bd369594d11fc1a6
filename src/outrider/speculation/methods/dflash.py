"""DFlash: a head that reads the target's states as its context and fills a block of masks in one pass."""

from __future__ import annotations

from .. import Target
from ..block_drafter import BlockDrafter, BlockOptions, build_block

Options = BlockOptions


def build(options: Options, target: Target) -> BlockDrafter:
    return build_block("dflash", options, target)
