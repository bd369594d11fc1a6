"""The decoder of all architectures. They differ only in their ModelConfig; Llama is the plain case."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import UserError
from ..kernels import Batch, Kernels, LayerPages, LayerStates, Weight, WindowMap
from ..kernels.cpu import quantize_weight
from ..kernels.quantization import FORMATS
from ..types import Progress, unwatched
from . import layers
from .config import ModelConfig, read_config
from .experts import moe
from .layers import ModelCheckpoint, RopeTables, WeightReader
from .lora import LoraLayers
from .recurrent import recurrent
from .rope import rotary_order

log = logging.getLogger(__name__)


class Model:
    """A decoder on one backend: tokens in, hidden states and logits out."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: ModelCheckpoint,
        ops: Kernels,
        quantize: str | None = None,
        max_context: int | None = None,
        progress: Progress = unwatched,
        lora: LoraLayers | None = None,
    ) -> None:
        """lora: gets slots for adapters over the matrices of all layers; None: adapters are off."""
        if lora is not None and config.recurrent is not None:
            raise UserError("adapters are not supported for models with recurrent layers: start without `lora`")
        self.config = config
        self.ops = ops
        self.lora = lora
        label, parts = "loading weights", config.layers + 1  # embedding and head count as one
        progress(0, parts, label)
        reader = WeightReader(checkpoint, ops, quantize)
        self.embedding, self.head, dtype, self._head_kind = layers.embedding_and_head(config, reader, ops)
        scale = config.embedding_scale
        self.embedding_scale = rounded_scale(scale, dtype) if config.rounds_scale else scale
        self.norm = reader.norm("model.norm.weight", config.width)  # [E]
        self._logit_norm = self.norm if config.logit_scale == 1 else self.norm * config.logit_scale
        positions = min(config.context, max_context or config.context)
        rope_tables = RopeTables(config, ops, positions)
        self.layers = []
        for layer in range(config.layers):
            progress(layer + 1, parts, label)
            self.layers.append((self._mixer(reader, layer, rope_tables), self._perceptron(reader, layer)))
            checkpoint.release()
        self._pages: Sequence[LayerPages | LayerStates] = ()
        self._stacks: dict[tuple[int, int], object] = {}
        self._window_map: WindowMap | None = None
        self._ends: set[int] = set()  # of runs of layers that all have window pages, or all have not
        reader.finish(config)
        if reader.stored_kinds:
            kinds = ", ".join(sorted(reader.stored_kinds))
            log.warning("`quantize=%s` has no effect on weights that are stored as %s: leave it out", quantize, kinds)
        progress(parts, parts, label)
        self.weight_bytes = reader.weight_bytes  # of the weights that a step of one token reads
        self.idle_bytes = reader.idle_bytes  # of the experts that it does not read

    def _mixer(self, reader: WeightReader, layer: int, rope_tables: RopeTables) -> object:
        """Return the attention of a layer, or the recurrent layer in its place."""
        shape = self.config.recurrent
        if shape is not None and shape.layers[layer]:
            return self.ops.recurrent_layer(recurrent(self.config, shape, reader, layer))
        attention = layers.attention(self.config, reader, layer, rope_tables)
        if self.lora is not None:
            order = rotary_order(self.config.ropes[layer], self.config.head_dim)
            attention = self.lora.attention(layer, attention, order)
        return self.ops.attention_layer(attention)

    def _perceptron(self, reader: WeightReader, layer: int) -> object:
        """Return the MLP of a layer, or its mixture of experts."""
        experts = self.config.experts
        if experts is not None and experts.layers[layer]:
            return self.ops.moe_layer(moe(self.config, experts, reader, layer))
        mlp = layers.mlp(self.config, reader, layer)
        return self.ops.mlp_layer(mlp if self.lora is None else self.lora.mlp(layer, mlp))

    def forward(
        self, batch: Batch, pages: Sequence[LayerPages | LayerStates], aux_layers: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the hidden states before the last norm [T, E], and copies of the aux hidden states.

        Aux layer i stands for the states entering layer i, and `layers` for those leaving the last layer.

        The hidden states are for `logits` alone: they are divided by `residual_scale`. So what a layer adds needs no
        factor, and norms need only another epsilon (`stream_eps`).
        """
        scale = self.config.residual_scale
        x = self.ops.embed(self.embedding, batch.tokens, self.embedding_scale / scale)  # [T, E]
        aux_states: dict[int, Tensor] = {}
        if self._pages is not pages:
            self._bind(pages)
        in_windows = batch if self._window_map is None else self._window_map.translate(batch)
        begin = 0
        for end in sorted({*aux_layers, *self._ends}):
            if end > begin:
                has_window = window_map(pages[begin]) is not None
                self.ops.run_layers(x, self._stack(begin, end), in_windows if has_window else batch)
            begin = end
            if end in aux_layers:
                aux_states[end] = x.clone() if scale == 1 else x * scale
        return x, [aux_states[layer] for layer in aux_layers]

    def _bind(self, pages: Sequence[LayerPages | LayerStates]) -> None:
        """Take over the storage of all layers. It stays allocated, so what depends on it is cached."""
        maps = [window_map(kept) for kept in pages]
        self._pages, self._stacks = pages, {}
        self._window_map = next((one for one in maps if one is not None), None)
        self._ends = {layer for layer in range(1, len(maps)) if maps[layer] is not maps[layer - 1]} | {len(maps)}

    def _stack(self, begin: int, end: int) -> object:
        """Return layers [begin, end) with their pages or states."""
        if (begin, end) not in self._stacks:
            self._stacks[begin, end] = self.ops.layer_stack(self.layers[begin:end], self._pages[begin:end])
        return self._stacks[begin, end]

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Apply the last norm and the LM head: [R, E] to [R, V] f32, written to `out` if given."""
        logits = self.ops.norm_linear(hidden, self._logit_norm, self.config.stream_eps, self.head, out)
        if self.config.logit_cap:
            self.ops.soft_cap(logits, self.config.logit_cap)
        return logits

    def head_rows(self, ids: Tensor) -> object:
        """Return the LM head rows of the tokens `ids` [U], in 8 bits if the head is quantized."""
        rows = self.ops.embed(self.head, ids.to(torch.int32), 1.0)  # [U, E]
        weight = Weight("f32", tuple(rows.shape), rows)
        if FORMATS[self._head_kind].quantized:
            weight = quantize_weight(weight, "int8")
        elif self._head_kind != "f32":
            weight = Weight(self._head_kind, weight.shape, weight.data.to(FORMATS[self._head_kind].dtype))
        return self.ops.matrix(weight)

    def default_aux_layers(self) -> tuple[int, int, int]:
        """Return the layers whose input EAGLE-3 heads read if their checkpoint names none."""
        count = self.config.layers
        early, middle, late = 2, count // 2, count - 3
        if not early < middle < late:
            raise UserError(
                f"this model has {count} layers, too few for the default aux layers `(2, layers // 2, layers - 3)`: "
                "name the layers in the draft head's configuration"
            )
        return early, middle, late


def window_map(kept: LayerPages | LayerStates) -> WindowMap | None:
    """Return the map of a layer with window pages; None: it has others, or states."""
    return kept.window_map if isinstance(kept, LayerPages) else None


def rounded_scale(scale: float, dtype: torch.dtype) -> float:
    """Return the factor on the embedding as a Gemma model was trained with it.

    Gemma was trained with sqrt(width) rounded to the dtype of the embedding, and transformers rounds likewise.
    Quantized files (uint8) follow llama.cpp, which does not round.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return scale
    return float(torch.tensor(scale).to(dtype))


def build(
    checkpoint: ModelCheckpoint,
    ops: Kernels,
    quantize: str | None = None,
    max_context: int | None = None,
    progress: Progress = unwatched,
    lora: LoraLayers | None = None,
) -> Model:
    """Build the model of a checkpoint on the device of `ops`. Its architecture is one of ARCHITECTURES."""
    return Model(read_config(checkpoint.config), checkpoint, ops, quantize, max_context, progress, lora)
