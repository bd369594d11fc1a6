"""Heads as their authors' own code runs them: our loader reads their weights, our networks give their logits.

tools/record_originals.py wrote the folders: EAGLE-1 by SafeAILab, Medusa by FasterDecoding, multi-token prediction by
Xiaomi (MiMo). The target is a tiny Llama of transformers. Row t of a recorded text joins token t + 1 with the target's
state of token t; here it is the entry at position t + 1. Letters: T tokens, V the vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import tiny
from outrider import kernels
from outrider.cache.pages import Pages
from outrider.models import Model, build
from outrider.models.heads import EagleHead, MedusaHeads
from outrider.speculation.checkpoints import Head, choose_aux_layers, open_head

FOLDER = Path(__file__).parents[1] / "vectors" / "originals"
PAGE, TABLE = 4, [7, 2, 5, 0, 8]


@pytest.fixture(params=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> kernels.Kernels:
    return kernels.load(request.param)


def target(ops: kernels.Kernels) -> tuple[Model, list[int]]:
    """The recorded model, and its text."""
    tensors = load_file(FOLDER / "target.safetensors")
    tokens: list[int] = tensors.pop("tokens").tolist()
    return build(tiny.Memory(json.loads((FOLDER / "target.json").read_text()), tensors, False), ops), tokens


def features(model: Model, head: Head, tokens: list[int]) -> Tensor:
    """The target's states that the head reads: [T, E]."""
    _, states = tiny.run(model, tokens, 100, choose_aux_layers(head, model))
    return torch.cat(states, 1)


def same(found: Tensor, recorded: Tensor) -> None:
    assert recorded.std() > 0.5  # else the tolerance would mean nothing
    assert found.shape == recorded.shape
    assert float((found - recorded).abs().max()) < 2e-5 * float(recorded.abs().max())


@pytest.mark.parametrize(("name", "method", "layout"), [("eagle", "eagle", "SpecForge"), ("mtp-mimo", "mtp", "MiMo")])
def test_token_by_token_heads_draft_as_the_original(ops: kernels.Kernels, name: str, method: str, layout: str) -> None:
    """The text in one pass, then a draft whose entries read the head's own states."""
    model, tokens = target(ops)
    recorded = load_file(FOLDER / name / "vectors.safetensors")
    head = open_head(str(FOLDER / name), model.config, method)
    assert head.shape.kind == method and head.shape.layout == layout
    layers = head.shape.layers
    pages = Pages(layers.layers, layers.kv_heads, PAGE, layers.head_dim, "float32")
    pages.allocate(9)
    network = EagleHead(head.module(0) if method == "mtp" else head, model, pages, 64)
    states = network.project_features(features(model, head, tokens)[:-1].contiguous())
    out = network.run(tiny.batch([(tokens[1:], 1, TABLE)], PAGE), states)
    same(network.logits(out), recorded["text"])
    drafted: list[int] = recorded["drafted"].tolist()
    assert network.logits(out[-1:]).argmax().item() == drafted[0]
    for step, token in enumerate(drafted):
        entry = tiny.batch([([token], len(tokens) + step, TABLE)], PAGE)
        out = network.run(entry, network.feedback_features(out[-1:].contiguous()))
        same(network.logits(out)[0], recorded["draft"][step])


def test_medusa_heads_give_the_originals_logits(ops: kernels.Kernels) -> None:
    model, tokens = target(ops)
    recorded = load_file(FOLDER / "medusa" / "vectors.safetensors")["text"]  # [heads, T, V]
    head = open_head(str(FOLDER / "medusa"), model.config, "medusa")
    assert head.shape.layout == "FasterDecoding" and head.shape.heads == len(recorded) == 3
    network = MedusaHeads(head, model)
    for logits, wanted in zip(network.logits(features(model, head, tokens), 3), recorded, strict=True):
        same(logits, wanted)
