"""Find methods by name: those of the package, user modules, and combinations such as `suffix+eagle3`."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from types import ModuleType
from typing import cast

from ..errors import UserError
from . import methods
from .interface import MethodOptions, Proposer, Target


def available() -> list[str]:
    """Return the names of the methods that come with the package."""
    return sorted(module.name for module in pkgutil.iter_modules(methods.__path__))


def find(name: str) -> ModuleType:
    """Return the module of a method: one of `available()`, the user's own `package.module`, or `a+b` for several."""
    if "+" in name:
        return importlib.import_module(".combined", __package__)
    if "." in name:
        return _import_user_method(name)
    if name not in available():
        raise UserError(
            f"no method called `{name}`: expected one of {', '.join(available())}, "
            "or the import path of your own such as `package.module`"
        )
    return importlib.import_module(f".methods.{name}", __package__)


def _import_user_method(name: str) -> ModuleType:
    """Import a user module and check that it is a method."""
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"cannot import the method `{name}`: {error}") from error
    missing = [attribute for attribute in ("Options", "build") if not hasattr(module, attribute)]
    if missing:
        raise UserError(f"the method `{name}` defines no `{missing[0]}`: a method has `Options` and `build`")
    if not (inspect.isclass(module.Options) and issubclass(module.Options, MethodOptions)):
        raise UserError(f"`{name}.Options` must extend `outrider.speculation.MethodOptions`")
    return module


def members(name: str) -> list[str]:
    """Return the methods that `a+b` combines, or the single one that is named."""
    return name.split("+")


def drafts_from(name: str) -> str:
    """Return the sampling parameter that a method drafts from (its `DRAFTS_FROM`); empty: none."""
    parameters: list[str] = [getattr(find(member), "DRAFTS_FROM", "") for member in members(name)]
    return next(filter(None, parameters), "")


def build(name: str, options: MethodOptions, target: Target) -> Proposer:
    """Build the drafter of a method for this target."""
    return cast(Proposer, find(name).build(options, target))
