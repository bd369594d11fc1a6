"""The flags that several commands share, and the model that they open."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from ..config import EngineConfig
from ..errors import UserError
from . import console

if TYPE_CHECKING:
    from ..llm import LLM


@contextmanager
def importing() -> Iterator[None]:
    """Import torch in here. What it makes stays for good: searching it for garbage takes a tenth of the time in vain.

    So it would later on: what is there in the end is left out of every search to come.
    """
    if "torch" in sys.modules:  # then there may be garbage among what would be left out
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


Model = Annotated[str, typer.Option("--model", "-m", help="Catalog name, hub name, HF folder or GGUF file")]
Quantize = Annotated[str | None, typer.Option(help="Quantise float weights while loading: int8 or int4")]
Backend = Annotated[str, typer.Option(help="auto (the GPU if there is one), cpu, cuda, or reference (torch, slow)")]
Deterministic = Annotated[bool, typer.Option("--deterministic", help="On a GPU: the same bits in any batch")]
CudagraphMode = Annotated[
    str, typer.Option(metavar="MODE", help="What a GPU replays as graphs: NONE, FULL_DECODE_ONLY or FULL")
]
EnforceEager = Annotated[bool, typer.Option("--enforce-eager", help="The same as --cudagraph-mode NONE")]
DecodeSteps = Annotated[
    int | None,
    typer.Option(
        "--decode-steps",
        "--rounds",  # deprecated alias
        help="Decode steps that the device runs without the host, at most [default: chosen for the device]",
    ),
]
Threads = Annotated[int | None, typer.Option(help="Threads [default: the cores that this process may use]")]
MaxContext = Annotated[int | None, typer.Option(help="Tokens of prompt and output together [default: the model's own]")]
Speculate = Annotated[
    str | None, typer.Option(metavar="METHOD[:KEY=VALUE,...]", help="Who drafts; `none`, the default: plain decoding")
]
SpeculativeConfig = Annotated[str | None, typer.Option(metavar="JSON", help="The same as JSON, with vLLM's keys")]
MaxTokens = Annotated[int, typer.Option(help="Tokens to generate at most")]
Temperature = Annotated[float, typer.Option(help="0 always takes the likeliest token")]
TopK = Annotated[int, typer.Option(help="Sample among the K likeliest tokens; 0: all")]
TopP = Annotated[float, typer.Option(help="Sample among the likeliest tokens that together reach this probability")]
MinP = Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest one's probability")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same text")]
Stop = Annotated[list[str] | None, typer.Option(help="Stop before this text; may be given several times")]
System = Annotated[str | None, typer.Option(help="System message of the chat")]
Raw = Annotated[bool, typer.Option("--raw", help="No chat template")]
Prediction = Annotated[
    str | None, typer.Option(metavar="FILE|TEXT", help="What the answer is expected to repeat, to draft from")
]
Prompts = Annotated[list[str] | None, typer.Argument(help="One or more prompts", show_default=False)]
File = Annotated[Path | None, typer.Option(help="Prompts, one a line, text or JSON; `-` reads stdin")]
Limit = Annotated[int | None, typer.Option(min=1, help="Use the first prompts only")]
Sets = Annotated[
    list[str] | None, typer.Option(metavar="NAME=FILE", help="A set of prompts; may be given several times")
]
SetLimit = Annotated[int | None, typer.Option(min=1, help="Use the first prompts of each set only")]
Batches = Annotated[str, typer.Option(help="Batch sizes to decode with")]
Repeats = Annotated[int, typer.Option(min=1, help="Interleaved rounds; figures are their medians")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line")]

DEFAULT_MODEL, DEFAULT_BACKEND = EngineConfig.model, EngineConfig.backend


def batch_sizes(given: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in given.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise UserError(f"`--batch` is `{given}`: expected whole numbers from 1 up, separated by commas")
    return sizes


def open_model(model: str, **fields: Any) -> LLM:
    """`fields` are those of EngineConfig. On a terminal a bar shows how far it is."""
    with console.bar(f"opening {model}") as progress:
        with importing():
            from ..llm import LLM

        return LLM(model, progress, **fields)


@dataclass(frozen=True)
class EngineFlags:
    """How the model is run. The fields are EngineConfig's."""

    quantize: Quantize = EngineConfig.quantize
    backend: Backend = EngineConfig.backend
    deterministic: Deterministic = EngineConfig.deterministic
    cudagraph_mode: CudagraphMode = EngineConfig.cudagraph_mode
    enforce_eager: EnforceEager = EngineConfig.enforce_eager
    decode_steps: DecodeSteps = EngineConfig.decode_steps
    threads: Threads = EngineConfig.threads


@dataclass(frozen=True)
class DraftFlags:
    speculate: Speculate = None
    speculative_config: SpeculativeConfig = None

    def fields(self, otherwise: str = "none") -> dict[str, Any]:
        """Those of EngineConfig, which holds the two against each other. otherwise: who drafts when neither says."""
        config = None if self.speculative_config is None else read_config(self.speculative_config)
        return {"speculate": self.speculate or (otherwise if config is None else "none"), "speculative_config": config}


@dataclass(frozen=True)
class SamplingFlags:
    """The fields are SamplingParams'."""

    max_tokens: MaxTokens
    temperature: Temperature = 0.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    min_p: MinP = 0.0
    seed: Seed = None


def read_config(given: str) -> dict[str, Any]:
    try:
        value = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise UserError(f"`--speculative-config` is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError('`--speculative-config` must be an object, such as `{"method": "ngram"}`')
    return value


ENGINE, DRAFT = EngineFlags(), DraftFlags()


def unfold(command: Callable[..., None]) -> Callable[..., None]:
    """The command with a parameter for each field of its groups, in their place; called, it gathers them again."""
    groups: dict[str, Any] = {}  # by parameter, with the defaults of this command
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
    def unfolded(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = replace(group, **{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    unfolded.__signature__ = Signature(flags)  # type: ignore[attr-defined]
    unfolded.__annotations__ = {flag.name: flag.annotation for flag in flags}
    return unfolded
