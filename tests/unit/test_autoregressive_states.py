"""Drafters that read the target's states: each entry joins a token to the true state before it."""

from __future__ import annotations

import pytest
import torch
from fake_target import SIZE, Stage, continuation, entries
from torch import Tensor

import tiny
from outrider.kernels import Batch, Kernels, load
from outrider.request import Request
from outrider.speculation.drafters.autoregressive import Autoregressive

WIDTH = 3


@pytest.fixture(scope="module", params=["cpu", "reference"])
def ops(request: pytest.FixtureRequest) -> Kernels:
    return load(request.param)


class Chain:
    """A network of whole numbers that reads states: its entry joins a token to the state before it."""

    parallel, mask, ids = False, -1, None
    modulus = 4093

    def __init__(self, stage: Stage, context: int = 128) -> None:
        self.context, self.features = context, 2
        self.pages = stage.target.storage(1, 1, 2, "float32", states=2)
        self.vocabulary = stage.model.config.vocabulary

    def project_features(self, features: Tensor) -> Tensor:
        return features + 3

    def run(self, batch: Batch, features: Tensor | None) -> Tensor:
        assert features is not None and features.shape == (batch.tokens.shape[0], 2)
        assert not features.isnan().any()
        layer = self.pages.layers[0]
        for token, slot, feature in zip(batch.tokens.tolist(), batch.slots.tolist(), features, strict=True):
            layer.keys[slot // SIZE, 0, slot % SIZE] = feature
            layer.values[slot // SIZE, 0, slot % SIZE] = token
        starts = batch.query_starts.tolist()
        out = []
        for row, table in enumerate(batch.page_tables):
            for position in batch.positions[starts[row] : starts[row + 1]].tolist():
                out.append(self.fold(entries(self.pages, table.tolist(), 1, position + 1)[0]))
        return torch.tensor(out)

    def fold(self, held: Tensor) -> list[float]:
        """A number that depends on every entry and on their order. held [2, positions, 1, 2]."""
        number = 1
        for key, value in zip(held[0, :, 0, 0].tolist(), held[1, :, 0, 0].tolist(), strict=True):
            number = (number * 31 + int(key) * 7 + int(value)) % self.modulus
        return [float(number)]

    def logits(self, states: Tensor) -> Tensor:
        said = torch.zeros(states.shape[0], self.vocabulary)
        said[torch.arange(states.shape[0]), states[:, 0].long() % self.vocabulary] = 1.0
        return said

    def feedback_features(self, states: Tensor) -> Tensor:
        return torch.cat([states, states + 1], 1)


class AuxStage(Stage):
    """A target whose states are whole numbers that stand for the whole text up to a position."""

    held: dict[int, list[int]]  # by first page: what was run so far

    def run(self, rows: list[tuple[list[int], int, list[int]]]) -> tuple[Tensor, Tensor]:
        logits, _ = super().run(rows)
        states = []
        for tokens, start, table in rows:
            text = self.held.get(table[0], [])[:start] + tokens
            self.held[table[0]] = text
            states += [state_of(text[: at + 1]) for at in range(start, start + len(tokens))]
        return logits, torch.tensor(states)


def state_of(text: list[int]) -> list[float]:
    number = 1
    for token in text:
        number = (number * 17 + token) % 2039
    return [float(number), float(number % 7)]


def make_stage(ops: Kernels) -> tuple[AuxStage, Chain]:
    stage = AuxStage(ops)
    stage.held = {}
    network = Chain(stage)
    stage.begin(Autoregressive(network, stage.target, WIDTH))
    return stage, network


def assert_chain(stage: AuxStage, network: Chain, request: Request, width: int = WIDTH) -> None:
    """Entries and draft as they follow from the text alone."""
    text = request.prompt + request.output
    keys = torch.tensor([state_of(text[:at]) for at in range(1, len(text))]) + 3  # [positions, 2]
    values = torch.tensor(text[1:], dtype=torch.float32)[:, None].expand(-1, 2)
    held = torch.stack([keys, values])[:, :, None]  # [2, positions, 1, 2]
    assert torch.equal(entries(network.pages, request.pages, 1, len(text))[0], held)
    draft: list[int] = []
    for _ in range(width):
        state = network.fold(held)[0]
        draft.append(int(state) % network.vocabulary)
        entry = torch.tensor([[state, state + 1], [draft[-1], draft[-1]]])[:, None, None]
        held = torch.cat([held, entry], 1)
    assert stage.drafts[request] == draft


@pytest.mark.parametrize("chunk", [1, 3, SIZE, 9])
def test_states_stand_before_their_tokens(ops: Kernels, chunk: int) -> None:
    stage, network = make_stage(ops)
    request, other = stage.request(tiny.prompt(9)), stage.request(tiny.prompt(6, 1), 1)
    stage.decode(other, width=1)
    while request.computed + chunk < 9:
        stage.step((other, other.length - other.computed, 2), (request, chunk, 0), lookahead=0)
    stage.decode(other, request, width=WIDTH)
    assert_chain(stage, network, request)
    assert_chain(stage, network, other)
    for _ in range(3):
        # Accepted drafts came from drafted states: their entries are computed again from true ones.
        stage.drafts[request] = continuation(stage.model, request, request.prompt + request.output, 2)
        before = request.length
        stage.decode(request, other, width=WIDTH)
        assert request.length == before + 3
        assert_chain(stage, network, request)
        assert_chain(stage, network, other)


def test_states_survive_preemption_and_shared_prefixes(ops: Kernels) -> None:
    stage, network = make_stage(ops)
    first = stage.request(tiny.prompt(14))
    stage.step((first, 6, 0))
    stage.decode(first, width=WIDTH)
    second = stage.request([*tiny.prompt(14)[:12], 7], 1)
    second.pages, second.computed = first.pages[:3], 12
    stage.decode(second, width=WIDTH)
    assert_chain(stage, network, second)
    shared = first.pages[:2]
    first.pages = first.pages[2:]
    stage.preempt(first)
    first.pages, first.computed = shared, 8
    stage.decode(first, width=WIDTH)
    assert_chain(stage, network, first)


def test_without_a_state_nothing_is_drafted(ops: Kernels) -> None:
    stage, network = make_stage(ops)
    request, other = stage.request(tiny.prompt(9)), stage.request(tiny.prompt(9, 1), 1)
    stage.decode(request, other, width=WIDTH)
    request.computed += 1  # a step that the drafter never saw
    request.output.append(5)
    stage.drafts.clear()
    drafts = stage.decode(request, other, width=WIDTH)
    assert drafts[0] == []
    assert_chain(stage, network, other)
