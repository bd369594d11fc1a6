"""Fail when a source file outgrows one sitting. Prints how much there is to read."""

from __future__ import annotations

import sys
from pathlib import Path

LIMIT = 800
FOLDERS = ("src", "csrc", "tests", "tools", "examples")
SUFFIXES = {".py", ".cpp", ".h"}


def count(path: Path) -> int:
    with path.open(encoding="utf-8") as lines:
        return sum(1 for _ in lines)


def main(root: Path) -> int:
    too_long = []
    for folder in FOLDERS:
        files = {path: count(path) for path in sorted((root / folder).rglob("*")) if path.suffix in SUFFIXES}
        too_long += [f"{path.relative_to(root)}: {lines} lines" for path, lines in files.items() if lines > LIMIT]
        sys.stdout.write(f"{folder}: {sum(files.values())} lines in {len(files)} files\n")
    for line in too_long:
        sys.stderr.write(f"{line}, the limit is {LIMIT}: split the file\n")
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent.parent))
