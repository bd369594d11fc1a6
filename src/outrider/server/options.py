"""Settings of the HTTP server. Imports no web framework, so that `outrider serve --help` starts quickly."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import UserError

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")


@dataclass(frozen=True)
class ServerOptions:
    """Settings of the server; those of the engine are in `EngineConfig`."""

    host: str = "127.0.0.1"
    port: int = 8000
    names: tuple[str, ...] = ()  # model names that requests may use; empty: the model as it was given
    api_keys: tuple[str, ...] = ()  # accepted API keys; empty: no authentication
    max_body_bytes: int = 4 * 2**20
    max_waiting: int = 256  # queued requests above which new ones get status 429
    max_prompt_tokens: int | None = None  # None: the context length
    max_tokens: int | None = None  # upper limit of a request's `max_tokens`; None: the context length
    allow_lora_updates: bool = False  # clients may load adapters from this machine's folders, and unload them
    max_stored_responses: int = 1000  # responses of `/v1/responses` that clients may continue; 0: none is stored
    receive_seconds: float = 30.0  # time limit for the head of a request to arrive, and again for its body
    send_seconds: float = 30.0  # time after which a client that reads nothing of its response is disconnected
    drain_seconds: float = 30.0  # time that running requests get to finish after SIGTERM
    allow_origins: tuple[str, ...] = ()  # web origins that may call this server; "*": all
    reasoning_format: str = "auto"  # "none": leave <think> blocks in the content; "auto": split them off
    playground: bool = True
    log_requests: bool = True
    log_json: bool = False  # write the request log as JSON lines
    otlp_traces_endpoint: str | None = None  # URL of an OpenTelemetry collector; None: no traces

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_texts()

    def _check_numbers(self) -> None:
        if not 0 <= self.port < 2**16:
            raise UserError(f"`port` is {self.port}: it must lie between 0 (any free one) and 65535")
        for name in ("max_body_bytes", "max_waiting", "max_prompt_tokens", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"`{name}` is {value}: it must be at least 1")
        for name in ("max_stored_responses", "drain_seconds"):
            if not getattr(self, name) >= 0:
                raise UserError(f"`{name}` is {getattr(self, name)}: it must be 0 or more")
        for name in ("receive_seconds", "send_seconds"):
            if not getattr(self, name) > 0:
                raise UserError(f"`{name}` is {getattr(self, name)}: it must be above 0")

    def _check_texts(self) -> None:
        if self.reasoning_format not in ("auto", "none"):
            raise UserError(f"`reasoning_format` is `{self.reasoning_format}`: expected `auto` or `none`")
        if self.otlp_traces_endpoint is not None and "://" not in self.otlp_traces_endpoint:
            raise UserError(
                f"`otlp_traces_endpoint` is `{self.otlp_traces_endpoint}`: expected a URL, such as "
                "`http://localhost:4317`"
            )
        for origin in self.allow_origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise UserError(f"`{origin}` is not a web origin: expected `https://host`, without a path, or `*`")
        for name in ("names", "api_keys"):
            if not all(getattr(self, name)):
                raise UserError(f"`{name}` contains an empty string: remove it, or write at least one character")
