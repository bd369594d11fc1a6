"""Tiny random DFlash and DSpark heads in all published layouts."""

from __future__ import annotations

import functools
import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import tiny
from outrider import kernels
from outrider.cache.pages import Pages
from outrider.kernels import Batch
from outrider.models import build
from outrider.models.block_head import BlockHead
from outrider.speculation.checkpoints import open_head
from tiny_plan import HeadPlan


@dataclass(frozen=True)
class Plan(HeadPlan):
    method: str = "dflash"
    layers: int = 2
    head_norms: bool = True
    block: int = 8
    mask: int = 100
    from_anchor: bool | None = None  # None: as is usual for the method
    windows: tuple[int, ...] | None = None  # by layer; 0: it sees all
    both_ways: bool = False  # layers with a window see what comes after them in the block
    mask_embedding: bool = False
    rank: int = 8  # of DSpark
    markov: str = "vanilla"
    confidence: bool = True
    confidence_markov: bool = True

    @property
    def anchored(self) -> bool:
        return self.method == "dspark" if self.from_anchor is None else self.from_anchor

    @property
    def sliding(self) -> tuple[int, ...]:
        return self.windows or (0,) * self.layers


def tensors(plan: Plan) -> dict[str, Tensor]:
    """Make random weights under plain names: `fc.weight`, `layers.0...`, `norm.weight`, `markov_head...`."""
    generator = torch.Generator().manual_seed(plan.seed)
    width, drafted = plan.width, plan.draft_vocabulary or tiny.VOCABULARY
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (width, len(plan.aux_layers) * plan.target_width)}
    shapes |= {"hidden_norm.weight": (width,), "norm.weight": (width,)}
    for layer in range(plan.layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in _layer(plan).items()}
    if plan.own_head:
        shapes["lm_head.weight"] = (drafted, width)
    if plan.own_embedding:
        shapes["embed_tokens.weight"] = (tiny.VOCABULARY, width)
    if plan.mask_embedding:
        shapes["mask_embedding"] = (width,)
    if plan.method == "dspark":
        shapes |= _sequential(plan, drafted)
    found: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        values = torch.randn(*shape, generator=generator)
        if len(shape) == 2:
            size = {"embed_tokens.weight": 1.0, "markov_head.markov_w1.weight": 0.3}.get(name, shape[1] ** -0.5)
            found[name] = values * size
        else:
            found[name] = values if name == "mask_embedding" else 0.2 * values + ("norm" in name)
    return {name: tensor.to(plan.dtype) for name, tensor in found.items()}


def _layer(plan: Plan) -> dict[str, tuple[int, ...]]:
    queries, keys, width = plan.heads * plan.head_dim, plan.kv_heads * plan.head_dim, plan.width
    matrices = {"self_attn.q_proj": (queries, width), "self_attn.k_proj": (keys, width)}
    matrices |= {"self_attn.v_proj": (keys, width), "self_attn.o_proj": (width, queries)}
    matrices |= {"mlp.gate_proj": (plan.inner, width), "mlp.up_proj": (plan.inner, width)}
    matrices["mlp.down_proj"] = (width, plan.inner)
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in matrices.items()}
    if plan.bias:
        shapes |= {f"{name}.bias": shape[:1] for name, shape in matrices.items()}
    norms = ("input_layernorm", "post_attention_layernorm")
    shapes |= {f"{name}.weight": (width,) for name in norms}
    own = ("q_norm", "k_norm") if plan.head_norms else ()
    return shapes | {f"self_attn.{name}.weight": (plan.head_dim,) for name in own}


def _sequential(plan: Plan, drafted: int) -> dict[str, tuple[int, ...]]:
    rank, width = plan.rank, plan.width
    shapes: dict[str, tuple[int, ...]] = {}
    if rank:
        shapes |= {"markov_head.markov_w1.weight": (tiny.VOCABULARY, rank)}
        shapes |= {"markov_head.markov_w2.weight": (drafted, rank)}
    if rank and plan.markov == "gated":
        shapes |= {"markov_head.gate_proj.weight": (rank, width + rank), "markov_head.gate_proj.bias": (rank,)}
    if rank and plan.markov == "rnn":
        shapes |= {"markov_head.joint_proj.weight": (3 * rank, 2 * rank + width)}
        shapes |= {"markov_head.joint_proj.bias": (3 * rank,)}
    if plan.confidence:
        columns = width + (rank if plan.confidence_markov else 0)
        shapes |= {"confidence_head.proj.weight": (1, columns), "confidence_head.proj.bias": (1,)}
    return shapes


