"""Flags that go together, as one value, and how a command takes them.

Typer makes a flag of every parameter of a function. `unfold` lets a command have a group as its parameter instead, with
the command's own defaults in the parameter's:

    @unfold
    def chat(model: options.Model, engine: EngineFlags = ENGINE, json: options.Json = False) -> None: ...
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints

from ..config import EngineConfig
from ..errors import UserError
from . import options


@dataclass(frozen=True)
class EngineFlags:
    """How the model is run. The fields are EngineConfig's."""

    quantize: options.Quantize = EngineConfig.quantize
    backend: options.Backend = EngineConfig.backend
    deterministic: options.Deterministic = EngineConfig.deterministic
    cudagraph_mode: options.CudagraphMode = EngineConfig.cudagraph_mode
    enforce_eager: options.EnforceEager = EngineConfig.enforce_eager
    decode_steps: options.DecodeSteps = EngineConfig.decode_steps
    threads: options.Threads = EngineConfig.threads


@dataclass(frozen=True)
class DraftFlags:
    speculate: options.Speculate = None
    speculative_config: options.SpeculativeConfig = None

    def fields(self, otherwise: str = "none") -> dict[str, Any]:
        """Those of EngineConfig, which holds the two against each other. otherwise: who drafts when neither says."""
        config = None if self.speculative_config is None else read_config(self.speculative_config)
        return {"speculate": self.speculate or (otherwise if config is None else "none"), "speculative_config": config}


@dataclass(frozen=True)
class SamplingFlags:
    """The fields are SamplingParams'."""

    max_tokens: options.MaxTokens
    temperature: options.Temperature = 0.0
    top_k: options.TopK = 0
    top_p: options.TopP = 1.0
    min_p: options.MinP = 0.0
    seed: options.Seed = None


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
