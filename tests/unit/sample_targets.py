"""Outputs of tiny models for the tests of draft heads, computed one document at a time without TargetModel."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

import tiny
from outrider.kernels import load
from outrider.models import Model, build
from outrider.train.data.pack import Pack
from outrider.train.heads.base import DraftHead, HeadExport
from outrider.train.target import TargetInfo, TargetOutputs

Sizes = Sequence[Sequence[tuple[int, int]]]  # by row, of each document: tokens of the prompt and of the answer
SIZES: Sizes = (((5, 14), (3, 6)), ((4, 20),), ((9, 2), (2, 1), (6, 7)))


def pack(sizes: Sizes = SIZES, length: int = 30) -> Pack:
    tokens = torch.zeros(len(sizes), length, dtype=torch.int64)
    positions, documents = torch.zeros_like(tokens), torch.full_like(tokens, -1)
    answered = torch.zeros_like(tokens, dtype=torch.bool)
    for row, texts in enumerate(sizes):
        start = 0
        for number, (prompt, answer) in enumerate(texts):
            end = start + prompt + answer
            tokens[row, start:end] = torch.tensor(tiny.prompt(end - start, seed=7 * row + number))
            positions[row, start:end] = torch.arange(end - start)
            documents[row, start:end] = number
            answered[row, start + prompt : end] = True
            start = end
    return Pack(tokens, positions, documents, answered)


@functools.cache
def model(target: str) -> Model:
    return build(tiny.checkpoint(target), load("cpu"))


@functools.cache
def target_info(target: str = "llama") -> TargetInfo:
    original, network = tiny.original(target), model(target)
    counts = torch.randint(1, 50, (tiny.VOCABULARY,), generator=torch.Generator().manual_seed(3))
    counts[[2, 40, 90]] = 0
    return TargetInfo(
        model=target,
        config=network.config,
        embedding=original.get_input_embeddings().weight.detach() * network.embedding_scale,
        lm_head=original.get_output_embeddings().weight.detach(),
        aux_layers=(1, 2, 3),
        token_counts=counts,
        torch_device=torch.device("cpu"),
        weights=lambda name: original.state_dict()[name].float(),
    )


def outputs(given: Pack, aux_layers: Sequence[int], target: str = "llama") -> TargetOutputs:
    """Fill padding with noise, which must not be read."""
    network, (rows, length) = model(target), given.tokens.shape
    generator = torch.Generator().manual_seed(5)
    read = sorted({*aux_layers, network.config.layers})
    states = {aux_layer: torch.randn(rows, length, network.config.width, generator=generator) for aux_layer in read}
    logits = torch.randn(rows, length, network.config.vocabulary, generator=generator)
    for row in range(rows):
        for number in range(int(given.documents[row].max()) + 1):
            at = given.documents[row] == number
            logits[row, at], aux_states = tiny.run(network, given.tokens[row, at].tolist(), length, read)
            for aux_layer, found in zip(read, aux_states, strict=True):
                states[aux_layer][row, at] = found
    last = network.ops.rms_norm(states[network.config.layers].flatten(0, 1), network.norm, network.config.eps)
    return TargetOutputs(
        given, {aux_layer: states[aux_layer] for aux_layer in aux_layers}, last.view(rows, length, -1), logits
    )


def learn(learner: DraftHead, given: TargetOutputs, steps: int) -> list[float]:
    """Return by step the share of correct draft tokens."""
    optimizer = torch.optim.AdamW(learner.parameters(), lr=3e-3, weight_decay=0.0)
    shares = []
    for _ in range(steps):
        report = learner(given)
        optimizer.zero_grad()
        report.loss.backward()
        optimizer.step()
        shares.append(float(report.correct.sum() / report.counted.sum()))
    return shares


def check_half_precision(learner: DraftHead, given: TargetOutputs) -> None:
    """Under autocast the loss is nearly the same, and every parameter has a gradient."""
    losses = []
    for enabled in (False, True):
        torch.manual_seed(4)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            losses.append(learner(given).loss)
    losses[1].backward()
    assert losses[0].dtype == losses[1].dtype == torch.float32
    assert float(losses[0].detach()) != float(losses[1].detach())
    torch.testing.assert_close(losses[1], losses[0], rtol=0.02, atol=0.0)
    for part, parameter in learner.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.isfinite().all()) and bool(parameter.grad.any()), part


def write(found: HeadExport, folder: Path) -> str:
    """As plainly as a checkpoint can be."""
    tensors: dict[str, Tensor] = dict(found.tensors)
    if found.draft_ids is not None:
        tensors["d2t"] = found.draft_ids - torch.arange(len(found.draft_ids))
    (folder / "config.json").write_text(json.dumps(found.config))
    save_file(tensors, folder / "model.safetensors")
    return str(folder)
