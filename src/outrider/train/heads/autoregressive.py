"""Heads that draft one token after the other, trained on what they will do: drafting on from their own states.

Row t of a text reads token t + 1 beside a state, at first the target's at t, and guesses token t + 2. Step s goes on
from there: the row reads token t + 1 + s beside its own output of the step before, and guesses token t + 2 + s. It
sees the first entries of its document up to its own, and its own of all steps. Letters: S steps, R answered tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...kernels.attention_ranges import AttentionRanges, OwnKeys
from ..data.pack import Pack
from ..losses import Loss, score
from ..target import Lesson, Subject
from .base import Report, Student
from .layers import DecoderLayer, LayerShape, Norm, Turning, attend, causal, narrow


@dataclass(frozen=True)
class Plan:
    """What all such heads are told."""

    shape: LayerShape
    layers: int
    weights: tuple[float, ...]  # of the losses, by step
    loss: Loss
    rows: int  # logits that are there at a time


class Memory:
    """Keys and values of one layer: first entries, for every row after them; then each row's own."""

    def __init__(self, seen: tuple[Tensor, Tensor]) -> None:
        self.seen = seen  # begins and ends (`causal`)
        self.first: tuple[Tensor, Tensor] | None = None  # [B, L, G, D] each
        self.own: list[tuple[Tensor, Tensor]] = []  # by step from 1 on

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """The next step [B, L, H, D], [B, L, G, D] twice, to [B, L, H * D]."""
        if self.first is None:
            self.first = keys, values
            return attend(query, AttentionRanges(keys, values, *self.seen))
        self.own.append((keys, values))
        own_keys, own_values = (torch.stack(parts, 2) for parts in zip(*self.own, strict=True))  # [B, L, s, G, D]
        return attend(query, AttentionRanges(*self.first, *self.seen, OwnKeys(own_keys, own_values)))


class Layer(DecoderLayer):
    def forward(self, x: Tensor, read: Tensor, places: Tensor, turning: Turning, memory: Memory) -> Tensor:
        """x [B, L, E] f32 and what attention is to read [B, L, inputs], normed, to [B, L, E] f32."""
        query = self.self_attn.queries(read, places, turning)
        mixed = memory.attend(query, *self.self_attn.entries(read, places, turning))
        x = x + self.self_attn.o_proj(mixed)
        inner: Tensor = self.mlp(narrow(self.post_attention_layernorm(x)))
        return x + inner


class Unrolled(Student):
    embedding: Tensor  # [V, E]
    ids: Tensor | None  # [U]: the tokens that it can draft, rising; None: all

    def __init__(self, subject: Subject, plan: Plan, first: Layer, positions: int, ids: Tensor | None) -> None:
        super().__init__()
        shape = plan.shape
        self.plan, self.target = plan, subject.config
        # The engine's heads read the embedding as it is stored.
        scale = subject.config.embedding_scale
        self.register_buffer("embedding", subject.embedding / scale if scale != 1 else subject.embedding, False)
        self.register_buffer("ids", ids)
        self.layers = nn.ModuleList([first, *(Layer(shape) for _ in range(plan.layers - 1))])
        self.norm = Norm(shape.width, shape.eps)
        self.turning = Turning(shape.rope, shape.head_dim, positions)

    @property
    def drafted(self) -> Tensor | None:
        return self.ids

    @property
    @abstractmethod
    def token_norm(self) -> Norm: ...

    @property
    @abstractmethod
    def matrix(self) -> Tensor: ...  # [U, E], to the logits

    @abstractmethod
    def states(self, lesson: Lesson) -> Tensor:
        """What entries read of the target: [B, L, E] f32."""

    @abstractmethod
    def enter(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Normed tokens and states [B, L, E] as what the first layer adds to [B, L, E] f32, and what it reads."""

    def outputs(self, lesson: Lesson) -> Iterator[Tensor]:
        """By step: what goes to the logits and to the next step, [B, L, E] f32."""
        pack, length = lesson.pack, lesson.pack.tokens.shape[1]
        ahead = functional.pad(pack.tokens, (0, len(self.plan.weights)))  # [B, L + S]
        tokens = narrow(self.token_norm(functional.embedding(ahead, self.embedding)))  # [B, L + S, E]
        seen, last = causal(pack.documents), len(self.turning.cos) - 1
        memories = [Memory(seen) for _ in self.layers]
        state = self.states(lesson)
        for step in range(1, 1 + len(self.plan.weights)):
            places = (pack.positions + step).clamp(max=last)  # beyond it nothing is asked
            x, read = self.enter(tokens[:, step : step + length], state)
            for number, (layer, memory) in enumerate(zip(self.layers, memories, strict=True)):
                assert isinstance(layer, Layer)
                x = layer(x, narrow(layer.input_layernorm(x)) if number else read, places, self.turning, memory)
            state = self.norm(x)
            yield state

    def forward(self, lesson: Lesson) -> Report:
        answers = Answers.of(lesson, self.ids)
        losses, counts = [], []
        first = torch.ones((), device=lesson.logits.device)
        for step, states in enumerate(self.outputs(lesson)):
            entries, there = answers.entries(step)  # [R] each
            weights = (there & (answers.best >= 0)).float()
            first = first if step else weights.sum().clamp(min=1)
            scores = score(
                [(states.flatten(0, 1).index_select(0, entries), self.matrix)],
                answers.wanted,
                weights * self.plan.weights[step],
                self.plan.loss,
                answers.whole,
                self.plan.rows,
                answers.tokens - 1,
            )
            losses.append(scores.loss)
            right = there & (scores.best == answers.best)
            counts.append(torch.stack([there.sum(), right.sum(), (scores.overlap * there).sum()]))
        counted, correct, overlap = torch.stack(counts, 1).float().detach()  # [S] each
        return Report(torch.stack(losses).sum() / first, counted, correct, overlap)


@dataclass(frozen=True)
class Answers:
    """The tokens that the target wrote, and what it held likely in their places."""

    pack: Pack
    tokens: Tensor  # [R]: where they are in all rows, one after the other
    wanted: Tensor  # [B * L, U] f32: logits of what can be drafted; a token's are those at the place before it
    whole: Tensor | None  # [R] f32: logsumexp of all logits; None: U is everything
    best: Tensor  # [R]: the likeliest, a column of U; -1: none of them

    @staticmethod
    def of(lesson: Lesson, ids: Tensor | None) -> Answers:
        written = lesson.pack.answered & (lesson.pack.documents >= 0)
        written[:, :2] = False  # no entry comes before them
        tokens = written.flatten().nonzero().flatten()  # the only time that the host waits
        told = lesson.about(ids)
        whole, best = None if told.whole is None else told.whole[tokens - 1], told.best[tokens - 1]
        if ids is not None:
            columns = ids.new_full((lesson.logits.shape[-1],), -1)  # [V]
            columns[ids] = torch.arange(len(ids), device=ids.device)
            best = columns[best]
        return Answers(lesson.pack, tokens, told.wanted, whole, best)

    def entries(self, step: int) -> tuple[Tensor, Tensor]:
        """The rows that guess them in that step [R], and whether these are there at all."""
        rows = self.tokens - 2 - step
        documents, column = self.pack.documents.flatten(), self.tokens % self.pack.tokens.shape[1]
        rows = rows.clamp(min=0)
        return rows, (column >= 2 + step) & (documents[rows] == documents[self.tokens])
