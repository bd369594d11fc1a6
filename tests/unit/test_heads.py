"""Draft heads say what their formulas say: entry q joins token q with the target's state of position q - 1."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

import tiny
import tiny_heads
from outrider import kernels
from outrider.cache.pages import Pages
from outrider.device import open_device
from outrider.models import Model, build
from outrider.models.heads import EagleHead
from outrider.request import Request
from outrider.speculation import DraftContext, Target, find
from outrider.speculation.checkpoints import choose_aux_layers, open_head
from outrider.types import SamplingParams
from tiny_heads import Plan

PAGE = 4
TOKENS = tiny.prompt(14)
DRAFTED = tiny.prompt(5, seed=1)
EAGLE3: dict[str, dict[str, Any]] = {
    "plain": {},
    "residual after the norm": {"norm_before_residual": True},
    "one norm before fc": {"norm_before_fc": True},
    "a norm for each layer": {"fc_norm": True},
    "normed feedback": {"norm_output": True},
    "EAGLE-3.1": {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
    "three layers": {"layers": 3, "norm_output": True},
    "head norms": {"head_norms": True, "head_dim": 32},
    "biases": {"bias": True, "layers": 2},
    "window": {"window": 3},
    "all tokens": {"draft_vocabulary": None},
    "target's head, some tokens": {"own_head": False},
    "target's head, all tokens": {"own_head": False, "draft_vocabulary": None},
    "own embedding": {"own_embedding": True},
    "narrower than the target": {"width": 32, "own_embedding": True},
    "five aux layers": {"aux_layers": (0, 3, 1, 2, 3)},
    "half precision": {"dtype": torch.bfloat16, "own_embedding": True},
    "grouped keys": {"kv_heads": 1, "theta": 500.0},
}
EAGLE1: dict[str, dict[str, Any]] = {
    "EAGLE-1": {},
    "EAGLE-1 without bias": {"fc_bias": False},
    "EAGLE-1 with biases": {"bias": True},
    "EAGLE-1, two layers": {"layers": 2},
}
LAST = {"last state": {"last_state": True}}
PLANS = {name: Plan(**each) for name, each in EAGLE3.items()}
PLANS |= {name: Plan(method="eagle", **each) for name, each in EAGLE1.items()}
PLANS |= {name: Plan(**each) for name, each in LAST.items()}


class Formulas:
    """A head in plain torch, entry by entry, from the papers' formulas."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.weights = {name: tensor.float() for name, tensor in tiny_heads.tensors(plan).items()}
        target = tiny.original(plan.target)
        self.embedding = self.weights.get("embed_tokens.weight", target.get_input_embeddings().weight.detach())
        self.head = self.weights.get("lm_head.weight", target.get_output_embeddings().weight.detach())
        if "lm_head.weight" not in self.weights and plan.ids is not None:
            self.head = self.head[plan.ids]
        self.past: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(plan.layers)]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.weights[name], 1e-5)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self.weights[name + ".weight"], self.weights.get(name + ".bias"))

    def fuse(self, aux_layers: list[Tensor]) -> Tensor:
        """The target's states at one position, [E] each, to the state that the entry after it reads: [H]."""
        if self.plan.method == "eagle" or self.plan.last_state:
            return aux_layers[0]
        if self.plan.fc_norm:
            aux_layers = [self.norm(layer, f"fc_norm.{at}.weight") for at, layer in enumerate(aux_layers)]
        joined = torch.cat(aux_layers)
        return self.linear(self.norm(joined, "input_norm.weight") if self.plan.norm_before_fc else joined, "fc")

    def entry(self, token: int, state: Tensor, position: int) -> Tensor:
        """The output of the entry that joins a token with the state before it: [H]."""
        embedded = self.embedding[token]
        if self.plan.method == "eagle":
            x = self.linear(torch.cat([embedded, state]), "fc")
            inputs = x
        else:
            normed = self.norm(state, "layers.0.hidden_norm.weight")
            inputs = torch.cat([self.norm(embedded, "layers.0.input_layernorm.weight"), normed])
            x = normed if self.plan.norm_before_residual else state
        for layer in range(self.plan.layers):
            prefix = f"layers.{layer}."
            if layer:
                inputs = self.norm(x, prefix + "input_layernorm.weight")
            x = x + self.attention(inputs, layer, position)
            y = self.norm(x, prefix + "post_attention_layernorm.weight")
            gated = functional.silu(self.linear(y, prefix + "mlp.gate_proj")) * self.linear(y, prefix + "mlp.up_proj")
            x = x + self.linear(gated, prefix + "mlp.down_proj")
        return x

    def attention(self, x: Tensor, layer: int, position: int) -> Tensor:
        plan, prefix = self.plan, f"layers.{layer}.self_attn."
        query, key, value = (self.linear(x, f"{prefix}{part}_proj").view(-1, plan.head_dim) for part in "qkv")
        if plan.head_norms:
            query, key = self.norm(query, prefix + "q_norm.weight"), self.norm(key, prefix + "k_norm.weight")
        self.past[layer].append((self.rotate(key, position), value))
        seen = self.past[layer][-plan.window :]  # a window of 0 is all
        shared = plan.heads // plan.kv_heads
        keys, values = (torch.stack([pair[part] for pair in seen]).repeat_interleave(shared, 1) for part in (0, 1))
        scores = torch.einsum("hd,nhd->hn", self.rotate(query, position), keys) * plan.head_dim**-0.5
        mixed = torch.einsum("hn,nhd->hd", scores.softmax(-1), values)
        return self.linear(mixed.flatten(), prefix + "o_proj")

    def rotate(self, heads: Tensor, position: int) -> Tensor:
        half = self.plan.head_dim // 2
        angles = position * self.plan.theta ** -(torch.arange(half) / half)
        rotation = torch.polar(torch.ones(half), angles)
        rotated = torch.complex(heads[:, :half], heads[:, half:]) * rotation
        return torch.cat([rotated.real, rotated.imag], 1)

    def logits(self, out: Tensor) -> Tensor:
        found = self.head @ (out if self.plan.method == "eagle" else self.norm(out, "norm.weight"))
        if self.plan.ids is None:
            return found
        spread = torch.full((tiny.VOCABULARY,), -torch.inf)
        spread[self.plan.ids] = found
        return spread

    def feedback_features(self, out: Tensor) -> Tensor:
        return self.norm(out, "norm.weight") if self.plan.norm_output else out


