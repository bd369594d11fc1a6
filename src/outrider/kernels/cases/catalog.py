"""The list of cases of all operations, for tests, the kernel benchmark and docs/reference/kernels.md.

`Case.build(ops, seed)` prepares an operation on a backend and returns `run(items)`, which runs it for these items
(tokens, or rows of logits; None: all) and returns one entry per item. So a test can check that an item's result does
not depend on the rest of the batch.
"""

from __future__ import annotations

from .attention import ATTENTION_CASES
from .case import Case
from .drafter_inputs import DRAFTER_INPUT_CASES
from .layers import LAYER_CASES
from .logits import LOGIT_CASES
from .verification import VERIFY_CASES

CASES: list[Case] = [*LAYER_CASES, *LOGIT_CASES, *ATTENTION_CASES, *DRAFTER_INPUT_CASES, *VERIFY_CASES]
