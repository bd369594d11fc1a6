"""Answers for flags of vLLM and llama.cpp, and commands of Ollama, that do not exist here.

docs/from-vllm.md and docs/from-llama-cpp.md give the same answers in tables.
"""

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

PENALTIES = "the penalties are fields of a request, and of `SamplingParams` in Python"
NO_SAMPLER = "this sampler is not supported; use `--temperature`, `--top-k`, `--top-p` or `--min-p`"
METHOD = "use `--speculate METHOD:width=N`; `outrider --help` lists the methods"

LLAMA_CPP_FLAGS: Mapping[str, str] = {
    "-c": "use `--max-context N`",
    "--ctx-size": "use `--max-context N`",
    "-n": "use `--max-tokens N` for `-n`, `--backend cuda` or `cpu` for `-ngl`, `--max-requests N` for `-np`",
    "--predict": "use `--max-tokens N`",
    "--n-predict": "use `--max-tokens N`",
    "-t": "use `--threads N`",
    "-p": "pass the prompt without a flag",
    "--prompt": "pass the prompt without a flag",
    "-ngl": "use `--backend cuda`, which runs all layers on the GPU, or `--backend cpu`",
    "--n-gpu-layers": "use `--backend cuda`, which runs all layers on the GPU, or `--backend cpu`",
    "--hf-repo": "use `--model USER/MODEL:QUANT`",
    "--model-url": "use `--model URL`",
    "--cache-list": "use `outrider list`",
    "--parallel": "use `--max-requests N` of `outrider serve`",
    "--batch-size": "use `--max-step-tokens N` of `outrider serve`",
    "--ubatch-size": "use `--max-step-tokens N` of `outrider serve`",
    "--jinja": "not needed, the chat template is always rendered",
    "--flash-attn": "not needed, attention is always computed that way",
    "--temp": "use `--temperature`",
    "--repeat-penalty": PENALTIES,
    "--presence-penalty": PENALTIES,
    "--frequency-penalty": PENALTIES,
    "--grammar": "pass `response_format` in a request, or `StructuredOutput` in Python",
    "--json-schema": "pass `response_format` in a request, or `StructuredOutput` in Python",
    "--logit-bias": "pass `logit_bias` in a request, or in `SamplingParams` in Python",
    "--reverse-prompt": "use `--stop`",
    "--alias": "use `--served-model-name` of `outrider serve`",
    "--metrics": "not needed, `/metrics` is always there",
    "--no-ui": "use `--no-playground`",
    "--cache-reuse": "not supported; equal prefixes share pages by themselves",
    "--context-shift": "not supported; `/shift` of `outrider chat` drops old messages",
    "--slot-save-path": "not supported; equal prefixes share pages by themselves",
    "--mirostat": NO_SAMPLER,
    "--dry-multiplier": NO_SAMPLER,
    "--xtc-probability": NO_SAMPLER,
    "--typical": NO_SAMPLER,
    "--mmproj": "only text is supported",
    "--embedding": "only text generation is supported",
    "--rerank": "only text generation is supported",
    "--model-draft": "use `--speculate draft_model:model=FILE`",
    "--spec-type": METHOD,
    "--spec-draft-n-max": METHOD,
    "--draft-max": METHOD,
}

OLLAMA_COMMANDS: Mapping[str, str] = {
    "run": "`outrider chat -m MODEL` chats, `outrider generate PROMPT -m MODEL` answers once",
    "ps": "`outrider top URL` shows a running server, `outrider list` the models on this machine",
}


def explain(error: Exception) -> None:
    """Replace the message of a usage error by the answer for this flag or command, if there is one."""
    flag = str(getattr(error, "option_name", ""))  # of Click's NoSuchOption, which Typer does not export
    message = str(getattr(error, "message", ""))
    if answer := VLLM_FLAGS.get(flag) or LLAMA_CPP_FLAGS.get(flag):
        vars(error).update(message=f"No such option: {flag}: {answer}", possibilities=[])
    for command, answer in OLLAMA_COMMANDS.items():
        if message.startswith(f"No such command '{command}'"):
            vars(error).update(message=f"No such command '{command}': {answer}")
