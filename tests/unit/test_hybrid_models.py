"""Models with recurrent layers: their configurations, and what is refused for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, kernels
from outrider.diagnostics.model_check import check_tensors
from outrider.errors import UserError
from outrider.models import build, read_config
from outrider.models.lora import LoraLayers
from outrider.train.target import TargetModel
from outrider.weights.hf_folder import normalize
from tiny import checkpoint


@pytest.mark.parametrize("name", ["qwen3-next-moe", "qwen3.5", "granite4-moe"])
def test_the_tensors_of_a_folder_are_checked_without_reading_them(tiny_folder: Callable[..., Path], name: str) -> None:
    check_tensors(tiny_folder(name))


def test_adapters_are_refused() -> None:
    ops = kernels.load("reference")
    with pytest.raises(UserError, match="adapters are not supported for models with recurrent layers"):
        build(checkpoint("qwen3-next"), ops, lora=LoraLayers(ops, 1, 8))


def test_hybrid_draft_models_are_refused(tiny_folder: Callable[..., Path]) -> None:
    method = f"draft_model:model={tiny_folder('granite4')}"
    with pytest.raises(UserError, match="it has recurrent layers, which draft models must not have"):
        LLM(str(tiny_folder("llama")), backend="cpu", speculate=method)


def test_training_is_refused(tiny_folder: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match="has recurrent layers, for which heads cannot be trained"):
        TargetModel(str(tiny_folder("qwen3.5")), "reference")


def test_the_text_model_of_a_multimodal_configuration_is_read() -> None:
    config = checkpoint("qwen3.5").config
    rope = {**config["rope_parameters"], "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    text = {**config, "rope_parameters": rope}
    del text["tie_word_embeddings"]
    whole = {"model_type": "qwen3_5", "tie_word_embeddings": True, "text_config": text, "vision_config": {}}
    assert read_config(normalize(json.loads(json.dumps(whole)))) == read_config(config)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("qwen3-next", {"layer_types": ["linear_attention"] * 3}, "no layer of the model has attention"),
        ("qwen3-next", {"layer_types": ["full_attention"]}, "lists 1 `layer_types` for 3 layers"),
        ("qwen3-next", {"layer_types": ["chunked_attention"] * 3}, "layer type `chunked_attention` is not supported"),
        ("qwen3-next", {"linear_num_key_heads": 3}, "the first must be a multiple of the second"),
        ("granite4", {"mamba_proj_bias": True}, "mamba_proj_bias"),
        ("granite4", {"time_step_limit": [0.0, 1.0]}, "time_step_limit"),
        ("granite4", {"mamba_n_heads": 7}, "expected a divisor of 128 values"),
    ],
)
def test_configurations_that_do_not_run_are_refused(name: str, change: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        read_config({**checkpoint(name).config, **change})


def test_layers_are_named_as_older_configurations_name_them() -> None:
    config = checkpoint("granite4").config
    older = {**config, "layer_types": ["mamba", "attention", "mamba"], "time_step_limit": [0.0, float("inf")]}
    assert read_config(older) == read_config(config)
    interval = {key: value for key, value in checkpoint("qwen3-next").config.items() if key != "layer_types"}
    found = read_config({**interval, "full_attention_interval": 2}).recurrent
    assert found is not None and found.layers == (True, False, True)
