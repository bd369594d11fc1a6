"""P-EAGLE says what its formulas say: one pass over the newest token and masks, each with the same learned state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_target import SIZE, Stage, continuation
from test_heads import Formulas, error
from torch import Tensor

import refusals
import tiny
import tiny_heads
import tiny_modules
from outrider.kernels import Kernels, load
from outrider.request import Request
from outrider.speculation import find
from outrider.speculation.checkpoints import open_head
from outrider.speculation.drafters.autoregressive import Autoregressive
from tiny_heads import Plan
from unit.checkpoint_changes import change_both

WIDTH = 4
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "four layers": {"layers": 4},
    "one norm before fc": {"norm_before_fc": True},
    "a norm for each aux layer": {"fc_norm": True, "norm_before_residual": True},
    "normed output": {"norm_output": True},  # of no use: nothing is fed back
    "head norms": {"head_norms": True, "layers": 2},
    "window": {"window": 6},
    "all tokens": {"draft_vocabulary": None, "own_embedding": True},
    "five aux layers": {"aux_layers": (0, 3, 1, 2, 3)},
    "narrow": {"width": 32, "own_embedding": True},
}


@pytest.fixture(scope="module", params=["cpu", "reference"])
def ops(request: pytest.FixtureRequest) -> Kernels:
    return load(request.param)


def stage_for(ops: Kernels, plan: Plan, folder: Path, layout: str = "speculators", width: int = WIDTH) -> Stage:
    stage, method = Stage(ops, plan.target), find("peagle")
    options = tiny_modules.peagle(plan, folder, layout)
    stage.begin(method.build(method.Options(width=width, model=options["model"]), stage.target))
    return stage


@functools.cache
def states_of(target: str, text: tuple[int, ...]) -> list[Tensor]:
    """The states [T, E] entering each layer of the target and leaving the last."""
    model, leaving = tiny.original(target), []
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: leaving.append(inputs[0][0]))
    with torch.no_grad():
        found = model(torch.tensor([text]), output_hidden_states=True).hidden_states
    hook.remove()
    return [*(state[0] for state in found[:-1]), leaving[0]]


def by_formulas(plan: Plan, text: list[int], width: int = WIDTH, mask: int = tiny_modules.MASK) -> Tensor:
    """Logits [width, V] after a text whose last token has not run, all computed from the text alone."""
    head, states = Formulas(plan), states_of(plan.target, tuple(text))
    out = torch.empty(0)
    for position in range(1, len(text)):
        aux_hidden = [states[layer][position - 1] for layer in plan.aux_layers]
        out = head.entry(text[position], head.fuse(aux_hidden), position)
    rows = [head.logits(out)]
    beside = head.fuse(list(tiny_modules.mask_state(plan).chunk(len(plan.aux_layers))))
    for depth in range(1, width):
        rows.append(head.logits(head.entry(mask, beside, len(text) - 1 + depth)))
    return torch.stack(rows)


def assert_draft(stage: Stage, plan: Plan, request: Request, width: int = WIDTH) -> None:
    wanted = by_formulas(plan, request.prompt + request.output, width).argmax(-1).tolist()[:width]
    assert stage.drafts[request] == wanted


@pytest.mark.parametrize("variant", VARIANTS)
def test_drafts_and_logits_equal_the_formulas(variant: str, ops: Kernels, tmp_path: Path) -> None:
    plan = Plan(**VARIANTS[variant])
    stage = stage_for(ops, plan, tmp_path)
    seen: list[Tensor] = []
    network = stage.proposer.network
    said = network.scores  # nothing is drawn: the words that it can say are all that is looked at
    network.scores = lambda states: seen.append(said(states)) or seen[-1]
    request = stage.request(tiny.prompt(11))
    stage.decode(request, width=WIDTH)
    assert len(seen) == 1, "one pass drafts all"
    wanted = by_formulas(plan, request.prompt + request.output)
    wanted = wanted if network.ids is None else wanted[:, network.ids.long()]
    assert wanted[wanted.isfinite()].std() > 0.3
    assert error(seen[0], wanted) < 1e-5
    assert_draft(stage, plan, request)


@pytest.mark.parametrize("chunk", [1, 3, SIZE, 9])
def test_drafts_follow_from_the_text_alone(chunk: int, ops: Kernels, tmp_path: Path) -> None:
    """A prompt in pieces beside another request of its own widths; then steps that keep drafts, and that reject."""
    plan = Plan(layers=2)
    stage = stage_for(ops, plan, tmp_path)
    request, other = stage.request(tiny.prompt(9)), stage.request([*tiny.prompt(5, 1), tiny_modules.MASK, 8], 1)
    stage.decode(other, width=1)
    while request.computed + chunk < 9:
        stage.step((other, other.length - other.computed, 2), (request, chunk, 0))
        assert_draft(stage, plan, other, 2)
    stage.decode(other, request, width=WIDTH)
    for widths in ((3, 4), (4, 1), (0, 4)):
        stage.drafts[request] = continuation(stage.model, request, request.prompt + request.output, 2)
        before = request.length
        stage.step(
            *[(each, each.length - each.computed, width) for each, width in zip((request, other), widths, strict=True)]
        )
        assert request.length == before + 3
        assert_draft(stage, plan, request, widths[0])
        assert_draft(stage, plan, other, widths[1])


def test_preemption_and_shared_prefixes(ops: Kernels, tmp_path: Path) -> None:
    plan = Plan(layers=2)
    stage = stage_for(ops, plan, tmp_path)
    first = stage.request(tiny.prompt(14))
    stage.step((first, 6, 0))
    stage.decode(first, width=WIDTH)
    second = stage.request([*tiny.prompt(14)[:12], 7], 1)
    second.pages, second.computed = first.pages[:3], 12
    stage.decode(second, width=WIDTH)
    assert_draft(stage, plan, second)
    shared, first.pages = first.pages[:2], first.pages[2:]
    stage.preempt(first)
    first.pages, first.computed = shared, 8
    stage.decode(first, width=WIDTH)
    assert_draft(stage, plan, first)


def test_at_the_end_of_the_context(ops: Kernels, tmp_path: Path) -> None:
    """Masks stand as far as there is room, and the others in the batch have all theirs."""
    plan = Plan()
    stage = stage_for(ops, plan, tmp_path)
    request, other = stage.request(tiny.prompt(124)), stage.request(tiny.prompt(6, 1), 1)
    drafts = stage.decode(request, other, width=WIDTH)
    assert [len(draft) for draft in drafts] == [4, 4]
    stage.drafts.clear()
    while request.computed < 126:
        drafts = stage.decode(request, other, width=WIDTH)
        stage.drafts.clear()
    assert len(drafts[0]) < 4 == len(drafts[1])


def test_one_head_in_every_layout(ops: Kernels, tmp_path: Path) -> None:
    plan = Plan(layers=2, norm_before_residual=True)
    shapes, drafts = [], []
    for layout in tiny_modules.PEAGLE:
        stage = stage_for(ops, plan, tmp_path / layout, layout)
        request = stage.request(tiny.prompt(11))
        drafts.append(stage.decode(request, width=WIDTH))
        shapes.append(open_head(str(tmp_path / layout), stage.model.config, "peagle").shape)
    assert drafts[0] == drafts[1] == drafts[2]
    assert {shape.mask for shape in shapes} == {tiny_modules.MASK}
    assert {(shape.kind, shape.aux_layers) for shape in shapes} == {("peagle", plan.aux_layers)}


def test_a_mask_beyond_the_targets_vocabulary(ops: Kernels, tmp_path: Path) -> None:
    """Where the head has its own embedding, with a row for it."""
    plan = Plan(own_embedding=True)
    rows = torch.cat([tiny_heads.tensors(plan)["embed_tokens.weight"], torch.ones(1, plan.width)])
    tiny_modules.peagle(plan, tmp_path, "speculators", mask=tiny.VOCABULARY, embed_tokens__weight=rows)
    stage, method = Stage(ops), find("peagle")
    stage.begin(method.build(method.Options(width=WIDTH, model=str(tmp_path)), stage.target))
    assert isinstance(stage.proposer, Autoregressive)
    assert len(stage.decode(stage.request(tiny.prompt(7)), width=WIDTH)[0]) == WIDTH
    tiny_modules.peagle(plan, tmp_path, "speculators", mask=tiny.VOCABULARY)
    assert f"the mask token of `{tmp_path}` is {tiny.VOCABULARY}" in refusal(tmp_path)


def refusal(folder: Path, method: str = "peagle") -> str:
    stage, module = Stage(load("reference")), find(method)
    return refusals.refusal(lambda: module.build(module.Options(model=str(folder)), stage.target))


Edit = Callable[[dict[str, Any], dict[str, Tensor]], object]
BROKEN: dict[str, tuple[Edit, str]] = {
    "no mask token": (lambda config, _: config.update(mask_token_id=None), "state `mask_token_id`"),
    "an odd one": (lambda config, _: config.update(mask_token_id="x"), "state `mask_token_id`"),
    "no state": (lambda _, tensors: tensors.pop("mask_hidden"), "lacks the tensor `mask_hidden`"),
    "a short state": (lambda _, tensors: tensors.update(mask_hidden=torch.ones(1, 1, 64)), "has 64 floats"),
    "another width": (lambda config, _: config.update(target_hidden_size=32), "reads states of width 32"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_refusals(name: str, tmp_path: Path) -> None:
    edit, wanted = BROKEN[name]
    tiny_modules.peagle(replace(Plan(), aux_layers=(1, 2)), tmp_path, "speculators")
    change_both(tmp_path, edit)
    assert wanted in refusal(tmp_path)


def test_it_is_another_method_than_eagle3(tmp_path: Path) -> None:
    tiny_modules.peagle(Plan(), tmp_path / "parallel", "speculators")
    assert "pass `peagle` instead of `eagle3`" in refusal(tmp_path / "parallel", "eagle3")
    tiny_heads.write(Plan(), tmp_path / "one by one", "speculators")
    assert "pass `eagle3` instead of `peagle`" in refusal(tmp_path / "one by one")
