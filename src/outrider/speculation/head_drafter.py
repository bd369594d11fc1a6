"""What the methods with a trained head share: their options, and the way from a checkpoint to a drafter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..models.heads import EagleHead
from ..types import UserError
from . import MethodOptions, Target
from .autoregressive import Autoregressive
from .checkpoint import choose_taps, open_head


@dataclass(frozen=True)
class HeadOptions(MethodOptions):
    model: str = ""  # the head: a folder, or a name on the hub
    quantize: Literal["int8", "int4"] | None = None  # float weights of the head become this; default: as the target's


def build_head(method: str, options: HeadOptions, target: Target, taps: tuple[int, ...] = ()) -> Autoregressive:
    """A drafter over a head that is for `method`; `taps` as the user chose them."""
    if not options.model:
        raise UserError(f"`{method}` needs a head: pass its folder as `model`")
    head = open_head(options.model, target.model.config, method)
    chosen = choose_taps(head, target.model, taps)
    layers = head.shape.layers
    states = head.shape.tap_count * head.shape.target_width
    pages = target.storage(layers.layers, layers.kv_heads, layers.head_dim, target.kv_dtype, states)
    network = EagleHead(head, target.model, pages, target.max_context, options.quantize or target.quantize)
    return Autoregressive(network, target, options.width, chosen)
