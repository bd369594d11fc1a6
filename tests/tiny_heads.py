"""Tiny random drafters for the models of `tiny`: EAGLE heads in all published layouts, and draft models."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import tiny
import tiny_blocks
import tiny_medusa
import tiny_modules
from outrider import kernels
from outrider.cache.pages import Pages
from outrider.models import Model, build
from outrider.models.heads import EagleHead
from outrider.speculation import find
from outrider.speculation.checkpoints import open_head
from tiny_plan import HeadPlan

JOINED = {
    "q_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "gate_proj": ("gate_up_proj", ("gate_proj", "up_proj")),
}


@dataclass(frozen=True)
class Plan(HeadPlan):
    """The plan of an EAGLE-1 or EAGLE-3 head; EAGLE-1 drafts all tokens and has no aux layers."""

    method: str = "eagle3"
    last_state: bool = False  # EAGLE-3 over the target's last state alone
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    fc_bias: bool = True  # EAGLE-1
    window: int = 0

    @property
    def ids(self) -> Tensor | None:
        return None if self.method == "eagle" else super().ids


def tensors(plan: Plan) -> dict[str, Tensor]:
    """Make random weights under plain names: `fc.weight`, `layers.0...`, `norm.weight`, `lm_head.weight`."""
    generator = torch.Generator().manual_seed(plan.seed)
    width, states = plan.width, plan.target_width * (1 if plan.last_state else len(plan.aux_layers))
    found: dict[str, Tensor] = {}

    def matrix(name: str, rows: int, columns: int) -> None:
        found[name] = torch.randn(rows, columns, generator=generator) * columns**-0.5

    def vector(name: str, length: int, middle: float = 1.0) -> None:
        found[name] = middle + 0.2 * torch.randn(length, generator=generator)

    if plan.method == "eagle":
        matrix("fc.weight", width, 2 * width)
        if plan.fc_bias:
            vector("fc.bias", width, 0)
    else:
        if not plan.last_state:
            matrix("fc.weight", width, states)
        if plan.norm_before_fc:
            vector("input_norm.weight", states)
        for layer in range(len(plan.aux_layers) if plan.fc_norm else 0):
            vector(f"fc_norm.{layer}.weight", plan.target_width)
        vector("layers.0.hidden_norm.weight", width)
        vector("norm.weight", width)
    for layer in range(plan.layers):
        _layer(plan, layer, matrix, vector)
    if plan.own_head and plan.method != "eagle":
        matrix("lm_head.weight", plan.draft_vocabulary or tiny.VOCABULARY, width)
    if plan.own_embedding:
        matrix("embed_tokens.weight", tiny.VOCABULARY, width)
        found["embed_tokens.weight"] *= width**0.5
    return {name: tensor.to(plan.dtype) for name, tensor in found.items()}


def _layer(plan: Plan, layer: int, matrix: Callable[..., None], vector: Callable[..., None]) -> None:
    prefix, eagle = f"layers.{layer}.", plan.method == "eagle"
    inputs = plan.width if layer or eagle else 2 * plan.width
    rows = {"q": plan.heads * plan.head_dim, "k": plan.kv_heads * plan.head_dim, "v": plan.kv_heads * plan.head_dim}
    shapes = {f"self_attn.{part}_proj": (count, inputs) for part, count in rows.items()}
    shapes |= {"self_attn.o_proj": (plan.width, rows["q"]), "mlp.down_proj": (plan.width, plan.inner)}
    shapes |= {f"mlp.{part}_proj": (plan.inner, plan.width) for part in ("gate", "up")}
    for name, shape in shapes.items():
        matrix(f"{prefix}{name}.weight", *shape)
        if plan.bias:
            vector(f"{prefix}{name}.bias", shape[0], 0)
    for part in ("q_norm", "k_norm") if plan.head_norms else ():
        vector(f"{prefix}self_attn.{part}.weight", plan.head_dim)
    if layer or not eagle:
        vector(prefix + "input_layernorm.weight", plan.width)
    vector(prefix + "post_attention_layernorm.weight", plan.width)


def flat_config(plan: Plan) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": plan.width,
        "intermediate_size": plan.inner,
        "num_hidden_layers": plan.layers,
        "num_attention_heads": plan.heads,
        "num_key_value_heads": plan.kv_heads,
        "head_dim": plan.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": plan.theta,
        "max_position_embeddings": 32,  # shorter than the target's: it is to be raised
        "vocab_size": tiny.VOCABULARY,
    }
    if plan.window:
        config |= {"sliding_window": plan.window, "layer_types": ["sliding_attention"] * plan.layers}
    if plan.method == "eagle3":
        config["draft_vocab_size"] = plan.draft_vocabulary or tiny.VOCABULARY
        if plan.target_width != plan.width:
            config["target_hidden_size"] = plan.target_width
    return config


def flags(plan: Plan) -> dict[str, bool]:
    return {name: getattr(plan, name) for name in ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")}


def maps(plan: Plan, always: bool) -> dict[str, Tensor]:
    """Return d2t, the offsets, and t2d, a mask of the target's tokens that can be drafted."""
    ids = plan.ids
    if ids is None and not always:
        return {}
    ids = torch.arange(tiny.VOCABULARY) if ids is None else ids
    known = torch.zeros(tiny.VOCABULARY, dtype=torch.bool)
    known[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": known}


def embedding(plan: Plan) -> dict[str, Tensor]:
    """Return the target's embedding, which most layouts copy."""
    own = tiny.original(plan.target).get_input_embeddings().weight.detach().to(plan.dtype)
    return {} if plan.own_embedding else {"embed_tokens.weight": own}


def middle(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("layers.0.", "midlayer."): tensor for name, tensor in found.items()}


Written = tuple[dict[str, Any], dict[str, Tensor]]


def safeailab(plan: Plan, found: dict[str, Tensor]) -> Written:
    if plan.method == "eagle":
        return flat_config(plan) | {"bias": plan.fc_bias}, embedding(plan) | found
    return flat_config(plan) | flags(plan), middle(found) | maps(plan, always=True)


def specforge(plan: Plan, found: dict[str, Tensor]) -> Written:
    inner = {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in plan.aux_layers], "use_aux_hidden_state": True}
    config = flat_config(plan) | flags(plan) | {"eagle_config": inner, "architectures": ["LlamaForCausalLMEagle3"]}
    names = {"fc_norm.0.": "aux_norm_low.", "fc_norm.1.": "aux_norm_mid.", "fc_norm.2.": "aux_norm_high."}
    for ours, theirs in names.items():  # as its older versions wrote them
        found = {name.replace(ours, theirs): tensor for name, tensor in found.items()}
    return config, middle(found) | embedding(plan) | maps(plan, always=True)


