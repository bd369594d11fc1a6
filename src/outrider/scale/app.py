"""The entry point of `serve run outrider.scale:app` and of config files: importable without Ray."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from .settings import read_settings


def app(arguments: Mapping[str, Any]) -> Any:
    """Build the Ray Serve application from the `args` of `serve run` or of a config file."""
    from .deployment import build  # imports Ray, which is an optional dependency

    return build(read_settings(arguments, os.environ))