def flat_config(plan: Plan) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": plan.width,
        "intermediate_size": plan.inner,
        "num_hidden_layers": plan.layers,
        "num_attention_heads": plan.heads,
        "num_key_value_heads": plan.kv_heads,
        "head_dim": plan.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": plan.theta, "rope_type": "default"},
        "max_position_embeddings": 32,  # shorter than the target's: it is to be raised
        "vocab_size": tiny.VOCABULARY,
        "layer_types": ["sliding_attention" if window else "full_attention" for window in plan.sliding],
        "sliding_window": max(plan.sliding) or None,
    }
    if plan.target_width != plan.width:
        config["target_hidden_size"] = plan.target_width
    return config


def flags(plan: Plan) -> dict[str, Any]:
    if plan.method == "dflash":
        return {}
    found = {"markov_rank": plan.rank, "markov_head_type": plan.markov, "enable_confidence_head": plan.confidence}
    return found | {"confidence_head_with_markov": plan.confidence_markov}


def maps(plan: Plan) -> dict[str, Tensor]:
    if plan.ids is None:
        return {}
    known = torch.zeros(tiny.VOCABULARY, dtype=torch.bool)
    known[plan.ids] = True
    return {"d2t": plan.ids - torch.arange(len(plan.ids)), "t2d": known}


Written = tuple[dict[str, Any], dict[str, Tensor]]


def speculators(plan: Plan, found: dict[str, Tensor]) -> Written:
    config = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": plan.method,
        "transformer_layer_config": flat_config(plan),
        "draft_vocab_size": plan.draft_vocabulary or tiny.VOCABULARY,
        "target_hidden_size": None if plan.target_width == plan.width else plan.target_width,
        "aux_hidden_state_layer_ids": list(plan.aux_layers),
        "block_size": plan.block,
        "mask_token_id": plan.mask,
        "sample_from_anchor": plan.anchored,
        "sliding_window_non_causal": plan.both_ways,
        "speculators_config": {"proposal_methods": [{"speculative_tokens": 3}]},
        **flags(plan),
    }
    return config, found | maps(plan)


def zlab(plan: Plan, found: dict[str, Tensor]) -> Written:
    inner: dict[str, Any] = {"mask_token_id": plan.mask, "target_layer_ids": [layer - 1 for layer in plan.aux_layers]}
    if plan.from_anchor is not None:
        inner["sample_from_anchor"] = plan.from_anchor
    if plan.both_ways:
        inner["causal"] = False
    return flat_config(plan) | {"block_size": plan.block, "dflash_config": inner}, found | maps(plan)


def newer_zlab(plan: Plan, found: dict[str, Tensor]) -> Written:
    config, found = zlab(plan, found)
    inner = config["dflash_config"] | {"block_size": config.pop("block_size")}
    return config | {"dflash_config": inner}, found


def specforge(plan: Plan, found: dict[str, Tensor]) -> Written:
    """Nest the Markov and confidence heads under `logit_head`, as older versions do."""
    config, found = zlab(plan, found)
    config["dflash_config"] |= flags(plan) | ({"projector_type": "dspark"} if plan.method == "dspark" else {})
    nested = ("markov_head.", "confidence_head.")
    return config, {f"logit_head.{name}" if name.startswith(nested) else name: each for name, each in found.items()}


def assistant(plan: Plan, found: dict[str, Tensor]) -> Written:
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    config = flat_config(plan) | {"architectures": ["AssistantModel"], "block_size": plan.block}
    config |= {"mask_token_id": plan.mask, "target_layer_ids": [layer - 1 for layer in plan.aux_layers]}
    return config, {names.get(name, name): tensor for name, tensor in found.items()} | maps(plan)


def deepspec(plan: Plan, found: dict[str, Tensor]) -> Written:
    config = flat_config(plan) | flags(plan) | {"block_size": plan.block, "mask_token_id": plan.mask}
    config |= {"target_layer_ids": [layer - 1 for layer in plan.aux_layers], "num_anchors": 4}
    own = tiny.original(plan.target).get_input_embeddings().weight.detach().to(plan.dtype)
    return config, {"embed_tokens.weight": own} | found | maps(plan)


