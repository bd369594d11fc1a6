"""`outrider doctor`: report versions, processor, GPU, models and advice on speed; or describe a draft head."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .. import __version__, catalog
from ..device import choose_backend, cuda
from ..kernels import cpu
from ..llm import LLM
from ..models import read_config
from ..speculation.checkpoints import command, open_head
from ..speculation.checkpoints import describe as describe_head
from ..weights import open_checkpoint
from .machine import host_bandwidth, host_facts

PACKAGES = ("torch", "triton", "numpy", "tokenizers", "safetensors", "transformers")

ADVICE = {
    "portable": "no vector instructions in use: every kernel is plain C++, several times slower",
    "neon": "128-bit vectors with int8 dot products: quantised models are fast, steps with many tokens cost more",
    "i8mm": "128-bit vectors with int8 matrix instructions: quantised models are fast, prompts faster than at neon",
    "avx2": "256-bit vectors without int8 dot products: decoding is fast, long prompts are not",
    "avx512": "512-bit vectors with int8 dot products (VNNI): quantised models are fast",
    "amx": "int8 and bf16 tiles: a step with 16 tokens costs about as much as a step with one",
}


def examine() -> dict[str, Any]:
    """Collect versions, machine, GPU, cached models and findings."""
    machine = host_facts()
    available = list(cpu.facts()["levels"])
    bandwidth = host_bandwidth().bytes_per_second
    return {
        "versions": {
            "outrider": __version__,
            "python": platform.python_version(),
            **{name: installed(name) for name in PACKAGES},
        },
        "machine": {**machine, "available_levels": available, "bandwidth_gb_per_second": bandwidth / 1e9},
        "gpu": cuda.describe(),
        "backend": choose_backend("auto"),
        "models": [{"name": name, "path": str(path)} for name, path in cached_models()],
        "findings": findings(machine, available),
    }


def examine_head(source: str, model: str | None = None) -> dict[str, Any]:
    """Describe a draft head; with `model`, load both and refuse a head that does not fit."""
    head = open_head(source)
    if model is None:
        return {"head": dict(describe_head(head)), "model": None, "use": command(head, "MODEL")}
    open_head(
        source, read_config(open_checkpoint(model).config)
    )  # refuse a head of another shape before loading the model
    llm = LLM(model, speculative_config={"method": head.shape.kind, "model": str(head.path)})
    return {"head": dict(describe_head(head, llm.engine.model)), "model": model, "use": command(head, model)}


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def cached_models() -> list[tuple[str, Path]]:
    return [(model.name, model.path) for model in catalog.pulled()]


def default_backend() -> str:
    """Return the backend that `auto` resolves to and the reason."""
    reason = cuda.why_unavailable()
    if reason is not None:
        return f"`auto` is `cpu`: {reason}"
    return "`auto` is `cuda`: models run on the GPU (`--backend cpu` to run on the CPU)"


def findings(machine: dict[str, Any], available: list[str]) -> list[str]:
    """Return what is fast on this machine and why, and what would make it faster."""
    level = machine["level"]
    found = [default_backend(), f"{level}: {ADVICE[level]}"]
    if level != available[-1]:
        found.append(f"`OUTRIDER_ISA` holds the kernels at {level}: unset it to use {available[-1]}")
    if machine["threads"] < machine["cores"]:
        found.append(f"{machine['threads']} of {machine['cores']} cores are used: unset `OUTRIDER_THREADS` for all")
    if machine["threads"] > machine["cores"]:
        found.append(f"{machine['threads']} threads share {machine['cores']} cores: lower `OUTRIDER_THREADS`")
    if not cached_models():
        found.append("no model is in the cache: run `outrider pull smollm2-135m`")
    return found
