"""Exports: what is written is the head that was trained, in every layout, and a failed write costs nothing."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
import tiny_blocks
import tiny_heads
import tiny_medusa
import tiny_modules
from outrider import LLM, SamplingParams
from outrider.errors import UserError
from outrider.kernels import Weight
from outrider.kernels.quantization import FORMATS, dequantize
from outrider.models import read_config
from outrider.models.rope import rope_frequencies
from outrider.speculation.checkpoints import Head, describe, open_head
from outrider.train.heads.base import HeadExport
from outrider.train.io import disk as folders
from outrider.train.io.export import write_head, write_model, write_speculators
from outrider.train.io.vllm_export import read_back, with_d2t
from outrider.train.target import TargetInfo
from outrider.weights import gguf_writer, open_checkpoint
from outrider.weights.random import byte_tokens

CARD = {"steps": 7, "target": {"model": "tiny"}}
MAPS = ("d2t", "t2d", "token_map", "verifier_norm.weight", "verifier_lm_head.weight")
# method -> what the tiny head is to be
METHODS: dict[str, dict[str, Any]] = {
    "eagle3": {"fc_norm": True, "norm_output": True},
    "dflash": {"bias": True},
    "dspark": {"rank": 32, "mask_embedding": True},
    "medusa": {"vocabulary": 70, "ends": "one"},
    "mtp": {"head_norms": True},
}


def random_export(method: str, folder: Path, **variant: Any) -> HeadExport:
    """A random head, as its student would hand it over."""
    write(method, folder, variant or METHODS[method])
    tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    config = json.loads((folder / "config.json").read_text())
    ids = open_head(str(folder), read_config(tiny.checkpoint("llama").config)).draft_ids
    if "token_map" in tensors:
        order = tensors["token_map"].long().argsort()
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
    if (folder / "mask_embedding.pt").is_file():
        tensors["mask_embedding"] = torch.load(folder / "mask_embedding.pt")["embedding"]
    tensors.pop("embed_tokens.weight", None)  # some have the target's; students do without
    return HeadExport(config, {name: each for name, each in tensors.items() if name not in MAPS}, ids)


def write(method: str, folder: Path, variant: dict[str, Any]) -> None:
    """In the layouts of people who keep all keys at the top, or nearly so."""
    if method == "eagle3":
        tiny_heads.write(tiny_heads.Plan(**variant), folder, "specforge")
    elif method == "medusa":
        plan = tiny_medusa.Plan(heads=3, **variant)
        rows = torch.randn(plan.vocabulary, plan.states, generator=torch.Generator().manual_seed(1))
        tiny_medusa.write(plan, folder, "vllm", tiny_medusa.blocks(plan) | {"lm_head.weight": rows})
    elif method == "mtp":
        tiny_modules.mtp(tiny_modules.ModulePlan(**variant), folder, "qwen")
    else:
        layout = {"dflash": "assistant", "dspark": "deepspec"}[method]
        tiny_blocks.write(tiny_blocks.Plan(method=method, **variant), folder, layout)


@pytest.fixture(scope="module", params=METHODS)
def head_export(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HeadExport:
    return random_export(request.param, tmp_path_factory.mktemp("head"))


@pytest.fixture(scope="module")
def target_info(tiny_folder: Callable[..., Path]) -> TargetInfo:
    return target_info_of(str(tiny_folder()))


def target_info_of(model: str) -> TargetInfo:
    original = tiny.original("llama")
    embedding, head = original.get_input_embeddings().weight.detach(), original.lm_head.weight.detach()
    config = read_config(open_checkpoint(model).config)
    counts = torch.ones(len(head), dtype=torch.int64)
    return TargetInfo(
        model, config, embedding, head, (1, 2, 3), counts, torch.device("cpu"), original.state_dict().__getitem__
    )


def drafts(model: str, method: str, source: Path, **options: Any) -> list[list[int]]:
    """What is said where all drafts are kept, whatever they are: three tokens of four are the drafter's."""
    kept = "verify=synthetic,rates=1/1/1"
    llm = LLM(model, backend="reference", speculate=f"{method}:model={source},{kept}", **options)
    prompts = [tiny.prompt(8, seed=row) for row in range(2)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=9, temperature=0, ignore_eos=True))
    assert llm.method_stats[method].accepted >= 10
    return [list(output.completions[0].token_ids) for output in outputs]


def agreement(model: str, source: Path) -> float:
    """Return the acceptance rate of a draft model's first draft tokens."""
    llm = LLM(model, backend="reference", speculate=f"draft_model:model={source},adaptive=false")
    llm.generate([tiny.prompt(8)], SamplingParams(max_tokens=16, temperature=0, ignore_eos=True))
    return llm.method_stats["draft_model"].rates[0]


