"""transformers in the same process, with the same weights and device: the peer of `outrider bench speed`.

Other engines run in processes of their own: see `peers/`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..errors import UserError
from ..kernels.quantization import dequantize
from ..llm import LLM
from ..weights import open_checkpoint


class InProcessPeer(Protocol):
    title: str
    compiled: bool

    def seconds_per_token(self, prompt: list[int], tokens: int) -> float:
        """Decode one request greedily and return the seconds per token without prefill."""
        ...


def find(name: str) -> Callable[[LLM, int], InProcessPeer]:
    """Return the constructor of the peer: it takes the engine and the maximum length of a text."""
    if name not in PEERS:
        raise UserError(f"no peer called `{name}`: expected one of {', '.join(PEERS)}")
    import_transformers()
    return PEERS[name]


def import_transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise UserError("`--peer` needs transformers, which is not installed: run `pip install transformers`") from None
    return transformers


def build(llm: LLM) -> Any:
    """Build the engine's model in transformers: same weights and device, in bf16, or fp32 on a CPU."""
    transformers = import_transformers()
    device = llm.engine.device.torch_device
    checkpoint = open_checkpoint(llm.resolved.model, device=device)
    config = transformers.AutoConfig.for_model(**checkpoint.config)
    config.eos_token_id = None  # always generate `tokens` tokens
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            weight = checkpoint.weight(name)
            parameter.copy_(weight.data if weight.data.is_floating_point() else dequantize(weight))
    return model


class GenerateCall:
    """`generate` with a static cache; on a GPU it compiles the decoding step itself."""

    title = "transformers with a static cache"

    def __init__(self, llm: LLM, _: int) -> None:
        self.device = llm.engine.device
        self.compiled = self.device.torch_device.type != "cpu"
        self.model = build(llm)
        options: dict[str, Any] = {"do_sample": False, "cache_implementation": "static"}
        if self.compiled:
            compile_config = import_transformers().CompileConfig
            options["compile_config"] = compile_config(mode="reduce-overhead", fullgraph=True, dynamic=False)
        self.options = options

    def seconds_per_token(self, prompt: list[int], tokens: int) -> float:
        whole, first = self.seconds(prompt, tokens), self.seconds(prompt, 1)
        return (whole - first) / (tokens - 1)

    def seconds(self, prompt: list[int], tokens: int) -> float:
        begin = time.perf_counter()
        text = self.text(prompt, tokens)
        assert len(text) == tokens
        return time.perf_counter() - begin

    def text(self, prompt: list[int], tokens: int) -> list[int]:
        ids = torch.tensor([prompt], device=self.device.torch_device)
        with torch.no_grad():
            output = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, **self.options
            )
        text: list[int] = output[0, len(prompt) :].tolist()  # synchronizes
        return text


class ForwardLoop:
    """A bare loop around the compiled forward pass, without the overhead of `generate` between tokens."""

    title = "transformers' forward pass in a bare loop"

    def __init__(self, llm: LLM, longest: int) -> None:
        self.device, self.compiled = llm.engine.device, llm.engine.device.torch_device.type != "cpu"
        self.model = build(llm)
        self.cache = import_transformers().StaticCache(config=self.model.config, max_cache_len=longest)
        step = self._step
        self.step = torch.compile(step, mode="reduce-overhead", fullgraph=True) if self.compiled else step

    def _step(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Return the next token [1, 1] after token [1, 1] at `position` [1, 1]."""
        output = self.model(token, position_ids=position, past_key_values=self.cache, use_cache=True)
        following: torch.Tensor = output.logits[:, -1:].argmax(-1)
        return following

    def seconds_per_token(self, prompt: list[int], tokens: int) -> float:
        with torch.no_grad():
            token, position = self._begin(prompt)
            self.device.fence().wait()
            begin = time.perf_counter()
            self._decode(token, position, tokens - 1)
            return (time.perf_counter() - begin) / (tokens - 1)

    def text(self, prompt: list[int], tokens: int) -> list[int]:
        with torch.no_grad():
            token, position = self._begin(prompt)
            return [int(token), *self._decode(token, position, tokens - 1)]

    def _begin(self, prompt: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        self.cache.reset()
        positions = torch.arange(len(prompt), device=self.device.torch_device)[None]  # [1, T]
        ids = torch.tensor([prompt], device=self.device.torch_device)
        output = self.model(ids, position_ids=positions, past_key_values=self.cache, use_cache=True)
        return output.logits[:, -1:].argmax(-1), positions[:, -1:] + 1

    def _decode(self, token: torch.Tensor, position: torch.Tensor, tokens: int) -> list[int]:
        decoded = []
        for _ in range(tokens):
            token = self.step(token, position).clone()  # the graph reuses its output buffer
            position = position + 1
            decoded.append(token)
        text: list[int] = torch.cat(decoded, 1)[0].tolist()  # synchronizes
        return text


PEERS: dict[str, Callable[[LLM, int], InProcessPeer]] = {"transformers": GenerateCall, "transformers-loop": ForwardLoop}
