"""Heads that fill a block of masks say what their formulas say, whatever happened to the pages that they read."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from fake_target import SIZE, Stage, entries
from torch import Tensor

import tiny
import tiny_blocks
from outrider.cache.pages import Pages
from outrider.kernels import Kernels, load
from outrider.models import Model, build
from outrider.models.block_head import BlockHead
from outrider.request import Request
from outrider.speculation import find
from outrider.speculation.checkpoints import open_head
from tiny_blocks import Plan

TEXT = tiny.prompt(14)
FLASH: dict[str, dict[str, Any]] = {
    "plain": {},
    "one layer, grouped keys": {"layers": 1, "kv_heads": 1, "theta": 500.0},
    "five aux layers": {"aux_layers": (3, 0, 1, 2, 3)},
    "one aux layer": {"aux_layers": (2,)},
    "two aux layers": {"aux_layers": (1, 3)},
    "from the anchor": {"from_anchor": True},
    "without head norms": {"head_norms": False},
    "biases": {"bias": True},
    "target's head, some tokens": {"own_head": False},
    "target's head, all tokens": {"own_head": False, "draft_vocabulary": None},
    "all tokens": {"draft_vocabulary": None},
    "own embedding": {"own_embedding": True},
    "own mask": {"mask_embedding": True},
    "narrower than the target": {"width": 32, "own_embedding": True},
    "windows": {"windows": (3, 0)},
    "windows, both ways": {"windows": (4, 4), "both_ways": True},
    "half precision": {"dtype": torch.bfloat16, "own_embedding": True},
}
SPARK: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gated": {"markov": "gated", "confidence_markov": False},
    "rnn": {"markov": "rnn", "confidence": False},
    "rnn in its place": {"markov": "rnn", "from_anchor": False},
    "no bias": {"rank": 0, "confidence_markov": False},
    "high rank": {"rank": 32, "draft_vocabulary": None},
}
PLANS = {name: Plan(**each) for name, each in FLASH.items()}
PLANS |= {f"dspark {name}": Plan(method="dspark", **each) for name, each in SPARK.items()}


class Formulas:
    """A head in plain torch, one block at a time, all keys in one tensor."""

    def __init__(self, plan: Plan, **more: Tensor) -> None:
        self.plan = plan
        self.weights = {name: tensor.float() for name, tensor in (tiny_blocks.tensors(plan) | more).items()}
        target = tiny.original(plan.target)
        self.embedding = self.weights.get("embed_tokens.weight", target.get_input_embeddings().weight.detach())
        self.head = self.weights.get("lm_head.weight", target.get_output_embeddings().weight.detach())
        if "lm_head.weight" not in self.weights and plan.ids is not None:
            self.head = self.head[plan.ids]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.weights[name + ".weight"], 1e-5)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self.weights[name + ".weight"], self.weights.get(name + ".bias"))

    def states(self, features: Tensor, token: int, size: int) -> Tensor:
        """Features of the text [T, F] and the token after it, with masks to a block of `size`: [size, H]."""
        context = self.norm(self.linear(features, "fc"), "hidden_norm")  # [T, H]
        embedded = self.embedding[[token] + [self.plan.mask] * (size - 1)]
        if self.plan.mask_embedding:
            embedded = torch.cat([embedded[:1], self.weights["mask_embedding"].expand(size - 1, -1)])
        x = embedded.float()
        for layer in range(self.plan.layers):
            prefix = f"layers.{layer}."
            x = x + self.attention(self.norm(x, prefix + "input_layernorm"), context, layer)
            y = self.norm(x, prefix + "post_attention_layernorm")
            gated = functional.silu(self.linear(y, prefix + "mlp.gate_proj")) * self.linear(y, prefix + "mlp.up_proj")
            x = x + self.linear(gated, prefix + "mlp.down_proj")
        return self.norm(x, "norm")

    def attention(self, x: Tensor, context: Tensor, layer: int) -> Tensor:
        plan, prefix = self.plan, f"layers.{layer}.self_attn."
        whole, length, size = torch.cat([context, x]), len(context), len(x)
        query = self.linear(x, prefix + "q_proj").view(size, -1, plan.head_dim)
        key, value = (
            self.linear(whole, f"{prefix}{part}_proj").view(length + size, -1, plan.head_dim) for part in "kv"
        )
        if plan.head_norms:
            query, key = self.norm(query, prefix + "q_norm"), self.norm(key, prefix + "k_norm")
        positions = torch.arange(length + size)
        query, key = self.rotate(query, positions[length:]), self.rotate(key, positions)
        key, value = (each.repeat_interleave(plan.heads // plan.kv_heads, 1) for each in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * plan.head_dim**-0.5
        scores = scores.masked_fill(~self.visible(length, size, layer), -torch.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
        return self.linear(mixed.flatten(1), prefix + "o_proj")

    def visible(self, length: int, size: int, layer: int) -> Tensor:
        """[size, keys]: the window is the same for all of the block, which it does not cut."""
        window = self.plan.sliding[layer]
        inside = torch.ones(size, size, dtype=torch.bool)
        if window and not self.plan.both_ways:
            inside = inside.tril()
        before = torch.arange(length) >= (length - window if window else 0)
        return torch.cat([before.expand(size, -1), inside], 1)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        half = self.plan.head_dim // 2
        angles = positions[:, None] * self.plan.theta ** (-torch.arange(half) / half)  # [T, D / 2]
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        left, right = x.chunk(2, -1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)

    def step(self, state: Tensor, before: int, memory: Tensor) -> tuple[Tensor, Tensor]:
        """The bias by the token before, [U], and what is kept of the block, [M]."""
        plan, prefix = self.plan, "markov_head."
        if plan.method == "dflash" or not plan.rank:
            return torch.zeros(len(self.head)), memory
        mixed = embedded = self.weights[prefix + "markov_w1.weight"][before]
        if plan.markov == "gated":
            mixed = self.linear(torch.cat([state, embedded]), prefix + "gate_proj").sigmoid() * embedded
        if plan.markov == "rnn":
            gate, fresh, out = self.linear(torch.cat([memory, embedded, state]), prefix + "joint_proj").chunk(3)
            memory = gate.sigmoid() * memory + (1 - gate.sigmoid()) * fresh.tanh()
            mixed = out.tanh()
        return self.linear(mixed, prefix + "markov_w2"), memory

    def sure(self, state: Tensor, before: int) -> float | None:
        if self.plan.method == "dflash" or not self.plan.confidence:
            return None
        if self.plan.confidence_markov:
            state = torch.cat([state, self.weights["markov_head.markov_w1.weight"][before]])
        return float(self.linear(state, "confidence_head.proj").sigmoid())

    def drafts(self, features: Tensor, token: int, width: int) -> tuple[list[int], list[Tensor], list[float | None]]:
        """Return the argmax tokens, the logits [V] of each, and the confidence."""
        unsaid = 0 if self.plan.anchored else 1
        states = self.states(features, token, width + unsaid)
        memory, before = torch.zeros(self.plan.rank), token
        if unsaid:
            memory = self.step(states[0], before, memory)[1]
        tokens: list[int] = []
        logits: list[Tensor] = []
        sure: list[float | None] = []
        for state in states[unsaid:]:
            bias, memory = self.step(state, before, memory)
            sure.append(self.sure(state, before))
            found = self.head @ state + bias
            spread = torch.full((tiny.VOCABULARY,), -torch.inf)
            spread[slice(None) if self.plan.ids is None else self.plan.ids] = found
            logits.append(spread)
            before = int(spread.argmax())
            tokens.append(before)
        return tokens, logits, sure


@pytest.fixture(scope="module", params=["cpu", "reference"])
def ops(request: pytest.FixtureRequest) -> Kernels:
    return load(request.param)


@functools.cache
def features(aux_layers: tuple[int, ...], text: tuple[int, ...]) -> Tensor:
    """What the target's layers are given, side by side: [T, F]."""
    model = build(tiny.checkpoint("llama"), load("reference"))
    return torch.cat(tiny.run(model, text, len(text), aux_layers)[1], 1)


