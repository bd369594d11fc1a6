"""The list of cases of all operations, for tests, the kernel benchmark and docs/reference/kernels.md.

`Case.build(ops, seed)` prepares an operation on a backend and returns `run(items)`, which runs it for these items
(tokens, or rows of logits; None: all) and returns one entry per item. So a test can check that an item's result does
not depend on the rest of the batch.
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
