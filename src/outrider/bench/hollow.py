"""What Python costs: a step of a model as deep as the real one, and with nearly no width.

Scheduler, gathering, every call of every layer, sampling and decoding run as they do for the real model; the
arithmetic in between is all but gone, and on one thread there is nothing to wait for.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file
from torch import Tensor

from ..engine import LLM
from ..kernels import cpu
from ..types import SamplingParams

WIDTH = 32
VOCABULARY = 64
CONTEXT = 256
STEPS = 64


class Hollow:
    def __init__(self, layers: int, backend: str) -> None:
        with tempfile.TemporaryDirectory(prefix="outrider-hollow-") as name:
            write(Path(name), layers)
            self.llm = LLM(name, backend=backend, cache_tokens=CONTEXT)

    def step_seconds(self) -> float:
        """Seconds per decode step of one request."""
        params = SamplingParams(max_tokens=STEPS, temperature=0, ignore_eos=True)
        engine = self.llm.engine
        with one_thread():
            for index, _ in enumerate(self.llm.stream([1, 2, 3], params)):
                if index == 0:
                    engine.reset_times()
        return engine.times.seconds / engine.times.steps


@contextmanager
def one_thread() -> Iterator[None]:
    before = cpu.facts()["threads"]
    cpu.set_threads(1)
    try:
        yield
    finally:
        cpu.set_threads(before)


def write(folder: Path, layers: int) -> None:
    """A Llama checkpoint of zeros, as users have them."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors(layers), folder / "model.safetensors")
    vocabulary = {chr(ord("0") + index): index for index in range(VOCABULARY)}
    tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [])).save(str(folder / "tokenizer.json"))


def tensors(layers: int) -> dict[str, Tensor]:
    found = {"model.embed_tokens.weight": torch.zeros(VOCABULARY, WIDTH), "model.norm.weight": torch.ones(WIDTH)}
    matrices = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    for layer in range(layers):
        for name in matrices:
            found[f"model.layers.{layer}.{name}.weight"] = torch.zeros(WIDTH, WIDTH)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{layer}.{name}.weight"] = torch.ones(WIDTH)
    return found
