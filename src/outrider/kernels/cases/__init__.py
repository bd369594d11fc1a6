"""One list of cases for all operations: tests, the kernel benchmark and the support table read it."""

from __future__ import annotations

from .case import TOLERANCE as TOLERANCE
from .case import Case as Case
from .case import Run as Run
from .case import difference as difference
from .catalog import CASES as CASES
