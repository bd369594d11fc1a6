"""Multi-token prediction (MTP) with several modules: each drafts one token and reads the output of the one before it.

The entry of module j at position q joins token q with the output of module j - 1 at position q - 1; module 0 reads the
target's state. So module j has no entry below position j + 1, and its keys are indexed by position as the target's are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..kernels import Batch
from .heads import EagleHead, Storage


class StateStorage(Storage, Protocol):
    page_size: int
    states: Tensor  # [pages, floats]


StorageT = TypeVar("StorageT", bound=StateStorage)


class ModuleChain(Generic[StorageT]):
    """MTP modules that run one after the other over the same entries. N: modules. H: their width.

    Inputs and outputs have H floats for each module that still has a token to draft: the state that it reads, and its
    output. Each draft step leaves out the module that has drafted its token.
    """

    parallel, mask, mask_features = False, -1, None

    def __init__(self, modules: Sequence[EagleHead[StorageT]]) -> None:
        """Chain the modules. The pages of the second also store the states that later modules read, by slot."""
        first = modules[0]
        self.modules, self.width = list(modules), first.width
        self.pages, self.context, self.features = first.pages, first.context, first.features
        self.outputs = modules[1].pages
        self.weight_bytes = sum(module.weight_bytes for module in modules)

    def project_features(self, features: Tensor) -> Tensor:
        """Convert [T, features] to [T, N * H]: the other modules read outputs of modules, so their parts are zero."""
        return pad(self.modules[0].project_features(features), (0, (len(self.modules) - 1) * self.width))

    def run(self, batch: Batch, features: Tensor | None) -> Tensor:
        assert features is not None
        parts = torch.split(features, self.width, 1)
        running = self.modules[-len(parts) :]
        if len(running) < len(self.modules):  # drafting: one token per row, and `feedback_features` gave every part
            outputs = [module.run(batch, part.contiguous()) for module, part in zip(running, parts, strict=True)]
            return torch.cat(outputs, 1)
        outputs = [running[0].run(batch, parts[0].contiguous())]  # [T, H] each
        states: list[Tensor] = []  # [T, H] each, as the next module reads them
        for index, module in enumerate(running[1:], 1):
            states.append(running[index - 1].feedback_features(outputs[-1]))
            outputs.append(module.run(batch, self._shifted(batch, states[-1], index)))
        self._stored()[batch.slots.long()] = torch.cat(states, 1)
        return torch.cat(outputs, 1)

    def _shifted(self, batch: Batch, outputs: Tensor, index: int) -> Tensor:
        """Return the previous module's outputs [T, H] at the previous position; a row's first is read from storage.

        Before the first entry of a module the storage is undefined, and what comes of it is never read.
        """
        states, firsts = outputs.roll(1, 0), batch.query_starts[:-1].long()  # [B]
        size = self.outputs.page_size
        positions = (batch.positions[firsts].long() - 1).clamp(min=0)  # [B]; padding has position 0
        pages = batch.page_tables.gather(1, (positions // size)[:, None])[:, 0].long()  # [B]
        columns = slice((index - 1) * self.width, index * self.width)
        states[firsts] = self._stored()[pages * size + positions % size, columns]
        return states

    def _stored(self) -> Tensor:
        """Return the states that later modules read, by slot: [slots, (N - 1) * H]."""
        states: Tensor = self.outputs.states
        return states.view(-1, (len(self.modules) - 1) * self.width)

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits [R, V] f32 of the next module to draft."""
        return self._next(states).logits(states[:, : self.width].contiguous())

    def scores(self, states: Tensor) -> Tensor:
        """Return the same over the draft vocabulary `ids`: [R, U]."""
        return self._next(states).scores(states[:, : self.width].contiguous())

    @property
    def ids(self) -> Tensor | None:
        return self.modules[0].ids

    def _next(self, states: Tensor) -> EagleHead[StorageT]:
        module: EagleHead[StorageT] = self.modules[-(states.shape[1] // self.width)]
        return module

    def feedback_features(self, states: Tensor) -> Tensor:
        """Return what the modules after the first of these read with its token: [R, one part less]."""
        *parts, _ = torch.split(states, self.width, 1)
        running = self.modules[-len(parts) - 1 : -1]
        return torch.cat(
            [module.feedback_features(part.contiguous()) for module, part in zip(running, parts, strict=True)], 1
        )
