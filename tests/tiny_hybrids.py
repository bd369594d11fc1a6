"""Tiny hybrid models with their own MTP module, whose parts are those of transformers.

transformers has no MTP modules of Qwen, but the layer in one is a decoder layer with full attention.
"""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import tiny

TARGETS = ("qwen3-next", "qwen3-next-moe", "qwen3.5", "qwen3.5-moe")


class Module(nn.Module):
    """An MTP module; the names of its parameters are those of published checkpoints, after `mtp.`."""

    def __init__(self, target: str) -> None:
        super().__init__()
        self.target = tiny.original(target).model
        config = copy.deepcopy(tiny.original(target).config)
        config.layer_types, config.mlp_only_layers = ["full_attention"], []
        width, norm = config.hidden_size, type(self.target.norm)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (
            norm(width, config.rms_norm_eps) for _ in "123"
        )
        self.layers = nn.ModuleList([type(self.target.layers[0])(config, 0)])
        self.head = tiny.original(target).lm_head

    def forward(self, tokens: Tensor, states: Tensor) -> Tensor:
        """Return states [T, E] of tokens [T] and the states [T, E] of the positions before them."""
        embedded = self.target.embed_tokens(tokens[None])  # [1, T, E]
        joined = torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(states[None])], -1)
        positions = torch.arange(1, 1 + len(tokens))[None]
        found = self.layers[0](
            self.fc(joined),
            position_embeddings=self.target.rotary_emb(embedded, positions),
            position_ids=positions,
            attention_mask=torch.full((len(tokens),) * 2, -torch.inf).triu(1)[None, None],
        )
        return self.norm(found)[0]

    @torch.no_grad()
    def draft(self, text: list[int], width: int) -> tuple[list[int], Tensor]:
        """Return tokens and logits [width, V] after a text whose last token has not run."""
        states, text, rows = self.target(torch.tensor([text])).last_hidden_state[0, :-1], list(text), []
        for _ in range(width):
            last = self(torch.tensor(text[1:]), states)[-1:]
            rows.append(self.head(last)[0])
            text.append(int(rows[-1].argmax()))
            states = torch.cat([states, last])
        return text[-width:], torch.stack(rows)


@functools.cache
def module(target: str) -> Module:
    """Return a random module in which the token counts most, as in the target itself."""
    torch.manual_seed(sum(map(ord, target)) + 1)
    found = Module(target).eval()
    own = {name: each for name, each in found.named_parameters() if not name.startswith(("target.", "head."))}
    with torch.no_grad():
        for name, parameter in own.items():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
            if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
                parameter.mul_(0.5)
        found.fc.weight.copy_(torch.cat([torch.eye(len(found.fc.weight)), found.fc.weight.chunk(2, 1)[1] * 0.5], 1))
    return found


def tensors(target: str, merged: bool = False) -> dict[str, Tensor]:
    """Return the tensors of the module by published names. merged: all experts in one tensor, as transformers saves."""
    found: dict[str, Tensor] = {}
    for name, tensor in module(target).state_dict().items():
        if name.startswith(("target.", "head.")):
            continue
        parts = {f"mtp.{name}": tensor}
        stem = f"mtp.{name.rpartition('.')[0]}"
        if name.endswith("experts.gate_up_proj") and not merged:
            gates = [each.chunk(2) for each in tensor]
            parts = {f"{stem}.{index}.gate_proj.weight": gate for index, (gate, _) in enumerate(gates)}
            parts |= {f"{stem}.{index}.up_proj.weight": up for index, (_, up) in enumerate(gates)}
        elif name.endswith("experts.down_proj") and not merged:
            parts = {f"{stem}.{index}.down_proj.weight": each for index, each in enumerate(tensor)}
        found |= parts
    return {name: tensor.contiguous().clone() for name, tensor in found.items()}


def inside(target: str, folder: Path, merged: bool = False) -> Path:
    """Write the checkpoint of a target with its module in it."""
    tiny.copy(target, folder)
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors(target, merged), file, metadata={"format": "pt"})
    return folder


def multimodal(target: str, folder: Path) -> Path:
    """Write the same as Qwen3.5 is published: the text model is a part of one that also reads images."""
    inside(target, folder)
    file, path = folder / "model.safetensors", folder / "config.json"
    text: dict[str, Any] = json.loads(path.read_text())
    text["rope_parameters"] |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    whole = {"model_type": text["model_type"].removesuffix("_text"), "image_token_id": 7, "vision_config": {"depth": 1}}
    path.write_text(json.dumps(whole | {"text_config": text, "tie_word_embeddings": text["tie_word_embeddings"]}))
    renamed = {name.replace("model.", "model.language_model.", 1): each for name, each in load_file(file).items()}
    save_file(renamed | {"model.visual.blocks.0.weight": torch.ones(2, 2)}, file, metadata={"format": "pt"})
    return folder
