"""The first second of a command, most of which is torch's."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Import torch in here. What it makes stays for good: searching it for garbage takes a tenth of the time in vain.

    So it would later on: what is there in the end is left out of every search to come.
    """
    if "torch" in sys.modules:  # then there may be garbage among what would be left out
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