def angelslim(plan: Plan, found: dict[str, Tensor]) -> Written:
    config = flat_config(plan) | flags(plan) | {"tie_word_embeddings": True, "target_model_type": "llama"}
    return config | {"architectures": ["Eagle3LlamaForCausalLM"]}, middle(found) | embedding(plan) | maps(plan, True)


def speculators(plan: Plan, found: dict[str, Tensor]) -> Written:
    layer = flat_config(plan)
    if plan.head_norms:
        layer["model_type"] = "qwen3"
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        "draft_vocab_size": layer.pop("draft_vocab_size"),
        "target_hidden_size": plan.target_width,
        "eagle_aux_hidden_state_layer_ids": list(plan.aux_layers),
        "speculators_config": {"proposal_methods": [{"speculative_tokens": 3}]},
        **flags(plan),
    }
    if plan.norm_before_residual:
        del config["norm_before_residual"]  # its default in this layout
    verifier = {"verifier_norm.weight": torch.ones(plan.target_width), "verifier_lm_head.weight": torch.ones(2, 2)}
    return config, found | embedding(plan) | maps(plan, always=False) | verifier


def nvidia(plan: Plan, found: dict[str, Tensor]) -> Written:
    inner: dict[str, Any] = {"use_aux_hidden_state": not plan.last_state, "norm_before_fc": plan.norm_before_fc}
    if not plan.last_state:
        inner["eagle_aux_hidden_state_layer_ids"] = [layer - 1 for layer in plan.aux_layers]
    others = {name: flag for name, flag in flags(plan).items() if name != "norm_before_fc"}
    fused: dict[str, Tensor] = {}
    for name, tensor in found.items():
        part = next((part for part in JOINED if f".{part}." in name), None)
        if part is not None:
            whole, parts = JOINED[part]
            fused["model." + name.replace(part, whole)] = torch.cat([found[name.replace(part, each)] for each in parts])
        elif not any(f".{each}." in name for each in ("k_proj", "v_proj", "up_proj")):
            fused[name if name.startswith("lm_head") else "model." + name] = tensor
    return flat_config(plan) | others | {"eagle_config": inner}, fused | maps(plan, always=True)


