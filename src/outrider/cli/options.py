"""The flags that several commands share, and the model that they open."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import EngineConfig
from ..errors import UserError
from . import say, start

if TYPE_CHECKING:
    from ..llm import LLM

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
    with say.bar(f"opening {model}") as progress:
        with start.importing():
            from ..llm import LLM

        return LLM(model, progress, **fields)
