"""Folders of DFlash and DSpark heads: every layout is read correctly, and unusable heads are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import tiny
import tiny_blocks
import tiny_heads
from outrider import kernels
from outrider.cache.pages import Pages
from outrider.device import open_device
from outrider.models import Model, build
from outrider.models.block_head import BlockHead, evenly_spaced_layers
from outrider.speculation import Target, find
from outrider.speculation.checkpoints import describe, open_head
from outrider.speculation.config import parse
from outrider.speculation.vllm_config import method_of
from refusals import refusal
from tiny_blocks import DFLASH, DSPARK, Plan
from unit.checkpoint_changes import Config, Tensors, change, change_tensors

LAYOUTS = [("dflash", layout) for layout in DFLASH] + [("dspark", layout) for layout in DSPARK]


@pytest.fixture(scope="module")
def model() -> Model:
    return build(tiny.checkpoint("llama"), kernels.load("reference"))


@pytest.fixture
def target(model: Model) -> Target:
    return Target(model, cast(Any, None), model.ops, open_device("reference"), 4, 96, "float32")


def states(folder: Path, model: Model, plan: Plan) -> Tensor:
    """Of a block behind states that are the same for all."""
    head = open_head(str(folder), model.config)
    pages = Pages(plan.layers, plan.kv_heads, 16, plan.head_dim, "float32")
    pages.allocate(1)
    network = BlockHead(head, model, pages, 16)
    features = torch.randn(6, network.features, generator=torch.Generator().manual_seed(1))
    network.store(network.project_features(features), tiny.batch([([0] * 6, 0, [0])], 16))
    found = network.run(tiny.batch([([9, *[plan.mask] * 3], 6, [0])], 16))
    bias, _ = network.bias(
        found, torch.tensor([3, 4, 5, 6], dtype=torch.int32), network.begin(found, torch.zeros(4).int())
    )
    return network.logits(network.scores(found) + (0 if bias is None else bias))


@pytest.mark.parametrize(("method", "layout"), LAYOUTS)
def test_every_layout_is_the_same_head(method: str, layout: str, tmp_path: Path, model: Model) -> None:
    plan = Plan(method=method)
    tiny_blocks.write(plan, tmp_path / "known")
    tiny_blocks.write(plan, tmp_path / layout, layout)
    known, found = (open_head(str(tmp_path / name), model.config, method) for name in ("known", layout))
    assert (found.shape.kind, found.shape.block, found.shape.mask) == (method, 8, 100)
    assert found.shape.aux_layers == plan.aux_layers and found.shape.from_anchor == plan.anchored
    own = {"layout": "", "anchored": False, "own_embedding": 0, "scaled_embedding": False}
    assert replace(found.shape, **own) == replace(known.shape, **own)
    assert torch.equal(states(tmp_path / layout, model, plan), states(tmp_path / "known", model, plan))
    assert method_of(str(tmp_path / layout)) == method


def test_markov_and_confidence_heads_are_read_from_tensors_and_keys(tmp_path: Path, model: Model) -> None:
    def edited(plan: Plan, edit: Callable[[Config], object]) -> Any:
        tiny_blocks.write(plan, tmp_path / "edited")
        change(tmp_path / "edited", edit)
        return open_head(str(tmp_path / "edited"), model.config).shape

    bare = edited(Plan(method="dspark", rank=0, confidence=False), lambda config: None)
    assert (bare.kind, bare.markov_rank, bare.confidence, bare.drafts) == ("dspark", 0, False, 8)
    for kind in ("gated", "rnn"):
        unsaid = edited(Plan(method="dspark", markov=kind), lambda config: config.pop("markov_head_type"))
        assert (unsaid.markov, unsaid.markov_rank, unsaid.markov_tokens) == (kind, 8, tiny.VOCABULARY)
    alone = edited(Plan(method="dspark", confidence_markov=False), lambda config: config.pop("sample_from_anchor"))
    assert alone.confidence and not alone.confidence_markov and alone.from_anchor
    assert not edited(Plan(), lambda config: config.pop("sample_from_anchor")).from_anchor


def test_sliding_layers(tmp_path: Path, model: Model) -> None:
    """Who looks ahead in a block depends on who wrote the head, and on flags."""
    plan = Plan(windows=(5, 0))

    def read(layout: str, plan: Plan = plan, **inner: Any) -> tuple[tuple[int, ...], tuple[bool, ...], bool]:
        tiny_blocks.write(plan, tmp_path / "head", layout)
        change(
            tmp_path / "head", lambda config: config.setdefault("dflash_config", {}).update(inner) if inner else None
        )
        shape = open_head(str(tmp_path / "head"), model.config).shape
        return shape.layers.windows, shape.causal, shape.anchored

    assert read("speculators") == ((5, 0), (True, False), True)
    assert read("speculators", replace(plan, both_ways=True)) == ((5, 0), (False, False), True)
    assert read("zlab") == ((5, 0), (True, False), False)
    assert read("zlab", causal=False) == ((5, 0), (False, False), False)
    assert read("zlab", Plan(), is_causal=True) == ((0, 0), (True, True), False)
    assert read("zlab", swa_window_size=7) == ((7, 0), (True, False), False)
    assert read("zlab", Plan(), use_swa=True, swa_window_size=6) == ((6, 6), (False, False), False)
    assert read("assistant") == ((5, 0), (False, False), False)


def test_one_rope_for_all_layers(tmp_path: Path, model: Model) -> None:
    tiny_blocks.write(Plan(theta=321.0), tmp_path)
    nested = {"sliding_attention": {"rope_type": "default", "rope_theta": 321.0}, "full_attention": {"rope_theta": 5.0}}
    change(tmp_path, lambda config: config["transformer_layer_config"].update(rope_parameters=nested))
    assert {rope.theta for rope in open_head(str(tmp_path), model.config).shape.layers.ropes} == {321.0}


def test_default_aux_layers(tmp_path: Path, target: Target) -> None:
    assert (
        evenly_spaced_layers(1, 30) == (16,)
        and evenly_spaced_layers(3, 30) == (2, 15, 28)
        and evenly_spaced_layers(5, 30) == (2, 9, 15, 21, 28)
    )
    tiny_blocks.write(Plan(aux_layers=(2,)), tmp_path, "zlab")
    change(tmp_path, lambda config: config["dflash_config"].pop("target_layer_ids"))
    assert open_head(str(tmp_path)).shape.aux_layers is None
    dflash = find("dflash")
    assert dflash.build(dflash.Options(model=str(tmp_path)), target).needs.aux_layers == (2,)
    assert dict(describe(open_head(str(tmp_path)), target.model))["reads"].endswith(
        "layers 2: the default for this model"
    )
    change(tmp_path, lambda config: config.update(num_target_layers=5))
    assert open_head(str(tmp_path)).shape.aux_layers == (3,)
    answer = refusal(lambda: dflash.build(dflash.Options(model=str(tmp_path)), target))
    assert "was made for a model of 5 layers" in answer


def test_the_width_comes_from_the_checkpoint(tmp_path: Path, target: Target) -> None:
    for method, drafts in (("dflash", 7), ("dspark", 8)):
        folder = tiny_blocks.write(Plan(method=method), tmp_path / method)["model"]
        for plan in (parse(f"{method}:model={folder}"), parse("none", {"model": folder})):
            assert plan.method == method and find(method).build(plan.options, target).needs.width == drafts
        assert parse(f"{method}:model={folder},width=3").width(1) == 3


def test_quantized_heads(tmp_path: Path, model: Model) -> None:
    """All large matrices shrink, but those of too low a rank."""
    for rank in (8, 32):
        tiny_blocks.write(Plan(method="dspark", rank=rank, own_embedding=True), tmp_path)
        head = open_head(str(tmp_path), model.config)
        pages = Pages(2, 2, 4, 16, "float32")
        full, small = (BlockHead(head, model, pages, 16, how).weight_bytes for how in (None, "int8"))
        assert 0 < small < 0.4 * full


@pytest.mark.parametrize("rank", [8, 32])
def test_the_weights_that_a_step_reads(tmp_path: Path, model: Model, rank: int) -> None:
    """Every matrix but the tables, of which a step reads a few rows; 34 bytes for 32 numbers where it is quantised."""
    plan = Plan(method="dspark", rank=rank, markov="gated", own_embedding=True)
    head = open_head(tiny_blocks.write(plan, tmp_path)["model"], model.config)
    tables = ("embed_tokens.weight", "markov_head.markov_w1.weight")
    found = {name: each.nbytes for name, each in tiny_blocks.tensors(plan).items() if each.ndim == 2}
    read = {name: size for name, size in found.items() if name not in tables}
    exact = ("markov_head" if rank % 32 else "markov_head.gate_proj", "confidence_head")
    small = {name: size if name.startswith(exact) else size // 4 * 34 // 32 for name, size in read.items()}
    pages = Pages(2, 2, 4, 16, "float32")
    assert BlockHead(head, model, pages, 16).weight_bytes == sum(read.values())
    assert BlockHead(head, model, pages, 16, "int8").weight_bytes == sum(small.values())


# ---- refusals ----

CONFIGS: dict[str, tuple[str, Callable[[Config], object], str]] = {
    "no block size": ("dflash", lambda config: config.pop("block_size"), "states no `block_size`"),
    "no draft tokens": ("dflash", lambda config: config.update(block_size=1), "`block_size` is 1"),
    "bad block size": ("dflash", lambda config: config.update(block_size="x"), "`block_size` is 'x'"),
    "no mask": ("dspark", lambda config: config.update(mask_token_id=None), "`mask_token_id` is None"),
    "strange mask": ("dflash", lambda config: config.update(mask_token_id=-1), "`mask_token_id` is -1"),
    "mask beyond": ("dflash", lambda config: config.update(mask_token_id=101), "mask token of .* is 101"),
    "layers beyond": ("dflash", lambda config: config.update(aux_hidden_state_layer_ids=[1, 2, 9]), "layer 9"),
    "few layers": ("dflash", lambda config: config.update(aux_hidden_state_layer_ids=[1, 2]), "reads 3 states"),
    "no list": ("dflash", lambda config: config.update(aux_hidden_state_layer_ids=3), "expected a list of layers"),
    "no keys": ("dflash", lambda config: config.update(dflash_config=3), "`dflash_config` is 3"),
    "unknown bias": ("dspark", lambda config: config.update(markov_head_type="deep"), "`markov_head_type` is 'deep'"),
    "width of the target": ("dflash", lambda config: config.update(target_hidden_size=96), "states of width 96"),
    "gated without gate": ("dspark", lambda config: config.update(markov_head_type="gated"), "gate_proj.weight"),
}
TENSORS: dict[str, tuple[str, Callable[[Tensors], object], str]] = {
    "DFlash2": ("dflash", lambda found: found.update(candidate_selector=torch.ones(1)), "head of DFlash2"),
    "convolutions": ("dflash", lambda found: found.update({"layers.0.mlp_conv.base_kernel": torch.ones(2)}), "DFlash2"),
    "Domino": ("dspark", lambda found: found.update({"prefix_gru.weight": torch.ones(1)}), "head of Domino"),
    "sinks": ("dflash", lambda found: found.update({"layers.0.self_attn.attention_sink_bias": torch.ones(4)}), "sinks"),
    "stranger": ("dflash", lambda found: found.update(other=torch.ones(3)), "`model.other` of shape"),
    "few tokens before": (
        "dspark",
        lambda found: found.update({"markov_head.markov_w1.weight": torch.ones(50, 8)}),
        "`markov_w1` of .* has 50 tokens",
    ),
    "other ranks": (
        "dspark",
        lambda found: found.update({"markov_head.markov_w2.weight": torch.ones(60, 7)}),
        r"markov_w2.weight` has the shape \[60, 7\]",
    ),
    "no bias matrix": (
        "dspark",
        lambda found: found.pop("markov_head.markov_w1.weight"),
        "lacks the tensor .*markov_w1",
    ),
    "other confidence": (
        "dspark",
        lambda found: found.update({"confidence_head.proj.weight": torch.ones(1, 70)}),
        r"confidence_head.proj.weight` has the shape \[1, 70\]",
    ),
    "no norm": ("dflash", lambda found: found.pop("norm.weight"), "lacks the tensor `model.norm.weight`"),
    "no map": ("dflash", lambda found: found.pop("d2t"), "has 60 rows, but 101 tokens to draft"),
    "ragged states": ("dflash", lambda found: found.update({"fc.weight": torch.ones(64, 100)}), "no multiple"),
}


def attempt(method: str, folder: Path, target: Target, **options: Any) -> None:
    module = find(method)
    module.build(module.Options(model=str(folder), **options), target)


@pytest.mark.parametrize("case", CONFIGS)
def test_refused_configurations(case: str, tmp_path: Path, target: Target) -> None:
    method, edit, pattern = CONFIGS[case]
    tiny_blocks.write(Plan(method=method), tmp_path)
    change(tmp_path, edit)
    message = refusal(lambda: attempt(method, tmp_path, target))
    assert re.search(pattern, message), message


@pytest.mark.parametrize("case", TENSORS)
def test_refused_tensors(case: str, tmp_path: Path, target: Target) -> None:
    method, edit, pattern = TENSORS[case]
    tiny_blocks.write(Plan(method=method), tmp_path)
    change_tensors(tmp_path, edit)
    message = refusal(lambda: attempt(method, tmp_path, target))
    assert re.search(pattern, message), message


def test_refused_options(tmp_path: Path, target: Target) -> None:
    folder = Path(tiny_blocks.write(Plan(), tmp_path / "dflash")["model"])
    other = Path(tiny_heads.write(tiny_heads.Plan(), tmp_path / "eagle3", "speculators")["model"])
    message = refusal(lambda: attempt("dflash", folder, target, width=8))
    assert "`width` is 8" in message and "blocks of 8" in message and "pass at most 7" in message
    assert "pass `dflash` instead of `dspark`" in refusal(lambda: attempt("dspark", folder, target))
    assert "pass `eagle3` instead of `dflash`" in refusal(lambda: attempt("dflash", other, target))
    assert "names 2: pass 3 layers as `aux_layers`" in refusal(
        lambda: attempt("dflash", folder, target, aux_layers=(1, 2))
    )
    assert "names the state entering layer 4" in refusal(
        lambda: attempt("dflash", folder, target, aux_layers=(1, 2, 4))
    )
    assert "pass its folder as `model`" in refusal(lambda: find("dspark").build(find("dspark").Options(), target))
    message = refusal(lambda: attempt("dflash", folder, target, width=15, branches=2, max_depth=8))
    assert "`max_depth` is 8" in message and "pass at most 7" in message


def test_a_damaged_mask_embedding(tmp_path: Path, target: Target) -> None:
    tiny_blocks.write(Plan(mask_embedding=True), tmp_path)
    torch.save({"embedding": torch.ones(32), "mask_token_id": 100}, tmp_path / "mask_embedding.pt")
    assert "`model.mask_embedding` has the shape [32]" in refusal(lambda: attempt("dflash", tmp_path, target))
    for damaged in ({"embedding": 3, "mask_token_id": 100}, {"mask_token_id": 100}, [1], torch.ones(3)):
        torch.save(damaged, tmp_path / "mask_embedding.pt")
        assert "mask_embedding.pt` holds no `embedding`" in refusal(lambda: attempt("dflash", tmp_path, target))
    (tmp_path / "mask_embedding.pt").write_bytes(b"nonsense")
    assert "mask_embedding.pt` holds no `embedding`" in refusal(lambda: attempt("dflash", tmp_path, target))
