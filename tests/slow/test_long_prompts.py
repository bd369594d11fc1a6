"""A prompt of more than 100,000 tokens is read at positions far beyond those of other tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import tiny
from outrider import LLM, SamplingParams

LENGTH, CONTEXT = 100_003, 131_072
SHAPE = {
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "hidden_size": 32,
    "intermediate_size": 32,
    "max_position_embeddings": CONTEXT,
}


def last_logprobs(name: str, prompt: list[int]) -> Tensor:
    """Return the log-probabilities [V] after the prompt: a single layer needs only the last query over all keys."""
    model = tiny.original(name)
    layer, states = model.model.layers[0], model.model.embed_tokens(torch.tensor([prompt]))  # [1, T, E]
    normed, attention = layer.input_layernorm(states), layer.self_attn
    cos, sin = model.model.rotary_emb(states, torch.arange(len(prompt))[None])
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
def test_a_prompt_of_a_hundred_thousand_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiny.CASES, "long-context", ("Llama", SHAPE))
    llm = LLM(str(tiny.copy("long-context", tmp_path)), backend="cpu", cache_tokens=CONTEXT, speculate="ngram")
    prompt = tiny.prompt(LENGTH)
    assert llm.resolved.max_context == CONTEXT
    output = llm.generate([prompt], SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, logprobs=100))[0]
    first = output.completions[0].logprobs[0]
    expected = last_logprobs("long-context", prompt)
    for token, logprob in first.top:
        assert logprob == pytest.approx(float(expected[token]), abs=1e-3)
    # The continuation as a prompt: other chunks, and positions that decoding has stored before.
    more = llm.generate([prompt + output.completions[0].token_ids[:20]], SamplingParams(max_tokens=20, temperature=0))
    assert more[0].completions[0].token_ids == output.completions[0].token_ids[20:]
    assert more[0].stats is not None and more[0].stats.cached_tokens > 100_000
