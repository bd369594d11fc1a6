"""Whether this server can still answer."""

from __future__ import annotations

from ..async_llm import AsyncLLM

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
