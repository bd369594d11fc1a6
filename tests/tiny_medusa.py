"""Tiny Medusa heads for the models of `tiny`, in all published layouts."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import silu

import tiny


@dataclass(frozen=True)
class Plan:
    target: str = "llama"
    heads: int = 7
    blocks: int = 1
    bias: bool = True
    ends: Literal["each", "one", "target"] = "each"  # whose matrices to the vocabulary
    vocabulary: int | None = None  # tokens that can be drafted
    width: int | None = None  # another than the target's: it fits nothing
    dtype: torch.dtype = torch.float32
    seed: int = 0

    @property
    def states(self) -> int:
        return self.width or int(tiny.original(self.target).config.hidden_size)

    @property
    def ids(self) -> Tensor | None:
        """Return the tokens that can be drafted [vocabulary], unordered; None: all tokens."""
        if self.vocabulary is None:
            return None
        order = torch.randperm(tiny.VOCABULARY, generator=torch.Generator().manual_seed(self.seed))
        return order[: self.vocabulary]


def blocks(plan: Plan) -> dict[str, Tensor]:
    """Make random blocks under vLLM's names."""
    generator = torch.Generator().manual_seed(plan.seed)
    width = plan.states
    found: dict[str, Tensor] = {}
    for head in range(plan.heads):
        for layer in range(plan.blocks):
            prefix = f"blocks.{head}.layers.{layer}."
            found[prefix + "weight"] = torch.randn(width, width, generator=generator) * width**-0.5
            if plan.bias:
                found[prefix + "bias"] = 0.2 * torch.randn(width, generator=generator)
    return found


def through(plan: Plan, found: dict[str, Tensor], head: int, states: Tensor) -> Tensor:
    """Run the blocks of a head on states [T, E]."""
    for layer in range(plan.blocks):
        prefix = f"blocks.{head}.layers.{layer}."
        states = states + silu(states @ found[prefix + "weight"].T + found.get(prefix + "bias", torch.zeros(1)))
    return states


@functools.cache
def texts(target: str) -> tuple[Tensor, Tensor]:
    """Run the target on its own texts: last states after the norm [texts, T, E], and logits [texts, T, V]."""
    tokens = torch.tensor([tiny.prompt(8, seed=100 + row) for row in range(96)])
    model = tiny.original(target)
    with torch.no_grad():
        while tokens.shape[1] < 40:
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
        found = model(tokens, output_hidden_states=True)
    return found.hidden_states[-1], found.logits


@functools.cache
def tensors(plan: Plan) -> dict[str, Tensor]:
    """Make blocks, and matrices fitted by least squares to the target's logits at each head's distance."""
    found = blocks(plan)
    if plan.ends != "target":
        rows = torch.arange(tiny.VOCABULARY) if plan.ids is None else plan.ids
        for head in range(plan.heads if plan.ends == "each" else 1):
            random = torch.Generator().manual_seed(plan.seed + head)
            shape = (tiny.VOCABULARY, plan.width)  # [V, E]
            matrix = torch.randn(shape, generator=random) if plan.width else fitted(plan, found, head)
            found["lm_head.weight" if plan.ends == "one" else f"lm_heads.{head}.weight"] = matrix[rows]
    return {name: tensor.to(plan.dtype) for name, tensor in found.items()}


def fitted(plan: Plan, found: dict[str, Tensor], head: int) -> Tensor:
    states, logits = texts(plan.target)
    inputs = through(plan, found, head, states[:, : -head - 1].flatten(0, 1))  # [T, E]
    wanted = logits[:, head + 1 :].flatten(0, 1)  # [T, V]
    damped = inputs.T @ inputs + len(inputs) * 0.01 * torch.eye(inputs.shape[1])
    return torch.linalg.solve(damped, inputs.T @ wanted).T.contiguous()


def vllm(plan: Plan, found: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = {"model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": 64, "num_heads": plan.heads}
    config |= {"num_hidden_layers": plan.blocks, "vocab_size": tiny.VOCABULARY, "medusa_fc_bias": plan.bias}
    config |= {"original_lm_head": plan.ends == "one", "truncated_vocab_size": plan.vocabulary or tiny.VOCABULARY}
    ids = plan.ids
    return config, found if ids is None else found | {"token_map": ids}


def fasterdecoding(plan: Plan, found: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """State fewer heads in the configuration than there are, as this project does."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in found.items():
        parts = name.split(".")
        if parts[0] == "blocks":
            renamed[f"{parts[1]}.{parts[3]}.linear.{parts[4]}"] = tensor
        elif parts[0] == "lm_heads":
            renamed[f"{parts[1]}.{plan.blocks}.weight"] = tensor
    return {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "someone/model"}, renamed


def prefixed(plan: Plan, found: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config, renamed = fasterdecoding(plan, found)
    return config, {f"medusa_heads.{name}": tensor for name, tensor in renamed.items()}


# layout -> (what it writes, the file)
LAYOUTS = {
    "vllm": (vllm, "model.safetensors"),
    "fasterdecoding": (fasterdecoding, "medusa_lm_head.pt"),
    "prefixed": (prefixed, "medusa_lm_head.safetensors"),
}


def write(plan: Plan, folder: Path, layout: str, found: dict[str, Tensor] | None = None) -> dict[str, str]:
    """Write the heads as that project does; return the options of the method."""
    form, file = LAYOUTS[layout]
    config, named = form(plan, tensors(plan) if found is None else found)
    named = {name: tensor.clone().contiguous() for name, tensor in named.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".pt"):
        torch.save(named, folder / file)
    else:
        save_file(named, folder / file)
    return {"model": str(folder)}


def make(method: str, folder: Path, target: str = "llama", layout: str | None = None, **variant: Any) -> dict[str, str]:
    assert method == "medusa"
    return write(replace(Plan(target=target, heads=8), **variant), folder, layout or "vllm")
