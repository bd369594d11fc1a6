"""The heads that can be trained, and the parser of `METHOD` or `METHOD:key=value,...`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from ..errors import UserError
from ..speculation.options import Setting, fill, hint
from .heads.base import DraftHead
from .optimizer import Recipe
from .target import TargetInfo


@dataclass(frozen=True)
class Trainable:
    """Where the code of a method is, and its defaults."""

    module: str  # in heads/
    head: str  # name of the DraftHead class
    options: str = "Options"
    learning_rate: float = 1e-3
    model: bool = False  # a model by itself, not a head on the target's hidden states


TRAINABLE: Mapping[str, Trainable] = {
    "eagle3": Trainable("autoregressive", "EagleDraftHead", "EagleOptions"),
    "eagle": Trainable("eagle1", "Eagle1DraftHead"),
    "peagle": Trainable("peagle", "PEagleDraftHead"),
    "dflash": Trainable("block", "DFlashDraftHead", "DFlashOptions"),
    "dspark": Trainable("block", "DSparkDraftHead"),
    "medusa": Trainable("medusa", "MedusaDraftHead"),
    "mtp": Trainable("autoregressive", "MtpDraftHead", "MtpOptions"),
    "draft_model": Trainable("draft_model", "DraftModelHead", learning_rate=6e-4, model=True),
}
ALIASES = {"taps": "aux_layers"}  # deprecated alias: new key of an option
KEYS_ON_DISK = {"aux_layers": "taps"}  # deprecated alias: cards and settings.json keep the key of the first format


@dataclass(frozen=True)
class CommonTrainOptions:
    """The options of every method, beside its own Options."""

    name: str | None = None  # of the folder that the head is written to; default: the method's name
    learning_rate: float | None = None  # default: that of the command, else the method's
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for matrices, AdamW for the rest
    matrix_rate: float | None = None  # learning rate of matrices under muon; default: the learning rate


@dataclass(frozen=True)
class HeadSpec:
    """One head to train, with all defaults resolved."""

    name: str
    method: str
    options: Any
    recipe: Recipe

    def build(self, target_info: TargetInfo, positions: int) -> DraftHead:
        kind = TRAINABLE[self.method]
        head: DraftHead = getattr(_module(kind), kind.head)(target_info, self.options, positions)
        return head

    @property
    def is_model(self) -> bool:
        return TRAINABLE[self.method].model

    def as_json(self) -> dict[str, Any]:
        """Return the spec as cards and settings.json store it."""
        options = {KEYS_ON_DISK.get(key, key): value for key, value in asdict(self.options).items()}
        return {"method": self.method, "options": options, "recipe": asdict(self.recipe)}


def parse(methods: Sequence[str], learning_rate: float | None = None) -> tuple[HeadSpec, ...]:
    """Parse the heads to train. learning_rate: of heads that set none themselves."""
    if not methods:
        raise UserError(f"no method is named: pass one or more of {', '.join(TRAINABLE)}")
    specs = tuple(_parse_one(text, learning_rate) for text in methods)
    names = [spec.name for spec in specs]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two heads have the name `{name}`: pass `name=...` for one of them")
    return specs


def _parse_one(text: str, learning_rate: float | None) -> HeadSpec:
    method, _, rest = text.strip().partition(":")
    if method not in TRAINABLE:
        raise UserError(
            f"the method `{method}` cannot be trained{hint(method, TRAINABLE, {})}: pass one of {', '.join(TRAINABLE)}"
        )
    kind = TRAINABLE[method]
    options_type = getattr(_module(kind), kind.options)
    own, shared = ([field.name for field in fields(options)] for options in (options_type, CommonTrainOptions))
    given = _settings(rest, method, own)
    for key in given:
        if key not in (*own, *shared):
            raise UserError(
                f"`{method}` has no training option `{key}`{hint(key, [*own, *shared], {})}: "
                f"pass {', '.join(own)}, or an option of every method: {', '.join(shared)}"
            )
    common = fill(CommonTrainOptions, {key: setting for key, setting in given.items() if key in shared})
    options = fill(options_type, {key: setting for key, setting in given.items() if key in own})
    rates = (common.learning_rate, learning_rate, kind.learning_rate)
    rate = next(rate for rate in rates if rate is not None)
    for key, value in (("learning_rate", rate), ("matrix_rate", common.matrix_rate)):
        if value is not None and value <= 0:
            raise UserError(f"`{key}` is {value}: it must be above 0")
    name = common.name or method
    if not name.replace("-", "").replace("_", "").replace(".", "").isalnum() or name.startswith("."):
        raise UserError(f"`name` is `{name}`, but it becomes a folder: use letters, digits, `-`, `_` and `.`")
    return HeadSpec(name, method, options, Recipe(rate, common.optimizer, common.matrix_rate))


def _settings(text: str, method: str, own: Sequence[str]) -> dict[str, Setting]:
    settings: dict[str, Setting] = {}
    for part in text.split(",") if text else []:
        written, equals, value = (piece.strip() for piece in part.partition("="))
        if not (written and equals and value):
            raise UserError(f"`{part}` of `{method}` sets nothing: write METHOD:key=value,key=value")
        key = ALIASES[written] if ALIASES.get(written) in own else written
        if key in settings:
            raise UserError(f"`{written}` is given twice for `{method}`: keep one of them")
        settings[key] = Setting(written, value)
    return settings


def _module(kind: Trainable) -> Any:
    return importlib.import_module(f".heads.{kind.module}", __package__)
