"""The CUDA backend with fast activations: e4m3 beside fp8 weights with a scale for each row."""

from __future__ import annotations

from functools import partial

from . import *  # noqa: F403
from . import attention_layer as _attention_layer
from . import mlp_layer as _mlp_layer

attention_layer = partial(_attention_layer, fast_activations=True)
mlp_layer = partial(_mlp_layer, fast_activations=True)
