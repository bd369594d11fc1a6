"""Tiny random P-EAGLE heads and modules of multi-token prediction, in all published layouts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tiny
import tiny_heads

MASK = 5  # texts hold it too: it is a mask by its position


def make(method: str, folder: Path, target: str = "llama", layout: str | None = None, **variant: Any) -> dict[str, str]:
    """Write a drafter for `target` to `folder`, and return the options that `method` is built with."""
    if method == "mtp":
        return mtp(ModulePlan(target=target, **variant), folder, layout or "qwen")
    plan = replace(tiny_heads.Plan(target=target, layers=2), **variant)
    fitted = {"lm_head__weight": tiny_heads.fitted(plan)} if plan.own_head else {}
    return peagle(plan, folder, layout or "speculators", **fitted)


# ---- P-EAGLE: EAGLE-3 with a state beside masks, in three layouts ----

PEAGLE: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {  # the layout of EAGLE-3 below, and what it adds
    "speculators": ("speculators", lambda mask: {"speculators_model_type": "peagle", "mask_token_id": mask}),
    "pard": ("specforge", lambda mask: {"pard_token": mask}),
    "ptd": ("nvidia", lambda mask: {"ptd_token_id": mask, "mask_token_id": 1}),
}


def mask_state(plan: tiny_heads.Plan) -> Tensor:
    """[aux layers * E]."""
    generator = torch.Generator().manual_seed(plan.seed + 1)
    return torch.randn(len(plan.aux_layers) * plan.target_width, generator=generator)


def peagle(plan: tiny_heads.Plan, folder: Path, layout: str, mask: int = MASK, **more: Tensor) -> dict[str, str]:
    below, added = PEAGLE[layout]
    options = tiny_heads.write(plan, folder, below, mask_hidden=mask_state(plan)[None, None], **more)
    file = folder / "config.json"
    config = json.loads(file.read_text()) | added(mask) | {"norm_before_residual": plan.norm_before_residual}
    file.write_text(json.dumps(config))
    return options


# ---- multi-token prediction ----


@dataclass(frozen=True)
class ModulePlan:
    """The configuration of modules, which determines their tensors in every layout."""

    target: str = "llama"
    modules: int = 1
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    inner: int = 96
    head_norms: bool = False
    bias: bool = False
    theta: float = 10_000.0
    own_ends: bool = False  # embedding and head of each module: DeepSeek alone
    offset_norms: bool = False  # stored minus 1: Qwen3-Next alone
    seed: int = 0

    @property
    def width(self) -> int:
        return int(tiny.original(self.target).config.hidden_size)


def module_tensors(plan: ModulePlan, module: int) -> dict[str, Tensor]:
    """Make the tensors of one module: `fc.weight` over [token, state], the three norms, and `block...`.

    The token counts most in it: as in the target itself, it says much of what comes next.
    """
    block = tiny_heads.Plan(
        method="eagle3",
        target=plan.target,
        width=plan.width,
        heads=plan.heads,
        kv_heads=plan.kv_heads,
        head_dim=plan.head_dim,
        inner=plan.inner,
        layers=2,
        head_norms=plan.head_norms,
        bias=plan.bias,
        own_embedding=True,
        draft_vocabulary=None,
        seed=plan.seed + 10 * module,
    )
    found = tiny_heads.tensors(block)
    generator, width = torch.Generator().manual_seed(plan.seed + 10 * module + 1), plan.width
    layer = {name: each for name, each in found.items() if name.startswith("layers.1.")}  # an ordinary one
    own = {name.replace("layers.1.", "block."): each for name, each in layer.items()}
    for name in ("block.self_attn.o_proj.weight", "block.mlp.down_proj.weight"):
        own[name] = own[name] * 0.5
    state = torch.randn(width, width, generator=generator) * 0.5 * width**-0.5
    own["fc.weight"] = torch.cat([torch.eye(width), state], 1)
    for name in ("token_norm", "state_norm", "norm"):
        own[f"{name}.weight"] = 1 + 0.2 * torch.randn(width, generator=generator)
    if plan.own_ends:
        own |= {"embed_tokens.weight": found["embed_tokens.weight"], "lm_head.weight": found["lm_head.weight"]}
    return own


def swapped(fc: Tensor) -> Tensor:
    """Swap the halves of `fc`: [state, token] for [token, state], or the reverse."""
    return torch.cat(fc.chunk(2, 1)[::-1], 1)


def named(parts: dict[str, Tensor], block: str, own: str, names: dict[str, str]) -> dict[str, Tensor]:
    """Rename tensors to a layout: prefix of the block, prefix of the other parts, names of those parts."""
    found = {}
    for name, tensor in parts.items():
        part, _, kind = name.rpartition(".")
        ours = name.startswith("block.")
        found[block + name.removeprefix("block.") if ours else f"{own}{names[part]}.{kind}"] = tensor
    return found


DEEPSEEK = {
    "fc": "eh_proj",
    "token_norm": "enorm",
    "state_norm": "hnorm",
    "norm": "shared_head.norm",
    "lm_head": "shared_head.head",
    "embed_tokens": "embed_tokens",
}
QWEN = {"fc": "fc", "token_norm": "pre_fc_norm_embedding", "state_norm": "pre_fc_norm_hidden", "norm": "norm"}
MIMO = {
    "fc": "input_proj",
    "token_norm": "token_layernorm",
    "state_norm": "hidden_layernorm",
    "norm": "final_layernorm",
}


def deepseek(plan: ModulePlan, module: int) -> dict[str, Tensor]:
    prefix = f"model.layers.{tiny.original(plan.target).config.num_hidden_layers + module}."
    return named(module_tensors(plan, module), prefix, prefix, DEEPSEEK)


def qwen(plan: ModulePlan, module: int) -> dict[str, Tensor]:
    """Write modules that share every part except the block."""
    parts = module_tensors(plan, module)
    if module:
        parts = {name: each for name, each in parts.items() if name.startswith("block.")}
    found = named(parts, f"mtp.layers.{module}.", "mtp.", QWEN)
    return {name: each - 1 if plan.offset_norms and "norm" in name else each for name, each in found.items()}


def mimo(plan: ModulePlan, module: int) -> dict[str, Tensor]:
    parts = module_tensors(plan, module)
    parts["fc.weight"] = swapped(parts["fc.weight"])
    prefix = f"model.mtp_layers.{module}."
    return named(parts, prefix, prefix, MIMO)


def speculators(plan: ModulePlan, module: int) -> dict[str, Tensor]:
    prefix = f"mtp_layers.{module}."
    return named(module_tensors(plan, module), prefix, prefix, MIMO)


MTP = {each.__name__: each for each in (deepseek, qwen, mimo, speculators)}


def config_of(plan: ModulePlan, layout: str) -> dict[str, Any]:
    shape = tiny_heads.Plan(
        target=plan.target,
        width=plan.width,
        heads=plan.heads,
        kv_heads=plan.kv_heads,
        head_dim=plan.head_dim,
        inner=plan.inner,
        theta=plan.theta,
        layers=tiny.original(plan.target).config.num_hidden_layers,
    )
    config = {key: value for key, value in tiny_heads.flat_config(shape).items() if key != "draft_vocab_size"}
    config |= {"num_nextn_predict_layers": plan.modules}
    if layout == "speculators":
        return {"speculators_model_type": "mtp", "transformer_layer_config": config, "num_nextn_predict_layers": 1}
    return config | ({"model_type": "qwen3_next", "partial_rotary_factor": 1.0} if plan.offset_norms else {})


def mtp(plan: ModulePlan, folder: Path, layout: str) -> dict[str, str]:
    """Write modules alone, in a separate folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(plan, layout)))
    save_file(written(plan, layout), folder / "model.safetensors")
    return {"model": str(folder)}


def written(plan: ModulePlan, layout: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for module in range(plan.modules):
        found |= MTP[layout](plan, module)
    return {name: tensor.contiguous().clone() for name, tensor in found.items()}


def inside(plan: ModulePlan, folder: Path, layout: str) -> Path:
    """Write the target's checkpoint with the modules in it."""
    tiny.copy(plan.target, folder)
    file = folder / "model.safetensors"
    save_file(load_file(file) | written(plan, layout), file, metadata={"format": "pt"})
    return folder