def deepseek(plan: Plan, found: dict[str, Tensor]) -> Written:
    config = flat_config(plan) | {"dspark_block_size": plan.block, "dspark_noise_token_id": plan.mask}
    config |= {"dspark_target_layer_ids": [layer - 1 for layer in plan.aux_layers], "dspark_markov_rank": plan.rank}
    return config, {f"model.{name}": tensor for name, tensor in found.items()} | maps(plan)


DFLASH = {each.__name__: each for each in (speculators, zlab, newer_zlab, specforge, assistant)}
DSPARK = {each.__name__: each for each in (speculators, specforge, deepspec, deepseek)}
LAYOUTS = DFLASH | DSPARK


def write(plan: Plan, folder: Path, layout: str = "speculators", **more: Tensor) -> dict[str, str]:
    """Write the head as that project does, with `more` tensors; return the options of its method."""
    found = tensors(plan) | {name.replace("__", "."): each for name, each in more.items()}
    mask = found.pop("mask_embedding", None)
    config, found = LAYOUTS[layout](plan, found)
    folder.mkdir(parents=True, exist_ok=True)
    if mask is not None:
        torch.save({"embedding": mask, "mask_token_id": plan.mask}, folder / "mask_embedding.pt")
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.clone().contiguous() for name, tensor in found.items()}, folder / "model.safetensors")
    return {"model": str(folder)}


def make(method: str, folder: Path, target: str = "llama", layout: str | None = None, **variant: Any) -> dict[str, str]:
    """Write a head for `target` to `folder`, its last matrix fitted so that some drafts are accepted."""
    plan = replace(Plan(method=method, target=target), **variant)
    more = {"lm_head__weight": fitted(plan)} if plan.own_head else {}
    return write(plan, folder, layout or "speculators", **more)


@functools.cache
def fitted(plan: Plan) -> Tensor:
    """Fit the head matrix [U, H] to the target's logits by least squares over generated texts."""
    model = build(tiny.checkpoint(plan.target), kernels.load("cpu"))
    rows, length = 48, 32
    size = length + plan.block
    with tempfile.TemporaryDirectory() as holder:
        head = open_head(write(replace(plan, own_head=False), Path(holder))["model"])
        pages = Pages(plan.layers, plan.kv_heads, size, plan.head_dim, "float32")
        pages.allocate(rows)
        network = BlockHead(head, model, pages, size)
    tokens = torch.tensor([tiny.prompt(8, seed=100 + row) for row in range(rows)])
    with torch.no_grad():
        while tokens.shape[1] < length + 1:
            logits = tiny.original(plan.target)(tokens).logits
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
    storage = tiny.pages_for(model, rows, size).layers
    texts: list[list[int]] = tokens.tolist()
    batch = tiny.batch([(text[:length], 0, [row]) for row, text in enumerate(texts)], size)
    _, aux_states = model.forward(batch, storage, plan.aux_layers)
    context = network.project_features(torch.cat(aux_states, 1))
    states, wanted = [], []
    kept = slice(None, 2) if plan.anchored else slice(1, 3)  # the first tokens matter most
    for anchor in range(8, length - plan.block):
        network.store(context, batch)  # blocks overwrite it
        begun = network.run(blocks_at(plan, texts, anchor, size)).view(rows, plan.block, -1)
        states.append(begun[:, kept])
        wanted.append(logits[:, anchor : anchor + 2])
    found, goal = torch.cat(states, 1).flatten(0, 1), torch.cat(wanted, 1).flatten(0, 1)  # [tokens, H], [tokens, V]
    damped = found.T @ found + len(found) * 0.01 * torch.eye(plan.width)
    goal = goal if plan.ids is None else goal[:, plan.ids]
    return torch.linalg.solve(damped, found.T @ goal).T.contiguous().to(plan.dtype)


def blocks_at(plan: Plan, texts: list[list[int]], anchor: int, size: int) -> Batch:
    """Make a block after the first `anchor` tokens of each text, with one page of `size` for each."""
    masks = [plan.mask] * (plan.block - 1)
    return tiny.batch([([text[anchor], *masks], anchor, [row]) for row, text in enumerate(texts)], size)
