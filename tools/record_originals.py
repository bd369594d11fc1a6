"""Record what the authors' own code makes of tiny random heads, for tests/unit/test_original_heads.py.

    python tools/record_originals.py EAGLE MEDUSA MIMO

EAGLE: a checkout of SafeAILab/EAGLE (its `eagle/model/cnets1.py` runs); MEDUSA: one of FasterDecoding/Medusa
(`medusa/model/medusa_model.py`); MIMO: a folder with `modeling_mimo.py` as Xiaomi publishes it with MiMo's weights. The
recorded vectors came from commits cb7e0841 and e2a5d20c of the first two. Nothing of that code is stored: only weights,
tokens, states and logits. Letters: T tokens, V the vocabulary, E the width.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

FOLDER = Path(__file__).parents[1] / "tests" / "vectors" / "originals"
LENGTH, STEPS = 13, 3  # tokens of the text; of the draft, the first of them from the text itself
SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def main(eagle: Path, medusa: Path, mimo: Path) -> None:
    torch.manual_seed(0)
    llama: Any = transformers.LlamaForCausalLM
    target = llama(transformers.LlamaConfig(**{**SHAPE, "num_hidden_layers": 2})).eval()
    stir(target)
    tokens = torch.randint(0, SHAPE["vocab_size"], (1, LENGTH))
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "target.json").write_text(target.config.to_json_string())
    save_file({**target.state_dict(), "tokens": tokens[0]}, FOLDER / "target.safetensors")
    with torch.no_grad():
        states = target.model(tokens).last_hidden_state  # [1, T, E], after the last norm
        record_eagle(eagle, target, tokens, states)
        record_medusa(medusa, target, tokens)
        record_mimo(mimo, target, tokens, states)


def stir(model: torch.nn.Module) -> None:
    """Make weights that tell tokens apart, and norms that are not ones."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.copy_(1 + 0.2 * torch.randn(parameter.shape))
            else:
                parameter.copy_(torch.randn(parameter.shape) * parameter.shape[1] ** -0.5)


def write(name: str, config: dict[str, Any], weights: dict[str, Tensor], vectors: dict[str, Tensor]) -> None:
    folder = FOLDER / name
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file({key: value.clone().contiguous() for key, value in weights.items()}, folder / "model.safetensors")
    save_file({key: value.contiguous() for key, value in vectors.items()}, folder / "vectors.safetensors")


def record_eagle(checkout: Path, target: Any, tokens: Tensor, states: Tensor) -> None:
    """Draft as `topK_genrate` does with one branch: each token beside the state before it, then its own states."""
    sys.path.insert(0, str(checkout))
    cnets = importlib.import_module("eagle.model.cnets1")
    configs = importlib.import_module("eagle.model.configs")
    config = configs.EConfig(**SHAPE, pad_token_id=0)
    config.rope_scaling = None  # new versions of transformers fill it in
    head = cnets.Model(config, bias=True).eval()
    stir(head)
    head.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
    out, cache = head(states[:, :-1], input_ids=tokens[:, 1:], use_cache=True)
    logits, drafted = [target.lm_head(out)[0]], []
    for _ in range(STEPS - 1):
        drafted.append(logits[-1][-1:].argmax(-1))
        out, cache = head(out[:, -1:], input_ids=drafted[-1][None], past_key_values=cache, use_cache=True)
        logits.append(target.lm_head(out)[0])
    weights = {name: value for name, value in head.state_dict().items() if "rotary" not in name}
    card = {**SHAPE, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    write("eagle", card, weights, {"drafted": torch.cat(drafted), "text": logits[0], "draft": torch.cat(logits[1:])})


def record_medusa(checkout: Path, target: Any, tokens: Tensor) -> None:
    """Run the heads on top of transformers' Llama: the copy in the checkout needs an old version of transformers."""
    sys.path.insert(0, str(checkout))
    for name, model in (("llama", transformers.LlamaForCausalLM), ("mistral", transformers.MistralForCausalLM)):
        module = ModuleType(f"medusa.model.modeling_{name}_kv")
        setattr(module, model.__name__, model)
        sys.modules[module.__name__] = module
    medusa = importlib.import_module("medusa.model.medusa_model")
    medusa_keys = {"medusa_num_heads": 3, "medusa_num_layers": 1}
    config = transformers.LlamaConfig(**{**SHAPE, "num_hidden_layers": 2, **medusa_keys})
    with mock.patch.object(medusa, "AutoTokenizer"):
        model = medusa.MedusaModelLlama(config).eval()
    stir(model.medusa_head)
    model.load_state_dict(target.state_dict(), strict=False)
    logits = model(tokens, medusa_forward=True)[:, 0]  # [heads, T, V]
    card = {**medusa_keys, "base_model_name_or_path": "someone/model"}
    write("medusa", card, model.medusa_head.state_dict(), {"text": logits})


def record_mimo(folder: Path, target: Any, tokens: Tensor, states: Tensor) -> None:
    """Run the layer over a growing text. As in vLLM, the entry at the first position reads zeros for its token."""
    package, configuration = ModuleType("mimo"), ModuleType("mimo.configuration_mimo")
    package.__path__ = [str(folder)]
    configuration.MiMoConfig = transformers.Qwen2Config  # type: ignore[attr-defined]
    sys.modules |= {"mimo": package, "mimo.configuration_mimo": configuration}
    mimo = importlib.import_module("mimo.modeling_mimo")
    config = transformers.Qwen2Config(**{**SHAPE, "attn_implementation": "eager"})
    layer = mimo.MiMoMTPLayers(config).eval()
    stir(layer)
    rotary = transformers.models.qwen2.modeling_qwen2.Qwen2RotaryEmbedding(config)

    def run(text: Tensor, before: Tensor) -> Tensor:
        embedded = target.model.embed_tokens(text)  # [1, T, E]
        embedded[:, 0] = 0
        count = text.shape[1]
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        positions = torch.arange(1, count + 1)[None]
        rotary_tables = rotary(embedded, positions)
        found = layer(embedded, before, mask, positions, position_embeddings=rotary_tables)
        return found if isinstance(found, Tensor) else found.last_hidden_state

    text, before = tokens[:, 1:], states[:, :-1]
    logits, drafted = [target.lm_head(run(text, before))[0]], []
    for _ in range(STEPS - 1):
        out = run(text, before)
        drafted.append(target.lm_head(out)[0, -1:].argmax(-1))
        text, before = torch.cat([text, drafted[-1][None]], 1), torch.cat([before, out[:, -1:]], 1)
        logits.append(target.lm_head(run(text, before))[0, -1:])
    weights = {f"model.mtp_layers.0.{name}": value for name, value in layer.state_dict().items()}
    card = {**SHAPE, "model_type": "mimo", "num_nextn_predict_layers": 1, "attention_bias": True}
    write("mtp-mimo", card, weights, {"drafted": torch.cat(drafted), "text": logits[0], "draft": torch.cat(logits[1:])})


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
