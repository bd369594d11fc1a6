"""What the user asked for is refused at once, or becomes facts."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from outrider import request, types
from outrider.config import DeviceFacts, EngineConfig, check, kv_dtype, make_config, resolve
from outrider.errors import UserError

FACTS = DeviceFacts(
    backend="cuda",
    trained_context=2048,
    kv_dtype="float16",
    cache_bytes_per_token=1000,
    free_bytes=10_000_000,
    cache_share=0.5,
    step_tokens=256,
    decode_steps=8,
)

REFUSED = {
    "backend": ("tpu", "`backend` is `tpu`: expected auto or one of cpu, cuda, reference"),
    "kv_dtype": ("int4", "`kv_dtype` is `int4`"),
    "quantize": ("bitsandbytes", "`quantize` is `bitsandbytes`: expected int8, int4, fp8, which"),
    "activations": ("low", "`activations` is `low`: expected auto or one of high, fast"),
    "max_context": (0, "`max_context` is 0"),
    "max_requests": (0, "`max_requests` is 0"),
    "max_step_tokens": (0, "`max_step_tokens` is 0"),
    "page_size": (0, "`page_size` is 0"),
    "cache_tokens": (0, "`cache_tokens` is 0"),
    "cache_share": (1.0, "`cache_share` is 1.0"),
    "decode_steps": (0, "`decode_steps` is 0"),
    "cudagraph_mode": ("", "`cudagraph_mode` is ``"),
    "threads": (-1, "`threads` is -1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_impossible_values(name: str) -> None:
    value, sentence = REFUSED[name]
    with pytest.raises(UserError) as refusal:
        check(replace(EngineConfig(), **{name: value}))
    assert str(refusal.value).startswith(sentence)


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE"])
def test_pieces_are_refused_with_the_reason(mode: str) -> None:
    with pytest.raises(UserError, match=f"`{mode}`, but .* whole or not at all.*: expected one of NONE, FULL_DECODE"):
        check(EngineConfig(cudagraph_mode=mode))


@pytest.mark.parametrize("mode", ["NONE", "FULL_DECODE_ONLY", "FULL"])
@pytest.mark.parametrize("backend", ["auto", "cpu", "cuda", "reference"])
def test_every_mode_goes_with_every_backend(backend: str, mode: str) -> None:
    check(EngineConfig(backend=backend, cudagraph_mode=mode, enforce_eager=True, deterministic=True, decode_steps=4))


def test_what_the_user_leaves_open_is_what_suits_the_device() -> None:
    plan = resolve(EngineConfig(), FACTS)
    assert (plan.backend, plan.kv_dtype, plan.max_context) == ("cuda", "float16", 2048)
    assert (plan.max_step_tokens, plan.decode_steps) == (256, 8)
    assert plan.pages * plan.page_size <= 5000 < (plan.pages + 1) * plan.page_size  # half of the memory
    for field in fields(plan):
        assert getattr(plan, field.name) not in (None, "auto"), field.name


def test_what_the_user_says_holds() -> None:
    asked = EngineConfig(max_context=100, max_step_tokens=64, cache_tokens=320, decode_steps=3, max_requests=7, seed=5)
    plan = resolve(asked, FACTS)
    assert (plan.max_context, plan.max_step_tokens, plan.pages, plan.decode_steps) == (100, 64, 20, 3)
    assert (plan.max_requests, plan.seed) == (7, 5)


def test_a_step_takes_every_request_and_the_cache_is_no_larger_than_they_need() -> None:
    assert resolve(EngineConfig(max_requests=1000), FACTS).max_step_tokens == 2000
    small = resolve(EngineConfig(max_requests=2, max_context=64), FACTS)
    assert small.pages * small.page_size == 128
    assert resolve(EngineConfig(cache_tokens=96), FACTS).max_context == 96


@pytest.mark.parametrize(
    ("asked", "facts", "remedy"),
    [
        (EngineConfig(max_context=4096), FACTS, "pass 2048 or less"),
        (EngineConfig(cache_tokens=8), FACTS, "raise `cache_tokens`"),
        (EngineConfig(max_context=1024, cache_tokens=512), FACTS, "but `cache_tokens` is 512: raise it, or pass 512$"),
        (
            EngineConfig(max_context=2000),
            replace(FACTS, free_bytes=20 * FACTS.cache_bytes_per_token * 100),
            r"is 2000, whose keys and values take .* \(\d+ bytes per token, float16\), .*: pass 992 or less, or "
            "`kv_dtype=int8`",
        ),
        (
            EngineConfig(max_context=2000),
            replace(FACTS, free_bytes=20 * FACTS.cache_bytes_per_token * 100, kv_dtype="fp8"),
            ": pass 992 or less$",
        ),
        (
            EngineConfig(),
            replace(FACTS, free_bytes=0),
            "would hold 0 tokens.*free some memory, or use a smaller model or one with fewer bits",
        ),
    ],
)
def test_what_does_not_fit_is_refused(asked: EngineConfig, facts: DeviceFacts, remedy: str) -> None:
    with pytest.raises(UserError, match=remedy):
        resolve(asked, facts)


def test_keys_and_values_follow_the_weights() -> None:
    assert kv_dtype(EngineConfig(), float32_weights=True) == "float32"
    assert kv_dtype(EngineConfig(), float32_weights=False) == "float16"
    assert kv_dtype(EngineConfig(kv_dtype="bfloat16"), float32_weights=True) == "bfloat16"
    assert kv_dtype(EngineConfig(kv_dtype="int8"), float32_weights=True) == "int8"
    assert kv_dtype(make_config("m", {"kv_cache_dtype": "fp8_e4m3"}), float32_weights=False) == "fp8"  # vLLM's words


def test_the_memory_of_the_cache_is_stated() -> None:
    plan = resolve(EngineConfig(max_context=2048, cache_tokens=4096), replace(FACTS, cache_bytes_per_token=30_000))
    words = "30000 bytes per token (float16), 122.9 MB for 4096 tokens, 61.4 MB for a context of 2048"
    assert plan.kv_memory == words


# A token takes 200 bytes in the layers that attend to all, and 1000 in those with a window of 100 tokens.
MIXED = replace(FACTS, cache_bytes_per_token=200, window=100, window_bytes_per_token=1000)


@pytest.mark.parametrize(
    ("free_bytes", "max_requests", "pages", "window_pages", "max_context"),
    [
        (400_000, 4, 10, 10, 160),  # too little for the window and the largest step: every page has a window page
        (1_000_000, 4, 36, 24, 576),  # enough for these, the rest for a longer text
        (2_000_000, 64, 132, 36, 2048),  # one text as long as the context, the rest for more windows
        (4_000_000, 4, 384, 48, 2048),  # the windows of four requests and the largest step, the rest for longer texts
        (10_000_000, 4, 512, 209, 2048),  # four texts as long as the context, the rest for windows of cached prefixes
        (100_000_000, 4, 512, 512, 2048),  # more is never needed
    ],
)
def test_pages_and_window_pages_share_the_memory(
    free_bytes: int, max_requests: int, pages: int, window_pages: int, max_context: int
) -> None:
    plan = resolve(EngineConfig(max_requests=max_requests), replace(MIXED, free_bytes=free_bytes))
    assert (plan.pages, plan.window_pages, plan.max_context) == (pages, window_pages, max_context)
    assert plan.cache_bytes == 16 * (200 * pages + 1000 * window_pages) <= free_bytes // 2


def test_cache_tokens_set_the_memory_of_all_layers() -> None:
    plan = resolve(EngineConfig(cache_tokens=1024, max_context=2048), MIXED)
    assert plan.cache_bytes <= 1024 * 1200 < plan.cache_bytes + 2 * 16 * 1200
    assert plan.max_context == 2048
    sliding = resolve(EngineConfig(cache_tokens=512), replace(MIXED, cache_bytes_per_token=0))
    assert (sliding.window_pages, sliding.max_context) == (32, 2048)
    with pytest.raises(UserError, match=r"is 2048, but `cache_tokens` is 512: raise it, or pass 1152$"):
        resolve(EngineConfig(cache_tokens=512, max_context=2048), MIXED)


def test_the_memory_of_windows_is_stated() -> None:
    plan = resolve(EngineConfig(max_requests=4), replace(MIXED, free_bytes=4_000_000))
    assert plan.kv_memory == (
        "1200 bytes per token, 200 behind a window of 100 (float16), 2.0 MB for 6144 tokens with windows of 768, "
        "0.5 MB for a context of 2048"
    )
    with pytest.raises(UserError, match=r"keys and values take 0.5 MB .* left for them is 0.5 MB: pass 576 or less"):
        resolve(EngineConfig(max_context=2048), replace(MIXED, free_bytes=1_000_000))


def test_deprecated_names_still_work() -> None:
    assert make_config("model", {"rounds": 3}).decode_steps == 3
    assert types.Request is request.Request and types.UserError is UserError
