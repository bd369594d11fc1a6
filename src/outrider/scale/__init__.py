"""Many replicas of the server behind one address: a Ray Serve application.

`serve run outrider.scale:app model=smollm2-135m max_replicas=2`, or `serve deploy` with a config file.
"""

from .app import app

__all__ = ["app"]
