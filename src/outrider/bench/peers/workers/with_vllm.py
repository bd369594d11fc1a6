"""vLLM on the CPU, speculation by n-gram lookup."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

# vLLM's bf16 kernels run on x86 and on Arm processors with bf16; on other Arm processors they raise SIGILL.
CPU = Path("/proc/cpuinfo")
WIDTH = 4  # draft tokens


class Worker:
    def open(self, model: str, threads: int, context: int, batch: int, speculate: bool) -> dict[str, Any]:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # by default it reserves a core
        os.environ["OMP_NUM_THREADS"] = str(threads)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process, so that its memory can be measured
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        import vllm

        has_bf16 = platform.machine() != "aarch64" or "bf16" in CPU.read_text().split()
        dtype = "bfloat16" if has_bf16 else "float32"
        drafts = {"method": "ngram", "num_speculative_tokens": WIDTH, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
        self.llm = vllm.LLM(
            model,
            skip_tokenizer_init=True,
            dtype=dtype,
            max_model_len=context + WIDTH + 1,
            max_num_seqs=batch,
            enable_prefix_caching=False,  # prompts repeat
            speculative_config=drafts if speculate else None,
        )
        self.sampling = vllm.SamplingParams
        return {"version": vllm.__version__, "weights": dtype}

    def complete(self, prompts: list[list[int]], tokens: int, width: int | None) -> list[list[int]]:
        params = self.sampling(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(requests, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]