def reference(head_export: HeadExport) -> Head:
    return read_back(head_export.config, with_d2t(head_export))


def equal(found: Head, wanted: Head) -> None:
    assert replace(found.shape, layout="") == replace(wanted.shape, layout="")
    assert (found.draft_ids is None) == (wanted.draft_ids is None)
    assert found.draft_ids is None or torch.equal(found.draft_ids, wanted.draft_ids)
    assert found.tensors.keys() == wanted.tensors.keys()
    for name in wanted.names():
        assert torch.equal(dequantize(found.weight(name)), dequantize(wanted.weight(name))), name


def test_a_head_in_our_layout_is_read_back_unchanged(
    head_export: HeadExport, tmp_path: Path, target_info: TargetInfo
) -> None:
    write_head(head_export, tmp_path / "head", "f32", CARD)
    equal(open_head(str(tmp_path / "head"), target_info.config), reference(head_export))
    assert json.loads((tmp_path / "head" / "card.json").read_text()) == CARD
    assert [each.name for each in tmp_path.iterdir()] == ["head"]  # nothing is left over
    write_head(head_export, tmp_path / "head", "bf16", CARD)
    head = open_head(str(tmp_path / "head"), target_info.config)
    kinds = {(head.weight(name).kind, len(head.weight(name).shape) > 1) for name in head.names()}
    assert kinds <= {("bf16", True), ("f32", False)}


def test_q8_0_matrices_are_within_their_rounding_error(
    head_export: HeadExport, tmp_path: Path, target_info: TargetInfo
) -> None:
    write_head(head_export, tmp_path / "q8", "q8_0", CARD)
    found, wanted = open_head(str(tmp_path / "q8"), target_info.config), reference(head_export)
    assert found.shape == wanted.shape
    packed = 0
    for name in wanted.names():
        weight, tensor = found.weight(name), dequantize(wanted.weight(name))
        whole = len(tensor.shape) == 2 and tensor.shape[0] > 1 and tensor.shape[1] % 32 == 0
        assert weight.kind == ("q8_0" if whole else "bf16" if tensor.dim() > 1 else "f32"), name
        packed += whole
        if whole:
            blocks = tensor.view(-1, 32)
            off = (dequantize(weight).view(-1, 32) - blocks).abs()
            assert bool((off <= blocks.abs().amax(1, keepdim=True) * (0.501 / 127 + 1e-3)).all()), name
    assert packed >= 2
    assert (tmp_path / "q8" / "model.safetensors").stat().st_size < 0.4 * 4 * sum(
        tensor.numel() for tensor in wanted.tensors.values()
    )
    assert "q8_0" in dict(describe(found))["weights"]


@pytest.mark.parametrize("storage", ["q8_0", "q5_1"])
def test_a_quantized_head_drafts_like_its_dequantized_copy(
    storage: Any, head_export: HeadExport, tmp_path: Path, target_info: TargetInfo
) -> None:
    """Blocks mean what they are read as, wherever a method reads them."""
    write_head(head_export, tmp_path / "q8", storage, CARD)
    plain = load_file(tmp_path / "q8" / "model.safetensors")
    packed = [name for name in plain if name.endswith(f".{storage}")]
    assert packed
    for name in packed:
        rows = plain.pop(name)
        shape = (rows.shape[0], rows.shape[1] // FORMATS[storage].bytes * 32)
        plain[name.removesuffix(f".{storage}")] = dequantize(Weight(storage, shape, rows))
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.json").write_bytes((tmp_path / "q8" / "config.json").read_bytes())
    save_file(plain, tmp_path / "plain" / "model.safetensors")
    method = reference(head_export).shape.kind
    assert drafts(target_info.model, method, tmp_path / "q8") == drafts(target_info.model, method, tmp_path / "plain")


def test_a_quantized_head_is_not_quantized_again(tmp_path: Path, target_info: TargetInfo) -> None:
    write_head(random_export("medusa", tmp_path / "made"), tmp_path / "q8", "q8_0", CARD)
    assert drafts(target_info.model, "medusa", tmp_path / "q8", quantize="int4")


def test_the_vllm_layout_holds_the_same_head(head_export: HeadExport, tmp_path: Path, target_info: TargetInfo) -> None:
    write_head(head_export, tmp_path / "ours", "f32", CARD)
    write_speculators(head_export, tmp_path / "theirs", target_info, 3, CARD, storage="f32")
    ours, theirs = (open_head(str(tmp_path / name), target_info.config) for name in ("ours", "theirs"))
    assert theirs.shape.kind == ours.shape.kind
    assert (theirs.draft_ids is None) == (ours.draft_ids is None)
    assert ours.draft_ids is None or torch.equal(theirs.draft_ids, ours.draft_ids)  # type: ignore[arg-type]
    for name in set(ours.names()) - {"model.mask_embedding"}:
        assert torch.equal(dequantize(ours.weight(name)), dequantize(theirs.weight(name))), name
    ends = {"model.embed_tokens.weight", "lm_head.weight"}
    assert set(theirs.names()) - set(ours.names()) <= ends
    if ours.shape.kind in ("eagle3", "dflash", "dspark"):
        assert theirs.shape.layout == "speculators" and ends <= set(theirs.names())
    assert drafts(target_info.model, ours.shape.kind, tmp_path / "theirs") == drafts(
        target_info.model, ours.shape.kind, tmp_path / "ours"
    )


def test_a_head_without_lm_head_is_exported_with_the_targets_rows(tmp_path: Path, target_info: TargetInfo) -> None:
    head_export = random_export("dflash", tmp_path / "made", own_head=False)
    write_speculators(head_export, tmp_path / "head", target_info, 3, CARD, storage="f32")
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], target_info.lm_head[head_export.draft_ids])
    assert torch.equal(tensors["embed_tokens.weight"], target_info.embedding)


