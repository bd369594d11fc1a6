"""Flags that several commands share, groups of such flags, and the loading of the model that they describe.

Typer makes one flag of every parameter of a function. With `unfold`, a parameter can be a group of flags instead:

    @unfold
    def chat(model: options.Model, engine: EngineFlags = ENGINE, json: options.Json = False) -> None: ...
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from ..config import EngineConfig
from ..errors import UserError
from . import console

if TYPE_CHECKING:
    from ..llm import LLM

# Read from the folder, because importing the registry takes seconds.
METHODS = sorted(module.name for module in iter_modules([str(Path(__file__).parents[1] / "speculation" / "methods")]))
METHOD_NAMES = ", ".join(METHODS)
MODEL_HELP = "Model: a name from the catalog, a hub name such as org/name:Q4_K_M, a folder, a GGUF file, or its URL"

Model = Annotated[str, typer.Option("--model", "-m", help=MODEL_HELP)]
Revision = Annotated[
    str | None, typer.Option(help="Branch, tag or commit of a hub model, as in org/name@REVISION [default: main]")
]
Quantize = Annotated[
    str | None,
    typer.Option(
        "--quantize",
        "--quantization",
        help="Quantize float weights while loading: int8, int4 or fp8; vLLM's names, such as awq, must match the model",
    ),
]
Activations = Annotated[
    str,
    typer.Option(
        help="Precision of the activations beside quantized weights: high, fast (8 bits; on a GPU only with FP8 "
        "weights), or auto (on a CPU fast where it is much faster, else high)"
    ),
]
KvDtype = Annotated[
    str,
    typer.Option(
        "--kv-dtype",
        "--kv-cache-dtype",
        help="Type of the cached keys and values: float32, float16, bfloat16; int8 or fp8 take half the memory of "
        "float16; auto: float16, or float32 beside float32 weights",
    ),
]
Backend = Annotated[
    str, typer.Option(help="Backend: auto (a GPU if there is one), cpu, cuda, or reference (plain torch, slow)")
]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="On a GPU, compute bit-identical results for any batch size")
]
CudagraphMode = Annotated[
    str, typer.Option(metavar="MODE", help="Steps that a GPU runs as CUDA graphs: NONE, FULL_DECODE_ONLY or FULL")
]
EnforceEager = Annotated[
    bool, typer.Option("--enforce-eager", help="Use no CUDA graphs, same as --cudagraph-mode NONE")
]
DecodeSteps = Annotated[
    int | None,
    typer.Option(
        "--decode-steps",
        "--rounds",  # deprecated alias
        help="Decode steps that the device runs without the host, at most [default: chosen for the device]",
    ),
]
Threads = Annotated[int | None, typer.Option(help="CPU threads [default: all cores that this process may use]")]
MaxContext = Annotated[
    int | None,
    typer.Option(
        "--max-context",
        "--max-model-len",
        help="Maximum tokens of prompt and output together [default: the model's limit]",
    ),
]
Speculate = Annotated[
    str | None,
    typer.Option(
        metavar="METHOD[:KEY=VALUE,...]",
        help=f"Draft tokens with this method: {METHOD_NAMES}; options follow, as in eagle3:model=FOLDER; "
        "a+b combines two, none: plain decoding [default: auto, the fastest that was measured for model and device]",
    ),
]
MeasuredMethod = Annotated[
    str | None,
    typer.Option(
        metavar="METHOD[:KEY=VALUE,...]",
        help=f"Measure this drafting method beside plain decoding: {METHOD_NAMES}; auto: the fastest known "
        "[default: none]",
    ),
]
SpeculativeConfig = Annotated[
    str | None,
    typer.Option(metavar="JSON", help="The drafting method as JSON with vLLM's keys, instead of --speculate"),
]
AlwaysDraft = Annotated[
    bool,
    typer.Option(
        "--always-draft",
        help="Draft in every step, even if drafts are not expected to pay; the same as METHOD:adaptive=no",
    ),
]
MaxTokens = Annotated[int, typer.Option(help="Maximum number of tokens to generate")]
Temperature = Annotated[float, typer.Option(help="Sampling temperature; 0 always takes the most probable token")]
TopK = Annotated[int, typer.Option(help="Sample among the K most probable tokens; 0 means all")]
TopP = Annotated[float, typer.Option(help="Sample among the most probable tokens that together have this probability")]
MinP = Annotated[
    float, typer.Option(help="Exclude tokens below this fraction of the probability of the most probable token")
]
Seed = Annotated[int | None, typer.Option(help="Seed for sampling; the same seed gives the same text")]
Stop = Annotated[list[str] | None, typer.Option(help="Stop before this text; may be repeated")]
System = Annotated[str | None, typer.Option(help="System message of the chat")]
Raw = Annotated[bool, typer.Option("--raw", help="Use the prompt as it is, without the chat template")]
Prediction = Annotated[
    str | None,
    typer.Option(metavar="FILE|TEXT", help="Expected output, a file or a text: tokens are drafted from it"),
]
Prompts = Annotated[
    list[str] | None, typer.Argument(help="One or more prompts; `-` reads one from stdin", show_default=False)
]
File = Annotated[
    Path | None, typer.Option(help="Read prompts from this file, one per line, text or JSON; `-` reads stdin")
]
Limit = Annotated[int | None, typer.Option(min=1, help="Use only the first LIMIT prompts")]
Sets = Annotated[list[str] | None, typer.Option(metavar="NAME=FILE", help="A named file of prompts; may be repeated")]
SetLimit = Annotated[int | None, typer.Option(min=1, help="Use only the first LIMIT prompts of each set")]
Batches = Annotated[str, typer.Option(help="Batch sizes to decode with, separated by commas")]
Repeats = Annotated[int, typer.Option(min=1, help="Repetitions, interleaved; the medians are reported")]
Lora = Annotated[
    list[str] | None,
    typer.Option(
        "--lora",
        "--lora-modules",
        metavar="NAME=PATH",
        help="Load a LoRA adapter, a folder that PEFT has saved; requests name it as `model`; may be repeated",
    ),
]
Adapter = Annotated[
    str | None, typer.Option("--lora", metavar="PATH", help="Use this LoRA adapter, a folder that PEFT has saved")
]
EnableLora = Annotated[bool, typer.Option("--enable-lora", help="Make room for adapters that are loaded later")]
MaxLoras = Annotated[int, typer.Option(help="Maximum number of different adapters in one step")]
MaxLoraRank = Annotated[int, typer.Option(help="Maximum rank of an adapter")]
MaxCpuLoras = Annotated[int, typer.Option(help="Maximum number of adapters in memory")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line")]

ANY_RANK = 512  # of the adapter of a command: larger than what people train
DEFAULT_MODEL, DEFAULT_BACKEND = EngineConfig.model, EngineConfig.backend


@dataclass(frozen=True)
class EngineFlags:
    """Flags that set fields of EngineConfig."""

    revision: Revision = EngineConfig.revision
    quantize: Quantize = EngineConfig.quantize
    activations: Activations = EngineConfig.activations
    kv_dtype: KvDtype = EngineConfig.kv_dtype
    backend: Backend = EngineConfig.backend
    deterministic: Deterministic = EngineConfig.deterministic
    cudagraph_mode: CudagraphMode = EngineConfig.cudagraph_mode
    enforce_eager: EnforceEager = EngineConfig.enforce_eager
    decode_steps: DecodeSteps = EngineConfig.decode_steps
    threads: Threads = EngineConfig.threads


@dataclass(frozen=True)
class DraftFlags:
    """Flags that choose the drafting method."""

    speculate: Speculate = None
    speculative_config: SpeculativeConfig = None
    always_draft: AlwaysDraft = EngineConfig.always_draft

    def fields(self, default: str = "auto") -> dict[str, Any]:
        """Return the fields of EngineConfig, with method `default` if neither flag is set."""
        config = None if self.speculative_config is None else read_config(self.speculative_config)
        return {
            "speculate": self.speculate or (default if config is None else "none"),
            "speculative_config": config,
            "always_draft": self.always_draft,
        }

    @property
    def is_auto(self) -> bool:
        """Return whether the engine chooses the method."""
        return self.speculative_config is None and self.speculate in (None, "auto")

    def drafting(self, llm: LLM) -> str:
        """Describe the method in force; if `auto` chose it, say how to choose another."""
        plan = llm.engine.spec_manager.plan
        source = getattr(plan.options, "model", "")
        method = f"{plan.method} with {source}" if source else plan.method
        if method and (layers := llm.engine.spec_manager.methods[plan.method].needs.aux_layers):
            method += f", which reads the states that enter layers {', '.join(map(str, layers))}"
        if method and self.always_draft:
            method += " in every step, whether it pays or not"
        if not self.is_auto:
            return f"drafting: {method or 'none, plain decoding'}"
        if not method:
            return "drafting: none, auto knows no faster method here; `--speculate METHOD` names one"
        return f"drafting: {method}, chosen by auto; `--speculate none` is plain decoding"


@dataclass(frozen=True)
class MeasuredDraftFlags(DraftFlags):
    """Flags of a command that measures plain decoding, and a drafting method only if it is named."""

    speculate: MeasuredMethod = None


@dataclass(frozen=True)
class SamplingFlags:
    """Flags that set fields of SamplingParams."""

    max_tokens: MaxTokens
    temperature: Temperature = 0.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    min_p: MinP = 0.0
    seed: Seed = None


@dataclass(frozen=True)
class LoraFlags:
    """Flags that set the adapters of EngineConfig."""

    lora: Lora = None
    enable_lora: EnableLora = EngineConfig.enable_lora
    max_loras: MaxLoras = EngineConfig.max_loras
    max_lora_rank: MaxLoraRank = EngineConfig.max_lora_rank
    max_cpu_loras: MaxCpuLoras = EngineConfig.max_cpu_loras

    def fields(self) -> dict[str, Any]:
        """Return the fields of EngineConfig."""
        return vars(self) | {"lora": read_loras(self.lora or ())}


ENGINE, DRAFT, MEASURED_DRAFT, LORA = EngineFlags(), DraftFlags(), MeasuredDraftFlags(), LoraFlags()


def adapter_fields(path: str | None) -> dict[str, Any]:
    """Return the fields of EngineConfig for the one adapter of a command, whose name is its path."""
    return {} if path is None else {"lora": {path: path}, "max_loras": 1, "max_lora_rank": ANY_RANK}


def read_loras(values: Iterable[str]) -> dict[str, str] | None:
    """Parse the values of `--lora`: NAME=PATH, or vLLM's JSON with `name` and `path`."""
    found: dict[str, str] = {}
    for value in values:
        name, equals, path = value.partition("=")
        if value.startswith("{"):
            try:
                given = json.loads(value)
                name, equals, path = given["name"], "=", given["path"]
            except (ValueError, RecursionError, KeyError, TypeError):
                equals = ""
        if not (equals and name and path):
            raise UserError(f"`--lora` is `{value}`: expected NAME=PATH, such as `poet=./poet-lora`")
        if name in found:
            raise UserError(f"`--lora` names `{name}` twice: give each adapter a name of its own")
        found[name] = path
    return found or None


