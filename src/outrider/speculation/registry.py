"""Find methods by name: those of the package, user modules, and combinations such as `suffix+eagle3`."""

from __future__ import annotations

import importlib.util
import inspect
import pkgutil
import re
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import cast

from ..errors import UserError
from . import methods
from .interface import MethodOptions, Proposer, Target
from .options import hint

IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def available() -> list[str]:
    """Return the names of the methods that come with the package."""
    return sorted(module.name for module in pkgutil.iter_modules(methods.__path__))


def find(name: str) -> ModuleType:
    """Return the module of a method: one of `available()`, the user's own module, or `a+b` for several."""
    if "+" in name:
        return importlib.import_module(".combined", __package__)
    if name in available():
        return importlib.import_module(f".methods.{name}", __package__)
    if "." in name or is_importable(name):
        return _import_user_method(name)
    raise UserError(
        f"no method called `{name}`{hint(name.lower(), available(), {})}: expected one of {', '.join(available())}, "
        "or the import path of your own such as `my_module` or `package.module`"
    )


def is_importable(name: str) -> bool:
    """Report whether `name` is the import path of an existing module, in the current folder or installed."""
    if not IMPORT_PATH.fullmatch(name):
        return False
    _add_current_folder()
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # ValueError: a module without a specification, such as `__main__`
        return False


def _add_current_folder() -> None:
    """Put the current folder first on the import path, as `python -m` does; an installed command does not."""
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)


def _import_user_method(name: str) -> ModuleType:
    """Import a user module and check that it is a method."""
    _add_current_folder()
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"cannot import the method `{name}`: {error}; run the command in the folder that holds it, or install it"
        ) from error
    except Exception as error:  # such as a SyntaxError: the module runs when it is imported
        raise UserError(f"cannot import the method `{name}`: {type(error).__name__}: {error}") from error
    missing = [attribute for attribute in ("Options", "build") if not hasattr(module, attribute)]
    if missing:
        raise UserError(f"the method `{name}` defines no `{missing[0]}`: a method has `Options` and `build`")
    if not (inspect.isclass(module.Options) and issubclass(module.Options, MethodOptions)):
        raise UserError(f"`{name}.Options` must extend `outrider.speculation.MethodOptions`")
    return module


def members(name: str) -> list[str]:
    """Return the methods that `a+b` combines, or the single one that is named."""
    return name.split("+")


def has_model(name: str) -> bool:
    """Return whether a method, or one that `a+b` combines, drafts with a model, a head or modules of the target."""
    return any(field.name == "model" for member in members(name) for field in fields(find(member).Options))


def drafts_from(name: str) -> str:
    """Return the sampling parameter that a method drafts from (its `DRAFTS_FROM`); empty: none."""
    parameters: list[str] = [getattr(find(member), "DRAFTS_FROM", "") for member in members(name)]
    return next(filter(None, parameters), "")


def build(name: str, options: MethodOptions, target: Target) -> Proposer:
    """Build the drafter of a method for this target."""
    return cast(Proposer, find(name).build(options, target))
