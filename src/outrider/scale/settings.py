"""Settings of the deployment: from `serve run ... key=value`, the `args` of a config file, or the environment."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, get_type_hints

import msgspec

from ..config import EngineConfig, current_names
from ..errors import UserError
from ..server.options import ServerOptions

ENVIRONMENT_PREFIX = "OUTRIDER_SCALE_"
UNSUPPORTED = {
    "host": "Ray Serve listens, not the replicas: set `http_options.host` in the config file",
    "port": "Ray Serve listens, not the replicas: set `http_options.port` in the config file",
}


@dataclass(frozen=True)
class ScaleSettings:
    """Settings of the deployment. Those of the engine and of the server are passed next to them by their own names."""

    model: str = EngineConfig.model
    min_replicas: int = 1
    max_replicas: int = 1
    target_ongoing_requests: float = 16.0  # per replica: above this replicas are added, below it removed
    upscale_seconds: float = 15.0  # of high load before a replica is added
    downscale_seconds: float = 300.0  # of low load before a replica is removed
    max_ongoing_requests: int = 64  # of one replica; further requests wait in the gateway
    max_queued_requests: int = 256  # that wait in one gateway; further requests get 429
    gateways: int = 1  # processes that receive requests and choose the replica
    cpus: float = 1.0  # per replica, as Ray counts them; also its threads, unless `threads` is set
    gpus: float = 0.0  # per replica
    block: int = 128  # characters of a prompt that are hashed and compared together
    imbalance: int = 8  # requests above the least loaded replica up to which a prefix holder is preferred
    table_blocks: int = 65_536  # prompt blocks that a gateway remembers
    health_period_seconds: float = 10.0
    health_timeout_seconds: float = 30.0
    engine: Mapping[str, Any] = field(default_factory=dict)  # fields of EngineConfig
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
            limit = f"`max_replicas` ({self.max_replicas})"
            raise UserError(f"`min_replicas` is {self.min_replicas}, above {limit}: raise `max_replicas` too")

    @property
    def scales(self) -> bool:
        """Whether the number of replicas is adapted to the load."""
        return self.min_replicas < self.max_replicas

    @property
    def requests_per_gateway(self) -> int:
        """Requests that one gateway may have at one replica."""
        return math.ceil(self.max_ongoing_requests / self.gateways)

    @property
    def engine_options(self) -> dict[str, Any]:
        """Options of EngineConfig. Replicas may share a machine, so each uses only the cores that Ray counts for it."""
        return {"threads": max(1, int(self.cpus)), **self.engine}


def read_settings(arguments: Mapping[str, Any], environment: Mapping[str, str]) -> ScaleSettings:
    """Read the settings of deployment, engine and server from one set of names; arguments override the environment."""
    values: dict[str, Any] = {
        name.removeprefix(ENVIRONMENT_PREFIX).lower(): value
        for name, value in environment.items()
        if name.startswith(ENVIRONMENT_PREFIX)
    }
    values.update(arguments)
    values = current_names(values)
    deployment = fields_of(ScaleSettings, without=("engine", "server"))
    server = fields_of(ServerOptions, without=tuple(UNSUPPORTED))
    engine = fields_of(EngineConfig, without=("model",))
    for name in values:
        if name in UNSUPPORTED:
            raise UserError(f"`{name}` does not apply to this deployment: {UNSUPPORTED[name]}")
        if not (name in deployment or name in server or name in engine):
            close = get_close_matches(name, [*deployment, *server, *engine], n=1)
            hint = f"did you mean `{close[0]}`?" if close else "docs/scale.md lists all settings"
            raise UserError(f"`{name}` is not a setting of this deployment: {hint}")
    return ScaleSettings(
        **convert_all(values, deployment),
        engine=convert_all(values, {name: kind for name, kind in engine.items() if name not in server}),
        server=ServerOptions(**convert_all(values, server)),
    )


def fields_of(kind: type, without: tuple[str, ...]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind) if field.name not in without}


def convert_all(values: Mapping[str, Any], kinds: Mapping[str, Any]) -> dict[str, Any]:
    return {name: convert(name, values[name], kind) for name, kind in kinds.items() if name in values}


def convert(name: str, value: Any, kind: Any) -> Any:
    """Convert a value, which is text on the command line: lists are split at commas, objects are parsed as JSON."""
    try:
        if isinstance(value, str) and value.startswith("{"):
            value = msgspec.json.decode(value)
        elif isinstance(value, str) and kind == tuple[str, ...]:
            value = [item.strip() for item in value.split(",")]
        return msgspec.convert(value, kind, strict=False)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise UserError(f"`{name}` is `{value}`: {str(error).replace('Expected', 'expected', 1)}") from None
