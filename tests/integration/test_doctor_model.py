"""`outrider doctor --model`: what a checkpoint is, whether it runs, its memory, and why it does not run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import tiny
import tiny_gguf
import tiny_heads
import tiny_hybrids
import tiny_lora
import tiny_quantized

PARAMETERS = sum(parameter.numel() for parameter in tiny.original("phi3-long").parameters())


def examined(outrider, path: object, code: int = 0) -> dict[str, Any]:
    result = outrider("doctor", "--model", path, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("name", ["phi3-long", "gemma2", "olmo2", "granite", "smollm3-window", "qwen2-yarn"])
def test_models_that_run(outrider, tmp_path: Path, name: str) -> None:
    folder = tiny.copy(name, tmp_path / name)
    found = examined(outrider, folder)
    assert found["problem"] is None
    assert found["architecture"] == tiny.original(name).config.model_type
    # 2 tensors of 2 heads of 16 floats in each layer, for each of 1000 tokens
    assert found["memory"]["kv_bytes_per_1k_tokens"] == found["layers"] * 2 * 2 * 16 * 4 * 1000
    assert found["machine"]["tokens_that_fit"] > 1000
    assert found["heads"] == []


def test_the_table_names_format_layers_parameters_and_memory(outrider, tmp_path: Path) -> None:
    text = outrider("doctor", "-m", tiny.copy("phi3-long", tmp_path / "phi")).stdout
    words = " ".join(text.split())
    assert "architecture Phi-3 and Phi-4, 3 layers" in words
    assert f"parameters {PARAMETERS / 1e6:.1f}M" in words
    assert "format safetensors, F32" in words
    assert "for the weights" in words and "for each 1000 tokens" in words
    assert "heads that fit none ships" in words and "runs yes" in words


def test_a_models_own_mtp_module_is_named(outrider, tmp_path: Path) -> None:
    folder = tiny_hybrids.multimodal("qwen3.5", tmp_path / "model")
    found = examined(outrider, folder)
    assert found["problem"] is None and found["heads"] == ["mtp"]
    assert "heads that fit mtp" in " ".join(outrider("doctor", "-m", folder).stdout.split())
    head = json.loads(outrider("doctor", "--head", folder, "-m", folder, "--json").stdout)
    assert head["head"]["layout"] == "Qwen" and "with gates" in head["head"]["attention"]


@pytest.mark.parametrize("target", ["qwen3-next-moe", "qwen3.5"])
def test_an_mtp_module_in_a_gguf_file_is_named(outrider, tmp_path: Path, target: str) -> None:
    inside, without, alone = (
        tiny_gguf.write(target, tmp_path / f"m-{module}.gguf", module=module) for module in ("inside", "none", "alone")
    )
    assert examined(outrider, inside)["heads"] == ["mtp"]
    assert examined(outrider, without)["heads"] == []
    words = " ".join(outrider("doctor", "-m", without).stdout.split())
    assert "heads that fit none ships; none can be trained for recurrent layers" in words
    problem = examined(outrider, alone, code=1)["problem"]
    assert problem == f"it is a draft head, not a model: pass a model, and this with `--speculate mtp:model={alone}`"


@pytest.mark.parametrize("method", ["eagle3", "medusa", "dflash", "mtp"])
def test_draft_heads_are_no_models(outrider, tmp_path: Path, method: str) -> None:
    tiny_heads.make(method, tmp_path / "head")
    problem = examined(outrider, tmp_path / "head", code=1)["problem"]
    assert "it is a draft head, not a model" in problem and f"--speculate {method}:model=" in problem


def test_a_damaged_model_with_a_module_is_no_head(outrider, tmp_path: Path) -> None:
    folder = tiny_hybrids.inside("qwen3.5", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.input_layernorm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert "`model.layers.1.input_layernorm.weight`" in examined(outrider, folder, code=1)["problem"]


@pytest.mark.parametrize("command", [("doctor",), ("generate", "hello")])
def test_adapters_are_no_models(outrider, tmp_path: Path, command: tuple[str, ...]) -> None:
    tiny_lora.save("llama", tmp_path)
    result = outrider(*command, "-m", tmp_path)
    assert result.exit_code == 1 and "is a LoRA adapter, not a model" in result.stderr
    assert "with `--lora`" in result.stderr


@pytest.mark.parametrize(("scheme", "label"), [("awq", "AWQ"), ("gptq", "GPTQ-INT4"), ("fp8-block", "FP8")])
def test_quantized_checkpoints_are_named_by_their_layers(outrider, tmp_path: Path, scheme: str, label: str) -> None:
    """The embedding of a tiny or small model takes more bytes than all quantized matrices."""
    folder, _ = tiny_quantized.folder("llama", scheme, tmp_path)
    assert examined(outrider, folder)["quantization"].startswith(label)
    oss, _ = tiny_quantized.gpt_oss_folder(tmp_path / "oss")
    assert examined(outrider, oss)["quantization"] == "MXFP4"


def changed(tmp_path: Path, **keys: object) -> Path:
    folder = tiny.copy("llama", tmp_path / "changed")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **keys}))
    return folder


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"model_type": "mamba2"}, "the architecture `mamba2` is not supported"),
        ({"num_hidden_layers": 4}, "lacks the tensor `model.layers.3."),
        ({"num_hidden_layers": 2}, "holds the tensor `model.layers.2."),
        ({"hidden_act": "relu"}, "the activation `relu` is not supported"),
        ({"rope_parameters": {"rope_type": "ntk", "rope_theta": 1e4}}, "the rope type `ntk` is not supported"),
    ],
)
def test_models_that_do_not_run_are_described_with_one_reason(
    outrider, tmp_path: Path, keys: dict[str, object], reason: str
) -> None:
    folder = changed(tmp_path, **keys)
    found = examined(outrider, folder, code=1)
    assert reason in found["problem"] and "\n" not in found["problem"]
    assert found["architecture"] == keys.get("model_type", "llama")
    text = outrider("doctor", "-m", folder)
    assert text.exit_code == 1 and "Traceback" not in text.output
    assert reason.split("`")[0] in " ".join(text.stdout.split())


def test_gguf_files_that_do_not_run_are_described(outrider, tmp_path: Path) -> None:
    path = tiny_gguf.write("llama", tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes().replace(b"llama", b"bloom"))
    found = examined(outrider, path, code=1)
    assert (found["architecture"], found["format"], found["layers"]) == ("bloom", "GGUF", 3)
    assert "the architecture `bloom`" in found["problem"]


def test_shapes_with_random_weights_are_sent_to_the_benchmark(outrider) -> None:
    result = outrider("doctor", "-m", "random/llama-3.1-8b")
    assert result.exit_code == 1 and "outrider bench speed --model random/llama-3.1-8b" in result.stderr


def test_models_that_are_not_there(outrider) -> None:
    result = outrider("doctor", "-m", "no-such-model")
    assert result.exit_code == 1 and result.stdout == "" and "no-such-model" in result.stderr


def test_a_model_of_the_catalog_is_described_before_it_is_pulled(
    outrider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    words = " ".join(outrider("doctor", "-m", "smollm2-135m").stdout.split())
    assert "runs yes, after `outrider pull smollm2-135m`" in words
    assert not list(tmp_path.rglob("*.gguf"))


@pytest.mark.parametrize(("name", "full"), [("mistral", 0), ("gemma3", 2), ("llama", 3)])
def test_layers_with_a_window_take_the_memory_of_the_window(outrider, tmp_path: Path, name: str, full: int) -> None:
    """full: layers that attend to the whole text."""
    folder = tiny.copy(name, tmp_path / name)
    config, found = tiny.original(name).config, examined(outrider, folder)["memory"]
    each = 2 * 2 * 16 * 4  # keys and values, heads, floats, bytes of a layer and a token
    sliding, window = config.num_hidden_layers - full, getattr(config, "sliding_window", None) or 0
    assert found["window"] == window
    assert found["kv_bytes_per_1k_tokens"] == (full + sliding) * each * 1000
    assert found["kv_bytes_of_context"] == each * (full * config.max_position_embeddings + sliding * window)
    words = " ".join(outrider("doctor", "-m", folder).stdout.split())
    assert (f"of which a window of {window} tokens is kept" in words) == (full == 0)
    assert (f"behind a window of {window} tokens" in words) == (full > 0 and window > 0)


def test_hybrid_models_state_the_memory_of_their_states(outrider, tmp_path: Path) -> None:
    folder = tiny.copy("granite4", tmp_path / "granite4")
    found = examined(outrider, folder)["memory"]
    config = tiny.original("granite4").config
    heads, values, keys = config.mamba_n_heads, config.mamba_d_head, config.mamba_d_state
    inputs = 2 * config.mamba_n_groups * keys + heads * values + heads
    layers = sum(kind != "full_attention" for kind in config.layer_types)
    lines = 16 + config.mamba_d_conv - 1
    assert found["state_bytes_per_request"] == 4 * layers * (heads * values * keys + lines * inputs)
    words = " ".join(outrider("doctor", "-m", folder).stdout.split())
    assert "for the states of each request, and of each snapshot in the prefix cache" in words
