"""The decoder. Llama is the plain case; Mistral, Qwen, SmolLM and Gemma 3 differ only in their `ModelConfig`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import UserError
from ..kernels import Batch, Kernels, LayerPages, Weight
from ..kernels.blocks import FORMATS
from ..kernels.quantize import quantise
from ..types import Progress, unwatched
from . import gemma3, layers
from .config import ModelConfig, read_config
from .layers import Checkpoint, Reader, Tables


class Model:
    """A decoder on one backend: tokens in, hidden states and logits out."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        ops: Kernels,
        quantize: str | None = None,
        max_context: int | None = None,
        progress: Progress = unwatched,
    ) -> None:
        self.config = config
        self.ops = ops
        label, parts = "loading weights", config.layers + 1  # embedding and head are one
        progress(0, parts, label)
        reader = Reader(checkpoint, ops, quantize)
        self.embedding, self.head, stored, self._head_kind = layers.ends(config, reader, ops)
        self.embedding_scale = gemma3.embedding_scale(config.embedding_scale, stored)
        self.norm = reader.norm("model.norm.weight", config.width)  # [E]
        positions = min(config.context, max_context or config.context)
        turning = Tables(config, ops, positions, layers.rope_factors(config, reader))
        self.layers = []
        for layer in range(config.layers):
            progress(layer + 1, parts, label)
            attention = ops.attention_layer(layers.attention(config, reader, layer, turning))
            self.layers.append((attention, ops.mlp_layer(layers.mlp(config, reader, layer))))
            checkpoint.release()
        self._pages: Sequence[LayerPages] = ()
        self._stacks: dict[tuple[int, int], object] = {}
        reader.finish(config)
        progress(parts, parts, label)
        self.weight_bytes = reader.weight_bytes  # of weights that every step reads

    def forward(
        self, batch: Batch, pages: Sequence[LayerPages], taps: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Hidden states before the last norm [T, E], and copies of the states that enter the tapped layers.

        Tap i is the state entering layer i; tap `layers` is the state that leaves the last one.
        """
        x = self.ops.embed(self.embedding, batch.tokens, self.embedding_scale)  # [T, E]
        tapped: dict[int, Tensor] = {}
        begin = 0
        for end in sorted({*taps, self.config.layers}):
            if end > begin:
                self.ops.run_layers(x, self._stack(begin, end, pages), batch)
            begin = end
            if end in taps:
                tapped[end] = x.clone()
        return x, [tapped[tap] for tap in taps]

    def _stack(self, begin: int, end: int, pages: Sequence[LayerPages]) -> object:
        """Layers [begin, end) over their storage. Storage stays for the life of an engine, so stacks are kept."""
        if self._pages is not pages:
            self._pages, self._stacks = pages, {}
        if (begin, end) not in self._stacks:
            self._stacks[begin, end] = self.ops.layer_stack(self.layers[begin:end], pages[begin:end])
        return self._stacks[begin, end]

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Last norm and head: [R, E] to [R, V] f32, in `out` if that is given."""
        return self.ops.norm_linear(hidden, self.norm, self.config.eps, self.head, out)

    def head_rows(self, ids: Tensor) -> object:
        """The head for the tokens `ids` [U] alone: a matrix of U rows, in 8 bits if the head has no more."""
        rows = self.ops.embed(self.head, ids.to(torch.int32), 1.0)  # [U, E]
        weight = Weight("f32", tuple(rows.shape), rows.cpu())
        if FORMATS[self._head_kind].quantised:
            weight = quantise(weight, "int8")
        elif self._head_kind != "f32":
            weight = Weight(self._head_kind, weight.shape, weight.data.to(FORMATS[self._head_kind].dtype))
        return self.ops.matrix(replace(weight, data=weight.data.to(rows.device)))

    def default_taps(self) -> tuple[int, int, int]:
        """Early, middle and late: the layers whose input EAGLE-3 heads read unless their checkpoint says otherwise."""
        count = self.config.layers
        early, middle, late = 2, count // 2, count - 3
        if not early < middle < late:
            raise UserError(
                f"this model has {count} layers, too few for the default taps `(2, layers // 2, layers - 3)`: "
                "name the layers to tap in the draft head's configuration"
            )
        return early, middle, late


def build(
    checkpoint: Checkpoint,
    ops: Kernels,
    quantize: str | None = None,
    max_context: int | None = None,
    progress: Progress = unwatched,
) -> Model:
    """The model of a checkpoint, with weights and rotary tables on the device of `ops`."""
    return Model(read_config(checkpoint.config), checkpoint, ops, quantize, max_context, progress)
