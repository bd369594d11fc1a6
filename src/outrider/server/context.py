"""What every handler needs: the engine, the options, and those who watch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.requests import Request

from ..async_llm import AsyncLLM
from ..tokenizer import Tokenizer
from .admission import Guard
from .api.errors import ApiError
from .metrics import Metrics
from .options import ServerOptions

# A step may be a long piece of a prompt on a slow machine, or wait for kernels to be compiled.
STEP_LIMIT = 300.0


class Health:
    """Red when the engine's thread is gone, hangs in a step, or the server is being shut down."""

    def __init__(self, llm: AsyncLLM, step_limit: float = STEP_LIMIT) -> None:
        self.llm, self.step_limit = llm, step_limit
        self.draining = False

    @property
    def ok(self) -> bool:
        return self.reason is None

    @property
    def dead(self) -> bool:
        """Whether no later look could find it well."""
        return not self.llm.alive

    @property
    def reason(self) -> str | None:
        """What is wrong, in a sentence; None if nothing is."""
        if self.llm.failure is not None:
            return f"the engine died: {type(self.llm.failure).__name__}"
        if not self.llm.alive:
            return "the engine is closed"
        if self.llm.stuck_seconds > self.step_limit:
            return f"the engine has been in one step for {self.llm.stuck_seconds:.0f} seconds"
        if self.draining:
            return "the server is shutting down"
        return None


KNOWN_TOKENS = 2**16


class Texts:
    """Tokens as they read, remembered: the same few thousand come again and again."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.text: Callable[[int], str] = functools.lru_cache(KNOWN_TOKENS)(tokenizer.token_text)
        self.spellings = functools.cache(tokenizer.spellings)

    def bytes(self, token: int) -> list[int]:
        known = self.spellings()
        return list(known[token]) if token < len(known) else []  # models may have more rows than there are tokens

    def of(self, tokens: Sequence[int]) -> list[str]:
        return [self.text(token) for token in tokens]


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
