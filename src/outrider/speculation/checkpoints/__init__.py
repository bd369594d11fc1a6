"""Draft heads on disk: folders of all published layouts, read into one configuration and one set of tensor names."""

from .folder import Folder, arrange, find_folder, has_modules, open_folder
from .head import METHODS, READERS, Head, choose_aux_layers, choose_source, command, describe, open_head, read_head

__all__ = [
    "METHODS",
    "READERS",
    "Folder",
    "Head",
    "arrange",
    "choose_aux_layers",
    "choose_source",
    "command",
    "describe",
    "find_folder",
    "has_modules",
    "open_folder",
    "open_head",
    "read_head",
]
