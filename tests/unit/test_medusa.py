"""Medusa: heads say what their formula says in every layout, trees are the best ones, misfits are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import tiny
import tiny_medusa
from outrider import kernels
from outrider.device import open_device
from outrider.errors import UserError
from outrider.models import Model, build
from outrider.models.heads import MedusaHeads
from outrider.request import Request
from outrider.speculation import DraftBatch, DraftContext, Target, find
from outrider.speculation.checkpoints import choose_aux_layers, open_head
from outrider.speculation.config import parse
from outrider.speculation.drafters.tree_builder import fixed_shape, product_tree
from outrider.speculation.methods.medusa import MedusaDrafter
from outrider.speculation.vllm_config import choose_method
from outrider.types import SamplingParams
from refusals import refusal
from tiny_medusa import Plan

PLANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two blocks": {"blocks": 2},
    "no bias": {"bias": False},
    "no block": {"blocks": 0},
    "one matrix for all": {"ends": "one"},
    "the target's matrix": {"ends": "target"},
    "some tokens": {"vocabulary": 40},
    "some tokens, one matrix": {"vocabulary": 40, "ends": "one"},
    "some tokens, the target's matrix": {"vocabulary": 40, "ends": "target"},
    "half precision": {"dtype": torch.float16},
}


@pytest.fixture(scope="module", params=["reference", "cpu"])
def model(request: pytest.FixtureRequest) -> Model:
    return build(tiny.checkpoint("llama"), kernels.load(request.param))


def target(model: Model, **options: Any) -> Target:
    return Target(model, cast(Any, None), model.ops, open_device("reference"), 4, 96, "float32", **options)


def medusa(model: Model, folder: Path, sampling: dict[str, Any] | None = None, **options: Any) -> MedusaDrafter:
    method = find("medusa")
    drafter: MedusaDrafter = method.build(method.Options(model=str(folder), **options), target(model, **sampling or {}))
    return drafter


def plainly(plan: Plan, hidden: Tensor) -> Tensor:
    """The formula over what leaves the target's last layer [B, E]: [heads, B, V]."""
    original, found = tiny.original(plan.target), {name: t.float() for name, t in tiny_medusa.tensors(plan).items()}
    state = original.model.norm(hidden)
    logits = []
    for head in range(plan.heads):
        own = {"each": f"lm_heads.{head}.weight", "one": "lm_head.weight", "target": ""}[plan.ends]
        matrix = (
            found[own] if own else original.lm_head.weight[plan.ids] if plan.vocabulary else original.lm_head.weight
        )
        said = tiny_medusa.through(plan, found, head, state) @ matrix.T
        if plan.ids is not None:
            spread = torch.full((len(hidden), tiny.VOCABULARY), -torch.inf)
            spread[:, plan.ids] = said
            said = spread
        logits.append(said)
    return torch.stack(logits).detach()


def states(model: Model, texts: list[list[int]]) -> list[Tensor]:
    """What leaves the last layer, for each text: [T, E]."""
    return [tiny.run(model, text, 100, (model.config.layers,))[1][0] for text in texts]


