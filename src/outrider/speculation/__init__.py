"""The method seam: what a drafter is, what it is told, and how it is found by name.

A method is a module with `Options` (a frozen dataclass that extends MethodOptions; its fields are the method's flags),
`build(options, target)` and a class with `needs` and three verbs. The engine reads `needs`, never the name. A method
that drafts from what a request brings names that sampling parameter as `DRAFTS_FROM`: to bring it is to ask for it.

What else is in this room, each line from the top down:

- a step: speculator, roster, sound, verify; what the user asked for: configure, keys, settings
- how much to draft, and when not to draft at all: adaptive
- drafters that look things up: lookup, suffixes; several at once: together
- drafters with a network: autoregressive, head_drafter, block_drafter; how their drafts grow: growth, tree_growth,
  block_growth; what they share: network, trails, sheet, grove, trees, draw, vocabulary; the same without the host:
  pilot, seats, slate, chain_part, block_part
- heads on disk: sources, checkpoint, layouts, head_folder, module_names, packed, describe
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

from torch import Tensor

from ..cache.pages import Pages
from ..device import Device
from ..errors import UserError
from ..kernels import Kernels
from ..models import Model
from ..request import Request
from ..tokenizer import Tokenizer
from ..types import Draft
from . import methods


@dataclass(frozen=True)
class MethodOptions:
    """The flags that every method has. A method's own Options extend it."""

    width: int = 4  # tokens that it drafts at most


@dataclass(frozen=True)
class TreeOptions(MethodOptions):
    """The flags of a method whose drafts may branch."""

    width: int = 4  # tokens that it drafts at most, in all branches together
    branches: int = 1  # tokens that may follow each; 1: a chain
    levels: int | None = None  # how deep a draft may be; default: as deep as it is wide, or as the method is good at

    def check_tree(self) -> None:
        """Refuse what no tree can be; a method calls it when it is built."""
        for name, value in (("branches", self.branches), ("levels", self.levels)):
            if value is not None and value < 1:
                raise UserError(f"`{name}` is {value}: it must be at least 1")
        if 0 < self.width < self.branches:
            raise UserError(
                f"`branches` is {self.branches} and `width` is {self.width}: a token has at most as many tokens after "
                "it as the whole draft has, so raise `width` or lower `branches`"
            )


@dataclass(frozen=True)
class Needs:
    """What a method asks of the engine."""

    width: int  # tokens that it drafts at most
    taps: tuple[int, ...] = ()  # states that it reads: entering layer i of the target; `layers`: leaving the last
    follows: bool = False  # it keeps keys and values of its own, in the target's pages, and must see every token
    lookahead: int = 0  # positions beyond the text that it writes while drafting
    context: int | None = None  # longer texts are not drafted for; None: no limit of its own
    trees: bool = False  # its drafts may branch
    costs: bool = False  # drafting takes time that must pay; else it is as good as free
    draws: bool = False  # its drafts have distributions, which they can be drawn from; else they are found
    unattended: bool = False  # it can draft without the host: it is Unattended too (seats.py)
    stops: bool = False  # it drafts token by token, and ends where the next one does not pay
    lazy: bool = False  # it may miss tokens, and be shown them later or never (trails.py)


