"""Read Medusa heads as FasterDecoding and vLLM write them.

The tensors determine the number of heads: configurations may state a wrong one.
"""

from __future__ import annotations

import re

from ...errors import UserError
from ...models.heads import MedusaShape
from .common import logit_scale
from .folder import Folder

BLOCK = re.compile(r"model\.blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
END = re.compile(r"lm_heads\.(\d+)\.weight")
SHARED = "lm_head.weight"


def read_medusa(folder: Folder) -> MedusaShape | None:
    """Read Medusa heads: each is a few blocks, then a head matrix of its own or a shared one."""
    blocks = [found for name in folder.tensors if (found := BLOCK.fullmatch(name))]
    ends = sorted(int(found[1]) for name in folder.tensors if (found := END.fullmatch(name)))
    if not blocks and not ends:
        return None
    heads = count_heads(folder, {int(found[1]) for found in blocks} or set(ends))
    width = next((folder.columns(name) for name in folder.tensors if name.endswith(".weight")), 0)
    read = read_ends(folder, heads, ends)
    return MedusaShape(
        kind="medusa",
        layout="vLLM" if folder.config.get("model_type") == "medusa" else "FasterDecoding",
        width=width,
        target_width=width,
        aux_layers=None,
        num_aux_layers=1,
        target_norm=True,
        own_embedding=0,
        own_head=bool(read),
        logit_scale=logit_scale(folder),
        heads=heads,
        blocks=1 + max((int(found[2]) for found in blocks), default=-1),
        block_bias=any(found[3] == "bias" for found in blocks),
        lm_heads=read,
    )


def count_heads(folder: Folder, numbers: set[int]) -> int:
    """Count the heads, and refuse gaps in their numbers."""
    missing = next(number for number in range(len(numbers) + 1) if number not in numbers)
    if missing < len(numbers):
        raise UserError(
            f"`{folder.path}` has {len(numbers)} Medusa heads, and none of the number {missing}: fetch it again"
        )
    return len(numbers)


def read_ends(folder: Folder, heads: int, ends: list[int]) -> tuple[str, ...]:
    """Return the names of the head matrices. If only the first head has one, all share it, as in vLLM."""
    if ends == list(range(heads)) or ends == [0]:
        return tuple(f"lm_heads.{head}.weight" for head in ends)
    if ends:
        missing = min(set(range(heads)) - set(ends), default=heads)
        raise UserError(
            f"`{folder.path}` has {heads} Medusa heads and lacks the tensor `lm_heads.{missing}.weight`: fetch it again"
        )
    return (SHARED,) if SHARED in folder.tensors else ()
