"""The CUDA backend in batch-invariant mode: tilings do not depend on the number of rows, hence neither do bits."""

from __future__ import annotations

from functools import partial

from . import *  # noqa: F403
from . import attention_layer as _attention_layer
from . import matrix as _matrix
from . import mlp_layer as _mlp_layer
from . import moe_layer as _moe_layer
from . import recurrent_layer as _recurrent_layer

matrix = partial(_matrix, batch_invariant=True)
attention_layer = partial(_attention_layer, batch_invariant=True)
mlp_layer = partial(_mlp_layer, batch_invariant=True)
moe_layer = partial(_moe_layer, batch_invariant=True)
recurrent_layer = partial(_recurrent_layer, batch_invariant=True)
