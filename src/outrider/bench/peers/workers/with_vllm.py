"""vLLM on the CPU, and drafts from n-grams as its speculation."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

# Its bf16 kernels are for x86, and for Arm processors that multiply in bf16: on others they are illegal instructions.
CPU = Path("/proc/cpuinfo")
WIDTH = 4  # tokens that are drafted at a time


class Worker:
    def open(self, model: str, threads: int, context: int, batch: int, speculate: bool) -> dict[str, Any]:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # it would leave a core to itself
        os.environ["OMP_NUM_THREADS"] = str(threads)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process, whose memory can be told
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        import vllm

        halves = platform.machine() != "aarch64" or "bf16" in CPU.read_text().split()
        dtype = "bfloat16" if halves else "float32"
        drafts = {"method": "ngram", "num_speculative_tokens": WIDTH, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
        self.llm = vllm.LLM(
            model,
            skip_tokenizer_init=True,
            dtype=dtype,
            max_model_len=context + WIDTH + 1,
            max_num_seqs=batch,
            enable_prefix_caching=False,  # prompts come again
            speculative_config=drafts if speculate else None,
        )
        self.sampling = vllm.SamplingParams
        return {"version": vllm.__version__, "weights": dtype}

    def complete(self, prompts: list[list[int]], tokens: int, width: int | None) -> list[list[int]]:
        params = self.sampling(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        found = self.llm.generate(asked, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in found]
