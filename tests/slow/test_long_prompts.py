"""Prompts of 128k tokens are read at positions far beyond those of other tests, with every scaling of the rope."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import tiny
from outrider import LLM, SamplingParams

CONTEXT = 131_072
LENGTH = CONTEXT - 61  # and an answer
SHAPE = {
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "hidden_size": 32,
    "intermediate_size": 32,
    "max_position_embeddings": CONTEXT,
}
THETA = 1_000_000.0
ROPES: dict[str, dict[str, Any]] = {  # as in Qwen2.5 with YaRN, Phi-3 and Llama 3.1
    "plain": {"rope_type": "default", "rope_theta": THETA},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": THETA,
        "factor": 4.0,
        "original_max_position_embeddings": CONTEXT // 4,
    },
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0, 1.1, 1.2, 1.5],
        "long_factor": [1.1, 2.5, 20.0, 60.0],
        "original_max_position_embeddings": 4096,
    },
    "llama3": {**tiny.LLAMA3, "rope_theta": 500_000.0, "original_max_position_embeddings": 8192},
}


def last_logprobs(name: str, prompt: list[int]) -> Tensor:
    """Return the log-probabilities [V] after the prompt: a single layer needs only the last query over all keys."""
    model = tiny.original(name)
    layer, states = model.model.layers[0], model.model.embed_tokens(torch.tensor([prompt]))  # [1, T, E]
    normed, attention = layer.input_layernorm(states), layer.self_attn
    cos, sin = model.model.rotary_emb(states, torch.arange(len(prompt))[None])  # long factors for a long text
    size = SHAPE["head_dim"]
    queries = attention.q_proj(normed).view(1, len(prompt), -1, size).transpose(1, 2)  # [1, H, T, D]
    keys, values = (part(normed)[:, None] for part in (attention.k_proj, attention.v_proj))  # [1, 1, T, D]
    queries, keys = apply_rotary_pos_emb(queries, keys, cos, sin)
    weights = torch.softmax(queries[:, :, -1:] @ keys.transpose(2, 3) / size**0.5, -1)  # [1, H, 1, T]
    out = states[:, -1:] + attention.o_proj((weights @ values).transpose(1, 2).flatten(2))
    out = out + layer.mlp(layer.post_attention_layernorm(out))
    return torch.log_softmax(model.lm_head(model.model.norm(out))[0, 0], -1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@torch.inference_mode()
@pytest.mark.parametrize("rope", ROPES)
def test_a_prompt_of_128k_tokens(rope: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"long-context-{rope}"
    monkeypatch.setitem(tiny.CASES, name, ("Llama", {**SHAPE, "rope_parameters": ROPES[rope]}))
    llm = LLM(str(tiny.copy(name, tmp_path)), backend="cpu", cache_tokens=CONTEXT, speculate="ngram")
    prompt = tiny.prompt(LENGTH)
    assert llm.resolved.max_context == CONTEXT
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, logprobs=100)
    output = llm.generate([prompt], params)[0]
    first = output.completions[0].logprobs[0]
    expected = last_logprobs(name, prompt)
    for token, logprob in first.top:
        assert logprob == pytest.approx(float(expected[token]), abs=1e-3)
    # The continuation as a prompt: other chunks, and positions that decoding has stored before.
    more = llm.generate([prompt + output.completions[0].token_ids[:20]], replace(params, max_tokens=20))
    assert more[0].completions[0].token_ids == output.completions[0].token_ids[20:]
    assert more[0].stats is not None and more[0].stats.cached_tokens > LENGTH - 64