@pytest.mark.parametrize("name", PLANS)
def test_heads_say_what_the_formula_says(model: Model, tmp_path: Path, name: str) -> None:
    plan = Plan(**PLANS[name])
    tiny_medusa.write(plan, tmp_path, "vllm")
    head = open_head(str(tmp_path), model.config, "medusa")
    assert choose_aux_layers(head, model) == (3,)
    hidden = states(model, [tiny.prompt(9)])[0]
    found = torch.stack(list(MedusaHeads(head, model).logits(hidden, plan.heads)))
    torch.testing.assert_close(found, plainly(plan, hidden), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", ["fasterdecoding", "prefixed"])
@pytest.mark.parametrize("name", ["plain", "two blocks", "no block", "the target's matrix"])
def test_every_layout_says_the_same(model: Model, tmp_path: Path, layout: str, name: str) -> None:
    plan = Plan(**PLANS[name])
    hidden = states(model, [tiny.prompt(9)])[0]
    found = []
    for one in ("vllm", layout):
        tiny_medusa.write(plan, tmp_path / one, one)
        head = open_head(str(tmp_path / one), model.config)
        assert (head.shape.kind, head.shape.heads, head.shape.blocks) == ("medusa", plan.heads, plan.blocks)
        assert head.shape.layout == ("vLLM" if one == "vllm" else "FasterDecoding")
        found.append(torch.stack(list(MedusaHeads(head, model).logits(hidden, plan.heads))))
    assert torch.equal(*found)


def test_a_vocabulary_of_its_own_in_any_order_over_a_full_matrix(model: Model, tmp_path: Path) -> None:
    """vLLM also reads full matrices beside a map, and that of the first head as everyone's."""
    plan = Plan(vocabulary=40, ends="one")
    full = tiny_medusa.tensors(replace(plan, vocabulary=None))
    full["lm_heads.0.weight"] = full.pop("lm_head.weight")
    tiny_medusa.write(plan, tmp_path, "vllm", full)
    full["lm_head.weight"] = full.pop("lm_heads.0.weight")
    hidden = states(model, [tiny.prompt(9)])[0]
    found = torch.stack(list(MedusaHeads(open_head(str(tmp_path), model.config), model).logits(hidden, 7)))
    torch.testing.assert_close(found, plainly(plan, hidden), rtol=1e-4, atol=1e-4)


# ---- drafts ----

TEXTS = [tiny.prompt(7), tiny.prompt(5, seed=4), tiny.prompt(9, seed=5)]


def contexts(width: int, temperature: float = 0.0) -> list[DraftContext]:
    """Texts of which all but the newest token ran in one step, side by side; the second asks for nothing."""
    found, first = [], 0
    for seed, text in enumerate(TEXTS):
        request = Request(f"{seed}", text[:-1], SamplingParams(temperature=temperature), seed)
        found.append(DraftContext(request, 0, len(text) - 1, text[-1:], 0 if seed == 1 else width, first))
        first += len(text) - 1
    return found


def draft(model: Model, drafter: MedusaDrafter, width: int, temperature: float = 0.0) -> DraftBatch:
    hidden = torch.cat(states(model, [text[:-1] for text in TEXTS]))
    return drafter.propose(contexts(width, temperature), torch.empty(0, dtype=torch.int32), hidden)


def logits_of(model: Model, plan: Plan) -> list[Tensor]:
    """By text: what the heads say after its last state [heads, V]."""
    return [plainly(plan, found[-1:])[:, 0] for found in states(model, [text[:-1] for text in TEXTS])]


def test_a_chain_is_what_each_head_likes_best(model: Model, tmp_path: Path) -> None:
    tiny_medusa.write(Plan(), tmp_path, "vllm")
    drafter = medusa(model, tmp_path, width=5)
    needs = drafter.needs
    assert (needs.width, needs.aux_layers, needs.has_kv, needs.lookahead, needs.trees) == (5, (3,), False, 0, False)
    found = draft(model, drafter, 4)
    assert found.parents is None and found.logits is None and found.confidence is not None
    for row, logits in enumerate(logits_of(model, Plan())):
        best = logits[:4] if row != 1 else logits[:0]
        assert found.tokens[row] == best.argmax(-1).tolist()
        assert found.confidence[row] == pytest.approx(best.softmax(-1).amax(-1).tolist(), abs=1e-4)


def test_a_tree_is_the_best_of_all(model: Model, tmp_path: Path) -> None:
    tiny_medusa.write(Plan(), tmp_path, "vllm")
    found = draft(model, medusa(model, tmp_path, width=20, branches=3, max_depth=4), 15)
    assert found.parents is not None and found.confidence is not None
    for row, logits in enumerate(logits_of(model, Plan())):
        top = logits[:4].softmax(-1).topk(3)
        levels = [
            list(zip(tokens, probs, strict=True))
            for tokens, probs in zip(top.indices.tolist(), top.values.tolist(), strict=True)
        ]
        expected = product_tree(levels, 15 if row != 1 else 0)
        assert (found.tokens[row], found.parents[row]) == (expected.items, expected.parents)
        assert found.confidence[row] == pytest.approx(expected.probabilities, abs=1e-4)


def test_a_tree_of_one_branch_is_the_chain(model: Model, tmp_path: Path) -> None:
    tiny_medusa.write(Plan(), tmp_path, "vllm")
    chain = draft(model, medusa(model, tmp_path, width=5), 5)
    tree = draft(model, medusa(model, tmp_path, tree="0/0.0/0.0.0/0.0.0.0/0.0.0.0.0"), 5)
    assert (tree.tokens, tree.parents, tree.confidence) == (chain.tokens, None, chain.confidence)
    assert draft(model, medusa(model, tmp_path, width=5, max_depth=2), 5).tokens == [row[:2] for row in chain.tokens]


def test_a_tree_of_the_users_own(model: Model, tmp_path: Path) -> None:
    tiny_medusa.write(Plan(), tmp_path, "vllm")
    drafter = medusa(model, tmp_path, tree="1/0/1.2/0.0/1.2.0")
    assert drafter.needs.width == 5 and drafter.needs.trees
    found = draft(model, drafter, 5)
    assert found.parents is not None and found.confidence is not None
    for row, logits in enumerate(logits_of(model, Plan())):
        top = logits[:3].topk(3).indices.tolist()
        wanted = {(0,), (1,), (0, 0), (1, 2), (1, 2, 0)} if row != 1 else set()
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(found.tokens[row], found.parents[row], strict=True):
            before = paths[parent] if parent >= 0 else ()
            paths.append((*before, top[len(before)].index(token)))
        assert set(paths) == wanted and len(paths) == len(wanted)
    assert [len(row) for row in draft(model, drafter, 2).tokens] == [2, 0, 2]


@pytest.mark.parametrize("replacement", [False, True])
def test_drawn_trees_have_a_fixed_shape_and_bring_their_logits(model: Model, tmp_path: Path, replacement: bool) -> None:
    tiny_medusa.write(Plan(), tmp_path, "vllm")
    sampling = {"sampled": True, "coupled": False, "replacement": replacement}
    found = draft(model, medusa(model, tmp_path, sampling, width=12, branches=3), 10, temperature=0.9)
    assert found.parents is not None and found.logits is not None and found.confidence is None
    parents = [parent for parent, _ in fixed_shape(10, 3, 7)]
    assert list(found.parents) == [parents, [], parents]
    assert tuple(found.logits.shape) == (3, 10, tiny.VOCABULARY)
    for row, logits in enumerate(logits_of(model, Plan())):
        depths: list[int] = []
        for parent in parents if row != 1 else ():
            depths.append(0 if parent < 0 else depths[parent] + 1)
        torch.testing.assert_close(found.logits[row, : len(depths)], logits[depths], rtol=1e-4, atol=1e-4)
        for node in range(-1, len(depths)):
            siblings = [t for t, parent in zip(found.tokens[row], found.parents[row], strict=True) if parent == node]
            assert replacement or len(set(siblings)) == len(siblings)


def test_draws_follow_the_targets_own_noise(model: Model, tmp_path: Path) -> None:
    """With noise that both share, the first child is what the target's sampler takes from these logits."""
    tiny_medusa.write(Plan(), tmp_path, "vllm")
    drafter = medusa(model, tmp_path, {"sampled": True}, width=9, branches=3)
    found = draft(model, drafter, 9, temperature=0.9)
    assert found.parents is not None and found.logits is None
    for row, logits in enumerate(logits_of(model, Plan())):
        if row != 1:
            first = found.tokens[row][found.parents[row].index(-1)]
            assert [first] == drafter.sampler.sample(
                logits[:1].contiguous(), drafter.sampler.sampling([contexts(9, 0.9)[row]]), 0
            ).tolist()


def test_a_head_runs_only_while_it_may_pay(model: Model, tmp_path: Path) -> None:
    tiny_medusa.write(Plan(), tmp_path, "vllm")
    drafter = medusa(model, tmp_path, width=7)
    hidden = torch.cat(states(model, [text[:-1] for text in TEXTS]))
    asked = [replace(context, min_acceptance=1.1) for context in contexts(7)]
    assert [len(row) for row in drafter.propose(asked, torch.empty(0), hidden).tokens] == [1, 0, 1]
    assert [len(row) for row in drafter.propose([contexts(7)[1]], torch.empty(0), hidden).tokens] == [0]


def test_tokens_that_cannot_be_drafted_are_left_out(model: Model, tmp_path: Path) -> None:
    tiny_medusa.write(Plan(vocabulary=2, heads=3), tmp_path, "vllm")
    found = draft(model, medusa(model, tmp_path, width=50, branches=5), 50)
    assert [len(row) for row in found.tokens] == [14, 0, 14]  # 2 + 4 + 8


# ---- refusals ----


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"width": 8}, "`width` is 8, but `.*` has 7 heads, .* pass `width=7` or less, or `branches` for a tree"),
        ({"width": 9, "branches": 2, "max_depth": 8}, "`max_depth` is 8, but `.*` has 7 heads"),
        ({"branches": 0}, "`branches` is 0"),
        ({"width": 3, "branches": 4}, "`branches` is 4 and `width` is 3"),
        ({"tree": "0/0.0", "branches": 2}, "`branches` is 2, but `tree` sets it"),
        ({"tree": "0/0.0", "width": 4}, "`width` is 4, but `tree` sets it"),
        ({"tree": "/".join(".".join("0" * n) for n in range(1, 9))}, "has the path `0.0.0.0.0.0.0.0`, but .* 7 heads"),
        ({"tree": "0/2.1"}, "`tree` has the path `2.1` and lacks `2`"),
    ],
)
def test_impossible_options_are_refused(model: Model, tmp_path: Path, options: dict[str, Any], said: str) -> None:
    tiny_medusa.write(Plan(), tmp_path, "vllm")
    with pytest.raises(UserError, match=said):
        medusa(model, tmp_path, **options)


