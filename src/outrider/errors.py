"""Errors that tell a user to change a request or an option."""

from __future__ import annotations

from collections.abc import Sequence

MAX_MESSAGE_LENGTH = 1000  # characters; limits how much a hostile file can put into an error message


class UserError(ValueError):
    """A request or an option that cannot be served. The message is one sentence that names the remedy."""

    def __init__(self, message: str) -> None:
        text = "".join(char if char.isprintable() else " " if char.isspace() else "?" for char in message)
        if len(text) > MAX_MESSAGE_LENGTH:  # keep the start, which names the cause, and the end, which names the remedy
            text = f"{text[: MAX_MESSAGE_LENGTH // 2]} ... {text[-MAX_MESSAGE_LENGTH // 3 :]}"
        super().__init__(text)


class PromptError(UserError):
    """A prompt that cannot be served, while others of its batch can. `tokens`: its tokens, as far as they are known."""

    def __init__(self, reason: str, name: str = "the prompt", tokens: Sequence[int] = ()) -> None:
        super().__init__(f"{name} {reason}")
        self.reason, self.tokens = reason, list(tokens)


class ContextLengthError(PromptError):
    """A prompt that is longer than the context."""
