"""The CUDA backend in batch-invariant mode with fast activations."""

from __future__ import annotations

from functools import partial

from .batch_invariant import *  # noqa: F403
from .batch_invariant import attention_layer as _attention_layer
from .batch_invariant import mlp_layer as _mlp_layer

attention_layer = partial(_attention_layer, fast_activations=True)
mlp_layer = partial(_mlp_layer, fast_activations=True)
