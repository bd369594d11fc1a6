"""Models by name: the catalog, the cache of pulled models, and their download. No torch here."""

from .cache import cache_folder
from .entries import CATALOG, CatalogEntry, WheelPart
from .hub_folder import pull_hub
from .names import with_revision
from .pulled import Pulled, pulled, remove
from .pulling import find, is_missing, is_pulled, known_hash, path, pull
from .shipped import file_bytes

__all__ = [
    "CATALOG",
    "CatalogEntry",
    "Pulled",
    "WheelPart",
    "cache_folder",
    "file_bytes",
    "find",
    "is_missing",
    "is_pulled",
    "known_hash",
    "path",
    "pull",
    "pull_hub",
    "pulled",
    "remove",
    "with_revision",
]