@dataclass(frozen=True)
class DraftContext:
    """One request after a step, as a drafter sees it. Its text is request.tokens(...), then `fresh`."""

    request: Request
    start: int  # where the tokens stand that the step ran
    computed: int  # tokens of the text whose states and keys are final; the text goes on beyond
    fresh: list[int]  # tokens that the step added: `request` does not have them yet; empty inside a prompt
    width: int  # tokens that may be drafted now; 0: only follow
    first: int  # the row of `hidden` that belongs to the token at `start`; those up to `computed` follow
    floor: float = 0.0  # a token with less of a chance to be kept does not pay: drafting may end there
    pace: float = 0.0  # tokens a second that the request makes at present: what time is worth
    onward: float = 0.0  # after a token with less of a chance it does not pay to guess another one

    @property
    def length(self) -> int:
        return self.request.length + len(self.fresh)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Tokens [start, stop) of the text."""
        known = self.request.length
        return self.request.tokens(start, min(stop, known)) + self.fresh[max(start - known, 0) : max(stop - known, 0)]


Ids = Tensor | Sequence[Sequence[int]]  # [B, W] int32 on the device, or a list for each row where the host found them


@dataclass(frozen=True)
class DraftBatch:
    """The guesses for all rows of one call. A tree lists its tokens so that any beginning of it is a tree, and the best
    of its size: parents first, and by how likely all of the path to a token is kept.
    """

    tokens: Ids
    lengths: Sequence[int] | None = None  # [B], how many count of each row; None: all
    parents: Ids | None = None  # the token before each; -1: the request's newest. None: chains
    logits: Tensor | None = None  # [B, W, V] f32 that tokens were drawn from, before the temperature; None: not drawn
    confidence: Sequence[Sequence[float]] | None = None  # how likely each is kept if its parent is; None: unknown
    origins: Sequence[Sequence[int]] | None = None  # of several drafters, who guessed each token: as in Guess
    reached: int | None = None  # how deep it drafted, where it ended when going on did not pay; None: as deep as asked

    def drafts(self) -> list[Draft]:
        """The guess for each row, its tokens on the host."""
        tokens = self.rows(self.tokens)
        parents = None if self.parents is None else self.rows(self.parents)
        return [
            Draft(
                own,
                None if parents is None else parents[row][: len(own)],
                None if self.logits is None else self.logits[row, : len(own)],
                None if self.confidence is None else list(self.confidence[row][: len(own)]),
                None if self.origins is None else list(self.origins[row][: len(own)]),
            )
            for row, own in enumerate(tokens)
        ]

    def rows(self, ids: Ids) -> list[list[int]]:
        """`tokens` or `parents` on the host, as long as they count."""
        listed: Sequence[Sequence[int]] = ids.tolist() if isinstance(ids, Tensor) else ids
        lengths = self.lengths if self.lengths is not None else map(len, listed)
        return [list(row[:length]) for row, length in zip(listed, lengths, strict=True)]


class Proposer(Protocol):
    needs: Needs

    def propose(self, turns: Sequence[DraftContext], last: Tensor, hidden: Tensor | None) -> DraftBatch:
        """Guess what comes after each turn's text, at most turn.width tokens.

        last [B] int32: the token at position turn.computed, the first that has not run; empty where the method does
        not follow. hidden [T, taps * E] f32: the tapped states of all tokens of the step, side by side; None without
        taps.
        """
        ...

    def accept(self, requests: Sequence[Request], kept: Sequence[int]) -> None:
        """Of the last draft for each request so many tokens were kept: rewind own state to that."""
        ...

    def release(self, requests: Sequence[Request]) -> None:
        """These requests are gone."""
        ...


@dataclass(frozen=True)
class Target:
    """What a method may know of the model that it drafts for."""

    model: Model
    tokenizer: Tokenizer
    ops: Kernels
    device: Device
    page_size: int
    max_context: int
    kv_dtype: str
    sampled: bool = False  # drafts are drawn at the request's temperature; else they are the likeliest tokens
    coupled: bool = True  # drawn with the target's own noise (exact match); else with noise of their own, logits kept
    replacement: bool = False  # siblings with noise of their own are drawn independently; else all differ
    lazy: bool = False  # a drafter that is not asked is not told of the text either, and catches up when it is
    quantize: str | None = None
    source: str = ""  # where the model comes from: a name or a path
    storages: list[Pages] = field(default_factory=list)

    def storage(self, layers: int, kv_heads: int, head_dim: int, dtype: str, states: int = 0) -> Pages:
        """Pages for a method's own keys and values, numbered as the target's; they are there once the engine runs.

        `states`: floats to keep beside each page, for what must be known of its last token.
        """
        pages = Pages(layers, kv_heads, self.page_size, head_dim, dtype, states)
        self.storages.append(pages)
        return pages


def available() -> list[str]:
    """The methods that come with the package."""
    return sorted(module.name for module in pkgutil.iter_modules(methods.__path__))


def find(name: str) -> ModuleType:
    """The module of a method: one of `available()`, `package.module` of the user's own, or `a+b` for several."""
    if "+" in name:
        return importlib.import_module(".together", __package__)
    if "." in name:
        return _own(name)
    if name not in available():
        raise UserError(
            f"no method called `{name}`: expected one of {', '.join(available())}, "
            "or the import path of your own such as `package.module`"
        )
    return importlib.import_module(f".methods.{name}", __package__)


def _own(name: str) -> ModuleType:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"cannot import the method `{name}`: {error}") from error
    missing = [part for part in ("Options", "build") if not hasattr(module, part)]
    if missing:
        raise UserError(f"the method `{name}` defines no `{missing[0]}`: a method has `Options` and `build`")
    if not (inspect.isclass(module.Options) and issubclass(module.Options, MethodOptions)):
        raise UserError(f"`{name}.Options` must extend `outrider.speculation.MethodOptions`")
    return module


def members(name: str) -> list[str]:
    """The methods of `a+b`, or the one that is named."""
    return name.split("+")


def drafts_from(name: str) -> str:
    """The sampling parameter that a method drafts from; empty: none."""
    parameters: list[str] = [getattr(find(member), "DRAFTS_FROM", "") for member in members(name)]
    return next(filter(None, parameters), "")


def build(name: str, options: MethodOptions, target: Target) -> Proposer:
    proposer: Any = find(name).build(options, target)
    return proposer  # type: ignore[no-any-return]