def test_the_config_of_an_eagle_head_has_the_keys_that_vllm_reads(tmp_path: Path, target_info: TargetInfo) -> None:
    write_speculators(random_export("eagle3", tmp_path / "made"), tmp_path / "head", target_info, 3, CARD)
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    said = config["speculators_config"]
    assert (config["speculators_model_type"], config["architectures"]) == ("eagle3", ["Eagle3Speculator"])
    assert said["proposal_methods"][0]["proposal_type"] == said["default_proposal_method"] == "greedy"
    assert said["proposal_methods"][0]["speculative_tokens"] == 3
    assert said["verifier"] == {"name_or_path": target_info.model, "architectures": ["LlamaForCausalLM"]}
    assert config["draft_vocab_size"] == 60 and config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    assert [config[name] for name in flags] == [False, False, True, True]
    layer = config["transformer_layer_config"]
    assert (layer["model_type"], layer["vocab_size"], layer["rope_theta"]) == ("llama", tiny.VOCABULARY, 10_000.0)
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    names = {"fc.weight", "embed_tokens.weight", "lm_head.weight", "d2t", "t2d", "norm.weight", "fc_norm.2.weight"}
    assert names | {"layers.0.self_attn.q_proj.weight", "layers.0.hidden_norm.weight"} <= tensors.keys()
    assert not any(name.startswith("model.") for name in tensors)  # vLLM puts that before every name itself
    ids = torch.arange(60) + tensors["d2t"]
    assert tensors["t2d"].dtype == torch.bool and tensors["t2d"].nonzero().flatten().tolist() == ids.tolist()
    assert tensors["fc.weight"].dtype == torch.bfloat16 and config["dtype"] == "bfloat16"


def test_a_head_that_the_layout_cannot_express_is_refused(tmp_path: Path, target_info: TargetInfo) -> None:
    head_export = random_export("eagle3", tmp_path / "made")
    scaled = replace(head_export, config=head_export.config | {"logit_scale": 0.5})
    with pytest.raises(UserError, match=r"cannot express that `logit_scale` is 0\.5"):
        write_speculators(scaled, tmp_path / "head", target_info, 3, CARD)
    unread = replace(head_export, tensors={"what.weight": torch.ones(2, 2)})
    with pytest.raises(UserError, match="no draft head of a known kind"):
        write_head(unread, tmp_path / "head", "f32", CARD)
    assert not (tmp_path / "head").exists()


def test_a_full_disk_leaves_the_older_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head_export = random_export("eagle3", tmp_path / "made")
    write_head(head_export, tmp_path / "head", "f32", CARD)
    before = {file.name: file.read_bytes() for file in (tmp_path / "head").iterdir()}

    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=r"cannot write `.*` \(No space left on device\)"):
            write_head(head_export, tmp_path / "head", "bf16", CARD)
    # And where the disk fails when all is written already.
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refusing_once(Path.rename))
        with pytest.raises(UserError, match="cannot write"):
            write_head(head_export, tmp_path / "head", "bf16", CARD)
    assert {file.name: file.read_bytes() for file in (tmp_path / "head").iterdir()} == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["head", "made"]