@functools.cache
def hidden_states(target: str) -> tuple[list[Tensor], Tensor]:
    """Of TOKENS: the states [T, E] entering each layer and leaving the last, and these after the last norm."""
    model, leaving = tiny.original(target), []
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: leaving.append(inputs[0][0]))
    with torch.no_grad():
        out = model(torch.tensor([TOKENS]), output_hidden_states=True)
    hook.remove()
    *entering, normed = (state[0] for state in out.hidden_states)
    return [*entering, leaving[0]], normed


def by_formulas(plan: Plan, aux_layers: tuple[int, ...]) -> Tensor:
    """Logits after each entry, of the text and then of the drafted tokens: [entries, V]."""
    head, (states, normed) = Formulas(plan), hidden_states(plan.target)
    read = [normed] if plan.method == "eagle" or plan.last_state else [states[layer] for layer in aux_layers]
    rows, out = [], torch.empty(0)
    for position in range(1, len(TOKENS)):
        state = head.fuse([each[position - 1] for each in read])
        out = head.entry(TOKENS[position], state, position)
        rows.append(head.logits(out))
    for step, token in enumerate(DRAFTED):
        out = head.entry(token, head.feedback_features(out), len(TOKENS) + step)
        rows.append(head.logits(out))
    return torch.stack(rows)


def greedy_by_formulas(plan: Plan, aux_layers: tuple[int, ...], text: list[int], count: int) -> list[int]:
    """Return the argmax tokens after a text whose last token has not run, one by one."""
    head, (states, normed) = Formulas(plan), hidden_states(plan.target)
    read = [normed] if plan.method == "eagle" else [states[layer] for layer in aux_layers]
    out = torch.empty(0)
    for position in range(1, len(text)):
        out = head.entry(text[position], head.fuse([each[position - 1] for each in read]), position)
    drafted = [int(head.logits(out).argmax())]
    while len(drafted) < count:
        out = head.entry(drafted[-1], head.feedback_features(out), len(text) + len(drafted) - 1)
        drafted.append(int(head.logits(out).argmax()))
    return drafted


def network(plan: Plan, folder: Path, model: Model, layout: str, quantize: str | None = None) -> EagleHead[Pages]:
    options = tiny_heads.write(plan, folder, layout)
    head = open_head(options["model"], model.config)
    layers = head.shape.layers
    pages = Pages(layers.layers, layers.kv_heads, PAGE, layers.head_dim, "float32")
    pages.allocate(9)
    return EagleHead(head, model, pages, 128, quantize)


