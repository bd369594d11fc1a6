"""One reader for each kind of head: a folder that it knows becomes a shape; it answers None to all others.

Readers look at tensors and keys, never at names of classes; no folder is known to two of them.
"""

from __future__ import annotations

from collections.abc import Callable

from ....models.heads import HeadShape
from ..head_folder import Folder
from .block import read_dflash, read_dspark
from .eagle import read_eagle, read_eagle3, read_peagle
from .medusa import read_medusa
from .mtp import read_mtp

READERS: tuple[Callable[[Folder], HeadShape | None], ...] = (
    read_eagle3,
    read_eagle,
    read_peagle,
    read_medusa,
    read_mtp,
    read_dflash,
    read_dspark,
)
