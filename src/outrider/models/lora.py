"""The slots of LoRA adapters over the matrices of a model, and the check whether an adapter fits them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import UserError
from ..kernels import AttentionLora, AttentionWeights, Kernels, MlpLora, MlpWeights, Weight

# Modules that hold the rows of several matrices, as Phi-3 stores them.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
Key = tuple[int, str]  # layer, module
Pairs = Mapping[Key, tuple[Tensor, Tensor]]


class StoredLora(Protocol):
    """An adapter as a file holds it (weights.lora.LoraWeights)."""

    @property
    def path(self) -> object: ...

    @property
    def base(self) -> str: ...

    @property
    def rank(self) -> int: ...

    @property
    def modules(self) -> Pairs: ...


class LoraLayers:
    """Slots for adapters over all matrices of a model."""

    def __init__(self, ops: Kernels, slots: int, rank: int) -> None:
        self.ops, self.slots, self.rank = ops, slots, rank
        self._shapes: dict[Key, tuple[int, int]] = {}
        self._orders: dict[Key, list[int]] = {}  # of the dimensions of each head, where a model reorders them
        self._slots: dict[Key, Any] = {}

    def attention(self, layer: int, weights: AttentionWeights, order: list[int] | None = None) -> AttentionWeights:
        """Add slots to the weights of an attention block. order: that of rope.rotary_order for queries and keys."""
        if order is not None:
            self._orders |= {(layer, "q_proj"): order, (layer, "k_proj"): order}
        matrices = {
            "q_proj": weights.query,
            "k_proj": weights.key,
            "v_proj": weights.value,
            "o_proj": weights.output,
        }
        return replace(weights, lora=AttentionLora(*(self._make(layer, *each) for each in matrices.items())))

    def mlp(self, layer: int, weights: MlpWeights) -> MlpWeights:
        """Add slots to the weights of an MLP."""
        matrices = {"gate_proj": weights.gate, "up_proj": weights.up, "down_proj": weights.down}
        return replace(weights, lora=MlpLora(*(self._make(layer, *each) for each in matrices.items())))

    def _make(self, layer: int, module: str, weight: Weight) -> Any:
        rows, columns = weight.shape
        self._shapes[layer, module] = rows, columns
        self._slots[layer, module] = self.ops.lora_slots(self.slots, self.rank, (rows, columns))
        return self._slots[layer, module]

    def fit(self, stored: StoredLora) -> Pairs:
        """Return the matrices of an adapter for this model; refuse one that does not fit it."""
        if stored.rank > self.rank:
            raise UserError(
                f"`{stored.path}` has rank {stored.rank}, but `max_lora_rank` is {self.rank}: raise `max_lora_rank`"
            )
        pairs: dict[Key, tuple[Tensor, Tensor]] = {}
        for (layer, module), (a, b) in stored.modules.items():
            parts = FUSED.get(module, (module,))
            shapes = [self._shape(stored, layer, part) for part in parts]
            expected = sum(rows for rows, _ in shapes), shapes[0][1]
            if (b.shape[0], a.shape[1]) != expected:
                raise UserError(
                    f"`{stored.path}` adapts `{module}` of layer {layer} as a matrix {[b.shape[0], a.shape[1]]}, but "
                    f"this model's is {list(expected)}: {_trained_for(stored)}"
                )
            for part, rows in zip(parts, torch.split(b, [rows for rows, _ in shapes]), strict=True):
                order = self._orders.get((layer, part))
                if order is not None:  # [heads, D, R]
                    rows = rows.view(-1, len(order), rows.shape[1])[:, order].flatten(0, 1)
                pairs[layer, part] = a, rows.contiguous()
        return pairs

    def _shape(self, stored: StoredLora, layer: int, module: str) -> tuple[int, int]:
        layers = {number for number, _ in self._shapes}
        if layer not in layers:
            count = max(layers, default=-1) + 1
            raise UserError(
                f"`{stored.path}` adapts layer {layer}, but this model has {count} layers: {_trained_for(stored)}"
            )
        if (layer, module) not in self._shapes:
            known = ", ".join(name for number, name in self._shapes if number == layer)
            raise UserError(
                f"`{stored.path}` adapts `{module}` of layer {layer}, which this model does not have or whose "
                f"adaptation is not supported: expected some of {known}"
            )
        return self._shapes[layer, module]

    def put(self, slot: int, pairs: Pairs) -> None:
        """Put an adapter into a slot; an empty one empties it."""
        for key, lora_slots in self._slots.items():
            a, b = pairs.get(key, (None, None))
            self.ops.set_lora(lora_slots, slot, a, b)


def _trained_for(stored: StoredLora) -> str:
    name = f"`{stored.base}`" if stored.base else "another model"
    return f"the adapter was trained for {name}"
