"""transformers: `generate`, speculation by prompt lookup."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers


def has_bfloat16(source: Path = Path("/proc/cpuinfo")) -> bool:
    """Say whether the processor multiplies in bf16: without it fp32 is faster."""
    words = set(source.read_text().split()) if source.exists() else set()
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})


class Worker:
    def open(self, model: str, threads: int, context: int, batch: int, speculate: bool) -> dict[str, Any]:
        torch.set_num_threads(threads)
        dtype = torch.bfloat16 if has_bfloat16() else torch.float32
        opened: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        self.model = opened.eval()
        self.model.generation_config.eos_token_id = None  # always generate `tokens` tokens
        self.model.config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0
        return {"version": transformers.__version__, "weights": str(dtype).removeprefix("torch.")}

    def complete(self, prompts: list[list[int]], tokens: int, width: int | None) -> list[list[int]]:
        longest = max(len(prompt) for prompt in prompts)
        # [B, T], padded on the left
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        lookup = {} if width is None else {"prompt_lookup_num_tokens": width}
        with torch.inference_mode():
            output = self.model.generate(
                ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, **lookup
            )
        return [row[longest : longest + tokens] for row in output.tolist()]
