"""One list of cases for all operations: tests, the kernel benchmark and docs/reference/kernels.md read it."""

from __future__ import annotations

from .attention import ATTENTION_CASES
from .case import TOLERANCE as TOLERANCE
from .case import Case as Case
from .case import Run as Run
from .case import difference as difference
from .drafter_inputs import DRAFTER_INPUT_CASES
from .layers import LAYER_CASES
from .logits import LOGIT_CASES
from .recording import RECORD_CASES
from .recurrent import RECURRENT_CASES
from .verification import VERIFY_CASES

CASES: list[Case] = [
    *LAYER_CASES,
    *RECURRENT_CASES,
    *LOGIT_CASES,
    *ATTENTION_CASES,
    *DRAFTER_INPUT_CASES,
    *RECORD_CASES,
    *VERIFY_CASES,
]