LAYOUTS = {each.__name__: each for each in (safeailab, specforge, angelslim, speculators, nvidia)}


def write(plan: Plan, folder: Path, layout: str, **more: Tensor) -> dict[str, str]:
    """Write the head as that project does, with `more` tensors; return the options of its method."""
    config, found = LAYOUTS[layout](
        plan, tensors(plan) | {name.replace("__", "."): each for name, each in more.items()}
    )
    found = {name: tensor.clone().contiguous() for name, tensor in found.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if layout == "safeailab":
        torch.save(found, folder / "pytorch_model.bin")
    else:
        save_file(found, folder / "model.safetensors")
    unsaid = plan.method == "eagle3" and not plan.last_state and layout in ("safeailab", "angelslim")
    return {"model": str(folder)} | ({"aux_layers": "/".join(map(str, plan.aux_layers))} if unsaid else {})


def make(method: str, folder: Path, target: str = "llama", layout: str | None = None, **variant: Any) -> dict[str, str]:
    """Write a drafter for `target` to `folder`; return the options of `method`, which are empty if it reads no model.

    Heads are random but for their last matrix, fitted to the target: some of their first drafted tokens are right.
    For `draft_model` the variant is `draft`, a model of tiny.CASES; the target itself if it is not given.
    """
    if not any(field.name == "model" for field in fields(find(method).Options)):
        return {}
    if method in ("peagle", "mtp"):
        return tiny_modules.make(method, folder, target, layout, **variant)
    if method == "draft_model":
        return draft_model(folder, variant.get("draft", target))
    if method in ("dflash", "dspark"):
        return tiny_blocks.make(method, folder, target, layout, **variant)
    if method == "medusa":
        return tiny_medusa.make(method, folder, target, layout, **variant)
    plan = replace(Plan(method=method, target=target), **variant)
    more = {"lm_head__weight": fitted(plan)} if plan.own_head else {}
    return write(plan, folder, layout or ("safeailab" if method == "eagle" else "speculators"), **more)


@functools.cache
def fitted(plan: Plan) -> Tensor:
    """Fit the head matrix [U, H] to the target's logits by least squares over generated texts."""
    model = build(tiny.checkpoint(plan.target), kernels.load("cpu"))
    with tempfile.TemporaryDirectory() as holder:
        layout = "safeailab" if plan.method == "eagle" else "nvidia" if plan.last_state else "speculators"
        head = open_head(write(replace(plan, own_head=False), Path(holder), layout)["model"])
        layers, rows, length = head.shape.layers, 48, 32
        pages = Pages(layers.layers, layers.kv_heads, length, layers.head_dim, "float32")
        pages.allocate(rows)
        network = EagleHead(head, model, pages, length)
        aux_layers = (model.config.layers,) if head.shape.target_norm else plan.aux_layers
    tokens = torch.tensor([tiny.prompt(8, seed=100 + row) for row in range(rows)])
    with torch.no_grad():
        while tokens.shape[1] < length:
            logits = tiny.original(plan.target)(tokens).logits
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
        logits = tiny.original(plan.target)(tokens).logits[:, 1:].flatten(0, 1)  # [entries, V]
    texts = tokens.tolist()
    _, aux_states = model.forward(
        tiny.batch([(text, 0, [row]) for row, text in enumerate(texts)], length),
        _storage(model, rows, length),
        aux_layers,
    )
    features = torch.cat(aux_states, 1).view(rows, length, -1)[:, :-1].flatten(0, 1)  # [entries, aux_layers * E]
    entries = tiny.batch([(text[1:], 1, [row]) for row, text in enumerate(texts)], length)
    states = network.run(entries, network.project_features(features))  # [entries, H]
    if network.norm is not None:
        states = network.ops.rms_norm(states, network.norm, network.eps)
    wanted = logits if plan.ids is None else logits[:, plan.ids]
    damped = states.T @ states + len(states) * 0.01 * torch.eye(plan.width)
    return torch.linalg.solve(damped, states.T @ wanted).T.contiguous().to(plan.dtype)


def _storage(model: Model, rows: int, length: int) -> list[kernels.LayerPages]:
    return tiny.pages_for(model, rows, length).layers


def draft_model(folder: Path, name: str) -> dict[str, str]:
    return {"model": str(tiny.copy(name, folder))}
