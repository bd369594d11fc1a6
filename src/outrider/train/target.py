"""The target as a teacher: the engine's own model and kernels, over whole documents at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import config as configuration
from ..cache.pages import Pages
from ..config import EngineConfig
from ..device import choose_backend, open_device
from ..errors import UserError
from ..kernels import Batch, load
from ..kernels.blocks import dequantize
from ..models import Model, ModelConfig, build
from ..weights import open_checkpoint
from .data.pack import Pack

Array = np.ndarray[Any, Any]
TOKENS = 1 << 15  # of a pass, unless the caller knows better


@dataclass(frozen=True)
class Lesson:
    """A pack, and what the target made of it."""

    pack: Pack
    states: Mapping[int, Tensor]  # by tap: [B, L, E] f32, the state entering layer `tap` (Model.forward)
    last: Tensor  # [B, L, E] f32, after the last norm
    logits: Tensor  # [B, L, V] f32: of the token after each
    _told: dict[int, Told] = field(default_factory=dict, init=False, repr=False, compare=False)  # by size of `ids`

    def about(self, ids: Tensor | None) -> Told:
        """Its logits of the words `ids` [U], None: of all. Students that draft as many draft the same, and share it."""
        size = 0 if ids is None else len(ids)
        if size not in self._told:
            self._told[size] = Told.of(self.logits.flatten(0, 1), ids)
        return self._told[size]


@dataclass(frozen=True)
class Told:
    """What the target says of U words at the B * L places of a lesson."""

    wanted: Tensor  # [B * L, U] f32: logits
    whole: Tensor | None  # [B * L] f32: logsumexp over all words; None: U are all
    best: Tensor  # [B * L] int64: the likeliest of all

    @staticmethod
    def of(logits: Tensor, ids: Tensor | None, rows: int = 4096) -> Told:
        """Of logits [B * L, V], `rows` at a time."""
        begins = range(0, len(logits), rows)
        best = torch.cat([logits[begin : begin + rows].argmax(-1) for begin in begins])
        if ids is None:
            return Told(logits, None, best)
        wanted, whole = logits.new_empty(len(logits), len(ids)), logits.new_empty(len(logits))
        for begin in begins:
            part = slice(begin, begin + rows)
            torch.index_select(logits[part], 1, ids, out=wanted[part])
            torch.logsumexp(logits[part], -1, out=whole[part])
        return Told(wanted, whole, best)


@dataclass(frozen=True)
class Subject:
    """What a student is told of the target before it begins."""

    model: str  # the name or path that the user gave
    config: ModelConfig
    embedding: Tensor  # [V, E] f32, as it enters the first layer
    head: Tensor  # [V, E] f32
    taps: tuple[int, ...]  # the model's default
    counts: Tensor  # [V] int64: how often the target wrote each token
    torch_device: torch.device
    weights: Callable[[str], Tensor]  # its layers' matrices and norms by their names, f32


class Teacher:
    """A target without an engine around it. tokens: the most that go through the model at once."""

    def __init__(self, model: str, backend: str = "auto", tokens: int = TOKENS) -> None:
        if tokens < 1:
            raise UserError(f"`tokens` is {tokens}: a pass of the target needs at least 1")
        self.name, self.tokens = model, tokens
        config = EngineConfig(model=model, backend=choose_backend(backend))
        configuration.check(config)
        self.device = open_device(config.backend)
        checkpoint = open_checkpoint(model, device=self.device.torch_device)
        self.model = build(checkpoint, load(config.backend))
        shape = self.model.config
        dtype = configuration.kv_dtype(config, checkpoint.float32)
        self.pages = Pages(shape.layers, shape.kv_heads, config.page_size, shape.head_dim, dtype)
        self._logits = torch.empty(0, device=self.device.torch_device)  # the largest that were asked for so far

    @torch.no_grad()
    def teach(self, pack: Pack, taps: Collection[int] = (), with_logits: bool = True) -> Lesson:
        """What the target makes of a pack on the host; zeros at padding. Logits are valid until the next call.

        taps: as Model.forward has them. Without logits, those of the lesson have no columns.
        """
        plan = plan_of(pack, self.pages.page_size)
        self._check(plan)
        if plan.pages > self.pages.count:
            self.pages.allocate(plan.pages, self.device)
        shape, width = tuple(pack.tokens.shape), self.model.config.width
        wanted = tuple(sorted(set(taps)))
        there = pack.to(self.device.torch_device)
        states = torch.zeros(
            1 + len(wanted), shape[0] * shape[1], width, device=self.device.torch_device
        )  # [taps, B * L, E]
        for begin in range(0, len(plan.tokens), self.tokens):
            end = min(begin + self.tokens, len(plan.tokens))
            places = self.device.upload(plan.places[begin:end], torch.int64)
            hidden, tapped = self.model.forward(self._batch(plan, begin, end), self.pages.layers, wanted)  # [T, E]
            for state, found in zip(states, (hidden, *tapped), strict=True):
                state.index_copy_(0, places, found)
        last = self.model.ops.rms_norm(states[0], self.model.norm, self.model.config.eps)  # [B * L, E]
        logits = self._head(states[0]) if with_logits else states.new_empty(shape[0] * shape[1], 0)  # [B * L, V]
        by_tap = {tap: state.view(*shape, width) for tap, state in zip(wanted, states[1:], strict=True)}
        return Lesson(there, by_tap, last.view(*shape, width), logits.view(*shape, -1))

    def subject(self, counts: Tensor) -> Subject:
        """counts: [V] int64, how often the target wrote each token."""
        model = self.model
        embedding = self._numbers(model.embedding, model.embedding_scale)
        shared = model.head is model.embedding and model.embedding_scale == 1
        return Subject(
            model=self.name,
            config=model.config,
            embedding=embedding,
            head=embedding if shared else self._numbers(model.head, 1.0),
            taps=usual_taps(model),
            counts=counts,
            torch_device=self.device.torch_device,
            weights=self._stored,
        )

    def _stored(self, name: str) -> Tensor:
        weight = open_checkpoint(self.name).weight(name)
        return weight.data.float() if weight.data.is_floating_point() else dequantize(weight)

    def _numbers(self, matrix: object, scale: float) -> Tensor:
        """A table as the kernels read it, all rows of it: [V, E] f32."""
        everything = self.device.upload(np.arange(self.model.config.vocabulary), torch.int32)
        return self.model.ops.embed(matrix, everything, scale)

    def _head(self, hidden: Tensor) -> Tensor:
        """Logits of states before the last norm, padding too, whose zeros stay zeros: [R, E] to [R, V] f32."""
        rows, vocabulary = len(hidden), self.model.config.vocabulary
        if self._logits.numel() < rows * vocabulary:
            self._logits = torch.empty(0, device=self.device.torch_device)  # first: both at once might be too much
            self._logits = torch.empty(rows * vocabulary, device=self.device.torch_device)
        logits = self._logits[: rows * vocabulary].view(rows, vocabulary)
        for begin in range(0, rows, self.tokens):
            end = begin + self.tokens
            self.model.logits(hidden[begin:end], logits[begin:end])
        return logits

    def _batch(self, plan: Plan, begin: int, end: int) -> Batch:
        """Tokens begin .. end - 1 of a plan, as one step. A document may go on in the next: its keys stay."""
        first, last = np.searchsorted(plan.starts, (begin, end - 1), "right") - 1
        starts = np.clip(plan.starts[first : last + 2], begin, end) - begin
        tables = np.minimum(plan.first_pages[first : last + 1, None] + np.arange(plan.width), plan.pages - 1)

        def upload(values: Array) -> Tensor:
            return self.device.upload(values, torch.int32)

        return Batch(
            tokens=upload(plan.tokens[begin:end]),
            positions=upload(plan.positions[begin:end]),
            slots=upload(plan.slots[begin:end]),
            query_starts=upload(starts),
            page_tables=upload(tables),
        )

    def _check(self, plan: Plan) -> None:
        shape = self.model.config
        strangers = plan.tokens[(plan.tokens < 0) | (plan.tokens >= shape.vocabulary)]
        if len(strangers):
            raise UserError(
                f"a document holds token {strangers[0]}, but the vocabulary of `{self.name}` ends at "
                f"{shape.vocabulary - 1}: train on answers that this model wrote"
            )
        longest = int(plan.positions.max(initial=-1)) + 1
        if longest > shape.context:
            raise UserError(
                f"a document has {longest} tokens, but `{self.name}` was trained for {shape.context}: "
                f"pack rows of at most {shape.context}"
            )


@dataclass(frozen=True)
class Plan:
    """The documents of a pack one after the other, without padding, each with pages of its own. T: all tokens."""

    tokens: Array  # [T]
    positions: Array  # [T]
    slots: Array  # [T]
    places: Array  # [T]: in the pack, row after row
    starts: Array  # [documents + 1]
    first_pages: Array  # [documents]; the pages of a document are neighbours
    width: int  # pages of the longest
    pages: int


def plan_of(pack: Pack, page_size: int) -> Plan:
    documents, positions = pack.documents.numpy(), pack.positions.numpy()
    # A row begins with padding's number before it, so that its first document begins something, too.
    before = np.pad(documents, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    places = np.flatnonzero(documents.ravel() >= 0)  # [T]
    begins = (documents != before).ravel()[places]  # [T]
    numbers = np.cumsum(begins) - 1  # [T], the document of each token
    positions = positions.ravel()[places]
    assert np.array_equal(begins, positions == 0), "positions of a pack count from 0 in each document"
    starts = np.append(np.flatnonzero(begins), len(places))  # [documents + 1]
    needed = -(-np.diff(starts) // page_size)  # [documents]
    first_pages = np.cumsum(needed) - needed
    return Plan(
        tokens=pack.tokens.numpy().ravel()[places],
        positions=positions,
        slots=first_pages[numbers] * page_size + positions,
        places=places,
        starts=starts,
        first_pages=first_pages,
        width=int(needed.max(initial=1)),
        pages=int(needed.sum()),
    )


def usual_taps(model: Model) -> tuple[int, ...]:
    """The model's default; spread evenly where it has too few layers for that."""
    try:
        return model.default_aux_layers()
    except UserError:
        layers = model.config.layers
        return tuple(sorted({-(-layers * part // 4) for part in (1, 2, 3)}))