@pytest.mark.parametrize(("heads", "options", "width"), [(2, {}, 2), (7, {}, 3), (2, {"branches": 2}, 3)])
def test_the_default_width_needs_no_more_heads_than_there_are(
    model: Model, tmp_path: Path, heads: int, options: dict[str, Any], width: int
) -> None:
    tiny_medusa.write(Plan(heads=heads), tmp_path, "vllm")
    assert medusa(model, tmp_path, **options).needs.width == width
    if heads == 2 and not options:
        with pytest.raises(UserError, match=r"`width` is 3, but `.*` has 2 heads"):
            medusa(model, tmp_path, width=3)


def test_heads_must_be_named(model: Model) -> None:
    assert "`medusa` needs a head" in refusal(lambda: find("medusa").build(find("medusa").Options(), target(model)))


def test_drawn_siblings_have_no_gaps(model: Model, tmp_path: Path) -> None:
    tiny_medusa.write(Plan(), tmp_path, "vllm")
    drawn = {"sampled": True, "coupled": False}
    assert "lacks the path `0.0`" in refusal(lambda: medusa(model, tmp_path, drawn, tree="0/0.1"))
    medusa(model, tmp_path, drawn, tree="0/0.1/0.0")
    medusa(model, tmp_path, {"sampled": True}, tree="0/0.1")


