"""Engine options as the user gives them, and resolved: `resolve` replaces every "auto" and None by a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypedDict

from .errors import UserError
from .validation import check_type

DTYPES = ("float32", "float16", "bfloat16")
KV_DTYPES = (*DTYPES, "int8", "fp8")
KV_DTYPE_ALIASES = {"fp8_e4m3": "fp8"}  # vLLM's name of the same format
BACKENDS = ("cpu", "cuda", "reference")
QUANTIZE = ("int8", "int4", "fp8")
STORED_FORMATS = {  # vLLM's value of `quantization` -> format that a checkpoint states
    "awq": "awq",
    "awq_marlin": "awq",
    "gptq": "gptq",
    "gptq_marlin": "gptq",
    "compressed-tensors": "compressed-tensors",
    "fp8": "fp8",
    "fbgemm_fp8": "fbgemm_fp8",
    "mxfp4": "mxfp4",
    "gguf": "gguf",
}
ACTIVATIONS = ("high", "fast")
GRAPHS = ("NONE", "FULL_DECODE_ONLY", "FULL")
NO_PIECEWISE = ", but a step is captured whole or not at all, since pieces would leave attention and drafts to the host"

OPTION_ALIASES = {  # other name -> name in EngineConfig
    "rounds": "decode_steps",  # deprecated alias
    "max_model_len": "max_context",  # this and the next four: vLLM's names
    "quantization": "quantize",
    "max_num_seqs": "max_requests",
    "max_num_batched_tokens": "max_step_tokens",
    "kv_cache_dtype": "kv_dtype",
}


@dataclass(frozen=True)
class EngineConfig:
    """The options of the engine."""

    model: str = "smollm2-135m"
    revision: str | None = None  # branch, tag or commit of a hub model; None: its main branch
    backend: str = "auto"  # cpu; cuda: an NVIDIA GPU; reference: plain torch, slow; auto: cuda if supported, else cpu
    quantize: str | None = None  # int8, int4, fp8: quantize float weights; awq, gptq, ...: the checkpoint's format
    # Precision beside quantized weights: high; fast (cpu: int8; cuda: e4m3, only with FP8 weights); auto: on a cpu by
    # the instruction set, else high.
    activations: str = "auto"
    kv_dtype: str = "auto"  # float32, float16, bfloat16; int8 or fp8 (e4m3): quantized, half the memory
    max_context: int | None = None  # limit on prompt and output together, in tokens; None: the trained context
    max_requests: int = 64  # requests in one step
    max_step_tokens: int | None = None  # tokens in one step, longer prompts are chunked; None: the device's default
    page_size: int = 16  # tokens in a page of the key/value cache
    # Memory of the key/value cache, in tokens of which all layers keep keys and values; None: cache_share of the free
    # memory. Layers with a sliding window keep fewer tokens, and leave the memory to the others.
    cache_tokens: int | None = None
    cache_share: float | None = None  # None: the device's default
    prefix_cache: bool = True
    decode_steps: int | None = None  # limit on decode steps without the host; None: the device's default
    deterministic: bool = False  # cuda: batch-invariant results, as the other backends always give
    cudagraph_mode: str = "FULL"  # cuda: which steps are captured: NONE, FULL_DECODE_ONLY or FULL
    enforce_eager: bool = False  # same as cudagraph_mode=NONE
    threads: int | None = None  # None: OUTRIDER_THREADS, else the cores available to this process
    seed: int = 0
    speculate: str = "none"  # METHOD or METHOD:key=value,...; auto: the fastest measured; none: plain decoding
    speculative_config: Mapping[str, Any] | None = None  # speculation options under vLLM's keys
    always_draft: bool = False  # the full width in every step, even if drafts do not pay: adaptive=no for any method
    enable_lora: bool = False  # let requests name adapters; `lora` does so too
    lora: Mapping[str, str] | None = None  # adapters to load at the start: name -> folder in PEFT's layout, or hub name
    max_loras: int = 4  # different adapters in one step
    max_lora_rank: int = 64  # largest rank of an adapter
    max_cpu_loras: int = 64  # adapters in host memory


class EngineOptions(TypedDict, total=False):
    """The keywords of LLM and AsyncLLM: the fields of EngineConfig but `model`, and other names of them."""

    revision: str | None
    backend: str
    quantize: str | None
    activations: str
    kv_dtype: str
    max_context: int | None
    max_requests: int
    max_step_tokens: int | None
    page_size: int
    cache_tokens: int | None
    cache_share: float | None
    prefix_cache: bool
    decode_steps: int | None
    deterministic: bool
    cudagraph_mode: str
    enforce_eager: bool
    threads: int | None
    seed: int
    speculate: str
    speculative_config: Mapping[str, Any] | None
    always_draft: bool
    enable_lora: bool
    lora: Mapping[str, str] | None
    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int
    rounds: int | None  # deprecated alias
    max_model_len: int | None
    quantization: str | None
    max_num_seqs: int
    max_num_batched_tokens: int | None
    kv_cache_dtype: str


@dataclass(frozen=True)
class DeviceFacts:
    """What `resolve` needs to know about the model and the device."""

    backend: str
    trained_context: int
    kv_dtype: str
    cache_bytes_per_token: int  # all layers, including the drafter's, without those that have window pages
    free_bytes: int
    cache_share: float  # this and the next two: the device's defaults
    step_tokens: int
    decode_steps: int
    window: int = 0  # the widest sliding window of all layers, in tokens; 0: no layer has one
    window_bytes_per_token: int = 0  # of the layers with a sliding window

    def text_bytes(self, tokens: int) -> int:
        """Return the bytes of the keys and values of a text: its layers with a sliding window keep the window."""
        return tokens * self.cache_bytes_per_token + min(tokens, self.window) * self.window_bytes_per_token


@dataclass(frozen=True)
class ResolvedConfig:
    """The configuration in force."""

    model: str
    backend: str
    kv_dtype: str
    max_context: int
    max_requests: int
    max_step_tokens: int
    page_size: int
    pages: int
    prefix_cache: bool
    decode_steps: int
    seed: int
    kv_bytes_per_token: int = 0  # of the key/value cache, in all layers, including the drafter's
    context_bytes: int = 0  # of the keys and values of a text as long as `max_context`
    window: int = 0  # the widest sliding window of all layers, in tokens; 0: no layer has one
    window_pages: int = 0
    window_bytes_per_token: int = 0  # of the layers with a sliding window, as part of `kv_bytes_per_token`

    @property
    def cache_bytes(self) -> int:
        """Return the bytes of the key/value cache."""
        windows = self.window_pages * self.window_bytes_per_token
        return self.page_size * (self.pages * (self.kv_bytes_per_token - self.window_bytes_per_token) + windows)

    @property
    def kv_memory(self) -> str:
        """Describe the memory of the key/value cache: per token, in all, and of one text as long as the context."""
        each, tokens = f"{self.kv_bytes_per_token} bytes per token", f"{self.pages * self.page_size} tokens"
        if self.window:
            left = self.kv_bytes_per_token - self.window_bytes_per_token
            each += f", {left} behind a window of {self.window}"
            tokens += f" with windows of {self.window_pages * self.page_size}"
        return (
            f"{each} ({self.kv_dtype}), {_size(self.cache_bytes)} for {tokens}, "
            f"{_size(self.context_bytes)} for a context of {self.max_context}"
        )


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 10**9 else f"{count / 1e6:.1f} MB"


def current_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """Replace other names of options by those of EngineConfig."""
    named: dict[str, Any] = {}
    for name, value in options.items():
        current = OPTION_ALIASES.get(name, name)
        if current in named or (current != name and current in options):
            raise UserError(f"`{name}` is another name of `{current}`, which is passed too: pass only one of them")
        named[current] = value
    return named


def make_config(model: str | Path, options: Mapping[str, Any]) -> EngineConfig:
    """Build an EngineConfig from keyword options; refuse unknown ones."""
    options = current_names(options)
    known = [field.name for field in fields(EngineConfig) if field.name != "model"]
    for name in options:
        if name not in known:
            close = get_close_matches(name, [*known, *OPTION_ALIASES], n=1)
            hint = f"did you mean `{close[0]}`?" if close else f"expected one of {', '.join(sorted(known))}"
            raise UserError(f"no option called `{name}`: {hint}")
    name = str(model.expanduser().absolute()) if isinstance(model, Path) else model  # a Path is never a hub name
    return replace(EngineConfig(model=name), **options)


def check(config: EngineConfig) -> None:
    """Refuse values that are wrong for every model and device."""
    for field in fields(config):
        check_type(field.name, getattr(config, field.name), str(field.type))
    if config.backend not in ("auto", *BACKENDS):
        raise UserError(f"`backend` is `{config.backend}`: expected auto or one of {', '.join(BACKENDS)}")
    if config.kv_dtype not in ("auto", *KV_DTYPES, *KV_DTYPE_ALIASES):
        raise UserError(f"`kv_dtype` is `{config.kv_dtype}`: expected auto or one of {', '.join(KV_DTYPES)}")
    if config.quantize is not None and config.quantize not in (*QUANTIZE, *STORED_FORMATS):
        raise UserError(
            f"`quantize` is `{config.quantize}`: expected {', '.join(QUANTIZE)}, which quantize float weights while "
            f"loading, or the format that the checkpoint has ({', '.join(STORED_FORMATS)})"
        )
    if config.activations not in ("auto", *ACTIVATIONS):
        raise UserError(f"`activations` is `{config.activations}`: expected auto or one of {', '.join(ACTIVATIONS)}")
    if config.cudagraph_mode not in GRAPHS:
        reason = NO_PIECEWISE if "PIECEWISE" in config.cudagraph_mode else ""
        raise UserError(f"`cudagraph_mode` is `{config.cudagraph_mode}`{reason}: expected one of {', '.join(GRAPHS)}")
    for name in ("max_requests", "page_size", "max_loras", "max_lora_rank", "max_cpu_loras"):
        if getattr(config, name) < 1:
            raise UserError(f"`{name}` is {getattr(config, name)}: it must be at least 1")
    for name in ("max_context", "cache_tokens", "threads", "max_step_tokens", "decode_steps"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise UserError(f"`{name}` is {value}: it must be at least 1")
    if config.cache_share is not None and not 0 < config.cache_share <= 0.95:
        raise UserError(f"`cache_share` is {config.cache_share}: it must lie in (0, 0.95]")


def kv_dtype(config: EngineConfig, float32_weights: bool) -> str:
    """Resolve the dtype of the key/value cache: float16, except for models with float32 weights."""
    if config.kv_dtype != "auto":
        return KV_DTYPE_ALIASES.get(config.kv_dtype, config.kv_dtype)
    return "float32" if float32_weights else "float16"


def step_tokens(config: EngineConfig, facts: DeviceFacts) -> int:
    """Return the tokens of the largest step.

    If all requests decode, at least as many tokens are left for prompts, so that new requests are not starved.
    """
    return config.max_step_tokens or max(facts.step_tokens, 2 * config.max_requests)


def most_window_pages(window: int, step_tokens: int, page_size: int) -> int:
    """Return the window pages that a text of any length holds at once: of its window and of the largest step.

    Both ends may lie within a page, hence one more.
    """
    return -(-(window + step_tokens) // page_size) + 1


def _pages(config: EngineConfig, facts: DeviceFacts, context: int) -> tuple[int, int]:
    """Return the pages of the key/value cache, and the window pages of the layers with a sliding window.

    Both take the memory of as many pages with a window page each. The rest of the memory serves longer texts: first
    one as long as the context, then the windows of all requests, then further pages.
    """
    size = config.page_size
    page, window_page = size * facts.cache_bytes_per_token, size * facts.window_bytes_per_token
    longest = -(-context // size)
    most = longest * config.max_requests
    if config.cache_tokens is not None:
        equal = config.cache_tokens // size
    else:
        equal = min(int(facts.free_bytes * (config.cache_share or facts.cache_share)) // (page + window_page), most)
    if not facts.window:
        return equal, 0
    memory, step = equal * (page + window_page), step_tokens(config, facts)
    windows = config.max_requests * most_window_pages(facts.window, 1, size) + -(-step // size)
    windows = min(windows, (memory - longest * page) // window_page)
    windows = min(max(windows, most_window_pages(facts.window, step, size)), equal)
    most = max(most, equal)
    pages = min((memory - windows * window_page) // page, most) if page else most
    return pages, min((memory - pages * page) // window_page, pages)


def _too_long(config: EngineConfig, facts: DeviceFacts, held: int, cache_bytes: int) -> str:
    """Say that the keys and values of `max_context` tokens do not fit, and what does."""
    if config.cache_tokens is not None:
        given = f"`max_context` is {config.max_context}, but `cache_tokens` is {config.cache_tokens}"
        return f"{given}: raise it, or pass {held}"
    each, context = facts.cache_bytes_per_token, config.max_context or facts.trained_context
    each += facts.window_bytes_per_token
    smaller = "" if facts.kv_dtype in ("int8", "fp8") else ", or `kv_dtype=int8`, which takes half the memory"
    return (
        f"`max_context` is {context}, whose keys and values take {_size(facts.text_bytes(context))} ({each} bytes per "
        f"token, {facts.kv_dtype}), but the memory left for them is {_size(cache_bytes)}: pass {held} or less{smaller}"
    )


def resolve(config: EngineConfig, facts: DeviceFacts) -> ResolvedConfig:
    """Fill in the options that the user left open; refuse those that do not fit the model or the memory."""
    context = config.max_context or facts.trained_context
    if context > facts.trained_context:
        raise UserError(
            f"`max_context` is {context}, but the model was trained for {facts.trained_context} tokens: "
            f"pass {facts.trained_context} or less"
        )
    pages, window_pages = _pages(config, facts, context)
    if pages < 1:
        each = facts.cache_bytes_per_token + facts.window_bytes_per_token
        share = config.cache_share or facts.cache_share
        tokens = config.cache_tokens or int(facts.free_bytes * share) // each
        remedy = "raise `cache_tokens`"
        if config.cache_tokens is None:
            remedy = "free some memory, or use a smaller model or one with fewer bits"
        raise UserError(
            f"the key/value cache would hold {tokens} tokens, less than one page of {config.page_size}: {remedy}"
        )
    step = step_tokens(config, facts)
    few_windows = facts.window and window_pages < most_window_pages(facts.window, step, config.page_size)
    held = (window_pages if few_windows else pages) * config.page_size
    resolved = ResolvedConfig(
        model=config.model,
        backend=facts.backend,
        kv_dtype=facts.kv_dtype,
        max_context=min(context, held),
        max_requests=config.max_requests,
        max_step_tokens=step,
        page_size=config.page_size,
        pages=pages,
        prefix_cache=config.prefix_cache,
        decode_steps=config.decode_steps or facts.decode_steps,
        seed=config.seed,
        kv_bytes_per_token=facts.cache_bytes_per_token + facts.window_bytes_per_token,
        context_bytes=facts.text_bytes(min(context, held)),
        window=facts.window,
        window_pages=window_pages,
        window_bytes_per_token=facts.window_bytes_per_token,
    )
    if config.max_context is not None and max(held, config.cache_tokens or 0) < context:
        raise UserError(_too_long(config, facts, held, resolved.cache_bytes))
    return resolved
