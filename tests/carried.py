"""A backend on another device, for tests that make their tensors on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

HOST = torch.device("cpu")


class Carried:
    """Each operation takes its tensors to the device and brings back its results, and what it changed in place.

    Handles stay where they are. Tensors that several arguments share are one tensor there, too.
    """

    def __init__(self, ops: Any, device: torch.device) -> None:
        self._ops, self._device = ops, device

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ops, name)
        return found if self._device == HOST or not callable(found) else self._carried(found)

    def _carried(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def carried(*arguments: Any, **named: Any) -> Any:
            there: dict[int, tuple[Tensor, Tensor]] = {}
            found = run(*(self._take(each, there) for each in arguments), **self._take(named, there))
            for here, moved in there.values():
                here.copy_(moved)
            if isinstance(found, Tensor):  # `out` comes back as what was passed in
                return next((here for here, moved in there.values() if moved is found), found.to(HOST))
            return self._bring(found)

        return carried

    def _take(self, value: Any, there: dict[int, tuple[Tensor, Tensor]]) -> Any:
        if isinstance(value, Tensor) and value.device == HOST:
            return there.setdefault(id(value), (value, value.to(self._device)))[1]
        return self._through(value, lambda each: self._take(each, there))

    def _bring(self, value: Any) -> Any:
        return value.to(HOST) if isinstance(value, Tensor) else self._through(value, self._bring)

    def _through(self, value: Any, change: Callable[[Any], Any]) -> Any:
        if isinstance(value, dict):
            return {key: change(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(change, value))
        if (
            is_dataclass(value)
            and not isinstance(value, type)
            and type(value).__module__ in ("outrider.kernels.structures", "outrider.kernels.recurrence")
        ):
            return replace(value, **{part.name: change(getattr(value, part.name)) for part in fields(value)})
        return value
