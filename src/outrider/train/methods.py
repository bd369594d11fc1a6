"""Which heads can be trained, and what users ask of them: `METHOD` or `METHOD:key=value,...`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from ..errors import UserError
from ..speculation.options import Setting, fill, hint
from .heads.base import Student
from .optimizer import Recipe
from .target import Subject


@dataclass(frozen=True)
class Kind:
    module: str  # of this room
    student: str
    options: str = "Options"
    learning_rate: float = 1e-3
    model: bool = False  # it is a model by itself, no head on the target's states


KINDS: Mapping[str, Kind] = {
    "eagle3": Kind("eagle", "EagleStudent"),
    "dflash": Kind("block", "DFlashStudent", "DFlashOptions"),
    "dspark": Kind("block", "DSparkStudent"),
    "medusa": Kind("medusa", "MedusaStudent"),
    "mtp": Kind("mtp", "MtpStudent"),
    "draft_model": Kind("draft_model", "DraftModelStudent", learning_rate=6e-4, model=True),
}


@dataclass(frozen=True)
class Common:
    """What can be set for every method, beside its own Options."""

    name: str | None = None  # of the folder that it is written to; default: the method's
    learning_rate: float | None = None  # default: the command's, else what suits the method
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for matrices, AdamW for the rest
    matrix_rate: float | None = None  # of matrices under muon; default: the learning rate


@dataclass(frozen=True)
class Asked:
    """One head to train: every field a fact."""

    name: str
    method: str
    options: Any
    recipe: Recipe

    def build(self, subject: Subject, positions: int) -> Student:
        kind = KINDS[self.method]
        made: Student = getattr(_module(kind), kind.student)(subject, self.options, positions)
        return made

    @property
    def is_model(self) -> bool:
        return KINDS[self.method].model

    def described(self) -> dict[str, Any]:
        return {"method": self.method, "options": asdict(self.options), "recipe": asdict(self.recipe)}


def parse(asked: Sequence[str], learning_rate: float | None = None) -> tuple[Asked, ...]:
    """learning_rate: of those that set none themselves."""
    if not asked:
        raise UserError(f"no method is named: expected one or more of {', '.join(KINDS)}")
    found = tuple(_one(text, learning_rate) for text in asked)
    names = [one.name for one in found]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two heads would be called `{name}`: tell them apart with `name=...`")
    return found


def _one(text: str, learning_rate: float | None) -> Asked:
    method, _, rest = text.strip().partition(":")
    if method not in KINDS:
        raise UserError(
            f"no head called `{method}` can be trained{hint(method, KINDS, {})}: expected one of {', '.join(KINDS)}"
        )
    kind = KINDS[method]
    given = _settings(rest, method)
    own, shared = getattr(_module(kind), kind.options), [field.name for field in fields(Common)]
    known = [field.name for field in fields(own)]
    for key in given:
        if key not in (*known, *shared):
            raise UserError(
                f"`{method}` has no option `{key}` in training{hint(key, [*known, *shared], {})}: "
                f"expected {', '.join(known)}, or what every method has: {', '.join(shared)}"
            )
    common = fill(Common, {key: setting for key, setting in given.items() if key in shared})
    options = fill(own, {key: setting for key, setting in given.items() if key in known})
    rate = next(one for one in (common.learning_rate, learning_rate, kind.learning_rate) if one is not None)
    for key, value in (("learning_rate", rate), ("matrix_rate", common.matrix_rate)):
        if value is not None and value <= 0:
            raise UserError(f"`{key}` is {value}: it must be above 0")
    name = common.name or method
    if not name.replace("-", "").replace("_", "").replace(".", "").isalnum() or name.startswith("."):
        raise UserError(f"`name` is `{name}`: a folder gets this name, so use letters, digits, `-`, `_` and `.`")
    return Asked(name, method, options, Recipe(rate, common.optimizer, common.matrix_rate))


def _settings(text: str, method: str) -> dict[str, Setting]:
    found: dict[str, Setting] = {}
    for part in text.split(",") if text else []:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (key and equals and value):
            raise UserError(f"`{part}` of `{method}` sets nothing: write METHOD:key=value,key=value")
        if key in found:
            raise UserError(f"`{key}` is given twice for `{method}`: keep one of them")
        found[key] = Setting(key, value)
    return found


def _module(kind: Kind) -> Any:
    return importlib.import_module(f".heads.{kind.module}", __package__)