def assemble(folder: Path, model: Model) -> BlockHead[Pages]:
    head = open_head(str(folder), model.config)
    layers = head.shape.layers
    pages = Pages(layers.layers, layers.kv_heads, SIZE, layers.head_dim, "float32")
    pages.allocate(12)
    return BlockHead(head, model, pages, 48)


def states_of(network: BlockHead[Pages], plan: Plan, size: int) -> Tensor:
    """Of a block behind all tokens of TEXT but the last."""
    table, length = [7, 2, 9, 0, 4, 11], len(TEXT) - 1
    context = tiny.batch([(TEXT[:-1], 0, table)], SIZE)
    network.store(network.project_features(features(plan.aux_layers, tuple(TEXT[:-1]))), context)
    return network.run(tiny.batch([([TEXT[-1], *[plan.mask] * (size - 1)], length, table)], SIZE))


def close(found: Tensor, expected: Tensor, plan: Plan) -> bool:
    exact = 1e-4 if plan.dtype is torch.float32 else 2e-3  # a backend may give bfloat16 rows fewer bits
    return torch.allclose(found, expected, atol=exact, rtol=exact)


@pytest.mark.parametrize("name", PLANS)
def test_forward(name: str, tmp_path: Path, ops: Kernels) -> None:
    plan = PLANS[name]
    tiny_blocks.write(plan, tmp_path)
    network = assemble(tmp_path, build(tiny.checkpoint("llama"), ops))
    formulas = Formulas(plan)
    for size in (plan.block, 3):
        found = states_of(network, plan, size)
        assert close(found, formulas.states(features(plan.aux_layers, tuple(TEXT[:-1])), TEXT[-1], size), plan)
    assert network.features == len(plan.aux_layers) * 64


