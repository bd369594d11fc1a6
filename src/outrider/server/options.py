"""What the server was asked to be."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UserError


@dataclass(frozen=True)
class ServerOptions:
    """The flags of the server; those of the engine are EngineConfig's."""

    host: str = "127.0.0.1"
    port: int = 8000
    names: tuple[str, ...] = ()  # what the model is called in requests; empty: as it was given
    api_keys: tuple[str, ...] = ()  # empty: everybody may ask
    max_body_bytes: int = 4 * 2**20
    max_waiting: int = 256  # requests in the queue before newcomers are turned away
    max_prompt_tokens: int | None = None  # None: what the context holds
    max_tokens: int | None = None  # that a request may ask for; None: what the context holds
    receive_seconds: float = 30.0  # for a request to arrive, head and body each
    drain_seconds: float = 30.0  # for requests that run when the server is told to stop
    playground: bool = True
    log_requests: bool = True
    log_json: bool = False  # a request's line as JSON

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise UserError(f"`port` is {self.port}: it must lie between 0 (any free one) and 65535")
        for name in ("max_body_bytes", "max_waiting", "max_prompt_tokens", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"`{name}` is {value}: it must be at least 1")
        if not self.drain_seconds >= 0:
            raise UserError(f"`drain_seconds` is {self.drain_seconds}: it must be 0 or more")
        if not self.receive_seconds > 0:
            raise UserError(f"`receive_seconds` is {self.receive_seconds}: it must be above 0")
        for name in ("names", "api_keys"):
            if not all(getattr(self, name)):
                raise UserError(f"`{name}` holds an empty text: leave it out, or give it a character")
