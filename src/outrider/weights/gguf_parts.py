"""The files of a GGUF model: one, or the parts that `llama-gguf-split` made of it.

Parts are named `NAME-00001-of-00003.gguf`. The first has the metadata of the whole model, each has some of its tensors.
"""

from __future__ import annotations

import mmap
from pathlib import Path

from ..catalog.names import ASIDE, split_parts
from ..errors import UserError
from .checkpoint import map_file
from .gguf_header import GgufHeader, TensorInfo, read_header

COUNT, NUMBER = "split.count", "split.no"  # metadata of each part


class GgufParts:
    """The mapped files of a model, with the metadata of the first and the tensors of all."""

    def __init__(self, path: Path) -> None:
        mapped = map_file(path)
        header = read_header(path, mapped)
        count = header.metadata.get(COUNT)
        opened = {path: (mapped, header)}
        if isinstance(count, int) and count > 1:
            opened = self._all_parts(path, count, opened)
        self.path = next(iter(opened))
        self.mappings = tuple(mapped for mapped, _ in opened.values())
        self.tensors: list[tuple[TensorInfo, mmap.mmap]] = []
        names: set[str] = set()
        for part, (mapped, found) in opened.items():
            twice = [tensor.name for tensor in found.tensors if tensor.name in names]
            if twice:
                raise UserError(f"`{part}` has the tensor `{twice[0][:64]}`, as another part has: fetch it again")
            names.update(tensor.name for tensor in found.tensors)
            self.tensors += [(tensor, mapped) for tensor in found.tensors]
        _, first = opened[self.path]
        self.header = GgufHeader(first.metadata, [tensor for tensor, _ in self.tensors])

    @staticmethod
    def _all_parts(
        path: Path, count: int, opened: dict[Path, tuple[mmap.mmap, GgufHeader]]
    ) -> dict[Path, tuple[mmap.mmap, GgufHeader]]:
        """Open the other parts, and return all in their order."""
        parts = [Path(part) for part in split_parts(str(path))]
        if len(parts) != count:
            raise UserError(
                f"`{path}` is one of {count} parts, but its name does not end in `-00001-of-{count:05d}.gguf`: "
                "give the parts the names that they had"
            )
        for part in parts:
            if part not in opened:
                if not part.is_file():
                    raise UserError(f"`{path}` is one of {count} parts, but `{part.name}` is missing: fetch it too")
                mapped = map_file(part)
                opened[part] = mapped, read_header(part, mapped)
        for number, part in enumerate(parts):
            metadata = opened[part][1].metadata
            if metadata.get(COUNT) != count or metadata.get(NUMBER) != number:
                raise UserError(f"`{part}` is not part {number + 1} of {count}, as its name says: fetch it again")
        return {part: opened[part] for part in parts}


def single_model(folder: Path) -> Path | None:
    """Return the GGUF file of a folder, its first part if it is split; None unless the folder holds one model."""
    files = sorted(file for file in folder.glob("*.gguf") if not file.name.startswith((".", *ASIDE)))
    firsts = {Path(split_parts(str(file))[0]) for file in files}
    return firsts.pop() if len(firsts) == 1 else None