def refusing_once(rename: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
    """The new folder cannot take its place; the old one can."""

    def renamed(path: Path, to: Path) -> Path:
        if path.name.endswith(".new"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(path, to)

    return renamed


def test_only_an_export_is_replaced(tmp_path: Path) -> None:
    head_export = random_export("medusa", tmp_path / "made")
    (tmp_path / "head").mkdir()
    write_head(head_export, tmp_path / "head", "f32", CARD)
    (tmp_path / "head" / "thesis.tex").write_text("")
    with pytest.raises(UserError, match=r"holds `thesis.tex`, which no export has"):
        write_head(head_export, tmp_path / "head", "f32", CARD)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file: pass another folder"):
        write_head(head_export, tmp_path / "file", "f32", CARD)


def test_tensors_that_share_memory_are_stored_apart(tmp_path: Path) -> None:
    shared = torch.randn(4, 4)
    (tmp_path / "x").write_bytes(folders.as_safetensors({"a": shared, "b": shared.T}))
    found = load_file(tmp_path / "x")
    assert torch.equal(found["a"], shared) and torch.equal(found["b"], shared.T)


def draft() -> HeadExport:
    """Use the target as its own draft model: every draft token is accepted."""
    config = json.loads(tiny.original("llama").config.to_json_string())
    return HeadExport(config, {name: each.clone() for name, each in tiny.checkpoint("llama").tensors.items()})


def test_a_draft_model_for_a_folder_is_a_folder(tmp_path: Path, target_info: TargetInfo) -> None:
    assert write_model(draft(), tmp_path / "draft", target_info, "f32", CARD) == tmp_path / "draft"
    assert (tmp_path / "draft" / "tokenizer.json").is_file()
    assert agreement(target_info.model, tmp_path / "draft") == 1
    write_model(draft(), tmp_path / "draft", target_info, "q8_0", CARD)
    assert open_checkpoint(str(tmp_path / "draft")).weight("model.norm.weight").kind == "bf16"


@pytest.mark.parametrize(("storage", "kind"), [("q8_0", "q8_0"), ("q5_1", "q5_1"), ("bf16", "bf16"), ("f32", "f32")])
def test_a_draft_model_for_a_gguf_file_is_a_gguf_file(storage: Any, kind: str, tmp_path: Path) -> None:
    made, words = draft(), byte_tokens("", tiny.VOCABULARY) | {"tokenizer.chat_template": "{{ messages }}"}
    words = {key: value for key, value in words.items() if key != "path"}
    metadata = gguf_writer.describe(made.config, "target", "f32") | words | {"tokenizer.ggml.eos_token_id": 2}
    weights = tiny.checkpoint("llama")
    tensors = gguf_writer.rename(made.config, {name: weights.weight(name) for name in weights.names()})
    target = tmp_path / "target.gguf"
    target.write_bytes(b"".join(gguf_writer.encode(metadata, tensors)))
    target_info = target_info_of(str(target))
    file = write_model(made, tmp_path / "draft", target_info, storage, CARD)
    assert file.suffix == ".gguf" and (tmp_path / "draft" / "card.json").is_file()
    found, original = open_checkpoint(str(file)), open_checkpoint(str(target))
    assert {name: value for name, value in found.tokenizer_source.items() if name != "path"} == {  # type: ignore[union-attr]
        name: value
        for name, value in original.tokenizer_source.items()  # type: ignore[union-attr]
        if name != "path"
    }
    assert found.weight("model.layers.0.self_attn.q_proj.weight").kind == kind
    assert found.weight("model.norm.weight").kind == "f32"
    for name in found.names():
        most = 0.05 if storage == "q5_1" else 0.02
        near = torch.allclose(dequantize(found.weight(name)), dequantize(weights.weight(name)), atol=most, rtol=most)
        assert near, name
    assert agreement(str(target), file) > (0.5 if storage == "q5_1" else 0.7)


def test_the_rotation_of_llama_3_survives_gguf(tmp_path: Path) -> None:
    original = tiny.original("llama3-rope")
    config = json.loads(original.config.to_json_string())
    made = HeadExport(config, dict(tiny.checkpoint("llama3-rope").tensors))
    target = tmp_path / "target.gguf"
    words = {key: value for key, value in byte_tokens("", tiny.VOCABULARY).items() if key != "path"}
    target.write_bytes(
        b"".join(gguf_writer.encode(gguf_writer.describe(draft().config, "t", "f32") | words, tensors_of(draft())))
    )
    file = write_model(made, tmp_path / "draft", target_info_of(str(target)), "f32", CARD)
    written = open_checkpoint(str(file)).config
    rope, expected = read_config(written).ropes[0], read_config(config).ropes[0]
    assert rope is not None and expected is not None
    assert rope.short == rope.long and (rope.short[0], rope.short[-1]) == (1, 8)
    rates = [rope_frequencies(each, original.config.head_dim) for each in (rope, expected)]
    torch.testing.assert_close(*rates, atol=0, rtol=1e-6)


def tensors_of(made: HeadExport) -> dict[str, Any]:
    weights = tiny.checkpoint("llama")
    return gguf_writer.rename(made.config, {name: weights.weight(name) for name in weights.names()})
