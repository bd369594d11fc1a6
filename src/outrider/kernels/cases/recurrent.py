"""Cases of recurrent layers: an item is a row of the batch, with its state. See case.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from ..protocol import Kernels
from ..recurrence import LayerStates, RecurrentWeights
from ..structures import Batch
from . import inputs as make
from .case import TOLERANCE, Case, Run, listed

TOKENS = 6  # of each row, so that the results of all rows have one shape
LINES = 12  # inputs that a slot keeps
# Rows of (tokens that the state has read, first position, tokens of the step that it will read).
ROWS = ((0, 0, 5), (0, 0, 0), (4, 4, 6), (31, 34, 0), (9, 17, 1), (40, 40, 0), (2, 3, 3))
TREE = (-1, 0, 0, 1, 1, 2)  # parents of the tokens of a row


@dataclass(frozen=True)
class Sizes:
    heads: int = 4
    key_heads: int = 2
    head_dim: int = 24
    state_dim: int = 40
    width: int = 64
    conv_size: int = 4


def weights(random: Generator, kind: str, sizes: Sizes, delta: bool, bias: bool = True) -> RecurrentWeights:
    values = sizes.heads * sizes.head_dim
    channels = 2 * sizes.key_heads * sizes.state_dim + values
    controls = sizes.heads * (2 if delta else 1)
    return RecurrentWeights(
        channels=make.random_weight(random, kind, channels, sizes.width),
        controls=make.random_weight(random, "f32", controls, sizes.width),
        gate=make.random_weight(random, kind, values, sizes.width),
        output=make.random_weight(random, kind, sizes.width, values),
        conv=make.normal(random, channels, sizes.conv_size),
        decay=-torch.rand(sizes.heads, generator=random),
        step_bias=make.normal(random, sizes.heads),
        out_norm=1 + 0.3 * make.normal(random, sizes.head_dim if delta else values),
        heads=sizes.heads,
        key_heads=sizes.key_heads,
        head_dim=sizes.head_dim,
        state_dim=sizes.state_dim,
        delta=delta,
        eps=1e-6,
        out_eps=1e-5,
        norm=1 + 0.3 * make.normal(random, sizes.width),
        conv_bias=make.normal(random, channels) if bias else None,
        skip=None if delta else make.normal(random, sizes.heads),
    )


def random_states(random: Generator, of: RecurrentWeights, slots: int, lines: int = LINES) -> LayerStates:
    states = make.normal(random, slots, of.heads, of.head_dim, of.state_dim) / math.sqrt(of.state_dim)
    inputs = make.normal(random, slots, lines, of.num_channels + of.num_controls)
    return LayerStates(states, inputs, torch.zeros(slots, dtype=torch.int32))


def copy_states(states: LayerStates) -> LayerStates:
    return LayerStates(states.states.clone(), states.inputs.clone(), states.lengths.clone())


def take_rows(batch: Batch, rows: Sequence[int]) -> tuple[Batch, list[int]]:
    """Return the batch of these rows only, and the tokens that it has of the whole one."""
    starts = batch.query_starts.tolist()
    tokens = [token for row in rows for token in range(starts[row], starts[row + 1])]
    part = make.take_tokens(batch, tokens)
    assert batch.states is not None
    return replace(part, states=batch.states[list(rows)]), tokens


def recurrent(
    name: str,
    delta: bool,
    kind: str = "f32",
    sizes: Sizes | None = None,
    trees: bool = False,
    op: str = "recurrent",
    lengths: Sequence[tuple[int, int, int]] = ROWS,
) -> Case:
    """Rows with states of several lengths, in place and to other slots; two rows read one state."""

    def build(ops: Kernels, seed: int) -> Run:
        random = make.generator(seed)
        of = weights(random, kind, sizes or Sizes(), delta)
        layer = ops.recurrent_layer(of)
        rows = [(length, start, 0 if trees else read) for length, start, read in lengths]
        states = random_states(random, of, 2 * len(rows))
        if trees:
            batch = make.random_trees(random, [(start, TREE) for _, start, _ in rows])
        else:
            batch = make.random_batch(random, [(start, TOKENS) for _, start, _ in rows])
        slots = []
        for row, (length, _, read) in enumerate(rows):
            states.lengths[row] = length
            slots.append([row, row if row % 2 else len(rows) + row, read])
        batch = replace(batch, states=torch.tensor(slots, dtype=torch.int32))
        x = make.normal(random, len(batch.tokens), of.output.shape[0])  # [T, E]

        def run(items: Sequence[int] | None) -> tuple[Tensor, ...]:
            chosen = listed(items, len(rows))
            part, tokens = take_rows(batch, chosen)
            out, kept = x[tokens], copy_states(states)
            ops.recurrent(out, layer, part, kept)
            targets = [slots[row][1] for row in chosen]
            lines = torch.stack([_kept_lines(kept, slots[row], rows[row], of.conv.shape[1]) for row in chosen])
            return out.view(len(chosen), -1), kept.states[targets], lines, kept.lengths[targets]

        return run

    tolerance = 4 * TOLERANCE[kind]
    return Case(op, name, len(lengths), tolerance, build)


def _kept_lines(states: LayerStates, slots: Sequence[int], row: tuple[int, int, int], conv_size: int) -> Tensor:
    """Return the inputs that a row's slot must hold after the step, zeros in front: [R, C + X]."""
    _, start, read = row
    found = torch.zeros_like(states.inputs[0])
    positions = list(range(max(start + read - conv_size + 1, 0), start + TOKENS))
    found[LINES - len(positions) :] = states.inputs[slots[1], [position % LINES for position in positions]]
    return found


def copy_inputs() -> Case:
    """Compact the accepted path of a tree in two layers."""
    sources, targets = (25, 26, 28, 31, 2, 40), (24, 25, 26, 27, 1, 0)

    def build(ops: Kernels, seed: int) -> Run:
        random = make.generator(seed)
        of = weights(random, "f32", Sizes(), True)
        storage = [random_states(random, of, 4) for _ in range(2)]

        def run(items: Sequence[int] | None) -> tuple[Tensor, ...]:
            layers = [copy_states(states) for states in storage]
            chosen = listed(items, len(sources))
            pairs = torch.tensor([sources, targets], dtype=torch.int32)[:, chosen]
            ops.copy_inputs(layers, pairs[0].contiguous(), pairs[1].contiguous())
            return tuple(layer.inputs.flatten(0, 1)[[targets[item] for item in chosen]] for layer in layers)

        return run

    return Case("copy_inputs", "two layers", len(sources), 0.0, build)


def _all() -> list[Case]:
    single = Sizes(heads=2, key_heads=2, head_dim=16, state_dim=16, conv_size=2)
    wide = Sizes(heads=4, key_heads=1, head_dim=64, state_dim=128, width=256)
    return [
        recurrent("delta rule", True),
        recurrent("delta rule, trees", True, trees=True),
        recurrent("delta rule, short convolution", True, sizes=single),
        recurrent("delta rule, q8_0", True, "q8_0", wide),
        recurrent("delta rule, layer", True, "bf16", op="recurrent_layer"),
        recurrent("Mamba-2", False),
        recurrent("Mamba-2, trees", False, trees=True),
        recurrent("Mamba-2, q4_1", False, "q4_1", wide),
        copy_inputs(),
    ]


RECURRENT_CASES = _all()
