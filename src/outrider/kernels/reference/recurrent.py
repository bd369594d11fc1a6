"""Recurrent layers in plain torch: one token at a time, so that a token's bits do not depend on its step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as functional
from torch import Tensor

from ..recurrence import UNIT_EPS, LayerStates, RecurrentWeights
from ..structures import Batch
from .layers import linear, matrix, optional_norm, rms_norm, row_by_row


@dataclass(frozen=True)
class RecurrentLayer:
    weights: RecurrentWeights
    channels: Tensor  # [C, E] f32, as are the others
    controls: Tensor
    gate: Tensor
    output: Tensor


@dataclass(frozen=True)
class StateRow:
    """A row of a batch, checked: where its state is, and which tokens it reads."""

    source: int  # slots
    target: int
    start: int  # position of the row's first token
    length: int  # tokens that the state in `source` has read; 0 at the start of a text
    read: int  # leading tokens of the row that the state in `target` will have read
    parents: list[int]  # of the row's tokens, counted in the row; -1: the token before the row


def recurrent_layer(weights: RecurrentWeights) -> RecurrentLayer:
    return RecurrentLayer(
        weights, matrix(weights.channels), matrix(weights.controls), matrix(weights.gate), matrix(weights.output)
    )


def recurrent(x: Tensor, layer: RecurrentLayer, batch: Batch, states: LayerStates) -> None:
    weights, conv_size = layer.weights, layer.weights.conv.shape[1]
    rows = state_rows(batch, states, conv_size)
    count = int(batch.query_starts[-1])  # the tokens after these pad
    normed = optional_norm(x[:count], weights.norm, weights.eps)  # [T, E]
    inputs = torch.cat([linear(normed, layer.channels), linear(normed, layer.controls)], 1)  # [T, C + X]
    mixed = torch.empty(count, weights.heads, weights.head_dim)  # [T, H, P]
    for row, begin, end in zip(rows, *zip(*pairwise(batch.query_starts.tolist()), strict=True), strict=True):
        if row is not None:
            mixed[begin:end] = _run_row(weights, row, inputs[begin:end], states)
    gate = row_by_row(linear(normed, layer.gate), functional.silu).view(mixed.shape)
    if weights.delta:
        mixed = row_by_row(mixed, lambda one: rms_norm(one, weights.out_norm, weights.out_eps)) * gate
    else:
        groups = (mixed * gate).view(count, weights.key_heads, -1)  # the heads that share keys
        norm = weights.out_norm.view(weights.key_heads, -1)
        mixed = row_by_row(groups, lambda one: rms_norm(one, norm, weights.out_eps))
    x[:count] += linear(mixed.flatten(1), layer.output)


def state_rows(batch: Batch, states: LayerStates, conv_size: int) -> list[StateRow | None]:
    """Return the rows of a batch; None for a row without tokens. Rows that no state can serve are refused."""
    if batch.states is None:
        raise ValueError("a recurrent layer needs the slots of its states: the batch has no `states`")
    slots, lines = states.inputs.shape[:2]
    found: list[StateRow | None] = []
    for (begin, end), (source, target, read) in zip(
        pairwise(batch.query_starts.tolist()), batch.states.tolist(), strict=True
    ):
        if begin == end:
            found.append(None)
            continue
        if not (0 <= source < slots and 0 <= target < slots):
            raise ValueError(f"states {source} and {target} lie outside the storage of {slots} slots")
        start = int(batch.positions[begin])
        length = int(states.lengths[source]) if start else 0
        if not 0 <= start - length <= lines - (conv_size - 1):
            raise ValueError(f"the state in slot {source} has read {length} tokens, and cannot continue at {start}")
        if not 0 <= read <= end - begin <= read + lines - (conv_size - 1):
            count = end - begin
            raise ValueError(f"a row of {count} tokens cannot be kept: {read} are read, and {lines} lines are left")
        parents = [token - 1 for token in range(end - begin)]
        if batch.parents is not None:
            parents = [max(parent - begin, -1) for parent in batch.parents[begin:end].tolist()]
        for token, parent in enumerate(parents):
            if not (parent == token - 1 if token < read else read - 1 <= parent < token):
                raise ValueError(f"token {token} of a row follows token {parent}, whose state is not kept")
        found.append(StateRow(source, target, start, length, read, parents))
    return found


def _run_row(weights: RecurrentWeights, row: StateRow, inputs: Tensor, states: LayerStates) -> Tensor:
    """Return the outputs [tokens, H, P] of a row with these inputs [tokens, C + X], and update its state."""
    lines, history = states.inputs.shape[1], weights.conv.shape[1] - 1
    before = {p: states.inputs[row.source, p % lines].clone() for p in range(max(row.length - history, 0), row.start)}

    def window(token: int, position: int) -> list[Tensor]:
        """Return the inputs of a token, or with token -1 of a position before the row, and of those before it."""
        found: list[Tensor] = []
        while token >= 0 and len(found) <= history:
            found.append(inputs[token])
            token, position = row.parents[token], row.start - 1
        while position >= 0 and len(found) <= history:
            found.append(before[position])
            position -= 1
        return found[::-1]

    state = states.states[row.source].clone() if row.start else torch.zeros_like(states.states[row.source])
    for position in range(row.length, row.start):
        state, _ = update(weights, state, window(-1, position))
    after = {-1: state}
    outputs = []
    for token, parent in enumerate(row.parents):
        after[token], output = update(weights, after[parent], window(token, row.start - 1))
        outputs.append(output)
    end = row.start + row.read
    for position in range(max(end - history, 0), row.start):
        states.inputs[row.target, position % lines] = before[position]
    for token in range(max(row.read - history, 0), len(inputs)):
        states.inputs[row.target, (row.start + token) % lines] = inputs[token]
    states.states[row.target] = after[row.read - 1]
    states.lengths[row.target] = end
    return torch.stack(outputs)


def update(weights: RecurrentWeights, state: Tensor, window: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the state [H, P, N] after a token, and its output [H, P].

    window: the inputs of the tokens that the convolution reads, the token's own last.
    """
    keys, count = weights.key_heads * weights.state_dim, weights.num_channels
    per_key = weights.heads // weights.key_heads
    conv = weights.conv[:, weights.conv.shape[1] - len(window) :]  # [C, len(window)]
    mixed = (conv * torch.stack([inputs[:count] for inputs in window], 1)).sum(1)  # [C]
    channels = functional.silu(mixed if weights.conv_bias is None else mixed + weights.conv_bias)
    query, key, value = channels[:keys], channels[keys : 2 * keys], channels[2 * keys :].view(weights.heads, -1, 1)
    query, key = query.view(weights.key_heads, -1), key.view(weights.key_heads, -1)  # [G, N]
    controls = window[-1][count:].view(-1, weights.heads)
    step = functional.softplus(controls[0] + weights.step_bias)  # [H]
    state = state * torch.exp(weights.decay * step)[:, None, None]
    if weights.delta:
        query, key = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + UNIT_EPS) for part in (query, key))
        query = query * weights.state_dim**-0.5
    key, query = (part.repeat_interleave(per_key, 0)[:, None] for part in (key, query))  # [H, 1, N]
    if weights.delta:
        known = (state * key).sum(-1, keepdim=True)  # [H, P, 1]
        state = state + (value - known) * torch.sigmoid(controls[1])[:, None, None] * key
    else:
        state = state + value * step[:, None, None] * key
    output = (state * query).sum(-1)  # [H, P]
    return state, output if weights.skip is None else output + weights.skip[:, None] * value[:, :, 0]


def copy_inputs(layers: Sequence[LayerStates], sources: Tensor, targets: Tensor) -> None:
    for layer in layers:
        lines = layer.inputs.flatten(0, 1)  # [slots * R, C + X], the same memory
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            if not (0 <= source < len(lines) and 0 <= target < len(lines)):
                raise ValueError(f"lines {source} and {target} lie outside the storage of {len(lines)} lines")
            lines[target] = lines[source]
