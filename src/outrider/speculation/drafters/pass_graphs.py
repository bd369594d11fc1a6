"""Run batches from the host through a draft network by CUDA graphs: prompts, trees, and steps after a suspension.

Batches are padded to the shapes of the target's steps (device/graphs.py), which the warm-up captures. Other shapes run
without a graph, and so do all batches on devices without graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...device import Buffer
from ...device.graphs import MAX_TOKENS
from ...input_batch import BatchBuilder, Shape, make_batch, padded_shape
from ...kernels import Batch
from ..interface import Target

Key = tuple[Shape, int]  # and the floats of a token's features


@dataclass
class PassBuffers:
    """The tensors of one graph. Features and states are shared with graphs of as many tokens."""

    inputs: Buffer
    batch: Batch
    features: Tensor | None  # [T, H]
    states: Tensor | None = None  # [T, S], allocated by the first run


class PassGraphs:
    def __init__(self, run: Callable[[Batch, Tensor | None], Tensor | None], target: Target) -> None:
        """run: takes a batch and its input features [T, H], and returns states [T, S] or nothing."""
        self.device, self.graphs, self._run = target.device, target.graphs, run
        self.buffers: dict[Key, PassBuffers] = {}
        self.features: dict[tuple[int, int], Tensor] = {}  # by their shape
        self.states: dict[torch.Size, Tensor] = {}  # by their shape
        self._current: tuple[Key, Batch] | None = None  # of the last upload, if it is captured

    @property
    def enabled(self) -> bool:
        return self.graphs is not None and self.graphs.decoding

    def upload(self, builder: BatchBuilder, floats: int, *indices: list[int]) -> tuple[Batch, list[Tensor], bool]:
        """Upload a batch and lists of indices; return whether it is captured: then `run` returns more rows.

        floats: of a token's features; 0: none.
        """
        shape = self._captured_shape(builder.shape, floats)
        if shape is None:
            self._current = None
            return *builder.upload(self.device, *indices), False
        buffers = self._buffers_of((shape, floats))
        buffers.inputs.fill(builder.pack(shape, self.device.alignment))
        self._current = (shape, floats), buffers.batch
        return buffers.batch, [self.device.upload(values, torch.int32) for values in indices], True

    def run(self, batch: Batch, features: Tensor | None) -> Tensor | None:
        """Run a batch, by replay if it is the last that was uploaded and captured. Valid until the next call."""
        if self._current is None or self._current[1] is not batch:
            return self._run(batch, features)
        key, self._current = self._current[0], None
        buffers = self.buffers[key]
        if buffers.features is not None:
            assert features is not None
            buffers.features[: len(features)].copy_(features)
            buffers.features[len(features) :].zero_()
        assert self.graphs is not None
        self.graphs.run(self._graph_key(key), lambda: self._run_buffers(buffers))
        return buffers.states

    def capture(self, shape: Shape, floats: int) -> None:
        """Capture passes of a padded shape, before the first request."""
        assert self.graphs is not None
        key = shape, floats
        buffers = self._buffers_of(key)
        buffers.inputs.fill(BatchBuilder().pack(shape, self.device.alignment))
        if buffers.features is not None:
            buffers.features.zero_()
        self.graphs.capture(self._graph_key(key), lambda: self._run_buffers(buffers))

    def _captured_shape(self, shape: Shape, floats: int) -> Shape | None:
        """Return the shape of the graph that runs this batch; None: it runs without one."""
        graphs = self.graphs
        if graphs is None or not (graphs.mixed or (graphs.decoding and shape.is_tree)):
            return None
        found = padded_shape(shape)
        if found.tokens > MAX_TOKENS and not shape.is_tree:
            return None
        return found if graphs.is_usable(self._graph_key((found, floats))) else None

    def _graph_key(self, key: Key) -> tuple[object, ...]:
        return ("pass", id(self), *key)

    def _buffers_of(self, key: Key) -> PassBuffers:
        if key not in self.buffers:
            shape, floats = key
            inputs, batch = make_batch(self.device, shape, self.device.alignment)
            if floats and (shape.tokens, floats) not in self.features:
                self.features[shape.tokens, floats] = self.device.zeros((shape.tokens, floats), torch.float32)
            self.buffers[key] = PassBuffers(inputs, batch, self.features.get((shape.tokens, floats)))
        return self.buffers[key]

    def _run_buffers(self, buffers: PassBuffers) -> None:
        states = self._run(buffers.batch, buffers.features)
        if states is None:
            return
        if buffers.states is None:
            buffers.states = self.states.setdefault(states.shape, torch.empty_like(states))
        buffers.states.copy_(states)
