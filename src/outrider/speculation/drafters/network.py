"""The interface of a draft network, the plan of its pass for one request, and opening one from a head on disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from ...cache.pages import Pages
from ...errors import UserError
from ...kernels import Batch
from ...models.heads import EagleHead
from ..checkpoints import Head, choose_aux_layers, choose_source, open_head
from ..interface import DraftContext, Target, TreeOptions
from .kv_tracker import TrackedKv


class Network(Protocol):
    """A small model that continues a text. Letters: F floats of `features`, H of its input, S of its states."""

    pages: Pages  # its own KV, with the target's page numbers
    context: int  # positions that it supports
    features: int  # floats of the aux hidden states that it reads with each token; 0: none
    parallel: bool  # it drafts all tokens in one pass, over mask tokens
    mask: int  # the mask token; -1: none
    weight_bytes: int  # bytes of the weights that every step reads

    @property
    def ids(self) -> Tensor | None:
        """Return the target's ids of the tokens in its vocabulary, ascending: [U]; None: all."""
        ...

    def project_features(self, features: Tensor) -> Tensor:
        """Return its input features [T, H] for aux hidden states [T, F] of the target."""
        ...

    @property
    def mask_features(self) -> Tensor | None:
        """Return the learned input features of a mask token: [1, H]; None: it has none."""
        ...

    def run(self, batch: Batch, features: Tensor | None) -> Tensor:
        """Return states [T, S] of a batch in the target's ids.

        features [T, H]: from `project_features`, `feedback_features` or `mask_features`; None without features.
        """
        ...

    def logits(self, states: Tensor) -> Tensor:
        """Return logits [R, V] f32 over the target's ids; -inf for tokens outside its vocabulary."""
        ...

    def scores(self, states: Tensor) -> Tensor:
        """Return logits over `ids` only: [R, U]."""
        ...

    def feedback_features(self, states: Tensor) -> Tensor | None:
        """Return its input features for the tokens sampled from its own `states` [R, S]; None without features."""
        ...


@dataclass(frozen=True)
class RequestPlan:
    """A request's part of a pass: compute the KV entries [begin, stop), then draft `width` tokens."""

    row: int  # index of the context
    context: DraftContext
    kv: TrackedKv
    begin: int
    stop: int
    width: int
    pages: list[int]  # pages of the request that the network reads
    shift: int  # positions that were left out before `begin` (kv_tracker.py)


@dataclass(frozen=True)
class HeadOptions(TreeOptions):
    """The options of a method with a trained head that drafts token by token."""

    model: str = ""  # the head: a folder, or a name on the hub; default: what ships for the model
    quantize: Literal["int8", "int4", "fp8"] | None = None  # format of float weights of the head; default: the target's


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
