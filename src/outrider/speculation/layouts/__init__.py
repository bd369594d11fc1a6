"""One reader for each kind of head: a folder that it knows becomes a shape; it answers None to all others.

Readers look at tensors and keys, never at names of classes; no folder is known to two of them.
"""

from __future__ import annotations

from collections.abc import Callable

from ...models.heads import HeadShape
from ..head_folder import Folder
from .eagle import read_eagle, read_eagle3

READERS: tuple[Callable[[Folder], HeadShape | None], ...] = (read_eagle3, read_eagle)
