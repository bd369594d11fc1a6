"""Several modules of multi-token prediction: each serves one token of a draft, and reads what the one before it found.

The entry of module j at position q joins token q with the output of module j - 1 at position q - 1, where module 0 has
the target's state. So module j has no entry below position j + 1, and its keys follow the text as the target's do.
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
    """Modules one after the other over the same entries. Letters: N modules, H their width.

    What goes in and out has a part of H floats for each module that still has a token to draft: the state that it
    reads, and its output. A step of a draft leaves out the module that has spoken.
    """

    parallel, mask, beside_mask = False, -1, None

    def __init__(self, modules: Sequence[EagleHead[StorageT]]) -> None:
        """The pages of the second have room for what the next module reads at each of their positions."""
        first = modules[0]
        self.modules, self.width = list(modules), first.width
        self.pages, self.context, self.features = first.pages, first.context, first.features
        self.outputs = modules[1].pages
        self.weight_bytes = sum(module.weight_bytes for module in modules)

    def absorb(self, features: Tensor) -> Tensor:
        """[T, features] to [T, N * H]: what the others read comes from the modules themselves."""
        return pad(self.modules[0].absorb(features), (0, (len(self.modules) - 1) * self.width))

    def run(self, batch: Batch, features: Tensor | None) -> Tensor:
        assert features is not None
        parts = torch.split(features, self.width, 1)
        running = self.modules[-len(parts) :]
        if len(running) < len(self.modules):  # a draft: one token a row, and `feedback` gave every part
            found = [module.run(batch, part.contiguous()) for module, part in zip(running, parts, strict=True)]
            return torch.cat(found, 1)
        found = [running[0].run(batch, parts[0].contiguous())]  # [T, H] each
        left: list[Tensor] = []  # [T, H] each, as the next module reads it
        for place, module in enumerate(running[1:], 1):
            left.append(running[place - 1].feedback(found[-1]))
            found.append(module.run(batch, self._before(batch, left[-1], place)))
        self._stored()[batch.slots.long()] = torch.cat(left, 1)
        return torch.cat(found, 1)

    def _before(self, batch: Batch, outputs: Tensor, place: int) -> Tensor:
        """The output of the module before [T, H], of the entry before each: a row's first was found in another pass.

        Below its first entry a module reads what nobody wrote there, and nobody reads what comes of it.
        """
        states, firsts = outputs.roll(1, 0), batch.query_starts[:-1].long()  # [B]
        size = self.outputs.page_size
        positions = (batch.positions[firsts].long() - 1).clamp(min=0)  # [B]; padding stands at position 0
        pages = batch.page_tables.gather(1, (positions // size)[:, None])[:, 0].long()  # [B]
        columns = slice((place - 1) * self.width, place * self.width)
        states[firsts] = self._stored()[pages * size + positions % size, columns]
        return states

    def _stored(self) -> Tensor:
        """What the later modules read, at every slot: [slots, (N - 1) * H]."""
        states: Tensor = self.outputs.states
        return states.view(-1, (len(self.modules) - 1) * self.width)

    def logits(self, states: Tensor) -> Tensor:
        """Of the first module that has not spoken yet: [R, V] f32."""
        return self._next(states).logits(states[:, : self.width].contiguous())

    def scores(self, states: Tensor) -> Tensor:
        """The same over `ids`: [R, U]."""
        return self._next(states).scores(states[:, : self.width].contiguous())

    @property
    def ids(self) -> Tensor | None:
        return self.modules[0].ids

    def _next(self, states: Tensor) -> EagleHead[StorageT]:
        found: EagleHead[StorageT] = self.modules[-(states.shape[1] // self.width)]
        return found

    def feedback(self, states: Tensor) -> Tensor:
        """What the modules after the first of these read beside its token: [R, a part less]."""
        *parts, _ = torch.split(states, self.width, 1)
        running = self.modules[-len(parts) - 1 : -1]
        return torch.cat([module.feedback(part.contiguous()) for module, part in zip(running, parts, strict=True)], 1)
