"""Modules of multi-token prediction say what their formulas say, which know nothing but the text."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from fake_target import SIZE, Stage, continuation
from safetensors.torch import load_file, save_file
from test_heads import error
from torch import Tensor

import refusals
import tiny
import tiny_modules
from outrider import LLM, SamplingParams
from outrider.errors import UserError
from outrider.kernels import Kernels, load
from outrider.models import build
from outrider.request import Request
from outrider.speculation import find
from outrider.speculation.checkpoints import open_head
from outrider.weights import open_checkpoint
from tiny_modules import ModulePlan
from unit.checkpoint_changes import change_both

WIDTH = 3
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepSeek": ("deepseek", {}),
    "DeepSeek, own ends": ("deepseek", {"own_ends": True}),
    "Qwen": ("qwen", {"head_norms": True}),
    "Qwen, norms minus 1": ("qwen", {"offset_norms": True, "head_norms": True, "head_dim": 32}),
    "MiMo": ("mimo", {"bias": True}),
    "speculators": ("speculators", {"kv_heads": 1, "theta": 500.0}),
    "DeepSeek, three": ("deepseek", {"modules": 3}),
    "DeepSeek, three with own ends": ("deepseek", {"modules": 3, "own_ends": True}),
    "Qwen, four": ("qwen", {"modules": 4, "head_norms": True}),
    "MiMo, three": ("mimo", {"modules": 3}),
    "another target": ("qwen", {"target": "gemma3", "modules": 3}),
}


@pytest.fixture(scope="module", params=["cpu", "reference"])
def ops(request: pytest.FixtureRequest) -> Kernels:
    return load(request.param)


class Formulas:
    """Modules in plain torch. Each is run over the whole text for each token that it says."""

    def __init__(self, plan: ModulePlan, layout: str) -> None:
        self.plan, self.blank = plan, layout in ("deepseek", "mimo")
        self.parts = [tiny_modules.module_tensors(plan, module) for module in range(plan.modules)]
        if layout == "qwen":
            for module, part in enumerate(self.parts):
                blocks = {name: each for name, each in part.items() if name.startswith("block.")}
                self.parts[module] = self.parts[0] | blocks
        target = tiny.original(plan.target)
        self.embedding = target.get_input_embeddings().weight.detach()
        self.head = target.get_output_embeddings().weight.detach()

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], weight, 1e-5)

    def run(self, module: int, text: list[int], states: Tensor) -> Tensor:
        """Outputs [entries, H] of the module's entries, which begin at position place + 1. states: one before each."""
        part, first = self.parts[module], module + 1
        tokens = torch.tensor(text[first : first + len(states)])
        embedded = part.get("embed_tokens.weight", self.embedding)[tokens]
        if self.blank:
            embedded = torch.cat([torch.zeros(1, self.plan.width), embedded[1:]])
        joined = [self.norm(embedded, part["token_norm.weight"]), self.norm(states, part["state_norm.weight"])]
        x = torch.cat(joined, 1) @ part["fc.weight"].T
        block = {name.removeprefix("block."): tensor for name, tensor in part.items() if name.startswith("block.")}

        def linear(y: Tensor, name: str) -> Tensor:
            return functional.linear(y, block[f"{name}.weight"], block.get(f"{name}.bias"))

        x = x + self.attention(self.norm(x, block["input_layernorm.weight"]), block, linear, first)
        y = self.norm(x, block["post_attention_layernorm.weight"])
        return x + linear(functional.silu(linear(y, "mlp.gate_proj")) * linear(y, "mlp.up_proj"), "mlp.down_proj")

    def attention(self, y: Tensor, block: dict[str, Tensor], linear: Callable[..., Tensor], first: int) -> Tensor:
        plan = self.plan
        query, key, value = (
            linear(y, f"self_attn.{part}_proj").unflatten(1, (-1, plan.head_dim)).transpose(0, 1) for part in "qkv"
        )  # [heads, entries, D] each
        if plan.head_norms:
            query, key = (
                self.norm(each, block[f"self_attn.{part}_norm.weight"]) for part, each in (("q", query), ("k", key))
            )
        positions = torch.arange(first, first + len(y))
        query, key = self.rotate(query, positions), self.rotate(key, positions)
        mixed = functional.scaled_dot_product_attention(
            query[None], key[None], value[None], is_causal=True, enable_gqa=True
        )[0]
        return linear(mixed.transpose(0, 1).flatten(1), "self_attn.o_proj")

    def rotate(self, heads: Tensor, positions: Tensor) -> Tensor:
        half = self.plan.head_dim // 2
        angles = positions[:, None] * self.plan.theta ** -(torch.arange(half) / half)
        rotated = torch.complex(heads[..., :half], heads[..., half:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([rotated.real, rotated.imag], -1)

    def draft(self, text: list[int], width: int) -> tuple[list[int], Tensor]:
        """Tokens and logits [width, V] after a text whose last token has not run."""
        with torch.no_grad():
            found = tiny.original(self.plan.target)(torch.tensor([text]), output_hidden_states=True)
        states, text, rows = found.hidden_states[-1][0, :-1], list(text), []  # [T - 1, E], after the last norm
        for depth in range(width):
            module = depth if self.plan.modules > 1 else 0
            part = self.parts[module]
            if self.plan.modules > 1:
                out = self.run(module, text, states)
                states = self.norm(out, part["norm.weight"])
            else:
                out = self.run(0, text, states)
                states = torch.cat([states, self.norm(out[-1:], part["norm.weight"])])
            rows.append(part.get("lm_head.weight", self.head) @ self.norm(out[-1], part["norm.weight"]))
            text.append(int(rows[-1].argmax()))
        return text[len(text) - width :], torch.stack(rows)


def stage_for(ops: Kernels, plan: ModulePlan, folder: Path, layout: str, width: int = WIDTH) -> Stage:
    stage, method = Stage(ops, plan.target), find("mtp")
    options = method.Options(width=width, **tiny_modules.mtp(plan, folder, layout))
    stage.begin(method.build(options, stage.target))
    return stage


def assert_draft(stage: Stage, formulas: Formulas, request: Request, width: int = WIDTH) -> None:
    text = request.prompt + request.output
    assert stage.drafts[request] == (formulas.draft(text, width)[0] if width else [])


@pytest.mark.parametrize("variant", VARIANTS)
def test_drafts_and_logits_equal_the_formulas(variant: str, ops: Kernels, tmp_path: Path) -> None:
    layout, changes = VARIANTS[variant]
    plan = ModulePlan(**changes)
    stage = stage_for(ops, plan, tmp_path, layout)
    seen: list[Tensor] = []
    network = stage.proposer.network
    said = network.logits
    network.logits = lambda states: seen.append(said(states)) or seen[-1]
    request = stage.request(tiny.prompt(11))
    stage.decode(request, width=WIDTH)
    formulas = Formulas(plan, layout)
    _, wanted = formulas.draft(request.prompt + request.output, WIDTH)
    assert wanted.std() > 0.3
    assert error(torch.cat(seen), wanted) < 2e-5
    assert_draft(stage, formulas, request)


@pytest.mark.parametrize("modules", [1, 3])
@pytest.mark.parametrize("chunk", [1, 3, SIZE, 9])
def test_drafts_follow_from_the_text_alone(chunk: int, modules: int, ops: Kernels, tmp_path: Path) -> None:
    """A prompt in pieces beside another request of its own widths; then steps that keep drafts, and that reject."""
    plan = ModulePlan(modules=modules)
    stage, formulas = stage_for(ops, plan, tmp_path, "deepseek"), Formulas(plan, "deepseek")
    request, other = stage.request(tiny.prompt(9)), stage.request(tiny.prompt(5, 1), 1)
    stage.decode(other, width=1)
    while request.computed + chunk < 9:
        stage.step((other, other.length - other.computed, 2), (request, chunk, 0))
        assert_draft(stage, formulas, other, 2)
    stage.decode(other, request, width=WIDTH)
    assert_draft(stage, formulas, request)
    for widths in ((2, 3), (3, 1), (0, 3), (3, 3)):
        stage.drafts[request] = continuation(stage.model, request, request.prompt + request.output, 2)
        before = request.length
        works = [
            (each, each.length - each.computed, width) for each, width in zip((request, other), widths, strict=True)
        ]
        stage.step(*works)
        assert request.length == before + 3
        assert_draft(stage, formulas, request, widths[0])
        assert_draft(stage, formulas, other, widths[1])


@pytest.mark.parametrize("modules", [1, 3])
def test_preemption_and_shared_prefixes(modules: int, ops: Kernels, tmp_path: Path) -> None:
    plan = ModulePlan(modules=modules)
    stage, formulas = stage_for(ops, plan, tmp_path, "mimo"), Formulas(plan, "mimo")
    first = stage.request(tiny.prompt(14))
    stage.step((first, 6, 0))
    stage.decode(first, width=WIDTH)
    second = stage.request([*tiny.prompt(14)[:12], 7], 1)
    second.pages, second.computed = first.pages[:3], 12
    stage.decode(second, width=WIDTH)
    assert_draft(stage, formulas, second)
    third = stage.request([*tiny.prompt(14)[:4], 9, 8], 2)
    third.pages, third.computed = first.pages[:1], 4
    stage.decode(third, second, width=WIDTH)
    assert_draft(stage, formulas, third)
    shared, first.pages = first.pages[:2], first.pages[2:]
    stage.preempt(first)
    first.pages, first.computed = shared, 8
    stage.decode(first, width=WIDTH)
    assert_draft(stage, formulas, first)


@pytest.mark.parametrize("layout", ["deepseek", "qwen"])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_texts_shorter_than_the_modules_are_many(length: int, layout: str, ops: Kernels, tmp_path: Path) -> None:
    plan = ModulePlan(modules=4)
    stage, formulas = stage_for(ops, plan, tmp_path, layout, width=4), Formulas(plan, layout)
    request = stage.request(tiny.prompt(length))
    for _ in range(3):
        stage.decode(request, width=4)
        assert_draft(stage, formulas, request, 4)


def test_layouts_that_mean_the_same(ops: Kernels, tmp_path: Path) -> None:
    """MiMo's matrix has the state first, as the test writes it; DeepSeek and MiMo blank the first token."""

    def draft(layout: str) -> tuple[list[list[int]], list[Tensor]]:
        stage = stage_for(ops, ModulePlan(), tmp_path / layout, layout)
        logits: list[Tensor] = []
        network = stage.proposer.network
        said = network.logits
        network.logits = lambda states: logits.append(said(states)) or logits[-1]
        return stage.decode(stage.request(tiny.prompt(11)), width=WIDTH), logits

    found = {layout: draft(layout) for layout in tiny_modules.MTP}
    assert all(map(torch.equal, found["qwen"][1], found["speculators"][1]))
    assert found["deepseek"][0] == found["mimo"][0]
    assert error(torch.cat(found["mimo"][1]), torch.cat(found["deepseek"][1])) < 1e-5
    assert error(torch.cat(found["qwen"][1]), torch.cat(found["deepseek"][1])) > 1e-4


@pytest.mark.parametrize("layout", ["deepseek", "qwen", "mimo"])
def test_inside_the_targets_checkpoint(layout: str, ops: Kernels, tmp_path: Path) -> None:
    """The model loads as if the modules were not there; the method finds them without being told where."""
    plan = ModulePlan(modules=2)
    folder = tiny_modules.inside(plan, tmp_path, layout)
    bare, whole = build(tiny.checkpoint("llama"), ops), build(open_checkpoint(folder), ops)
    assert torch.equal(tiny.run(whole, tiny.prompt(9), 4)[0], tiny.run(bare, tiny.prompt(9), 4)[0])
    stage, method = Stage(ops, source=str(folder)), find("mtp")
    stage.begin(method.build(method.Options(width=2), stage.target))
    request = stage.request(tiny.prompt(9))
    stage.decode(request, width=2)
    # The target's configuration is that of the modules too.
    own = replace(plan, theta=stage.model.config.ropes[0].theta)
    assert open_head(str(folder)).shape.layers.eps == 1e-6
    formulas = Formulas(own, layout)
    formulas.norm = lambda x, weight: functional.rms_norm(x, x.shape[-1:], weight, 1e-6)
    assert_draft(stage, formulas, request, 2)


@pytest.mark.parametrize("modules", [1, 3])
def test_an_engine_that_speculates_with_its_own_modules(modules: int, tmp_path: Path) -> None:
    folder = str(tiny_modules.inside(ModulePlan(modules=modules), tmp_path, "deepseek"))
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    plain = LLM(folder, backend="cpu").generate([tiny.prompt(40)], params)[0]
    llm = LLM(folder, backend="cpu", speculate="mtp:adaptive=false,width=3", max_step_tokens=7)
    cold, hot = (llm.generate([tiny.prompt(40)], params)[0] for _ in range(2))
    assert cold.completions[0].token_ids == hot.completions[0].token_ids == plain.completions[0].token_ids
    assert hot.stats.cached_tokens >= 32
    # What shared pages hold is what was computed in them: the same drafts come out of it.
    assert cold.stats.speculation.drafted == hot.stats.speculation.drafted > 20
    assert cold.stats.speculation.accepted_per_depth == hot.stats.speculation.accepted_per_depth


def test_mimo_is_a_qwen2_with_modules(ops: Kernels, tmp_path: Path) -> None:
    folder = tiny_modules.inside(ModulePlan(target="qwen2"), tmp_path, "mimo")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    bare, whole = build(tiny.checkpoint("qwen2"), ops), build(open_checkpoint(folder), ops)
    assert torch.equal(tiny.run(whole, tiny.prompt(9), 4)[0], tiny.run(bare, tiny.prompt(9), 4)[0])
    head = open_head(str(folder), whole.config, "mtp")
    assert head.shape.state_first and head.shape.blank_first and head.shape.layers.windows == (0,)


def test_quantised_modules_are_near(ops: Kernels, tmp_path: Path) -> None:
    plan, method = ModulePlan(modules=2), find("mtp")
    options = method.Options(width=2, quantize="int8", **tiny_modules.mtp(plan, tmp_path, "deepseek"))
    stage = Stage(ops)
    stage.begin(method.build(options, stage.target))
    seen: list[Tensor] = []
    network = stage.proposer.network
    said = network.logits
    network.logits = lambda states: seen.append(said(states)) or seen[-1]
    request = stage.request(tiny.prompt(11))
    stage.decode(request, width=1)
    _, wanted = Formulas(plan, "deepseek").draft(request.prompt + request.output, 1)
    assert 1e-5 < error(seen[0], wanted) < 0.05


def test_unexpected_tensors_are_still_refused(tmp_path: Path, ops: Kernels) -> None:
    folder = tiny_modules.inside(ModulePlan(), tmp_path, "deepseek")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.3.eh_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"holds the tensor `model\.layers\.3\."):
        build(open_checkpoint(folder), ops)


def refusal(folder: Path | None, method: str = "mtp", **options: Any) -> str:
    stage, module = Stage(load("reference"), source=options.pop("source", "")), find(method)
    given = module.Options(model="" if folder is None else str(folder), **options)
    return refusals.refusal(lambda: module.build(given, stage.target))


def renamed(tensors: dict[str, Tensor], old: str, new: str) -> None:
    for name in list(tensors):
        tensors[name.replace(old, new)] = tensors.pop(name)


Edit = Callable[[dict[str, Any], dict[str, Tensor]], object]
BROKEN: dict[str, tuple[Edit, str]] = {
    "MLA": (lambda _, tensors: renamed(tensors, "k_proj", "kv_a_proj_with_mqa"), "compressed keys (MLA)"),
    "experts": (lambda _, tensors: renamed(tensors, "mlp.up_proj", "mlp.experts.0.up_proj"), "a mixture of experts"),
    "linear attention": (lambda _, tensors: renamed(tensors, "self_attn", "linear_attn"), "have linear attention"),
    "a gate": (lambda config, _: config.update(attn_output_gate=True), "`attn_output_gate`"),
    "no block": (
        lambda _, tensors: [tensors.pop(name) for name in list(tensors) if "self_attn.q_proj" in name],
        "lack a block",
    ),
    "no norm": (lambda _, tensors: tensors.pop("model.layers.3.enorm.weight"), "`model.token_norm.weight`"),
    "a tensor too many": (
        lambda _, tensors: tensors.update({"model.layers.3.odd.weight": torch.ones(2)}),
        "`model.layers.0.odd.weight`",
    ),
    "other layers": (lambda _, tensors: renamed(tensors, "layers.3.", "layers.7."), "was made for a model of 7 layers"),
    "other tokens": (lambda config, _: config.update(vocab_size=99), "are for 99 tokens"),
    "another width": (lambda config, _: config.update(hidden_size=32, target_hidden_size=32), "states of width 32"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_refusals(name: str, tmp_path: Path) -> None:
    edit, wanted = BROKEN[name]
    tiny_modules.mtp(ModulePlan(), tmp_path, "deepseek")
    change_both(tmp_path, edit)
    assert wanted in refusal(tmp_path)


def test_refusals_of_what_modules_cannot_do(tmp_path: Path) -> None:
    tiny_modules.mtp(ModulePlan(modules=2), tmp_path / "two", "mimo")
    assert "has 2 modules, one for each token: pass `width=2` or less" in refusal(tmp_path / "two", width=3)
    assert "leave out `branches`" in refusal(tmp_path / "two", width=2, branches=2)
    assert "pass `mtp` instead of `eagle`" in refusal(tmp_path / "two", "eagle")
    bare = tiny.copy("llama", tmp_path / "bare")
    assert f"`{bare}` has no modules" in refusal(None, source=str(bare))