@pytest.mark.parametrize("name", PLANS)
def test_drafter(name: str, tmp_path: Path, ops: Kernels) -> None:
    """Tokens, logits and confidence of a draft, from a prompt that came in two parts."""
    plan = PLANS[name]
    stage = Stage(ops, sampled=True, coupled=False)
    begin(stage, plan, tmp_path)
    request = stage.request(TEXT)
    stage.step((request, 9, 5))
    stage.step((request, 5, 5))
    assert stage.draft_batch is not None and stage.draft_batch.logits is not None
    tokens, logits, sure = Formulas(plan).drafts(features(plan.aux_layers, tuple(TEXT)), request.output[0], 5)
    assert stage.drafts[request] == tokens
    assert close(stage.draft_batch.logits[0], torch.stack(logits), plan)
    if sure[0] is None:
        assert stage.draft_batch.confidence is None  # sampled tokens may not be chosen by their probability
    else:
        assert stage.draft_batch.confidence is not None
        assert close(torch.tensor(stage.draft_batch.confidence[0]), torch.tensor(sure), plan)


@pytest.mark.parametrize("name", PLANS)
def test_confidence_of_the_argmax_is_its_probability(name: str, tmp_path: Path, ops: Kernels) -> None:
    """Of the logits: a confidence that does not know the token tells less."""
    plan = PLANS[name]
    stage = Stage(ops)
    begin(stage, plan, tmp_path)
    request = stage.request(TEXT)
    stage.step((request, 14, 5))
    tokens, logits, _ = Formulas(plan).drafts(features(plan.aux_layers, tuple(TEXT)), request.output[0], 5)
    shares = [torch.softmax(row, -1)[token] for row, token in zip(logits, tokens, strict=True)]
    assert stage.drafts[request] == tokens
    assert stage.draft_batch is not None and stage.draft_batch.confidence is not None
    assert close(torch.tensor(stage.draft_batch.confidence[0]), torch.stack(shares), plan)


# ---- what the pages hold ----

METHODS = ("dflash", "dspark")


def begin(stage: Stage, plan: Plan, folder: Path, **options: Any) -> Formulas:
    model = tiny_blocks.write(plan, folder)["model"]
    module = find(plan.method)
    stage.begin(module.build(module.Options(model=model, **options), stage.target))
    return Formulas(plan)


def expected(formulas: Formulas, request: Request, width: int) -> list[int]:
    text = request.prompt + request.output
    if width < 1:
        return []
    return formulas.drafts(features(formulas.plan.aux_layers, tuple(text[:-1])), text[-1], width)[0]


@pytest.mark.parametrize("method", METHODS)
def test_a_text_that_goes_its_own_way(method: str, tmp_path: Path, ops: Kernels) -> None:
    """Drafts that are accepted, cut short and rejected, beside a request whose prompt comes in chunks."""
    stage = Stage(ops)
    formulas = begin(stage, Plan(method=method, windows=(9, 0)), tmp_path)
    stage.surprises = {16, 19, 20, 25}
    first, second = stage.request(TEXT), stage.request(tiny.prompt(11, seed=4), seed=1)
    stage.step((first, 14, 7), (second, 3, 5))
    assert stage.drafts[first] == expected(formulas, first, 7) and stage.drafts[second] == []
    stage.drafts[first] = truth(stage, first, 3)  # as if the draft were right
    stage.step((first, 1, 4), (second, 3, 5))
    assert first.length > 16 and stage.drafts[first] == expected(formulas, first, 4)
    stage.step((first, 1, 0), (second, 5, 2))
    assert stage.drafts[first] == [] and stage.drafts[second] == expected(formulas, second, 2)
    for width in (1, 7, 3):
        stage.decode(first, second, width=width)
        for request in (first, second):
            assert stage.drafts[request] == expected(formulas, request, width)


