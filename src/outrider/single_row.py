"""A decode step of one request by replay: the target's pass, and sampling or verification, in one native call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .cache.pages import Pages, slots_of
from .device import Device
from .input_batch import Shape, as_batch, sizes, slot_of
from .kernels import SamplingMetadata, VerifyInputs
from .models import Model
from .recordings import Recorded, Recordings, padded_table, table_width
from .request import Request, Row
from .sampler import is_plain
from .speculation.verifier import Verifier


@dataclass(frozen=True)
class SingleRowResult:
    tokens: list[int]  # accepted draft tokens, and one token of the target
    indices: list[int]  # indices of the logits that each was sampled from: 0 is the newest token's, then the draft's
    hidden: Tensor | None  # [T, layers * E]: aux hidden states; valid until the next step
    recorded: bool  # this step was recorded, not replayed


class SingleRowStep:
    """Steps that run the newest token of one request and its draft, without logits processors or log-probabilities."""

    def __init__(self, model: Model, device: Device, pages: Pages, verifier: Verifier) -> None:
        self.model, self.device, self.pages, self.verifier = model, device, pages, verifier
        self.recordings = Recordings(model.ops, pages)
        self._floats, self._seed = device.buffer(3, torch.float32), device.buffer(1, torch.int64)
        self._request: Request | None = None  # whose sampling parameters are in these buffers
        self._usable = False  # its steps can be recorded
        self._logits = torch.empty(0, model.config.vocabulary, device=device.torch_device)

    def run(self, row: Row, aux_layers: tuple[int, ...]) -> SingleRowResult | None:
        """Run a step; None if it is another one, or is not recorded."""
        request, draft = row.request, row.draft
        if not row.sample or len(row.tokens) != 1 or self.verifier.mode != "exact" or not self._take(request):
            return None
        size, pages, is_tree = row.size, request.pages, draft is not None and draft.parents is not None
        key = size, table_width(len(pages)), is_tree, request.adapter is not None, aux_layers
        found = self.recordings.find(key, lambda: self._record(*key), at_once=True)
        if found is None:
            return None
        following = range(row.start, row.start + size)
        positions: Sequence[int] = following
        parents: Sequence[int] = range(-1, size - 1)  # of a chain
        if draft is not None and draft.parents is not None:
            positions = [row.start, *(row.start + 1 + depth for depth in draft.depths())]
            parents = [-1, *(parent + 1 for parent in draft.parents)]
        tokens = row.tokens if draft is None else row.tokens + draft.tokens
        values = [*tokens, *positions, *slots_of(pages, following, self.pages.page_size), 0, size]
        values += padded_table(pages, key[1])
        if is_tree:
            values += parents
        if request.adapter is not None:
            values += [slot_of(request)] * size
        if self.pages.recurrent is not None:
            values += row.states
        values += request.length, request.params.top_k
        if draft is not None:
            values += -1, *draft.tokens, *parents
        found.inputs.fill(values)
        recorded = found.replay is None
        if self.recordings.run(found) < 0:
            return None
        if draft is None:
            return SingleRowResult(found.outputs.read(1), [0], found.hidden, recorded)
        count, *outputs = found.outputs.read(1 + 2 * size)
        return SingleRowResult(outputs[:count], outputs[size : size + count], found.hidden, recorded)

    def _take(self, request: Request) -> bool:
        """Fill in the sampling parameters of a request; return False if its logits are processed or reported."""
        if self._request is not request:
            params, self._request = request.params, None  # of no request until the buffers are filled
            self._floats.fill([params.temperature, params.top_p, params.min_p])
            self._seed.fill([request.seed])
            self._request, self._usable = request, is_plain(request)
        return self._usable

    def _logits_of(self, size: int) -> Tensor:
        """Return storage [size, V] f32 that all recordings share, as far as it reaches."""
        if self._logits.shape[0] < size:
            self._logits = self._logits.new_empty(1 << (size - 1).bit_length(), self.model.config.vocabulary)
        return self._logits[:size]

    def _record(self, size: int, pages: int, is_tree: bool, has_adapter: bool, aux_layers: tuple[int, ...]) -> Recorded:
        shape = Shape(size, 1, pages, is_tree, has_adapter, self.pages.recurrent is not None)
        drafted = size if size > 1 else 0
        lengths = [*sizes(shape), 1, 1, drafted, drafted]
        inputs, outputs = self.device.buffer(sum(lengths), torch.int32), self.device.buffer(1 + 2 * size, torch.int32)
        *parts, positions, top_k, draft_tokens, parents = torch.split(inputs.tensor, lengths)
        temperature, top_p, min_p = torch.split(self._floats.tensor, 1)
        sampling = SamplingMetadata(temperature, top_k, top_p, min_p, self._seed.tensor, positions)
        batch, ops = as_batch(shape, parts), self.model.ops
        starts = self.device.upload([0, size], torch.int32)
        hidden = None
        if aux_layers:
            hidden = self.device.zeros((size, len(aux_layers) * self.model.config.width), torch.float32)

        def run(_: object) -> None:
            states, aux_states = self.model.forward(batch, self.pages.storages, aux_layers)
            if hidden is not None:
                torch.cat(aux_states, 1, out=hidden)
            logits = self.model.logits(states, self._logits_of(size))
            if size == 1:
                ops.sample(logits, sampling, outputs.tensor[:1])
                return
            drafts = VerifyInputs(starts, draft_tokens, parents, size - 1)
            found = self.verifier.verify(logits, sampling, drafts, torch.empty_like(draft_tokens))
            torch.cat([found.counts, found.tokens[0], found.rows[0]], out=outputs.tensor)

        return Recorded(run, inputs, hidden, outputs)
