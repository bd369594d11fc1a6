"""The flags that several commands share, and the model that they open."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import EngineConfig
from ..types import UserError
from . import say, start

if TYPE_CHECKING:
    from ..engine import LLM

Model = Annotated[str, typer.Option("--model", "-m", help="Catalog name, hub name, HF folder or GGUF file")]
Quantize = Annotated[str | None, typer.Option(help="Quantise float weights while loading: int8 or int4")]
Backend = Annotated[str, typer.Option(help="auto (the GPU if there is one), cpu, cuda, or reference (torch, slow)")]
Deterministic = Annotated[bool, typer.Option("--deterministic", help="On a GPU: the same bits in any batch")]
CudagraphMode = Annotated[
    str, typer.Option(metavar="MODE", help="What a GPU replays as graphs: NONE, FULL_DECODE_ONLY or FULL")
]
EnforceEager = Annotated[bool, typer.Option("--enforce-eager", help="The same as --cudagraph-mode NONE")]
Rounds = Annotated[
    int | None, typer.Option(help="Steps in a row without the host, at most [default: what suits the device]")
]
Threads = Annotated[int | None, typer.Option(help="Threads [default: the cores that this process may use]")]
MaxContext = Annotated[int | None, typer.Option(help="Tokens of prompt and output together [default: the model's own]")]
Speculate = Annotated[
    str | None, typer.Option(metavar="METHOD[:KEY=VALUE,...]", help="Who drafts; `none`, the default: plain decoding")
]
SpeculativeConfig = Annotated[str | None, typer.Option(metavar="JSON", help="The same as JSON, with vLLM's keys")]
MaxTokens = Annotated[int, typer.Option(help="Tokens to generate at most")]
TopK = Annotated[int, typer.Option(help="Sample among the K likeliest tokens; 0: all")]
TopP = Annotated[float, typer.Option(help="Sample among the likeliest tokens that together reach this probability")]
MinP = Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest one's probability")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same text")]
System = Annotated[str | None, typer.Option(help="System message of the chat")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line")]

DEFAULT_MODEL, DEFAULT_BACKEND, DEFAULT_GRAPHS = EngineConfig.model, EngineConfig.backend, EngineConfig.cudagraph_mode


def speculation(speculate: str | None, config: str | None) -> dict[str, Any]:
    """The two flags as fields of EngineConfig, which holds them against each other."""
    return {"speculate": speculate or "none", "speculative_config": None if config is None else read_config(config)}


def read_config(given: str) -> dict[str, Any]:
    try:
        value = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise UserError(f"`--speculative-config` is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError('`--speculative-config` must be an object, such as `{"method": "ngram"}`')
    return value


def open_model(model: str, **fields: Any) -> LLM:
    """`fields` are those of EngineConfig. On a terminal a bar shows how far it is."""
    with say.bar(f"opening {model}") as progress:
        with start.importing():
            from ..engine import LLM

        return LLM(model, progress, **fields)


def messages(prompt: str, system: str | None) -> list[dict[str, str]]:
    opening = [] if system is None else [{"role": "system", "content": system}]
    return [*opening, {"role": "user", "content": prompt}]