def truth(stage: Stage, request: Request, count: int) -> list[int]:
    """What the target says next, as long as nothing surprises it."""
    text = request.prompt + request.output
    with torch.no_grad():
        for _ in range(count):
            text = [*text, int(tiny.original("llama")(torch.tensor([text])).logits[0, -1].argmax())]
    return text[request.length :]


@pytest.mark.parametrize("method", METHODS)
def test_entries_do_not_depend_on_how_a_text_came(method: str, tmp_path: Path, ops: Kernels) -> None:
    found = []
    for chunks in ([14], [5, 4, 5], [1] * 14):
        stage = Stage(ops)
        begin(stage, Plan(method=method), tmp_path)
        request = stage.request(TEXT)
        for count in chunks:
            stage.step((request, count, 0))
        found.append(entries(stage.target.storages[0], request.pages, 0, 14))
    assert not found[0].isnan().any()
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_pages_are_shared_and_come_anew(tmp_path: Path, ops: Kernels) -> None:
    stage = Stage(ops)
    formulas = begin(stage, Plan(method="dspark"), tmp_path)
    first = stage.request(TEXT)
    stage.step((first, 14, 6))
    heir = stage.request([*TEXT[:12], 5, 6], seed=1)
    heir.pages, heir.computed = first.pages[:2], 8  # two full pages, as the prefix cache supplies them
    stage.step((heir, 6, 6))
    assert stage.drafts[heir] == expected(formulas, heir, 6)
    stage.preempt(first)
    stage.free, stage.drafts = stage.free[8:] + stage.free[:8], {}
    stage.step((first, first.length, 6))
    assert stage.drafts[first] == expected(formulas, first, 6)


@pytest.mark.parametrize("method", METHODS)
def test_blocks_end_where_pages_and_context_do(method: str, tmp_path: Path, ops: Kernels) -> None:
    stage = Stage(ops, pages=60)
    formulas = begin(stage, Plan(method=method), tmp_path)
    unsaid = 1 if method == "dflash" else 0
    request, other = stage.request(TEXT), stage.request(tiny.prompt(5), seed=1)
    stage.step((request, 14, 7), (other, 5, 7), lookahead=0)  # 4 pages: 2 positions are left; 2 pages: 3
    assert stage.drafts[request] == expected(formulas, request, 2 - unsaid)
    assert stage.drafts[other] == expected(formulas, other, 3 - unsaid)
    full = stage.request(TEXT[:12], seed=2)
    stage.step((full, 12, 7), lookahead=0)
    assert stage.drafts[full] == []
    long = stage.request(tiny.prompt(125), seed=3)  # 128 positions are all that there are
    stage.step((long, 125, 7))
    assert stage.drafts[long] == expected(formulas, long, 3 - unsaid)


def test_needs(tmp_path: Path, ops: Kernels) -> None:
    for method, drafts, ahead in (("dflash", 7, 8), ("dspark", 8, 8)):
        stage = Stage(ops)
        begin(stage, Plan(method=method), tmp_path)
        needs = stage.proposer.needs
        assert (needs.width, needs.lookahead, needs.aux_layers) == (drafts, ahead, (1, 2, 3))
        assert needs.has_kv and needs.costs_time and needs.has_probs and not needs.trees and needs.context == 128
        begin(stage, Plan(method=method), tmp_path, width=3, aux_layers=(0, 1, 2))
        assert (stage.proposer.needs.width, stage.proposer.needs.aux_layers) == (3, (0, 1, 2))


def test_draws_share_the_noise_of_the_target(tmp_path: Path, ops: Kernels) -> None:
    """At a temperature, each token is the best of its logits and the noise of its own place."""
    stage = Stage(ops, sampled=True)
    formulas = begin(stage, Plan(method="dspark", rank=0, confidence_markov=False), tmp_path)
    request = stage.request(TEXT, seed=5, temperature=1.3)
    stage.step((request, 14, 6))
    _, logits, _ = formulas.drafts(features(formulas.plan.aux_layers, tuple(TEXT)), request.output[0], 6)
    said = [stage.say(request, 15 + depth, row) for depth, row in enumerate(logits)]
    assert stage.drafts[request] == said != [int(row.argmax()) for row in logits]
