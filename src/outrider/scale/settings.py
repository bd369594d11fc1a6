"""What the deployment was asked to be: from `serve run ... key=value`, a config file's `args`, or the environment."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, get_type_hints

import msgspec

from ..config import EngineConfig, current_names
from ..errors import UserError
from ..server.options import ServerOptions

PREFIX = "OUTRIDER_SCALE_"
NOT_HERE = {
    "host": "Ray Serve listens, not the replica: set `http_options.host` in the config file",
    "port": "Ray Serve listens, not the replica: set `http_options.port` in the config file",
}


@dataclass(frozen=True)
class ScaleSettings:
    """The flags of the deployment. Those of the engine and of the server are given beside them, by their own names."""

    model: str = EngineConfig.model
    min_replicas: int = 1
    max_replicas: int = 1
    target_ongoing_requests: float = 16.0  # a replica: above it replicas are added, below it some are let go
    upscale_seconds: float = 15.0  # that the load must be high before a replica is added
    downscale_seconds: float = 300.0  # that it must be low before one is let go
    max_ongoing_requests: int = 64  # that a replica gets at a time; more wait at the gateway
    max_queued_requests: int = 256  # that wait at a gateway; more are turned away with 429
    gateways: int = 1  # processes that read requests and choose the replica
    cpus: float = 1.0  # of a replica, as Ray counts them; also its threads, unless `threads` says otherwise
    gpus: float = 0.0  # of a replica
    block: int = 128  # characters of a prompt that are compared at a time
    imbalance: int = 8  # requests that the holder of a prefix may have above the least loaded replica
    table_blocks: int = 65_536  # blocks that a gateway remembers
    health_period_seconds: float = 10.0
    health_timeout_seconds: float = 30.0
    engine: Mapping[str, Any] = field(default_factory=dict)  # of EngineConfig
    server: ServerOptions = field(default_factory=ServerOptions)

    def __post_init__(self) -> None:
        for name in ("max_replicas", "max_ongoing_requests", "gateways", "block", "table_blocks"):
            if getattr(self, name) < 1:
                raise UserError(f"`{name}` is {getattr(self, name)}: it must be at least 1")
        for name in (
            "min_replicas",
            "max_queued_requests",
            "imbalance",
            "cpus",
            "gpus",
            "upscale_seconds",
            "downscale_seconds",
        ):
            if not getattr(self, name) >= 0:
                raise UserError(f"`{name}` is {getattr(self, name)}: it must be 0 or more")
        for name in ("target_ongoing_requests", "health_period_seconds", "health_timeout_seconds"):
            if not getattr(self, name) > 0:
                raise UserError(f"`{name}` is {getattr(self, name)}: it must be above 0")
        if self.min_replicas > self.max_replicas:
            raise UserError(
                f"`min_replicas` is {self.min_replicas}, above `max_replicas` ({self.max_replicas}): raise that too"
            )

    @property
    def scales(self) -> bool:
        return self.min_replicas < self.max_replicas

    @property
    def share(self) -> int:
        """Requests that one gateway may have at one replica."""
        return math.ceil(self.max_ongoing_requests / self.gateways)

    @property
    def engine_options(self) -> dict[str, Any]:
        """Several replicas may share a machine: each takes the cores that Ray counted for it."""
        return {"threads": max(1, int(self.cpus)), **self.engine}


def app(arguments: Mapping[str, Any]) -> Any:
    """Build the Ray Serve application from the `args` of `serve run` or of a config file."""
    from .deployment import build  # imports Ray, which is an optional dependency

    return build(read_settings(arguments, os.environ))


def read_settings(arguments: Mapping[str, Any], environment: Mapping[str, str]) -> ScaleSettings:
    """One flat list of names for the deployment, the engine and the server; arguments win over the environment."""
    given: dict[str, Any] = {
        name.removeprefix(PREFIX).lower(): value for name, value in environment.items() if name.startswith(PREFIX)
    }
    given.update(arguments)
    given = current_names(given)
    own = fields_of(ScaleSettings, without=("engine", "server"))
    server = fields_of(ServerOptions, without=tuple(NOT_HERE))
    engine = fields_of(EngineConfig, without=("model",))
    for name in given:
        if name in NOT_HERE:
            raise UserError(f"`{name}` has no meaning in this deployment: {NOT_HERE[name]}")
        if not (name in own or name in server or name in engine):
            close = get_close_matches(name, [*own, *server, *engine], n=1)
            hint = f"did you mean `{close[0]}`?" if close else "docs/scale.md lists those that are"
            raise UserError(f"`{name}` is no setting of this deployment: {hint}")
    return ScaleSettings(
        **taken(given, own),
        engine=taken(given, {name: kind for name, kind in engine.items() if name not in server}),
        server=ServerOptions(**taken(given, server)),
    )


def fields_of(kind: type, without: tuple[str, ...]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind) if each.name not in without}


def taken(given: Mapping[str, Any], kinds: Mapping[str, Any]) -> dict[str, Any]:
    return {name: convert(name, given[name], kind) for name, kind in kinds.items() if name in given}


def convert(name: str, value: Any, kind: Any) -> Any:
    """Command lines and the environment hold text only: lists are split at commas, objects are read as JSON."""
    try:
        if isinstance(value, str) and value.startswith("{"):
            value = msgspec.json.decode(value)
        elif isinstance(value, str) and kind == tuple[str, ...]:
            value = [item.strip() for item in value.split(",")]
        return msgspec.convert(value, kind, strict=False)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise UserError(f"`{name}` is `{value}`: {str(error).replace('Expected', 'expected', 1)}") from None
