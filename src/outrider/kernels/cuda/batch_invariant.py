"""The same operations with tilings that do not depend on the number of rows: a row's bits are those it has alone."""

from __future__ import annotations

from functools import partial

from . import *  # noqa: F403
from . import attention_layer as _attention_layer
from . import matrix as _matrix
from . import mlp_layer as _mlp_layer

matrix = partial(_matrix, fixed=True)
attention_layer = partial(_attention_layer, fixed=True)
mlp_layer = partial(_mlp_layer, fixed=True)
