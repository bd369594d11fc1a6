"""Shared by methods with a trained head: their options, and building a drafter from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...cache.pages import Pages
from ...errors import UserError
from ...models.heads import EagleHead
from ..checkpoints import Head, choose_aux_layers, choose_source, open_head
from ..interface import Target, TreeOptions
from .autoregressive import Autoregressive


@dataclass(frozen=True)
class HeadOptions(TreeOptions):
    model: str = ""  # the head: a folder, or a name on the hub; default: what ships for the model
    quantize: Literal["int8", "int4"] | None = None  # float weights of the head become this; default: as the target's


def build_head(method: str, options: HeadOptions, target: Target, aux_layers: tuple[int, ...] = ()) -> Autoregressive:
    """Build a drafter over a head of `method`; aux_layers: set by the user, empty for those of the checkpoint."""
    options.check_tree()
    network, chosen = open_network(method, options.model, options.quantize, target, aux_layers)
    return Autoregressive(network, target, options.width, chosen, options.branches, options.max_depth)


def open_network(
    method: str, model: str, quantize: str | None, target: Target, aux_layers: tuple[int, ...]
) -> tuple[EagleHead[Pages], tuple[int, ...]]:
    """Open the head; return it with the aux layers of the target that it reads."""
    source = choose_source(model, method, target)
    head = open_head(source, target.model.config, method, target.device.torch_device)
    check_mask(head, target)
    chosen = choose_aux_layers(head, target.model, aux_layers)
    layers = head.shape.layers
    states = head.shape.num_aux_layers * head.shape.target_width
    pages = target.storage(layers.layers, layers.kv_heads, layers.head_dim, target.kv_dtype, states)
    return EagleHead(head, target.model, pages, target.max_context, quantize or target.quantize), chosen


def check_mask(head: Head, target: Target) -> None:
    """Refuse a head whose mask token is outside its embedding."""
    mask, rows = head.shape.mask, head.shape.own_embedding or target.model.config.vocabulary
    if mask is not None and mask >= rows:
        raise UserError(
            f"the mask token of `{head.path}` is {mask}, but its embedding has {rows} tokens: "
            "take the head that was made for this model"
        )
