"""One list: for each operation how to make inputs, and how close to the reference is equal.

Tests, the kernel benchmark and the support table read it. `Case.build(ops, seed)` prepares an operation on a backend
and returns `run(items)`: run it for these items (tokens, or rows of logits; None: all) and return its results, one
entry per item. So a test can ask whether an item's result depends on its neighbours.
"""

from __future__ import annotations

from .blocks import BLOCK_CASES
from .case import Case
from .drafter_inputs import PREPARE_CASES
from .layers import LAYER_CASES
from .logits import LOGIT_CASES
from .trees import TREE_CASES
from .verification import VERIFY_CASES

CASES: list[Case] = [*LAYER_CASES, *LOGIT_CASES, *BLOCK_CASES, *PREPARE_CASES, *TREE_CASES, *VERIFY_CASES]
