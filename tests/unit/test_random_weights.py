"""Models of random numbers: every tensor that the shape has, made where it is to lie, the same each time."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from outrider import LLM, SamplingParams
from outrider.errors import UserError
from outrider.kernels import reference
from outrider.models import build, read_config
from outrider.models.config import Experts, Recurrent
from outrider.models.rope import Rope
from outrider.speculation.checkpoints import open_head
from outrider.tokenizer import Tokenizer
from outrider.weights import open_checkpoint
from outrider.weights.random import KINDS, SHAPES, open_random_head

GREEDY = SamplingParams(max_tokens=24, temperature=0)


@pytest.mark.parametrize("name", [name for name in tiny.CASES if tiny.model_type(name) in KINDS])
def test_the_tensors_are_those_that_transformers_has(name: str) -> None:
    original = tiny.checkpoint(name)
    path = tiny.folder(name) / "config.json"
    found = open_checkpoint(f"random/{path}")
    known = {each: tuple(tensor.shape) for each, tensor in original.tensors.items()}
    assert {each: stored.shape for each, stored in found.tensors.items()} == known
    build(found, reference)  # which refuses tensors that are missing, or that it does not know


@pytest.mark.parametrize(
    ("name", "recurrent", "billions"), [("granite-4-h-micro", 36, 3.2), ("qwen3-next-80b-a3b", 36, 79.7)]
)
def test_hybrid_shapes_have_their_size(name: str, recurrent: int, billions: float) -> None:
    found = open_checkpoint(f"random/{name}", device=torch.device("meta"))
    states = read_config(found.config).recurrent
    assert states is not None and sum(states.layers) == recurrent
    assert sum(math.prod(stored.shape) for stored in found.tensors.values()) == pytest.approx(billions * 1e9, rel=0.01)


# As published: config.json of ibm-granite/granite-4.0-h-micro and Qwen/Qwen3-Next-80B-A3B-Instruct.
PUBLISHED: dict[str, dict[str, Any]] = {
    "granite-4-h-micro": {
        "architecture": "granitemoehybrid",
        "vocabulary": 100_352,
        "width": 2048,
        "layers": 40,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 64,
        "mlp_width": 8192,
        "eps": 1e-5,
        "context": 131_072,
        "tied_head": True,
        "embedding_scale": 12,
        "residual_scale": 0.22,
        "attention_scale": 1 / 64,
        "logit_scale": 1 / 8,
        "ropes": (None,) * 40,  # no position embedding
        "experts": None,
        "gated_attention": False,
        "head_norms": False,
    },
    "qwen3-next-80b-a3b": {
        "architecture": "qwen3_next",
        "vocabulary": 151_936,
        "width": 2048,
        "layers": 48,
        "heads": 16,
        "kv_heads": 2,
        "head_dim": 256,
        "eps": 1e-6,
        "context": 262_144,
        "tied_head": False,
        "ropes": (Rope(1e7, dims=64),) * 48,
        "experts": Experts(512, 10, 512, 512, normalized=True, layers=(True,) * 48),
        "gated_attention": True,
        "head_norms": True,
    },
}
STATES = {
    "granite-4-h-micro": Recurrent(
        delta=False,
        heads=64,
        key_heads=1,
        head_dim=64,
        state_dim=128,
        conv_size=4,
        conv_bias=True,
        layers=tuple(layer not in (5, 15, 25, 35) for layer in range(40)),
    ),
    "qwen3-next-80b-a3b": Recurrent(
        delta=True,
        heads=32,
        key_heads=16,
        head_dim=128,
        state_dim=128,
        conv_size=4,
        layers=tuple(layer % 4 != 3 for layer in range(48)),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_hybrid_shapes_are_as_published(name: str) -> None:
    config = read_config(open_checkpoint(f"random/{name}", device=torch.device("meta")).config)
    assert {field: getattr(config, field) for field in PUBLISHED[name]} == PUBLISHED[name]
    assert config.recurrent == STATES[name]


@pytest.mark.parametrize("name", ["qwen3-next", "granite4-moe"])
def test_hybrid_shapes_generate(name: str) -> None:
    llm = LLM(f"random/{tiny.folder(name) / 'config.json'}", backend="cpu", cache_tokens=1024)
    output = llm.generate("a text", GREEDY)[0].completions[0]
    assert len(output.token_ids) == GREEDY.max_tokens


def test_a_recurrent_shape_without_its_sizes_is_refused(tmp_path: Path) -> None:
    config = json.loads((tiny.folder("qwen3-next") / "config.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "linear_num_key_heads": None}))
    with pytest.raises(UserError, match="a recurrent layer has `linear_num_key_heads` None"):
        open_checkpoint(f"random/{path}")


def test_a_tensor_depends_on_its_name_alone() -> None:
    first, again = open_checkpoint("random/tiny"), open_checkpoint("random/tiny")
    query, key = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "qk")
    assert torch.equal(first.weight(query).data, again.weight(query).data)
    assert not torch.equal(first.weight(query).data[:8], first.weight(key).data[:8])
    assert not torch.equal(first.weight(query).data, first.weight(query.replace("0", "1")).data)


def test_numbers_keep_the_size_of_what_they_multiply() -> None:
    found = open_checkpoint("random/tiny")
    matrix = found.weight("model.layers.1.mlp.down_proj.weight").data.float()  # [64, 128]
    assert matrix.std() == pytest.approx(128**-0.5, rel=0.05)
    assert abs(matrix.mean()) < 0.005
    norm = found.weight("model.norm.weight").data.float()
    assert norm.mean() == pytest.approx(1, abs=0.1)
    assert 0.02 < norm.std() < 0.2


def test_nothing_is_made_before_it_is_read() -> None:
    found = open_checkpoint("random/llama-3.1-8b", device=torch.device("meta"))
    assert found.bytes == 2 * 8_030_261_248  # as many parameters as Llama 3.1 8B has
    assert not found.float32
    config = read_config(found.config)
    assert (config.layers, config.heads, config.kv_heads, config.tied_head) == (32, 32, 8, False)
    assert config.ropes[0] is not None
    assert config.ropes[0].kind == "llama3"
    assert open_checkpoint("random/smollm2-135m").bytes == 2 * 134_515_008


def test_random_tensors_are_made_on_the_given_device() -> None:
    """A device without memory stands for one whose memory is elsewhere."""
    device = torch.device("meta")
    stored = open_checkpoint("random/tiny", device=device).tensors["model.norm.weight"]
    assert stored.device == device  # type: ignore[attr-defined]


def test_bytes_go_in_and_out() -> None:
    tokenizer = Tokenizer.open(open_checkpoint("random/tiny").tokenizer_source)
    text = "caf\u00e9 \u732b, two  spaces\n"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.decode([65, 32, 300]) == "A <300>"
    assert not tokenizer.end_ids


def test_an_engine_runs_it() -> None:
    llm = LLM("random/tiny", backend="cpu", cache_tokens=1024)
    (output,) = llm.generate("hello", GREEDY)
    assert len(output.completions[0].token_ids) == 24


def test_its_head_drafts_for_it() -> None:
    plain = LLM("random/tiny", backend="cpu", cache_tokens=1024).generate("hello", GREEDY)
    spoken = "eagle3:model=random/eagle3-tiny,width=4,adaptive=false"
    drafted = LLM("random/tiny", backend="cpu", cache_tokens=1024, speculate=spoken).generate("hello", GREEDY)
    assert drafted[0].completions[0].token_ids == plain[0].completions[0].token_ids
    assert drafted[0].stats is not None
    assert drafted[0].stats.speculation.drafted > 20


def test_the_head_has_the_shape_that_people_publish() -> None:
    config, tensors = open_random_head("random/eagle3-tiny")
    assert config["num_hidden_layers"] == 1
    head = open_head("random/eagle3-tiny", read_config(SHAPES["tiny"]), "eagle3")
    assert head.shape.aux_layers == (1, 2, 3)
    assert head.shape.draft_vocabulary == 256
    assert head.draft_ids is not None
    assert head.draft_ids.tolist() == list(range(0, 512, 2))
    assert tensors["model.fc.weight"].shape == (64, 192)
    assert not head.shape.own_embedding


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("random/huge", "`random/huge` is not a known shape: pass one of `random/llama-3.1-8b`"),
        ("random/bert.json", "`bert`, whose tensors are not known"),
        ("random/half.json", "says `hidden_size` is None"),
    ],
)
def test_mistakes(source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bert.json").write_text(json.dumps({"model_type": "bert"}))
    Path("half.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 8}))
    with pytest.raises(UserError, match=message):
        open_checkpoint(source)


def test_a_model_is_no_head() -> None:
    with pytest.raises(UserError, match="`random/tiny` is not a draft head"):
        open_head("random/tiny", None, "eagle3")


def test_a_mixture_of_experts_has_the_parameters_of_the_published_one() -> None:
    found = open_checkpoint("random/qwen3-30b-a3b", device=torch.device("meta"))
    assert found.bytes == 2 * 30_532_122_624
    config = read_config(found.config)
    assert config.experts is not None
    assert (config.experts.count, config.experts.top_k, config.experts.width) == (128, 8, 768)
