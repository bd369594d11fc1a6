"""Record what the package `speculators` 0.9.0 makes of tiny random heads, for tests/unit/test_recorded_heads.py.

Run it where that package is installed: `python tools/record_heads.py [NAME...]`. Each head is saved as the package
saves it; `vectors.safetensors` beside it holds what went in and what its own loss was handed. Letters: T tokens,
V the target's vocabulary, U the draft vocabulary, H width, A anchors, B block, N entries.
"""

from __future__ import annotations

import json
import sys
import zlib
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import Tensor

FOLDER = Path(__file__).parents[1] / "tests" / "vectors" / "heads"
VERSION = "0.9.0"
LENGTH, VOCABULARY, DRAFTED, WIDTH, MASK = 14, 96, 56, 32, 93
STEPS = 3  # of a draft: the text itself, then tokens one after the other
ANCHORS = (3, 6, 8)  # where blocks begin; they end within the text
CLASSES = {"eagle3": "Eagle3", "peagle": "PEagle", "dflash": "DFlash", "dspark": "DSpark"}
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
SLIDING = {"sliding_window": 5, "use_sliding_window": True}
# name -> (kind, family of the layers, what differs in the layers, what differs in the head)
HEADS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "eagle3-plain": ("eagle3", "Llama", {}, {}),
    "eagle3-3.1": (
        "eagle3",
        "Llama",
        {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
        {
            "fc_norm": True,
            "norm_output": True,
            "norm_before_residual": True,
            "draft_vocab_size": VOCABULARY,
            "eagle_aux_hidden_state_layer_ids": [0, 4, 2, 3],
        },
    ),
    "eagle3-qwen3": (
        "eagle3",
        "Qwen3",
        {"num_hidden_layers": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"norm_before_fc": True, "norm_output": True, "norm_before_residual": True},
    ),
    "eagle3-window": ("eagle3", "Qwen3", SLIDING | {"layer_types": ["sliding_attention"]}, {}),
    "peagle-plain": ("peagle", "Llama", {"num_hidden_layers": 2}, {}),
    "peagle-norm": ("peagle", "Qwen3", {}, {"norm_before_fc": True, "norm_before_residual": True}),
    "peagle-norms": ("peagle", "Qwen3", {}, {"fc_norm": True, "draft_vocab_size": VOCABULARY}),
    "dflash-plain": ("dflash", "Qwen3", {"num_hidden_layers": 2}, {"block_size": 4, "draft_vocab_size": VOCABULARY}),
    "dflash-some-tokens": (
        "dflash",
        "Qwen3",
        {"attention_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"block_size": 5, "aux_hidden_state_layer_ids": [4, 1]},
    ),
    "dflash-from-anchor": ("dflash", "Qwen3", {}, {"block_size": 3, "sample_from_anchor": True}),
    "dflash-window": (
        "dflash",
        "Qwen3",
        SLIDING | {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
        {"block_size": 4},
    ),
    "dflash-window-both-ways": (
        "dflash",
        "Qwen3",
        SLIDING | {"layer_types": ["sliding_attention"]},
        {"block_size": 4, "sliding_window_non_causal": True},
    ),
    "dspark-vanilla": ("dspark", "Qwen3", {"num_hidden_layers": 2}, {"block_size": 4, "markov_rank": 8}),
    "dspark-gated": (
        "dspark",
        "Qwen3",
        {},
        {
            "block_size": 4,
            "markov_rank": 6,
            "markov_head_type": "gated",
            "confidence_head_with_markov": False,
            "draft_vocab_size": VOCABULARY,
        },
    ),
    "dspark-rnn": ("dspark", "Qwen3", {}, {"block_size": 4, "markov_rank": 8, "markov_head_type": "rnn"}),
    "dspark-at-the-slot": (
        "dspark",
        "Qwen3",
        {},
        {
            "block_size": 4,
            "markov_rank": 8,
            "markov_head_type": "rnn",
            "sample_from_anchor": False,
            "enable_confidence_head": False,
        },
    ),
    "dspark-bare": (
        "dspark",
        "Qwen3",
        {},
        {"block_size": 3, "markov_rank": 0, "confidence_head_with_markov": False},
    ),
}


def build(name: str) -> Any:
    kind, architecture, layers, flags = HEADS[name]
    module, called = import_module(f"speculators.models.{kind}"), CLASSES[kind]
    inner = getattr(import_module("transformers"), architecture + "Config")(**COMMON | layers)
    inner._attn_implementation = "eager"
    ids = "aux_hidden_state_layer_ids" if kind in ("dflash", "dspark") else "eagle_aux_hidden_state_layer_ids"
    settings: dict[str, Any] = {"draft_vocab_size": DRAFTED, ids: [1, 2, 3]}
    settings |= {} if kind == "eagle3" else {"mask_token_id": MASK}
    config = getattr(module, called + "SpeculatorConfig")(
        transformer_layer_config=inner, speculators_config=intentions(kind), **settings | flags
    )
    model = getattr(module, called + "DraftModel")(config).eval()
    fill(model)
    return model


def intentions(kind: str) -> Any:
    config, greedy = import_module("speculators.config"), import_module("speculators.proposals.greedy")
    return config.SpeculatorsConfig(
        algorithm=kind,
        proposal_methods=[greedy.GreedyTokenProposalConfig(speculative_tokens=STEPS)],
        default_proposal_method="greedy",
        verifier=config.VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )


def fill(model: Any) -> None:
    """Weights large enough for the logits to tell tokens apart; norms around one."""
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            if "norm" in name:
                parameter.copy_(1 + 0.2 * torch.randn(parameter.shape))
            elif name in ("embed_tokens.weight", "mask_hidden"):
                parameter.normal_(0, 1)
            else:
                parameter.normal_(0, 0.3 if parameter.dim() == 1 else parameter.shape[1] ** -0.5)
    if model.d2t is not None:
        ids = torch.randperm(VOCABULARY)[: model.draft_vocab_size].sort().values
        known = torch.zeros(VOCABULARY, dtype=torch.bool)
        known[ids] = True
        model.load_vocab_mappings(known, ids - torch.arange(len(ids)))


def run(kind: str, model: Any, inputs: dict[str, Tensor], **more: Any) -> list[dict[str, Any]]:
    """A forward pass; what each call of its own loss was handed."""
    calls: list[dict[str, Any]] = []
    core = import_module(f"speculators.models.{kind}.core")
    arguments = {
        "eagle3": ["logits"],
        "peagle": [],
        "dflash": ["logits"],
        "dspark": ["logits", "targets", "confidence"],
    }

    def keep(*values: Any, **named: Any) -> tuple[Tensor, dict[str, Any]]:
        calls.append(dict(zip(arguments[kind], values, strict=False)) | named)
        return torch.zeros(()), {}

    batch = {name: tensor[None] for name, tensor in inputs.items()}
    with mock.patch.object(core, "compute_metrics", keep), torch.no_grad():
        model(
            hidden_states=batch["states"],
            input_ids=batch["tokens"],
            document_ids=torch.zeros(1, LENGTH, dtype=torch.long),
            verifier_last_hidden_states=torch.zeros(1, LENGTH, WIDTH),
            **more,
        )
    return calls


def record(kind: str, model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    if kind == "eagle3":
        windowed = model.uses_sliding_window_attn  # its training moves the window with the text alone, not the draft
        calls = run(kind, model, inputs, ttt_steps=1 if windowed else STEPS)
        return {"logits": torch.cat([call["logits"] for call in calls])}  # [steps, T, U]
    if kind == "peagle":
        loss_mask = torch.ones(1, LENGTH)
        loss_mask[:, :2] = 0
        (call,) = run(kind, model, inputs, loss_mask=loss_mask, num_depths=STEPS + 1, down_sample_ratio=1.0)
        return {"anchors": call["anchor_pos"], "depths": call["depth"], "logits": call["logits"][0]}  # [N, U]
    loss_mask = torch.zeros(1, LENGTH)
    loss_mask[:, list(ANCHORS)] = 1
    base: list[Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _, __, out: base.append(out))
    (call,) = run(kind, model, inputs, loss_mask=loss_mask, max_anchors=len(ANCHORS))
    hook.remove()
    blocks = (len(ANCHORS), model.block_size)
    found = {"anchors": torch.tensor(ANCHORS), "logits": call["logits"].view(*blocks, -1)}  # [A, B, U]
    found["embedding"] = model.embed_tokens.weight  # [V, H]
    if model.d2t is None:
        found["head"] = model.lm_head.weight  # [V, H]
    if kind == "dspark":
        found["logits_before"] = base[0].view(*blocks, -1)  # [A, B, U]
        if call["confidence"] is not None:
            found["confidence"] = call["confidence"].view(blocks)  # [A, B], before the sigmoid
    return found


def write(name: str) -> None:
    kind = HEADS[name][0]
    torch.manual_seed(zlib.crc32(name.encode()))
    model = build(name)
    inputs = {
        "tokens": torch.randint(3, VOCABULARY - 5, (LENGTH,)),
        "states": torch.randn(LENGTH, model.fc.in_features),  # [T, aux_layers * H]
    }
    found = inputs | record(kind, model, inputs)
    folder = FOLDER / name
    model.save_pretrained(folder)
    (folder / "config.py").unlink(missing_ok=True)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()), indent=1) + "\n")
    save_file({key: each.detach().contiguous().clone() for key, each in found.items()}, folder / "vectors.safetensors")


def main(names: list[str]) -> int:
    if import_module("importlib.metadata").version("speculators") != VERSION:
        sys.stderr.write(f"expected speculators {VERSION}\n")
        return 1
    for name in names or HEADS:
        write(name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
