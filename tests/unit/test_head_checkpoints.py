"""Folders of draft heads: every layout is read correctly, and unusable heads are refused in one sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tiny
import tiny_heads
from outrider import kernels
from outrider.cache.pages import Pages
from outrider.device import open_device
from outrider.errors import UserError
from outrider.models import Model, build
from outrider.models.heads import EagleHead
from outrider.speculation import Target
from outrider.speculation.checkpoints import choose_aux_layers, open_head
from outrider.speculation.checkpoints import folder as head_folder
from outrider.speculation.methods import eagle, eagle3
from refusals import refusal
from tiny_heads import Plan
from unit.checkpoint_changes import change, change_tensors

BAD = (None, -1, 0, 1.5, True, "x", [], {}, [1], {"a": 1}, 10**9)


@pytest.fixture(scope="module")
def model() -> Model:
    return build(tiny.checkpoint("llama"), kernels.load("reference"))


@pytest.fixture
def target(model: Model) -> Target:
    return Target(model, cast(Any, None), model.ops, open_device("reference"), 4, 96, "float32")


def make(method: str, folder: Path, layout: str | None = None, **variant: Any) -> dict[str, str]:
    """A random head, not fitted to anything."""
    layout = layout or ("safeailab" if method == "eagle" else "speculators")
    return tiny_heads.write(Plan(method=method, **variant), folder, layout)


def assemble(folder: Path, model: Model, aux_layers: tuple[int, ...] = ()) -> EagleHead[Pages]:
    head = open_head(str(folder), model.config)
    choose_aux_layers(head, model, aux_layers)
    layers = head.shape.layers
    return EagleHead(head, model, Pages(layers.layers, layers.kv_heads, 4, layers.head_dim, "float32"), 96)


@pytest.mark.parametrize("layout", tiny_heads.LAYOUTS)
def test_every_layout_gives_the_same_logits(layout: str, tmp_path: Path, model: Model) -> None:
    plan = Plan(norm_before_residual=True, norm_output=True)
    tiny_heads.write(plan, tmp_path, layout)
    head = open_head(str(tmp_path), model.config, "eagle3")
    assert head.shape.aux_layers == (None if layout in ("safeailab", "angelslim") else plan.aux_layers)
    assert (head.shape.num_aux_layers, head.shape.target_width) == (3, 64)
    assert head.shape.norm_before_residual and head.shape.norm_output
    assert not head.shape.norm_before_fc and not head.shape.fc_norm
    assert head.draft_ids is not None and plan.ids is not None
    assert torch.equal(head.draft_ids, plan.ids)
    assert head.shape.own_head


def test_absent_flags_mean_what_their_layout_says(tmp_path: Path, model: Model) -> None:
    for layout, before in (("speculators", True), ("specforge", False)):
        tiny_heads.write(Plan(), tmp_path / layout, layout)
        change(tmp_path / layout, lambda config: [config.pop(name, None) for name in tiny_heads.flags(Plan())])
        shape = open_head(str(tmp_path / layout), model.config).shape
        assert (shape.norm_before_residual, shape.norm_output) == (before, False)


def test_absent_flags_of_norms_before_fc_follow_their_tensors(tmp_path: Path, model: Model) -> None:
    for name in ("norm_before_fc", "fc_norm"):
        tiny_heads.write(Plan(**{name: True}), tmp_path / name, "speculators")
        change(tmp_path / name, lambda config, name=name: config.pop(name))
        assert getattr(open_head(str(tmp_path / name), model.config).shape, name)


def test_a_d2t_of_all_tokens_is_dropped(tmp_path: Path, model: Model) -> None:
    tiny_heads.write(Plan(draft_vocabulary=None), tmp_path, "specforge")
    head = open_head(str(tmp_path), model.config)
    assert head.draft_ids is None and head.shape.draft_vocabulary is None


def test_eagle1_in_a_nested_configuration(tmp_path: Path, model: Model) -> None:
    make("eagle", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "eagle", "model": config}))
    shape = open_head(str(tmp_path), model.config, "eagle").shape
    assert (shape.kind, shape.fc_bias, shape.norm_last, shape.own_head) == ("eagle", True, False, False)


@pytest.mark.parametrize("layout", ["safeailab", "speculators"])
def test_methods_ask_for_what_the_head_reads(layout: str, tmp_path: Path, target: Target) -> None:
    options = make("eagle3", tmp_path, layout=layout)
    aux_layers = tuple(map(int, options["aux_layers"].split("/"))) if "aux_layers" in options else ()
    proposer = eagle3.build(eagle3.Options(width=5, model=str(tmp_path), aux_layers=aux_layers), target)
    assert (proposer.needs.width, proposer.needs.aux_layers, proposer.needs.has_kv) == (5, (1, 2, 3), True)
    assert proposer.needs.context == 96
    assert [pages.states.shape[1] for pages in target.storages] == [3 * 64]


def test_eagle1_reads_the_last_state(tmp_path: Path, target: Target) -> None:
    proposer = eagle.build(eagle.Options(**make("eagle", tmp_path)), target)
    assert proposer.needs.aux_layers == (3,)
    assert [pages.states.shape[1] for pages in target.storages] == [64]


def test_aux_layers_of_the_user_take_precedence(tmp_path: Path, target: Target) -> None:
    make("eagle3", tmp_path)
    proposer = eagle3.build(eagle3.Options(model=str(tmp_path), aux_layers=(0, 1, 2)), target)
    assert proposer.needs.aux_layers == (0, 1, 2)


def test_default_aux_layers_are_the_models(tmp_path: Path) -> None:
    deep = build(tiny.checkpoint("gemma3"), kernels.load("reference"))
    make("eagle3", tmp_path, target="gemma3", layout="angelslim")
    head = open_head(str(tmp_path), deep.config)
    assert choose_aux_layers(head, deep) == deep.default_aux_layers() == (2, 3, 4)


def test_a_method_without_a_head_asks_for_one(target: Target) -> None:
    assert "pass its folder as `model`" in refusal(lambda: eagle.build(eagle.Options(), target))
    assert "pass its folder as `model`" in refusal(lambda: eagle3.build(eagle3.Options(), target))


def test_the_other_method_is_named(tmp_path: Path, target: Target) -> None:
    make("eagle3", tmp_path / "three")
    make("eagle", tmp_path / "one")
    wrong = refusal(lambda: eagle.build(eagle.Options(model=str(tmp_path / "three")), target))
    assert "pass `eagle3` instead of `eagle`" in wrong
    wrong = refusal(lambda: eagle3.build(eagle3.Options(model=str(tmp_path / "one")), target))
    assert "pass `eagle` instead of `eagle3`" in wrong


def test_aux_layers_beyond_the_target_are_refused(tmp_path: Path, model: Model) -> None:
    make("eagle3", tmp_path, aux_layers=(1, 2, 40))
    assert "entering layer 40, but the target has 3 layers" in refusal(lambda: assemble(tmp_path, model))
    assert "reads 3 states a token, but `aux_layers` names 2" in refusal(lambda: assemble(tmp_path, model, (1, 2)))
    make("eagle3", tmp_path / "silent", layout="angelslim")
    assert "3 layers, too few for the default aux layers" in refusal(lambda: assemble(tmp_path / "silent", model))


def test_heads_of_another_size_are_refused(tmp_path: Path, model: Model) -> None:
    wide = build(tiny.checkpoint("llama"), kernels.load("reference"))
    other = replace(wide.config, width=128)
    make("eagle3", tmp_path / "a")
    assert "states of width 64, but the target's have 128" in refusal(lambda: open_head(str(tmp_path / "a"), other))
    make("eagle3", tmp_path / "b", layout="safeailab", width=32)
    assert "lacks the tensor `embed_tokens.weight`" in refusal(lambda: open_head(str(tmp_path / "b"), model.config))
    large = replace(model.config, vocabulary=200)
    assert "has 101 tokens, but the target has 200" in refusal(lambda: open_head(str(tmp_path / "a"), large))
    change(tmp_path / "a", lambda config: config.update(target_hidden_size=65))
    assert "no multiple of the target's width 65" in refusal(lambda: open_head(str(tmp_path / "a")))


@pytest.mark.parametrize("break_it", ["falls", "repeats", "negative", "beyond", "missing"])
def test_invalid_d2t_is_refused(break_it: str, tmp_path: Path, model: Model) -> None:
    make("eagle3", tmp_path)

    def edit(tensors: dict[str, Tensor]) -> None:
        offsets = tensors["d2t"]
        if break_it == "falls":
            offsets[10] = 80
        elif break_it == "repeats":
            offsets[10] = offsets[9] - 1
        elif break_it == "negative":
            offsets[0] = -1
        elif break_it == "beyond":
            offsets[-1] = 101 - 59
        else:
            del tensors["d2t"]

    change_tensors(tmp_path, edit)
    message = refusal(lambda: open_head(str(tmp_path), model.config))
    assert "`d2t`" in message and ("rising ids below 101" in message or "`d2t` is missing" in message)


@pytest.mark.parametrize("layout", ["safeailab", "speculators", "nvidia"])
def test_missing_tensors_are_named(layout: str, tmp_path: Path, model: Model) -> None:
    plan = Plan(fc_norm=True, head_norms=True)
    for name in tiny_heads.tensors(plan):
        if name in ("lm_head.weight",) or "q_norm" in name or (layout == "nvidia" and ("proj" in name)):
            continue  # a head may do without; fused tensors go as one
        options = tiny_heads.write(plan, tmp_path, layout)
        file = tmp_path / ("pytorch_model.bin" if layout == "safeailab" else "model.safetensors")
        tensors = torch.load(file, weights_only=True) if layout == "safeailab" else load_file(file)
        spelled = [each for each in tensors if each.replace("midlayer.", "layers.0.").removeprefix("model.") == name]
        del tensors[spelled[0]]
        torch.save(tensors, file) if layout == "safeailab" else save_file(tensors, file)
        aux_layers = tuple(map(int, options["aux_layers"].split("/"))) if "aux_layers" in options else ()
        message = refusal(lambda aux_layers=aux_layers: assemble(tmp_path, model, aux_layers))
        known = name in message or "q_proj" in name  # without its queries it is not recognized as a head
        assert known, message


def test_strange_tensors_are_refused(tmp_path: Path, model: Model) -> None:
    make("eagle3", tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors.update({"gate.weight": torch.zeros(2, 2)}))
    assert "`model.gate.weight`" in refusal(lambda: assemble(tmp_path, model))
    change_tensors(tmp_path, lambda tensors: tensors.update({"gate.weight": torch.zeros(2, 2, dtype=torch.int8)}))
    assert "torch.int8" in refusal(lambda: assemble(tmp_path, model))


def test_multimodal_heads_are_refused(tmp_path: Path, model: Model) -> None:
    make("eagle3", tmp_path / "a", layout="specforge")
    change(tmp_path / "a", lambda config: config.update(rope_scaling={"type": "default", "mrope_section": [4, 2, 2]}))
    assert "`mrope_section`" in refusal(lambda: open_head(str(tmp_path / "a"), model.config))
    make("eagle3", tmp_path / "b")
    change(tmp_path / "b", lambda config: config.update(vision_config={"depth": 2}))
    assert "`vision_config`" in refusal(lambda: open_head(str(tmp_path / "b"), model.config))


def test_folders_without_a_head_are_refused(tmp_path: Path, model: Model) -> None:
    assert "method `draft_model`" in refusal(lambda: open_head(str(tiny.folder("llama"))))
    assert "no draft head at" in refusal(lambda: open_head(str(tmp_path / "nowhere")))
    assert "no `config.json`" in refusal(lambda: open_head(str(tmp_path)))
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    assert "no `model.safetensors`" in refusal(lambda: open_head(str(tmp_path)))
    save_file({"a.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    assert "is no draft head of a known kind" in refusal(lambda: open_head(str(tmp_path)))
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    assert "no usable safetensors file" in refusal(lambda: open_head(str(tmp_path)))
    make("eagle3", tmp_path / "parallel")
    change_tensors(tmp_path / "parallel", lambda tensors: tensors.update(mask_hidden=torch.zeros(1, 1, 192)))
    assert "state `mask_token_id`" in refusal(lambda: open_head(str(tmp_path / "parallel")))


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("this ran",)


def test_pickled_code_does_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make("eagle", tmp_path)
    torch.save({"fc.weight": Harmful()}, tmp_path / "pytorch_model.bin")
    assert "holds more than tensors" in refusal(lambda: open_head(str(tmp_path)))
    assert capsys.readouterr().out == ""
    torch.save([1, 2], tmp_path / "pytorch_model.bin")
    assert "no table of tensors" in refusal(lambda: open_head(str(tmp_path)))
    (tmp_path / "pytorch_model.bin").write_bytes(b"nonsense")
    assert "damaged" in refusal(lambda: open_head(str(tmp_path)))


def test_pickled_weights_of_the_hub_are_pulled_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make("eagle", tmp_path / "whole")
    (tmp_path / "bare").mkdir()
    asked: list[list[str]] = []

    def pull(name: str, also: list[str]) -> Path:
        asked.append([name, *also])
        return tmp_path / "whole"

    monkeypatch.setattr(head_folder, "locate", lambda source, kind: tmp_path / "bare")
    monkeypatch.setattr(head_folder.catalog, "pull_hub", pull)
    assert open_head("someone/head").shape.kind == "eagle"
    assert asked == [["someone/head", "pytorch_model.bin", "medusa_lm_head.pt", "mask_embedding.pt"]]


@pytest.mark.parametrize("layout", ["specforge", "speculators", "nvidia"])
def test_absurd_configurations_never_crash(layout: str, tmp_path: Path, model: Model) -> None:
    """Whatever stands in config.json, the head works or is refused."""
    plan = Plan(window=4)
    tiny_heads.write(plan, tmp_path, layout)
    original = json.loads((tmp_path / "config.json").read_text())
    refused = 0
    for path in key_paths(original):
        for bad in BAD:
            changed = json.loads(json.dumps(original))
            inner = changed
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = bad
            (tmp_path / "config.json").write_text(json.dumps(changed))
            try:
                assemble(tmp_path, model, plan.aux_layers)
            except UserError:
                refused += 1
    assert refused > 50


def key_paths(config: dict[str, Any]) -> list[tuple[str, ...]]:
    """Paths to every key, nested ones included."""
    found: list[tuple[str, ...]] = []
    for key, value in config.items():
        found.append((key,))
        if isinstance(value, dict):
            found += [(key, *path) for path in key_paths(value)]
    return found


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_fitted_heads_agree_with_the_target(method: str, tmp_path: Path, model: Model) -> None:
    """Invariants that are tested with heads whose every draft token is wrong would prove little."""
    plan = Plan(method=method)
    tiny_heads.make(method, tmp_path)
    head = assemble(tmp_path, model)
    head.pages.allocate(12)
    text = tiny.prompt(40, seed=9)
    logits, states = tiny.run(model, text, 8, (3,) if method == "eagle" else plan.aux_layers)
    entries = tiny.batch([(text[1:], 1, list(range(12)))], 4)
    drafts = head.logits(head.run(entries, head.project_features(torch.cat(states, 1)[:-1])))
    ids = torch.arange(tiny.VOCABULARY) if plan.ids is None else plan.ids
    wanted = logits[1:, ids]
    agreement = torch.corrcoef(torch.stack([drafts[:, ids].flatten(), wanted.flatten()]))[0, 1]
    assert float(agreement) > 0.3
