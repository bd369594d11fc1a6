"""Hugging Face folders as checkpoints, and finding a model by whatever names it."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import refusals
from outrider import catalog
from outrider.errors import UserError
from outrider.speculation.checkpoints import open_head
from outrider.weights import Checkpoint, open_checkpoint

CONFIG = {"model_type": "llama", "hidden_size": 8, "eos_token_id": 7, "bos_token_id": 1}
EMBEDDING = "model.embed_tokens.weight"


def make(folder: Path, config: dict[str, Any] | None = None, **tensors: torch.Tensor) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or CONFIG))
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file(named or {EMBEDDING: torch.zeros(4, 8)}, folder / "model.safetensors")
    return folder


def opened(folder: Path) -> Checkpoint:
    return open_checkpoint(str(folder))


def test_one_file(tmp_path: Path) -> None:
    matrix, vector = torch.randn(4, 8, dtype=torch.bfloat16), torch.randn(8)
    checkpoint = opened(make(tmp_path / "m", model__embed_tokens__weight=matrix, model__norm__weight=vector))
    weight = checkpoint.weight(EMBEDDING)
    assert (weight.kind, weight.shape) == ("bf16", (4, 8))
    assert torch.equal(weight.data, matrix)
    assert torch.equal(checkpoint.weight("model.norm.weight").data, vector)
    assert checkpoint.bytes == 4 * 8 * 2 + 8 * 4
    assert not checkpoint.float32
    assert checkpoint.tokenizer_source == tmp_path / "m"
    assert checkpoint.generation == {"bos_token_id": 1, "eos_token_id": [7]}
    assert "model.norm.weight" in checkpoint and "lm_head.weight" not in checkpoint


def test_several_shards(tmp_path: Path) -> None:
    folder = make(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    first, second = torch.randn(4, 8), torch.randn(8, 8)
    save_file({EMBEDDING: first}, folder / "a.safetensors")
    save_file({"lm_head.weight": second}, folder / "b.safetensors")
    weight_map = {EMBEDDING: "a.safetensors", "lm_head.weight": "b.safetensors"}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = opened(folder)
    assert checkpoint.float32
    assert torch.equal(checkpoint.weight("lm_head.weight").data, second)

    index.write_text(json.dumps({"weight_map": weight_map | {"model.norm.weight": "b.safetensors"}}))
    with pytest.raises(UserError, match=r"no tensor `model\.norm\.weight`"):
        opened(folder)
    index.write_text(json.dumps({"weight_map": {EMBEDDING: "../secret.safetensors"}}))
    with pytest.raises(UserError, match="outside of the folder"):
        opened(folder)
    index.write_text(json.dumps({"weight_map": weight_map}))
    save_file({EMBEDDING: first}, folder / "b.safetensors")
    with pytest.raises(UserError, match="is in two files"):
        opened(folder)
    (folder / "b.safetensors").unlink()
    with pytest.raises(UserError, match=r"b\.safetensors` is missing"):
        opened(folder)


def test_generation_config_wins(tmp_path: Path) -> None:
    folder = make(tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4], "temperature": 0.6}))
    generation = opened(folder).generation
    assert generation == {"eos_token_id": [3, 4], "bos_token_id": 1, "temperature": 0.6}


def test_gemma_text_of_a_multimodal_checkpoint(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 8, "num_hidden_layers": 1}
    config = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    tensors = {
        "language_model__model__layers__0__mlp__up_proj__weight": torch.ones(2, 8),
        "language_model__model__norm__weight": torch.zeros(8),
        "vision_tower__x__weight": torch.zeros(3, 3),
    }
    checkpoint = opened(make(tmp_path / "m", config, **tensors))
    assert sorted(checkpoint.names()) == ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"]
    assert checkpoint.norms_are_offset
    assert checkpoint.config["model_type"] == "gemma3_text"
    assert (checkpoint.config["head_dim"], checkpoint.config["hidden_size"]) == (256, 8)


def test_new_rotary_settings_under_their_classic_keys(tmp_path: Path) -> None:
    scaled = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}
    config = opened(make(tmp_path / "a", CONFIG | {"rope_parameters": scaled})).config
    assert config["rope_theta"] == 5e5
    assert config["rope_scaling"] == {"rope_type": "llama3", "factor": 8.0}
    both = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = opened(make(tmp_path / "b", {"model_type": "gemma3_text", "rope_parameters": both})).config
    assert (config["rope_theta"], config["rope_local_base_freq"], config["rope_scaling"]) == (1e6, 1e4, None)


def shard(header: Any, data: bytes = b"\0" * 16, length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def info(start: int, stop: int, dtype: str = "F32", shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape or [(stop - start) // 4], "data_offsets": [start, stop]}


HOSTILE = {
    "empty": b"",
    "three bytes": b"abc",
    "header beyond the file": shard({"a": info(0, 16)}, length=2**62),
    "huge header": shard({"a": info(0, 16)}, length=99_000_000),
    "no JSON": shard(b"{]"),
    "deep JSON": shard(b"[" * 100_000),
    "overlap": shard({"a": info(0, 8), "b": info(4, 16)}),
    "product that wraps": shard({"a": info(0, 16, shape=[2**62, 4])}),
    "shape and extent differ": shard({"a": info(0, 16, shape=[5])}),
    "beyond the file": shard({"a": info(0, 64)}),
    "backwards": shard({"a": info(16, 0)}),
    "negative shape": shard({"a": info(0, 16, shape=[-4])}),
    "unknown dtype": shard({"a": info(0, 16, dtype="Q9")}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused(name: str, tmp_path: Path) -> None:
    folder = make(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(HOSTILE[name])
    with pytest.raises(UserError) as refusal:
        opened(folder)
    assert f"`{folder / 'model.safetensors'}` is not a usable safetensors file" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_dtypes_that_are_no_weights(tmp_path: Path) -> None:
    folder = make(tmp_path / "m", model__norm__weight=torch.zeros(4, dtype=torch.int32))
    with pytest.raises(UserError, match=r"`model\.norm\.weight` as `I32`"):
        opened(folder)


def test_folders_that_are_no_models(tmp_path: Path) -> None:
    def refusal(folder: Path) -> str:
        return refusals.refusal(lambda: opened(folder))

    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no `config.json`" in refusal(empty)
    (empty / "x.gguf").touch()
    (empty / "y.gguf").touch()
    assert f"pass the file `{empty / 'x.gguf'}`" in refusal(empty)
    (empty / "config.json").write_text("{")
    assert "not valid JSON" in refusal(empty)
    (empty / "config.json").write_text("[]")
    assert "not a JSON object" in refusal(empty)
    (empty / "config.json").write_text("{}")
    assert "no `model.safetensors`" in refusal(empty)
    (empty / "pytorch_model.bin").touch()
    assert "pickled weights only" in refusal(empty)
    quantized = make(tmp_path / "q", CONFIG | {"quantization_config": {"quant_method": "bitsandbytes"}})
    assert "quantised with `bitsandbytes`, which Outrider cannot read" in refusal(quantized)


PATHS = [
    "./nothere",
    "../nothere",
    "~/nothere",
    "/nothere",
    "nothere/",
    "a/b/nothere",
    "a/nothere.gguf",
    ".hidden/nothere",
]


@pytest.mark.parametrize("name", PATHS)
def test_a_missing_path_is_not_asked_of_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object, **__: object) -> Path:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(catalog, "pull", asked)
    monkeypatch.setattr(catalog, "pull_hub", asked)
    with pytest.raises(UserError, match=re.escape(f"no model at `{name}`")):
        open_checkpoint(name)
    with pytest.raises(UserError, match="no draft head at"):
        open_head(name)
    with pytest.raises(AssertionError, match="the hub was asked"):
        open_checkpoint("someone/Model-0.5B_v1.0")


def test_sources_that_lead_nowhere(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no model at `missing\.gguf`.*`smollm2-135m`"):
        open_checkpoint("missing.gguf")
    with pytest.raises(UserError, match="no model at"):
        open_checkpoint("x" * 5000)
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(UserError, match="is empty"):
        open_checkpoint(str(tmp_path / "empty.gguf"))
    (tmp_path / "w.safetensors").touch()
    with pytest.raises(UserError, match="holds weights alone"):
        open_checkpoint(str(tmp_path / "w.safetensors"))