def test_heads_that_do_not_fit_are_refused(model: Model, tmp_path: Path) -> None:
    def said(name: str, change: Callable[[dict[str, Tensor]], object], **variant: Any) -> str:
        plan = Plan(**variant)
        found = dict(tiny_medusa.tensors(plan))
        change(found)
        tiny_medusa.write(plan, tmp_path / name, "vllm", found)
        return refusal(lambda: medusa(model, tmp_path / name))

    assert "reads states of width 32, but the target's have 64" in said("narrow", lambda _: None, width=32)
    fewer = said("vocabulary", lambda found: found.update({"lm_heads.1.weight": found["lm_heads.1.weight"][:50]}))
    assert "`lm_heads.1.weight` of" in fewer and "has 50 rows, but 101 tokens to draft" in fewer
    assert "lacks the tensor `lm_heads.2.weight`" in said("end", lambda found: found.pop("lm_heads.2.weight"))
    assert "lacks the tensor `model.blocks.3.layers.0.weight`" in said(
        "block", lambda found: found.pop("blocks.3.layers.0.weight")
    )
    assert "`model.blocks.9.what`" in said("more", lambda found: found.update({"blocks.9.what": torch.ones(2)}))
    twice = said("map", lambda found: found.update({"token_map": torch.zeros(40, dtype=torch.int64)}))
    assert "does not map its 40 tokens" in twice


def test_the_method_is_known_by_its_files(tmp_path: Path) -> None:
    tiny_medusa.write(Plan(), tmp_path, "fasterdecoding")
    assert choose_method({"model": str(tmp_path)}) == "medusa"
    plan = parse("none", {"method": "medusa", "model": str(tmp_path), "num_speculative_tokens": 4})
    assert (plan.method, plan.options.width) == ("medusa", 4)
    assert parse(f"medusa:model={tmp_path},tree=0/0.0/0.1/1").options.tree == "0/0.0/0.1/1"
    assert "is a head of the method `medusa`" in refusal(lambda: open_head(str(tmp_path), None, "eagle3"))
