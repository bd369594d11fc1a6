"""Many replicas of the server behind one address: a Ray Serve application.

`serve run outrider.scale:app model=smollm2-135m max_replicas=2`, or `serve deploy` with a config file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any


def app(arguments: Mapping[str, Any]) -> Any:
    """What `serve run` and the config file's `import_path` name: builds the application from its `args`."""
    from .deployment import build
    from .settings import read_settings

    return build(read_settings(arguments, os.environ))
