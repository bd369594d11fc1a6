"""How much memory an engine takes beside what nobody can do without."""

from __future__ import annotations

from ..llm import LLM


def beyond_weights(llm: LLM, free_before: int) -> int | None:
    """Bytes taken since the device had `free_before`, less weights and caches.

    None on the host, where memory is taken when it is first touched and other programs come and go.
    """
    engine = llm.engine
    if engine.device.torch_device.type == "cpu":
        return None
    taken = free_before - engine.device.free_bytes()
    return taken - weight_bytes(llm) - cache_bytes(llm)


def weight_bytes(llm: LLM) -> int:
    """Of the target, an embedding that is no head included, and of a drafter's network."""
    shape = llm.engine.model.config
    embedding = 0 if shape.tied_head else shape.vocabulary * shape.width * 2
    networks = [getattr(method, "network", None) for method in llm.engine.spec_manager.methods.values()]
    return llm.engine.weight_bytes + embedding + sum(getattr(each, "weight_bytes", 0) for each in networks)


def cache_bytes(llm: LLM) -> int:
    engine = llm.engine
    storages = [engine.runner.pages, *engine.spec_manager.target.storages]
    return llm.resolved.pages * llm.resolved.page_size * sum(storage.bytes_per_token for storage in storages)
