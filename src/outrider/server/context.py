"""What every handler needs: the engine, the options, and those who watch."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from ..async_llm import AsyncLLM
from .errors import ApiError
from .guard import Guard
from .health import Health
from .metrics import Metrics
from .options import ServerOptions
from .replies import Texts


@dataclass(frozen=True)
class Context:
    llm: AsyncLLM
    options: ServerOptions  # with a name at least
    guard: Guard
    metrics: Metrics
    health: Health
    texts: Texts
    started: int  # seconds since 1970, for `created` in the list of models

    @property
    def names(self) -> tuple[str, ...]:
        """What the model is called here, the usual name first."""
        return self.options.names

    def check_model(self, name: str | None) -> str:
        """The name to answer with. A request without one means the only model there is."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            known = ", ".join(f"`{each}`" for each in self.names)
            message = f"the model `{name}` is not served here: ask for {known}"
            raise ApiError(404, message, param="model", code="model_not_found", kind="not_found_error")
        return name


def context_of(request: Request) -> Context:
    context: Context = request.app.state.context
    return context
