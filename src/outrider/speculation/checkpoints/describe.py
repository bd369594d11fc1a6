"""Describe a draft head for users: each part of its shape in a few words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from shlex import quote
from typing import Any

from ...models import Model, ModelConfig
from ...models.heads import HeadShape
from .folder import Held, Packed
from .head import METHODS, Head, choose_aux_layers

COMMON = {field.name for field in fields(HeadShape)}  # described explicitly; the fields of one kind are listed by name


def describe(head: Head, target: Model | None = None) -> list[tuple[str, str]]:
    """Return (part, description) pairs, with the states that the head would read of `target`."""
    return list(_parts(head, target))


def command(head: Head, model: str) -> str:
    """Return a command line that uses the head."""
    speculate = quote(f"{head.shape.kind}:model={head.path}")
    return f"outrider generate PROMPT --model {quote(model)} --speculate {speculate}"


def _parts(head: Head, target: Model | None) -> Iterator[tuple[str, str]]:
    shape = head.shape
    yield "method", f"{shape.kind} ({METHODS[shape.kind]})"
    yield "layout", shape.layout
    yield "reads", _states(head, target)
    yield "width", str(shape.width)
    yield from _own(shape)
    own = shape.own_embedding
    yield "embedding", f"its own, {own} tokens" if own else "the target's"
    yield "head matrix", "its own" if shape.own_head else "the target's"
    ids = head.draft_ids
    yield "can draft", "every token" if ids is None else f"{len(ids)} tokens, ids {int(ids[0])} to {int(ids[-1])}"
    if shape.logit_scale != 1:
        yield "logits", f"times {shape.logit_scale:g}"
    stored = sum(tensor.nbytes for tensor in head.tensors.values())
    kinds = sorted({_kind(tensor) for tensor in head.tensors.values()})
    yield "weights", f"{stored / 1e6:.1f} MB, {' and '.join(kinds)}"
    if shape.target_layers is not None:
        yield "made for", f"a model of {shape.target_layers} layers"
    yield from _made_for(head.config)
    yield "ignored", ", ".join([*head.ignored, *_overruled(head)]) or "nothing"


def _kind(held: Held) -> str:
    return held.kind if isinstance(held, Packed) else str(held.dtype).removeprefix("torch.")


def _states(head: Head, target: Model | None) -> str:
    shape = head.shape
    if shape.target_norm:
        return f"the target's last state, after its last norm, {shape.target_width} wide"
    read = f"{shape.num_aux_layers} states, {shape.target_width} wide"
    aux_layers = shape.aux_layers if target is None else choose_aux_layers(head, target)
    if aux_layers is None:
        return f"{read}: the checkpoint does not say of which layers, the default for the model is taken"
    source = "stated by the checkpoint" if shape.aux_layers else "the default for this model"
    return f"{read}, entering layers {_list(aux_layers)}: {source}"


def _own(shape: HeadShape) -> Iterator[tuple[str, str]]:
    """List the fields that only this kind of head has; parts that the head lacks are left out."""
    own = [(field.name, getattr(shape, field.name), field.default) for field in fields(shape)]
    own = [entry for entry in own if entry[0] not in COMMON]
    parts = {_part(name) for name, value, default in own if value != default}
    for name, value, _ in own:
        if isinstance(value, ModelConfig):
            yield from _layers(value)
        elif value is not None and not isinstance(value, bool) and _part(name) in parts:
            yield name.replace("_", " "), _list(value) if isinstance(value, tuple | list) else str(value)
    yield "flags", _list([name for name, value, _ in own if value is True])


def _part(name: str) -> str:
    """Return the part that a field describes: the first word of its name, as in `markov`, `markov_rank`."""
    return name.split("_")[0]


def _layers(layers: ModelConfig) -> Iterator[tuple[str, str]]:
    heads = f"{layers.heads} heads of {layers.head_dim}, {layers.kv_heads} for keys"
    yield "layers", f"{layers.layers}, each with {heads}, MLP {layers.mlp_width} wide"
    biases = {"attention": layers.qkv_bias, "its output": layers.output_bias, "MLP": layers.mlp_bias}
    if layers.head_norms:
        yield "head norms", "on queries and keys"
    if any(biases.values()):
        yield "biases", ", ".join(part for part, there in biases.items() if there)
    if any(layers.windows):
        yield "windows", _list([str(window) if window else "all" for window in layers.windows])


def _made_for(config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Report the target and draft length that the checkpoint recommends."""
    recommended = config.get("speculators_config")
    if not isinstance(recommended, dict):
        return
    verifier, proposals = recommended.get("verifier"), recommended.get("proposal_methods")
    if isinstance(verifier, dict) and verifier.get("name_or_path"):
        yield "made for", str(verifier["name_or_path"])
    if isinstance(proposals, list) and proposals and isinstance(proposals[0], dict):
        yield "made to draft", f"{proposals[0].get('speculative_tokens')} tokens at a time"


def _overruled(head: Head) -> Iterator[str]:
    """List keys of the configuration that the tensors contradict; the tensors take precedence."""
    config, shape = head.config, head.shape
    if shape.own_head and config.get("tie_word_embeddings"):
        yield "`tie_word_embeddings` (the head matrix is stored)"
    stated = config.get("draft_vocab_size")
    if stated is not None and head.draft_ids is not None and stated != len(head.draft_ids):
        yield f"`draft_vocab_size` {stated} (`d2t` has {len(head.draft_ids)})"
    layers, stated = getattr(shape, "layers", None), config.get("num_hidden_layers")
    beside = hasattr(shape, "modules")  # MTP modules: the key counts the layers of the model
    if isinstance(layers, ModelConfig) and not beside and stated is not None and stated != layers.layers:
        yield f"`num_hidden_layers` {stated} (the tensors are of {layers.layers})"


def _list(values: Sequence[object]) -> str:
    words = {True: "yes", False: "no"}
    return ", ".join(words[value] if isinstance(value, bool) else str(value) for value in values) or "none"