def read_config(text: str) -> dict[str, Any]:
    """Parse the value of `--speculative-config`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"`--speculative-config` is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError('`--speculative-config` must be an object, such as `{"method": "ngram"}`')
    return value


def numbers(flag: str, text: str) -> tuple[int, ...]:
    """Parse the value of a flag that takes several numbers."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise UserError(f"`{flag}` is `{text}`: expected whole numbers from 1 up, separated by commas")
    return found


def unfold(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter of `command` that is a group by one parameter per flag; a call collects them again."""
    groups: dict[str, Any] = {}  # parameter -> group with the command's defaults
    flags: list[Parameter] = []
    for parameter in signature(command, eval_str=True).parameters.values():
        group = parameter.default
        if not is_dataclass(group):
            flags.append(parameter)
            continue
        groups[parameter.name] = group
        kinds = get_type_hints(type(group), include_extras=True)
        flags += [
            parameter.replace(name=field.name, default=getattr(group, field.name), annotation=kinds[field.name])
            for field in fields(group)
        ]

    @wraps(command)
    def unfolded(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = replace(group, **{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    unfolded.__signature__ = Signature(flags)  # type: ignore[attr-defined]
    unfolded.__annotations__ = {flag.name: flag.annotation for flag in flags}
    return unfolded


def open_model(model: str, **config: Any) -> LLM:
    """Load a model with these fields of EngineConfig, after downloading it if needed. A terminal shows the progress."""
    from .. import catalog

    model = catalog.with_revision(model, config.pop("revision", None))
    if catalog.is_missing(model):
        with console.download_bar(model) as progress:
            catalog.pull(model, progress=progress)
    with console.bar(f"opening {model}") as progress:
        with importing():
            from ..llm import LLM

        return LLM(model, progress, **config)


@contextmanager
def importing() -> Iterator[None]:
    """Import torch inside this block: garbage collection is off, which makes the import about 10 % faster.

    Afterwards the imported objects are exempt from all further collections, because they stay until the process ends.
    """
    if "torch" in sys.modules:  # freezing now could also exempt objects that become garbage later
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
