"""Operations of another device for inputs of the host, kept so that they can be run again where they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

HOST = torch.device("cpu")


class Recorder:
    """A backend whose operations take their tensors to `place`, and bring back results and what changed in place.

    `replay` calls the operations since `forget` once more, on the tensors that were taken there. Handles stay there.
    """

    def __init__(self, ops: Any, place: torch.device) -> None:
        self._ops, self._place = ops, place
        self._calls: list[Callable[[], Any]] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ops, name)
        return partial(self._run, found) if callable(found) else found

    def forget(self) -> None:
        self._calls.clear()

    def replay(self) -> list[Any]:
        return [call() for call in self._calls]

    def _run(self, operation: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        taken: dict[int, Moved] = {}  # tensors that several arguments share are one tensor there, too
        call = partial(operation, *self._take(arguments, taken), **self._take(named, taken))
        self._calls.append(call)
        found = call()
        for tensor in taken.values():
            tensor.here.copy_(tensor.there)
        if isinstance(found, Tensor):  # `out` comes back as what was passed in
            return next((each.here for each in taken.values() if each.there is found), found.to(HOST))
        return self._bring(found)

    def _take(self, value: Any, taken: dict[int, Moved]) -> Any:
        if isinstance(value, Tensor) and value.device == HOST:
            return taken.setdefault(id(value), Moved(value, value.to(self._place, copy=True))).there
        return _through(value, lambda each: self._take(each, taken))

    def _bring(self, value: Any) -> Any:
        return value.to(HOST) if isinstance(value, Tensor) else _through(value, self._bring)


@dataclass(frozen=True)
class Moved:
    here: Tensor
    there: Tensor


def _through(value: Any, change: Callable[[Any], Any]) -> Any:
    """The value with `change` made to all that it holds; handles of a backend are left alone."""
    if isinstance(value, dict):
        return {key: change(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(change, value))
    if is_dataclass(value) and not isinstance(value, type) and type(value).__module__ == "outrider.kernels":
        return replace(value, **{part.name: change(getattr(value, part.name)) for part in fields(value)})
    return value
