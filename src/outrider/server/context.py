"""State that all request handlers share: the engine, the options, admission, metrics, health."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from ..async_llm import AsyncLLM
from ..tokenizer import TokenTexts
from .admission import Admission
from .api.errors import ApiError
from .metrics import Metrics
from .options import ServerOptions
from .response_store import ResponseStore

# Seconds in one engine step before `/health` fails. Long, because a step may process a long prompt chunk on a slow
# machine, or wait until kernels are compiled.
STEP_LIMIT = 300.0


class Health:
    """Fails when the engine's thread has died or hangs in a step, and while the server shuts down."""

    def __init__(self, llm: AsyncLLM, step_limit: float = STEP_LIMIT) -> None:
        self.llm, self.step_limit = llm, step_limit
        self.draining = False

    @property
    def ok(self) -> bool:
        return self.reason is None

    @property
    def dead(self) -> bool:
        """Whether the engine has ended and will not recover."""
        return not self.llm.alive

    @property
    def reason(self) -> str | None:
        """The problem in one sentence, or None."""
        if self.llm.failure is not None:
            return f"the engine died: {type(self.llm.failure).__name__}"
        if not self.llm.alive:
            return "the engine is closed"
        if self.llm.stuck_seconds > self.step_limit:
            return f"the engine has been in one step for {self.llm.stuck_seconds:.0f} seconds"
        if self.draining:
            return "the server is shutting down"
        return None


@dataclass(frozen=True)
class Context:
    llm: AsyncLLM
    options: ServerOptions  # with at least one name
    admission: Admission
    metrics: Metrics
    health: Health
    texts: TokenTexts
    responses: ResponseStore
    started: int  # Unix time, returned as `created` of the models

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the served model, the default name first."""
        return self.options.names

    def check_model(self, name: str | None) -> str:
        """Return the model name for the response; raise 404 if `name` is not served. None means the default."""
        if name is None:
            return self.names[0]
        adapters = self.llm.engine.adapters.loaded
        if name not in self.names and name not in adapters:
            served = ", ".join(f"`{served}`" for served in (*self.names, *adapters))
            message = f"the model `{name}` is not served here: use {served}"
            raise ApiError(404, message, param="model", code="model_not_found", kind="not_found_error")
        return name

    def adapter_of(self, model: str) -> str | None:
        """Return the adapter that the name of a model means; None: the model itself."""
        if model in self.names:
            return None
        adapters = self.llm.engine.adapters.loaded
        untagged = model.removesuffix(":latest")  # of Ollama's clients
        return next((name for name in (model, untagged) if name in adapters), None)


def context_of(request: Request) -> Context:
    context: Context = request.app.state.context
    return context