def by_network(head: EagleHead[Pages], model: Model, aux_layers: tuple[int, ...], chunk: int) -> Tensor:
    """The same from the engine's model: the text in chunks, then one drafted token at a time, pages in no order."""
    _, aux_states = tiny.run(model, TOKENS, 5, aux_layers)
    features = torch.cat(aux_states, 1)  # [T, aux_layers * E]
    assert features.shape[1] == head.features
    table, rows = [7, 2, 5, 0, 8], []
    state = torch.empty(0)
    for start in range(1, len(TOKENS), chunk):
        tokens = TOKENS[start : start + chunk]
        absorbed = head.project_features(features[start - 1 : start - 1 + len(tokens)])
        out = head.run(tiny.batch([(tokens, start, table)], PAGE), absorbed)
        rows.append(head.logits(out))
        state = out[-1:]
    for step, token in enumerate(DRAFTED):
        state = head.run(tiny.batch([([token], len(TOKENS) + step, table)], PAGE), head.feedback_features(state))
        rows.append(head.logits(state))
    return torch.cat(rows)


def error(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, as a share of the largest logit; all else if -inf stands elsewhere."""
    if found.shape != wanted.shape or not torch.equal(found.isinf(), wanted.isinf()):
        return torch.inf
    kept = wanted.isfinite()
    return float((found - wanted)[kept].abs().max() / wanted[kept].abs().max())


def read_layers(plan: Plan, model: Model) -> tuple[int, ...]:
    return (model.config.layers,) if plan.method == "eagle" or plan.last_state else plan.aux_layers


def layout_of(plan: Plan) -> str:
    return "safeailab" if plan.method == "eagle" else "nvidia" if plan.last_state else "speculators"


@pytest.fixture(params=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> kernels.Kernels:
    return kernels.load(request.param)


@pytest.mark.parametrize(("name", "chunk"), [*((name, 4) for name in PLANS), ("plain", 1), ("EAGLE-1", 13)])
def test_heads_equal_their_formulas(name: str, chunk: int, ops: kernels.Kernels, tmp_path: Path) -> None:
    plan = PLANS[name]
    model = build(tiny.checkpoint(plan.target), ops)
    aux_layers = read_layers(plan, model)
    wanted = by_formulas(plan, aux_layers)
    assert wanted[wanted.isfinite()].std() > 0.3  # else the tolerance would mean nothing
    found = by_network(network(plan, tmp_path / "head", model, layout_of(plan)), model, aux_layers, chunk)
    assert found.dtype == torch.float32
    assert error(found, wanted) < 1e-5


@pytest.mark.parametrize("shift", [-1, 1])
def test_aux_layers_off_by_one_are_another_head(shift: int, tmp_path: Path) -> None:
    plan = Plan(aux_layers=(1, 2))
    model = build(tiny.checkpoint(plan.target), kernels.load("reference"))
    head = network(plan, tmp_path / "head", model, "speculators")
    shifted = tuple(layer + shift for layer in plan.aux_layers)
    assert error(by_network(head, model, plan.aux_layers, 4), by_formulas(plan, plan.aux_layers)) < 1e-5
    assert error(by_network(head, model, shifted, 4), by_formulas(plan, plan.aux_layers)) > 0.05


@pytest.mark.parametrize("target", ["llama3-rope", "qwen3", "gemma3"])
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_other_targets(method: str, target: str, tmp_path: Path) -> None:
    plan = Plan(method=method, target=target)
    model = build(tiny.checkpoint(target), kernels.load("reference"))
    aux_layers = read_layers(plan, model)
    found = by_network(network(plan, tmp_path / "head", model, layout_of(plan)), model, aux_layers, 4)
    assert error(found, by_formulas(plan, aux_layers)) < 1e-5


@pytest.mark.parametrize("variant", ["plain", "EAGLE-3.1", "one norm before fc", "all tokens"])
def test_one_head_in_every_layout(variant: str, tmp_path: Path, ops: kernels.Kernels) -> None:
    plan = PLANS[variant]
    model = build(tiny.checkpoint(plan.target), ops)
    wanted: Tensor | None = None
    for layout in tiny_heads.LAYOUTS:
        head = network(plan, tmp_path / layout, model, layout)
        options = tiny_heads.write(plan, tmp_path / layout, layout)
        chosen = tuple(map(int, options["aux_layers"].split("/"))) if "aux_layers" in options else ()
        aux_layers = choose_aux_layers(open_head(options["model"], model.config, "eagle3"), model, chosen)
        found = by_network(head, model, aux_layers, 4)
        assert aux_layers == plan.aux_layers
        wanted = found if wanted is None else wanted
        assert torch.equal(found, wanted), layout


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_quantised_heads_are_near(method: str, tmp_path: Path, ops: kernels.Kernels) -> None:
    plan = Plan(method=method, own_embedding=True)
    model = build(tiny.checkpoint(plan.target), ops)
    aux_layers = read_layers(plan, model)
    wanted = by_formulas(plan, aux_layers)
    for quantize, least, most in (("int8", 1e-5, 0.05), ("int4", 1e-3, 0.5)):
        head = network(plan, tmp_path / quantize, model, layout_of(plan), quantize)
        assert least < error(by_network(head, model, aux_layers, 4), wanted) < most


def test_a_quantised_target_lends_its_head(tmp_path: Path, ops: kernels.Kernels) -> None:
    """The rows of a draft vocabulary are picked after the whole head: its blocks stay as they are."""
    plan = Plan(own_head=False)
    model = build(tiny.checkpoint(plan.target), ops, quantize="int8")
    some = network(plan, tmp_path / "some", model, "speculators")
    states = torch.randn(3, plan.width, generator=torch.Generator().manual_seed(2))
    everything = ops.norm_linear(states, some.norm, some.eps, model.head)
    found = some.logits(states)
    assert plan.ids is not None
    assert torch.equal(found[:, plan.ids], everything[:, plan.ids])
    assert int(found.isinf().sum()) == 3 * (tiny.VOCABULARY - len(plan.ids))


def test_positions_reach_as_far_as_the_target(tmp_path: Path) -> None:
    """The heads' own `max_position_embeddings` is 32: their tables are made for the target's context."""
    plan = replace(Plan(), seed=3)
    model = build(tiny.checkpoint(plan.target), kernels.load("reference"))
    head = network(plan, tmp_path / "head", model, "speculators")
    assert head.context == 128
    state = torch.randn(1, plan.width, generator=torch.Generator().manual_seed(1))
    last = tiny.batch([([5], 127, [1] * 32)], PAGE)
    assert torch.isfinite(head.run(last, state)).all()


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_drafts_of_a_text_that_comes_in_pieces(method: str, ops: kernels.Kernels, tmp_path: Path) -> None:
    """A prompt in three chunks, then a step whose drafts were all rejected: the formulas over the whole text agree."""
    plan = Plan(method=method, norm_output=method == "eagle3")
    model = build(tiny.checkpoint(plan.target), ops)
    target = Target(model, cast(Any, None), ops, open_device("reference"), PAGE, 128, "float32")
    options: dict[str, Any] = {"width": 4, "model": tiny_heads.write(plan, tmp_path, layout_of(plan))["model"]}
    proposer = find(method).build(find(method).Options(**options), target)
    target.storages[0].allocate(9)
    states = torch.cat(tiny.run(model, TOKENS, 5, proposer.needs.aux_layers)[1], 1)  # [T, aux_layers * E]
    request = Request("0", TOKENS[:13], SamplingParams(temperature=0), 0, pages=[7, 2, 5, 0, 8])
    for start, stop in ((0, 5), (5, 10)):
        proposer.propose([DraftContext(request, start, stop, [], 0, 0)], last(TOKENS[stop]), states[start:stop])
    first = proposer.propose([DraftContext(request, 10, 13, TOKENS[13:], 4, 0)], last(TOKENS[13]), states[10:13])
    assert first.rows(first.tokens) == [greedy_by_formulas(plan, proposer.needs.aux_layers, TOKENS, 4)]
    proposer.accept([request], [0])
    request.output += TOKENS[13:]
    rejected = torch.full((4, states.shape[1]), torch.nan)
    second = proposer.propose([DraftContext(request, 13, 14, [77], 3, 0)], last(77), torch.cat([states[13:], rejected]))
    assert second.rows(second.tokens) == [greedy_by_formulas(plan, proposer.needs.aux_layers, [*TOKENS, 77], 3)]


def last(token: int) -> Tensor:
    return torch.tensor([token], dtype=torch.int32)
