"""LoRA adapters of an engine: loaded by name or by request, put into slots while requests run with them. No torch here.

An adapter stays in host memory from `add` to `remove`. Before a request with it runs, the scheduler takes a slot of the
model for it, and gives it back when the last such request stops; the adapter stays in its slot until another needs it.
A removed adapter takes no new requests. Those that it has go on with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from .errors import UserError


@dataclass(frozen=True)
class LoRARequest:
    """An adapter that a request uses, with the fields of vLLM's class.

    `lora_path` is a folder in PEFT's layout, or a hub name. It is read at the first use of the name. Without it the
    adapter must be loaded already. `lora_int_id` has no effect: adapters are known by their names.
    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


@dataclass(eq=False)
class Adapter:
    """An adapter in memory."""

    name: str
    path: str
    number: int  # counts the adapters of an engine from 1: a name that is loaded again has another number
    pairs: Any  # its matrices on the host, as Slots.put takes them
    pinned: bool  # loaded by name; others are dropped when room is needed
    slot: int = -1  # -1: in none
    running: int = 0  # requests that hold the slot
    used: int = 0  # when the slot was last taken, in calls of `take`
    removed: bool = False


class Slots(Protocol):
    """The slots of a model (models.lora.LoraLayers)."""

    slots: int

    def fit(self, stored: Any) -> Any: ...

    def put(self, slot: int, pairs: Any) -> None: ...


class AdapterManager:
    """The adapters of one engine. Its methods run on the thread of the engine, except `read`."""

    def __init__(self, slots: Slots | None, read: Callable[[str], Any], limit: int) -> None:
        """slots: None: adapters are off. read: reads an adapter from a path. limit: of adapters in memory."""
        self._slots, self._read, self._limit = slots, read, limit
        self._loaded: dict[str, Adapter] = {}
        self._in_slot: list[Adapter | None] = [None] * (0 if slots is None else slots.slots)
        self._numbers, self._clock = itertools.count(1), itertools.count(1)

    @property
    def enabled(self) -> bool:
        return self._slots is not None

    @property
    def loaded(self) -> Mapping[str, Adapter]:
        """Return a copy of the adapters that take requests, by name. Safe from any thread."""
        return dict(self._loaded)

    def read(self, path: str) -> Any:
        """Read an adapter and check that it fits the model. Safe from any thread: `add` takes the result."""
        return self._enabled_slots().fit(self._read(path))

    def add(self, name: str, path: str, pairs: Any | None = None, pinned: bool = True) -> Adapter:
        """Load an adapter under a name that is free. pairs: what `read` returned; None: read it now."""
        self._enabled_slots()
        if not name or not isinstance(name, str):
            raise UserError(f"the name of an adapter is {name!r}: expected a text")
        if name in self._loaded:
            raise UserError(f"the adapter `{name}` is loaded already: unload it first, or pick another name")
        pairs = self.read(path) if pairs is None else pairs
        if len(self._loaded) >= self._limit:
            self._drop_idle()
        self._loaded[name] = Adapter(name, path, next(self._numbers), pairs, pinned)
        return self._loaded[name]

    def remove(self, name: str) -> None:
        """Unload an adapter. Its unfinished requests go on with it."""
        adapter = self._loaded.pop(name, None)
        if adapter is None:
            raise UserError(f"no adapter called `{name}` is loaded")
        adapter.removed = True
        self._empty(adapter)

    def find(self, request: LoRARequest | str | None) -> Adapter | None:
        """Return the adapter of a request, loaded now if it is new; None: the model itself."""
        if request is None:
            return None
        if isinstance(request, str):
            request = LoRARequest(request)
        if not isinstance(request, LoRARequest):
            raise UserError(f"`lora_request` is {request!r}: expected a LoRARequest, or the name of a loaded adapter")
        self._enabled_slots()
        found = self._loaded.get(request.lora_name)
        if found is None and request.lora_path:
            return self.add(request.lora_name, str(request.lora_path), pinned=False)
        if found is None:
            names = ", ".join(f"`{name}`" for name in self._loaded) or "none"
            raise UserError(f"no adapter called `{request.lora_name}` is loaded (loaded: {names})")
        if request.lora_path and str(request.lora_path) != found.path:
            raise UserError(f"the adapter `{found.name}` was loaded from `{found.path}`: pick another name")
        return found

    def take(self, adapter: Adapter) -> bool:
        """Hold a slot for a request that starts to run; return False if requests with other adapters hold all."""
        if adapter.slot < 0:
            idle = [slot for slot, other in enumerate(self._in_slot) if other is None or not other.running]
            if not idle:
                return False
            slot = min(idle, key=lambda slot: 0 if (other := self._in_slot[slot]) is None else other.used)
            if (other := self._in_slot[slot]) is not None:
                other.slot = -1
            self._in_slot[slot] = None  # until it is filled: a failure must not leave half of an adapter
            self._enabled_slots().put(slot, adapter.pairs)
            self._in_slot[slot], adapter.slot = adapter, slot
        adapter.running += 1
        adapter.used = next(self._clock)
        return True

    def give_back(self, adapter: Adapter) -> None:
        """Let go of the slot that `take` gave, for one request."""
        adapter.running -= 1
        assert adapter.running >= 0, f"the slot of `{adapter.name}` was given back more often than taken"
        if adapter.removed:
            self._empty(adapter)

    def _empty(self, adapter: Adapter) -> None:
        if adapter.slot >= 0 and not adapter.running:
            self._in_slot[adapter.slot] = None
            self._enabled_slots().put(adapter.slot, {})
            adapter.slot = -1

    def _drop_idle(self) -> None:
        """Drop the adapter that has not run for the longest time, of those that requests have loaded."""
        idle = [adapter for adapter in self._loaded.values() if not adapter.pinned and not adapter.running]
        if not idle:
            raise UserError(f"{len(self._loaded)} adapters are loaded: unload one, or raise `max_cpu_loras`")
        self.remove(min(idle, key=lambda adapter: adapter.used).name)

    def _enabled_slots(self) -> Slots:
        if self._slots is None:
            raise UserError("adapters are off: start the engine with `enable_lora`")
        return self._slots
