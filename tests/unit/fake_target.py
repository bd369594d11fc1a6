"""A tiny engine for the tests of drafters: it runs a model, verifies drafts, and calls the drafter at each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import tiny
from outrider.cache.pages import Pages
from outrider.device import Cpu
from outrider.kernels import Kernels, SamplingMetadata
from outrider.models import Model, build
from outrider.request import Request
from outrider.speculation import DraftBatch, DraftContext, Proposer, Target
from outrider.types import SamplingParams

SIZE = 4
Work = tuple[Request, int, int]  # a request, tokens of its text to run, tokens that may be drafted


class Stage:
    """The model is the target. At the positions in `surprises` it says something else than it would."""

    def __init__(self, ops: Kernels, name: str = "llama", pages: int = 40, **options: Any) -> None:
        self.ops, self.model = ops, build(tiny.checkpoint(name), ops)
        self.pages = tiny.pages_for(self.model, pages, SIZE)
        self.free = torch.randperm(pages, generator=torch.Generator().manual_seed(3)).tolist()
        self.target = Target(
            self.model,
            options.pop("tokenizer", None),
            ops,
            Cpu(),
            SIZE,
            tiny.COMMON["max_position_embeddings"],
            "float32",
            **options,
        )
        self.surprises: set[int] = set()
        self.drafts: dict[Request, list[int]] = {}
        self.draft_batch: DraftBatch | None = None

    def begin(self, proposer: Proposer) -> None:
        self.proposer = proposer
        for storage in self.target.storages:
            storage.allocate(self.pages.count)
            for layer in storage.layers:  # reads of unwritten entries give NaN
                layer.keys.fill_(torch.nan)
                layer.values.fill_(torch.nan)
            storage.states.fill_(torch.nan)

    def request(self, prompt: Sequence[int], seed: int = 0, **params: Any) -> Request:
        return Request(f"{seed}", list(prompt), SamplingParams(**{"temperature": 0.0, **params}), seed)

    def reach(self, request: Request, positions: int) -> None:
        while len(request.pages) * SIZE < positions:
            request.pages.append(self.free.pop())

    def preempt(self, request: Request) -> None:
        """Give the pages of a request to others, which overwrite them."""
        for storage in self.target.storages:
            for layer in storage.layers:
                layer.keys[request.pages] = torch.nan
        self.free = request.pages + self.free
        request.pages, request.computed = [], 0
        request.preemptions += 1
        self.drafts.pop(request, None)

    def step(self, *works: Work, lookahead: int | None = None) -> list[list[int]]:
        """Run, verify, draft. Returns the drafts; the requests have their new tokens afterwards."""
        texts = [self._text(request, count) for request, count, _ in works]
        for (request, _, width), tokens in zip(works, texts, strict=True):
            self.reach(request, request.computed + len(tokens) + (width + 1 if lookahead is None else lookahead))
        logits, hidden = self.run([(tokens, w[0].computed, w[0].pages) for w, tokens in zip(works, texts, strict=True)])
        contexts: list[DraftContext] = []
        first = 0
        for (request, count, width), tokens in zip(works, texts, strict=True):
            draft = tokens[count:]
            whole = request.computed + count == request.length
            new_tokens = self._verify(request, draft, logits[first + count - 1 :]) if whole else []
            computed = request.computed + count + max(len(new_tokens) - 1, 0)
            contexts.append(DraftContext(request, request.computed, computed, new_tokens, width, first))
            if draft:
                self.proposer.accept([request], [len(new_tokens) - 1])
            first += len(tokens)
        last = torch.tensor(
            [context.tokens(context.computed, context.computed + 1)[0] for context in contexts], dtype=torch.int32
        )
        self.draft_batch = self.proposer.propose(contexts, last, hidden)
        tokens = self.draft_batch.rows(self.draft_batch.tokens)
        parents = None if self.draft_batch.parents is None else self.draft_batch.rows(self.draft_batch.parents)
        for row, context in enumerate(contexts):
            context.request.output += context.new_tokens
            context.request.computed = context.computed
            self.drafts[context.request] = tokens[row] if parents is None else trunk(tokens[row], parents[row])
        return [self.drafts[context.request] for context in contexts]

    def run(self, rows: list[tuple[list[int], int, list[int]]]) -> tuple[Tensor, Tensor | None]:
        states, aux_hidden = self.model.forward(
            tiny.batch(rows, SIZE), self.pages.storages, self.proposer.needs.aux_layers
        )
        return self.model.logits(states), torch.cat(aux_hidden, 1) if aux_hidden else None

    def decode(self, *requests: Request, width: int) -> list[list[int]]:
        return self.step(*[(request, request.length - request.computed, width) for request in requests])

    def _text(self, request: Request, count: int) -> list[int]:
        start = request.computed
        whole = start + count == request.length
        return request.tokens(start, start + count) + (self.drafts.pop(request, []) if whole else [])

    def _verify(self, request: Request, draft: list[int], logits: Tensor) -> list[int]:
        new_tokens: list[int] = []
        for depth, row in enumerate(logits[: len(draft) + 1]):
            new_tokens.append(self.say(request, request.length + depth, row))
            if depth == len(draft) or draft[depth] != new_tokens[-1]:
                break
        return new_tokens

    def say(self, request: Request, position: int, logits: Tensor) -> int:
        token = choose(self.ops, request, position, logits)
        return (token + 1) % logits.shape[0] if position in self.surprises else token


def trunk(tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    """The path of first children: what of a tree the stage verifies."""
    path: list[int] = []
    at = -1
    while at in parents:
        at = list(parents).index(at)
        path.append(tokens[at])
    return path


def choose(ops: Kernels, request: Request, position: int, logits: Tensor) -> int:
    params = request.params
    sampling = SamplingMetadata(
        torch.tensor([params.temperature]),
        torch.tensor([params.top_k], dtype=torch.int32),
        torch.tensor([params.top_p]),
        torch.tensor([params.min_p]),
        torch.tensor([request.seed]),
        torch.tensor([position], dtype=torch.int32),
    )
    return int(ops.sample(logits[None].contiguous(), sampling)[0])


def continuation(model: Model, request: Request, text: Sequence[int], count: int) -> list[int]:
    """What the model would say after `text`, computed from scratch."""
    whole = list(text)
    storage = tiny.pages_for(model, len(text) // SIZE + count, SIZE)
    table = list(range(storage.count))
    begin = 0
    while len(whole) < len(text) + count:
        hidden, _ = model.forward(tiny.batch([(whole[begin:], begin, table)], SIZE), storage.layers)
        begin = len(whole)
        whole.append(choose(model.ops, request, len(whole), model.logits(hidden[-1:])[0]))
    return whole[len(text) :]


def entries(pages: Pages, table: Sequence[int], first: int, stop: int) -> Tensor:
    """Keys and values of positions [first, stop): [layers, 2, positions, G, D]."""
    at = torch.arange(first, stop)
    where, slot = torch.tensor(list(table))[at // SIZE], at % SIZE
    return torch.stack(
        [torch.stack([each[where, :, slot] for each in (layer.keys, layer.values)]) for layer in pages.layers]
    )


def from_scratch(model: Model, text: Sequence[int]) -> Tensor:
    """The entries of a text, computed in one pass: [layers, 2, positions, G, D]."""
    storage = tiny.pages_for(model, len(text) // SIZE + 1, SIZE)
    table = list(range(storage.count))
    model.forward(tiny.batch([(list(text), 0, table)], SIZE), storage.layers)
    return entries(storage, table, 0, len(text))
