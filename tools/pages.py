"""Shared by the tools that generate pages of docs/reference."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path


def write_or_check(pages: Mapping[Path, str]) -> None:
    """Write the pages; with --check, fail if one is out of date."""
    for path, content in pages.items():
        if "--check" not in sys.argv:
            path.write_text(content, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != content:
            sys.exit(f"{path} is out of date: run `python tools/{Path(sys.argv[0]).name}`")
