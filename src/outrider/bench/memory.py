"""Memory that an engine takes beyond weights and KV caches: buffers, captured graphs, allocator overhead."""

from __future__ import annotations

from ..llm import LLM


def beyond_weights(llm: LLM, free_before: int) -> int | None:
    """Return the bytes taken since the device had `free_before` free bytes, without weights and KV caches.

    None on the host, where pages are mapped on first use and other programs allocate at the same time.
    """
    engine = llm.engine
    if engine.device.torch_device.type == "cpu":
        return None
    taken = free_before - engine.device.free_bytes()
    return taken - weight_bytes(llm) - cache_bytes(llm)


def weight_bytes(llm: LLM) -> int:
    """Return the bytes of the target's weights, its embedding included, and of the drafters' weights.

    A method without weights need not have `weight_bytes`.
    """
    shape = llm.engine.model.config
    embedding = 0 if shape.tied_head else shape.vocabulary * shape.width * 2
    drafters = llm.engine.spec_manager.methods.values()
    return llm.engine.weight_bytes + embedding + sum(getattr(drafter, "weight_bytes", 0) for drafter in drafters)


def cache_bytes(llm: LLM) -> int:
    """Return the bytes of the KV caches of target and drafters."""
    engine = llm.engine
    storages = [engine.runner.pages, *engine.spec_manager.target.storages]
    return llm.resolved.pages * llm.resolved.page_size * sum(storage.bytes_per_token for storage in storages)
