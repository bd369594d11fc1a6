"""The CPU backend with fast activations: 8 bits beside quantized weights, more where values are large."""

from __future__ import annotations

from functools import partial

from . import *  # noqa: F403
from . import attention_layer as _attention_layer
from . import matrix as _matrix
from . import mlp_layer as _mlp_layer
from . import moe_layer as _moe_layer
from . import recurrent_layer as _recurrent_layer

matrix = partial(_matrix, fast_activations=True)
attention_layer = partial(_attention_layer, fast_activations=True)
mlp_layer = partial(_mlp_layer, fast_activations=True)
moe_layer = partial(_moe_layer, fast_activations=True)
recurrent_layer = partial(_recurrent_layer, fast_activations=True)
