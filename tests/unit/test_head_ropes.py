"""Heads rotate as their own configuration says, and as the target does if it says nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_block_heads
import test_heads
import torch
import transformers
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import tiny
import tiny_blocks
import tiny_gguf
import tiny_heads
from outrider.cache.pages import Pages
from outrider.kernels import load
from outrider.models import Model, build, read_config
from outrider.models.heads import EagleHead
from outrider.models.rope import Rope
from outrider.speculation.checkpoints import open_head
from outrider.train.heads.layers import layer_keys, layer_shape
from outrider.weights import open_checkpoint
from refusals import refusal
from unit.checkpoint_changes import change
from unit.test_gguf_hybrids import edited

HEAD_DIM, CONTEXT, ORIGINAL = 16, 128, 16
ROPES: dict[str, dict[str, Any]] = {
    "partial": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    "yarn": {**tiny.YARN, "original_max_position_embeddings": ORIGINAL},
    "longrope": {**tiny.LONG, "original_max_position_embeddings": ORIGINAL},
    "linear": {**tiny.LINEAR, "partial_rotary_factor": 0.25},
}
Rotation = Callable[[Tensor, Tensor], Tensor]


def rotation(rope: dict[str, Any]) -> Rotation:
    """Return the rotation of heads [..., D] by positions that transformers does."""
    dims = int(HEAD_DIM * rope.get("partial_rotary_factor", 1.0))
    if rope["rope_type"] == "default":
        rates, factor = rope["rope_theta"] ** -(torch.arange(0, dims, 2) / dims), 1.0
    else:
        config = transformers.LlamaConfig(
            hidden_size=64,
            num_attention_heads=4,
            head_dim=HEAD_DIM,
            max_position_embeddings=CONTEXT,
            rope_parameters=rope,
        )
        rates, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"), seq_len=CONTEXT)

    def rotate(heads: Tensor, positions: Tensor) -> Tensor:
        angles = positions[..., None] * rates
        cos, sin = angles.cos() * factor, angles.sin() * factor
        left, right, still = torch.split(heads, [dims // 2, dims // 2, HEAD_DIM - dims], -1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin, still], -1)

    return rotate


def stated(rope: dict[str, Any], older: bool) -> dict[str, Any]:
    """Return the keys of a configuration, of current or older versions of transformers."""
    if not older:
        return {"rope_parameters": rope}
    keys = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    scaling = {key: value for key, value in rope.items() if key not in keys}
    return keys | ({} if rope["rope_type"] == "default" else {"rope_scaling": scaling})


def without_rope(config: dict[str, Any]) -> None:
    for holder in (config, config.get("transformer_layer_config", {})):
        holder.pop("rope_theta", None)


def write(folder: Path, keys: dict[str, Any]) -> tiny_heads.Plan:
    plan = tiny_heads.Plan(target="llama", layers=2)
    tiny_heads.write(plan, folder, "specforge")
    change(folder, without_rope)
    change(folder, lambda config: config.update(keys, max_position_embeddings=CONTEXT))
    return plan


def network(folder: Path, model: Model) -> EagleHead[Pages]:
    head = open_head(str(folder), model.config)
    layers = head.shape.layers
    pages = Pages(layers.layers, layers.kv_heads, test_heads.PAGE, layers.head_dim, "float32")
    pages.allocate(9)
    return EagleHead(head, model, pages, CONTEXT)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("name", ROPES)
def test_eagle_heads_follow_their_configuration(
    name: str, older: bool, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = write(tmp_path, stated(ROPES[name], older))
    model = build(tiny.checkpoint("llama"), load(backend))
    found = test_heads.by_network(network(tmp_path, model), model, plan.aux_layers, 4)
    assert test_heads.error(found, test_heads.by_formulas(plan, plan.aux_layers)) > 1e-3
    rotate = rotation(ROPES[name])
    monkeypatch.setattr(
        test_heads.Formulas, "rotate", lambda _, heads, position: rotate(heads, torch.tensor([position]))
    )
    assert test_heads.error(found, test_heads.by_formulas(plan, plan.aux_layers)) < 1e-5


@pytest.mark.parametrize("name", ROPES)
def test_block_heads_follow_their_configuration(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = tiny_blocks.Plan()
    tiny_blocks.write(plan, tmp_path)

    def edit(config: dict[str, Any]) -> None:
        layers = config.get("transformer_layer_config", config)
        without_rope(config)
        layers.update(stated(ROPES[name], older=False), max_position_embeddings=CONTEXT)

    change(tmp_path, edit)
    head = test_block_heads.assemble(tmp_path, build(tiny.checkpoint("llama"), load("cpu")))
    rotate = rotation(ROPES[name])
    monkeypatch.setattr(
        test_block_heads.Formulas, "rotate", lambda _, heads, positions: rotate(heads, positions[:, None])
    )
    features = test_block_heads.features(plan.aux_layers, tuple(test_block_heads.TEXT[:-1]))
    wanted = test_block_heads.Formulas(plan).states(features, test_block_heads.TEXT[-1], plan.block)
    assert test_block_heads.close(test_block_heads.states_of(head, plan, plan.block), wanted, plan)


@pytest.mark.parametrize("target", ["phi3", "phi3-long", "qwen2-yarn", "llama3-rope", "linear-rope"])
def test_heads_that_state_no_rope_have_the_targets(target: str, tmp_path: Path) -> None:
    config = read_config(tiny.checkpoint(target).config)
    write(tmp_path, {})
    assert open_head(str(tmp_path)).shape.layers.ropes == (Rope(10_000.0),) * 2
    assert open_head(str(tmp_path), config).shape.layers.ropes == (config.ropes[0],) * 2
    change(tmp_path, lambda config: config.update(rope_scaling=None))
    assert open_head(str(tmp_path), config).shape.layers.ropes == (Rope(10_000.0),) * 2


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_heads_have_the_rope_factors_of_a_gguf_target(backend: str, tmp_path: Path) -> None:
    """GGUF has no keys for the scaling of Llama 3: it is a tensor of the target."""
    model = build(open_checkpoint(tiny_gguf.write("llama3-rope", tmp_path / "m.gguf")), load(backend))
    plan = write(tmp_path / "head", {})
    found = test_heads.by_network(network(tmp_path / "head", model), model, plan.aux_layers, 4)
    same = build(tiny.checkpoint("llama3-rope"), load(backend))
    wanted = test_heads.by_network(network(tmp_path / "head", same), same, plan.aux_layers, 4)
    assert test_heads.error(found, wanted) < 1e-5
    change(tmp_path / "head", lambda config: config.update(rope_scaling=None))
    plain = test_heads.by_network(network(tmp_path / "head", model), model, plan.aux_layers, 4)
    assert test_heads.error(found, plain) > 1e-3


def test_rope_factors_beside_another_scaling(tmp_path: Path) -> None:
    def scaled(kind: str) -> Callable[[Any, Any], object]:
        return lambda _, fields: fields.update({"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 2.0})

    plain = open_checkpoint(tiny_gguf.write("llama3-rope", tmp_path / "plain.gguf")).config["rope_scaling"]
    linear = open_checkpoint(edited("llama3-rope", tmp_path / "linear.gguf", scaled("linear"))).config["rope_scaling"]
    assert linear["short_factor"] == linear["long_factor"] == [2 * value for value in plain["short_factor"]]
    yarn = edited("llama3-rope", tmp_path / "yarn.gguf", scaled("yarn"))
    assert "`yarn` and the tensor `rope_freqs.weight`" in refusal(lambda: open_checkpoint(yarn))


@pytest.mark.parametrize("change_factors", [lambda factors: factors[:-1], lambda factors: factors * 0])
def test_damaged_rope_factors_are_refused_by_name(change_factors: Callable[[Any], Any], tmp_path: Path) -> None:
    def damage(tensors: Any, _: Any) -> None:
        tensors["rope_freqs.weight"] = change_factors(tensors["rope_freqs.weight"])

    path = edited("llama3-rope", tmp_path / "m.gguf", damage)
    assert "the tensor `rope_freqs.weight` of" in refusal(lambda: open_checkpoint(path))


def test_a_rope_for_heads_of_another_size(tmp_path: Path) -> None:
    partial, long = (read_config(tiny.checkpoint(name).config) for name in ("phi3", "phi3-long"))
    plan = tiny_heads.Plan(heads=2, kv_heads=2, head_dim=32)
    tiny_heads.write(plan, tmp_path, "specforge")
    change(tmp_path, without_rope)
    assert open_head(str(tmp_path), partial).shape.layers.ropes == (Rope(500.0, dims=16),)
    assert "for heads of 16 dimensions, not 32: state `rope_theta`" in refusal(lambda: open_head(str(tmp_path), long))


@pytest.mark.parametrize(
    "target", ["llama", "phi3", "phi3-long", "qwen2-yarn", "llama3-rope", "linear-rope", "gpt-oss"]
)
def test_the_keys_of_a_trained_head_describe_the_targets_rope(target: str) -> None:
    config = read_config(tiny.checkpoint(target).config)
    keys = layer_keys(layer_shape(config, 0, head_norms=False), 2, config)
    assert read_config(keys).ropes == (config.ropes[0],) * 2
