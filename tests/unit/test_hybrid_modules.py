"""The MTP modules of Qwen3-Next and Qwen3.5, read from the model's own checkpoint, compute what transformers does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fake_target import Stage
from safetensors.torch import load_file, save_file
from test_heads import error
from torch import Tensor

import tiny
import tiny_gguf
import tiny_hybrids
from outrider import LLM, SamplingParams
from outrider.errors import UserError
from outrider.kernels import load
from outrider.speculation import find
from outrider.speculation.checkpoints import describe, open_head
from refusals import refusal
from unit.checkpoint_changes import change_both
from unit.test_gguf_hybrids import edited

WIDTH = 3


def drafted(stage: Stage, length: int = 11, model: str = "") -> tuple[list[int], list[int], Tensor]:
    """Return a text, the tokens that are drafted after it, and their logits [width, V]."""
    method = find("mtp")
    stage.begin(method.build(method.Options(width=WIDTH, model=model), stage.target))
    seen: list[Tensor] = []
    network = stage.proposer.network
    said = network.logits
    network.logits = lambda states: seen.append(said(states)) or seen[-1]
    request = stage.request(tiny.prompt(length))
    stage.decode(request, width=WIDTH)
    return request.prompt + request.output, stage.drafts[request], torch.cat(seen)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("target", "layout"),
    [
        ("qwen3-next", "by expert"),
        ("qwen3-next-moe", "by expert"),
        ("qwen3-next-moe", "merged"),
        ("qwen3.5", "multimodal"),
        ("qwen3.5-moe", "merged"),
        ("qwen3.5-moe", "multimodal"),
    ],
)
def test_drafts_and_logits_equal_transformers(target: str, layout: str, backend: str, tmp_path: Path) -> None:
    if layout == "multimodal":
        tiny_hybrids.multimodal(target, tmp_path)
    else:
        tiny_hybrids.inside(target, tmp_path, merged=layout == "merged")
    text, tokens, logits = drafted(Stage(load(backend), target, source=str(tmp_path)))
    expected, wanted = tiny_hybrids.module(target).draft(text, WIDTH)
    assert wanted.std() > 0.3
    assert error(logits, wanted) < 2e-5
    assert tokens == expected


@pytest.mark.parametrize("speculate", ["mtp:adaptive=false,width=3", "mtp:adaptive=false,width=6,branches=2"])
def test_an_engine_speculates_with_the_models_own_module(speculate: str, tmp_path: Path) -> None:
    folder = str(tiny_hybrids.multimodal("qwen3.5-moe", tmp_path))
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    plain = LLM(folder, backend="cpu").generate([tiny.prompt(40)], params)[0]
    output = LLM(folder, backend="cpu", speculate=speculate, max_step_tokens=7).generate([tiny.prompt(40)], params)[0]
    assert output.completions[0].token_ids == plain.completions[0].token_ids
    assert 0 < output.stats.speculation.accepted < output.stats.speculation.drafted


def test_a_head_says_what_its_layer_has(tmp_path: Path) -> None:
    tiny_hybrids.inside("qwen3-next-moe", tmp_path)
    parts = dict(describe(open_head(str(tmp_path))))
    assert parts["method"] == "mtp (MTP)" and parts["layout"] == "Qwen"
    assert parts["layers"] == "1, each with 4 heads of 32, 2 for keys, 8 experts 64 wide, 3 for each token"
    assert parts["attention"] == "with gates, 8 of 32 dimensions rotate"


def test_checkpoints_without_modules_are_refused_by_name(tmp_path: Path) -> None:
    bare = tiny.copy("qwen3.5", tmp_path)
    with pytest.raises(UserError, match=f"`{bare}` has no modules of multi-token prediction"):
        LLM(str(bare), backend="cpu", speculate="mtp")


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("module", ["inside", "alone"])
@pytest.mark.parametrize("target", ["qwen3-next-moe", "qwen3.5", "qwen3.5-moe"])
def test_modules_in_gguf_files_equal_transformers(target: str, module: str, backend: str, tmp_path: Path) -> None:
    """A module is in the file of the model, or in one of its own, which is named."""
    file = str(tiny_gguf.write(target, tmp_path / "m.gguf", module=module))
    source, model = (file, "") if module == "inside" else ("elsewhere", file)
    text, tokens, logits = drafted(Stage(load(backend), target, source=source), model=model)
    expected, wanted = tiny_hybrids.module(target).draft(text, WIDTH)
    assert error(logits, wanted) < 2e-5
    assert tokens == expected


def test_quantized_modules_in_gguf_files_stay_quantized(tmp_path: Path) -> None:
    parts = ("eh_proj", "attn_q", "attn_output", "_exps", "down_shexp")
    stages = []
    for plain in (False, True):
        file = tiny_gguf.write(
            "qwen3.5-moe", tmp_path / f"{plain}.gguf", "Q8_0", dequantized=plain, parts=parts, module="inside"
        )
        stages.append(drafted(Stage(load("cpu"), "qwen3.5-moe", source=str(file))))
        weights = dict(describe(open_head(str(file))))["weights"]
        assert ("q8_0" in weights) != plain, weights
    (_, tokens, logits), (_, expected, wanted) = stages
    assert tokens == expected and error(logits, wanted) < 2e-2  # activations are rounded


def test_a_gguf_file_without_modules_takes_those_of_another_source(tmp_path: Path) -> None:
    method = find("mtp")
    stage = Stage(load("reference"), "qwen3.5", source=str(tiny_gguf.write("qwen3.5", tmp_path / "model.gguf")))
    reason = refusal(lambda: method.build(method.Options(), stage.target))
    assert "model.gguf` has no modules of multi-token prediction" in reason
    assert "GGUF files often leave them out" in reason
    folder = tiny_hybrids.inside("qwen3.5", tmp_path / "folder")
    assert method.build(method.Options(model=str(folder), width=2), stage.target).needs.width == 2


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ("nextn.hnorm", "`model.state_norm.weight`"),
        ("attn_k_norm", "`model.layers.0.self_attn.k_norm.weight`"),
        ("attn_q", "lack a block"),
    ],
)
def test_missing_tensors_of_modules_in_gguf_files_are_named(part: str, reason: str, tmp_path: Path) -> None:
    file = edited("qwen3.5", tmp_path / "m.gguf", lambda tensors, _: tensors.pop(f"blk.3.{part}.weight"), "inside")
    assert reason in refusal(lambda: drafted(Stage(load("reference"), "qwen3.5", source=str(file))))


def test_a_gguf_file_without_modules_is_no_head(tmp_path: Path) -> None:
    file = tiny_gguf.write("qwen3.5", tmp_path / "m.gguf")
    assert "has no modules of multi-token prediction" in refusal(lambda: open_head(str(file)))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mtp.pre_fc_norm_hidden.weight", "`model.state_norm.weight`"),
        ("mtp.layers.0.self_attn.k_norm.weight", r"`model.layers.0.self_attn.k_norm.weight`"),
        ("mtp.layers.0.mlp.experts.5.up_proj.weight", r"`model.layers.0.mlp.experts.5.up_proj.weight`"),
        ("mtp.layers.0.mlp.gate.weight", "`model.layers.0.mlp."),
        ("mtp.layers.0.self_attn.q_proj.weight", "lack a block"),
    ],
)
def test_missing_tensors_are_named(name: str, reason: str, tmp_path: Path) -> None:
    file = tiny_hybrids.inside("qwen3-next-moe", tmp_path) / "model.safetensors"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    assert reason in refusal(lambda: LLM(str(tmp_path), backend="cpu", speculate="mtp"))


def test_modules_of_another_shape_are_refused(tmp_path: Path) -> None:
    tiny_hybrids.inside("qwen3-next", tmp_path)
    change_both(tmp_path, lambda config, _: config.update(head_dim=16))
    assert "heads of 16: config and weights are not of the same head" in refusal(lambda: open_head(str(tmp_path)))
