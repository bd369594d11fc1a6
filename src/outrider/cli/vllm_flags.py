"""Answers for flags of `vllm serve` that do not exist here. docs/from-vllm.md gives the same answers in a table."""

from __future__ import annotations

from collections.abc import Mapping

ONE_DEVICE = "one process uses one device; for several, run replicas with Ray Serve (docs/scale.md)"
FROM_TEMPLATE = "not needed, the format of tool calls is derived from the chat template"

VLLM_FLAGS: Mapping[str, str] = {
    "--dtype": "weights stay as they are stored; `--quantize int8`, `int4` or `fp8` quantizes float weights",
    "--gpu-memory-utilization": (
        "`outrider serve` has `--cache-tokens`, the size of the KV cache in tokens; in Python, `cache_share` is its "
        "share of the memory that is free after loading"
    ),
    "--block-size": "set `page_size` in Python",
    "--no-enable-prefix-caching": "set `prefix_cache=False` in Python",
    "--enable-prefix-caching": "not needed, prefixes are always cached; `prefix_cache=False` in Python turns it off",
    "--enable-chunked-prefill": "not needed, long prompts are always chunked",
    "--tensor-parallel-size": ONE_DEVICE,
    "--pipeline-parallel-size": ONE_DEVICE,
    "--data-parallel-size": ONE_DEVICE,
    "--compilation-config": "use `--cudagraph-mode` NONE, FULL_DECODE_ONLY or FULL",
    "--enable-auto-tool-choice": FROM_TEMPLATE,
    "--tool-call-parser": FROM_TEMPLATE,
    "--reasoning-parser": "not needed, <think> blocks are split off if the chat template has them",
    "--allowed-origins": "use `--allow-origin ORIGIN`, once for each origin",
    "--chat-template": "the model's own template is used",
    "--trust-remote-code": "code of a checkpoint is never run",
    "--task": "only text generation is supported",
    "--max-num-seqs": "only `outrider serve` limits the requests that run at once",
    "--max-num-batched-tokens": "only `outrider serve` limits the tokens of a step",
    "--served-model-name": "only `outrider serve` has it",
}
