"""Heads as the package `speculators` saves and runs them: our loader reads the same head, our networks say the same.

tools/record_heads.py wrote the folders. Row t of their texts joins token t with a state; here it is the entry at
position t + 1. Letters: T tokens, V the target's vocabulary, U the draft vocabulary.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

import tiny
from outrider import kernels
from outrider.cache.pages import Pages
from outrider.models import Model, build
from outrider.models.block_head import BlockHead
from outrider.models.heads import EagleHead
from outrider.speculation.checkpoints import Head, choose_aux_layers, open_head

FOLDER = Path(__file__).parents[1] / "vectors" / "heads"
NAMES = sorted(path.name for path in FOLDER.iterdir())
PAGE, TABLE = 4, [7, 2, 5, 0, 8]
NORMS = ("norm_before_fc", "fc_norm", "norm_before_residual")


def of_kind(*kinds: str) -> list[str]:
    return [name for name in NAMES if name.split("-")[0] in kinds]


def said(name: str) -> dict[str, Any]:
    """What the recorded configuration says."""
    found: dict[str, Any] = json.loads((FOLDER / name / "config.json").read_text())
    return found


def vectors(name: str) -> dict[str, Tensor]:
    return load_file(FOLDER / name / "vectors.safetensors")


@functools.cache
def plain_target() -> Any:
    layers = said("eagle3-plain")["transformer_layer_config"]
    changes = {"vocab_size": layers["vocab_size"], "hidden_size": layers["hidden_size"], "num_hidden_layers": 6}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**tiny.COMMON, **changes, "tie_word_embeddings": False})
    return transformers.LlamaForCausalLM(config)


def target(name: str, ops: kernels.Kernels) -> Model:
    """A model that the head fits, with the embedding and the head matrix that it was recorded with."""
    original, recorded = plain_target(), vectors(name)
    tensors = dict(original.state_dict())
    for ours, theirs in (("model.embed_tokens.weight", "embedding"), ("lm_head.weight", "head")):
        tensors[ours] = recorded.get(theirs, tensors[ours])
    return build(tiny.Memory(json.loads(original.config.to_json_string()), tensors, False), ops)


def eagle(name: str, ops: kernels.Kernels) -> tuple[Head, EagleHead[Pages]]:
    model = target(name, ops)
    head = open_head(str(FOLDER / name), model.config)
    layers = head.shape.layers
    pages = Pages(layers.layers, layers.kv_heads, PAGE, layers.head_dim, "float32")
    pages.allocate(9)
    return head, EagleHead(head, model, pages, 64)


def same(head: Head, found: Tensor, wanted: Tensor) -> None:
    """Logits [R, V] that are to be those recorded [R, U], with -inf wherever the head cannot say a token."""
    if head.draft_ids is not None:
        assert int(found.isfinite().sum()) == wanted.numel()
        found = found[:, head.draft_ids]
    assert wanted.std() > 0.5  # else the tolerance would mean nothing
    assert found.shape == wanted.shape
    error, largest = float((found - wanted).abs().max()), float(wanted.abs().max())
    assert error < 1e-5 * largest


@pytest.fixture(params=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> kernels.Kernels:
    return kernels.load(request.param)


@pytest.mark.parametrize("name", NAMES)
def test_what_was_understood_is_what_was_said(name: str) -> None:
    config, model = said(name), target(name, kernels.load("reference"))
    head = open_head(str(FOLDER / name), model.config)
    shape, layers = head.shape, config["transformer_layer_config"]
    assert shape.layout == "speculators" and shape.kind == config["speculators_model_type"]
    key = "eagle_aux_hidden_state_layer_ids" if "eagle" in shape.kind else "aux_hidden_state_layer_ids"
    assert choose_aux_layers(head, model) == shape.aux_layers == tuple(config[key])
    assert shape.num_aux_layers == len(config[key])
    assert shape.width == shape.target_width == layers["hidden_size"]
    assert shape.layers.layers == layers["num_hidden_layers"]
    assert shape.layers.head_norms == (layers["model_type"] == "qwen3")
    assert shape.layers.qkv_bias == layers["attention_bias"]
    assert shape.layers.kv_heads == layers["num_key_value_heads"]
    assert shape.layers.eps == layers["rms_norm_eps"]
    kinds = layers.get("layer_types", ["full_attention"] * layers["num_hidden_layers"])
    assert shape.layers.windows == tuple(layers["sliding_window"] if "sliding" in kind else 0 for kind in kinds)
    whole = config["draft_vocab_size"] == layers["vocab_size"]
    assert shape.draft_vocabulary == (None if whole else config["draft_vocab_size"])
    if head.draft_ids is not None:
        offsets = load_file(FOLDER / name / "model.safetensors")["d2t"]
        assert [int(each) - at for at, each in enumerate(head.draft_ids)] == offsets.tolist()
    for flag in NORMS if "eagle" in shape.kind else ():
        assert getattr(shape, flag) == config[flag], flag
    if shape.kind == "eagle3":  # P-EAGLE states it too, and feeds nothing back
        assert shape.norm_output == config["norm_output"]
    if "mask_token_id" in config:
        assert shape.mask == config["mask_token_id"]
    if shape.kind in ("dflash", "dspark"):
        check_block(shape, config, kinds)


def check_block(shape: Any, config: dict[str, Any], kinds: list[str]) -> None:
    assert shape.block == config["block_size"]
    assert shape.from_anchor == config["sample_from_anchor"]
    open_windows = config["sliding_window_non_causal"]
    assert shape.causal == tuple("sliding" in kind and not open_windows for kind in kinds)
    assert shape.markov_rank == config.get("markov_rank", 0)
    if shape.markov_rank:
        assert shape.markov == config["markov_head_type"]
    assert shape.confidence == config.get("enable_confidence_head", False)
    if shape.confidence:
        assert shape.confidence_markov == config["confidence_head_with_markov"]
    assert not shape.own_embedding and shape.own_head == (shape.draft_vocabulary is not None)


def run_text(network: EagleHead[Pages], recorded: dict[str, Tensor], chunk: int = 5) -> Tensor:
    """States [T, H] of all rows of the text."""
    tokens, features, rows = recorded["tokens"].tolist(), network.project_features(recorded["states"]), []
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        rows.append(
            network.run(tiny.batch([(part, start + 1, TABLE)], PAGE), features[start : start + chunk].contiguous())
        )
    return torch.cat(rows)


@pytest.mark.parametrize("name", of_kind("eagle3"))
def test_eagle3(name: str, ops: kernels.Kernels) -> None:
    """The text, then drafts from every row of it, the last ones first: a draft overwrites what comes after its row."""
    head, network = eagle(name, ops)
    recorded = vectors(name)
    tokens, (first, *later) = recorded["tokens"].tolist(), recorded["logits"]
    states = run_text(network, recorded)
    same(head, network.logits(states), first)
    for row in reversed(range(len(tokens) - len(later))):
        state = states[row : row + 1]
        for step, wanted in enumerate(later, 1):
            entry = tiny.batch([([tokens[row + step]], row + 1 + step, TABLE)], PAGE)
            state = network.run(entry, network.feedback_features(state))
            same(head, network.logits(state), wanted[row : row + 1])


@pytest.mark.parametrize("name", of_kind("peagle"))
def test_peagle(name: str, ops: kernels.Kernels) -> None:
    """The text, then masks after its rows in one pass each: the mask at depth d predicts d tokens further ahead."""
    head, network = eagle(name, ops)
    recorded = vectors(name)
    entries = list(zip(recorded["anchors"].tolist(), recorded["depths"].tolist(), strict=True))
    wanted = dict(zip(entries, recorded["logits"], strict=True))
    states, length = run_text(network, recorded), len(recorded["tokens"])
    same(head, network.logits(states), torch.stack([wanted[row, 0] for row in range(length)]))
    assert network.parallel and network.mask_features is not None
    chains = 0
    for row in reversed(range(length)):
        depth = max(deep for anchor, deep in wanted if anchor == row)
        if not depth:
            continue
        masks = tiny.batch([([network.mask] * depth, row + 2, TABLE)], PAGE)
        found = network.run(masks, network.mask_features.expand(depth, -1).contiguous())
        same(head, network.logits(found), torch.stack([wanted[row, deep] for deep in range(1, depth + 1)]))
        chains += depth > 2
    assert chains > 2


def block_head(name: str, ops: kernels.Kernels) -> tuple[Head, BlockHead[Pages]]:
    model = target(name, ops)
    head = open_head(str(FOLDER / name), model.config)
    layers = head.shape.layers
    pages = Pages(layers.layers, layers.kv_heads, PAGE, layers.head_dim, "float32")
    pages.allocate(9)
    return head, BlockHead(head, model, pages, 64)


@pytest.mark.parametrize("name", of_kind("dflash", "dspark"))
def test_blocks(name: str, ops: kernels.Kernels) -> None:
    """Blocks after three entries of a text, the last ones first: a block overwrites what comes after its place."""
    head, network = block_head(name, ops)
    recorded, shape = vectors(name), head.shape
    tokens = recorded["tokens"]
    text = tiny.batch([(tokens.tolist(), 0, TABLE)], PAGE)
    network.store(network.project_features(recorded["states"]), text)
    for at, anchor in reversed(list(enumerate(recorded["anchors"].tolist()))):
        block = [int(tokens[anchor]), *[shape.mask] * (shape.block - 1)]
        states = network.run(tiny.batch([(block, anchor, TABLE)], PAGE))  # [B, H]
        first = 0 if shape.from_anchor else 1  # of the block's tokens that predict
        before = tokens[anchor : anchor + shape.drafts].to(torch.int32)  # [drafts], the token before each prediction
        wanted = {key: recorded[key][at, first:] for key in ("logits", "logits_before") if key in recorded}
        scores = network.scores(states[first:])  # [drafts, U]
        same(head, network.logits(scores), wanted.get("logits_before", wanted["logits"]))
        memory = network.begin(states[:1], before[:1])
        for slot in range(shape.drafts):
            state, token = states[first + slot][None], before[slot][None]
            bias, memory = network.bias(state, token, memory)
            biased = scores[slot][None] if bias is None else scores[slot][None] + bias
            same(head, network.logits(biased), wanted["logits"][slot][None])
        sure = network.confidence(states[first:], before)
        assert (sure is None) == ("confidence" not in recorded)
        if sure is not None:
            assert torch.allclose(sure, recorded["confidence"][at, first:].sigmoid(), atol=1e-5)


@pytest.mark.parametrize("name", of_kind("dspark"))
def test_the_bias_matters(name: str) -> None:
    """What was recorded tells a head with a bias from one without: else the test above would say less than it seems."""
    recorded = vectors(name)
    apart = float((recorded["logits"] - recorded["logits_before"]).abs().max())
    assert (apart > 0.1) == (said(name)["markov_rank"] > 0)
