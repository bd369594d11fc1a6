"""Limits the prompt tokens of a step beside requests that decode, so that a long prompt does not stall their streams.

Results do not depend on how a prompt is cut, so the limit can follow the measured speed. No torch here.
"""

from __future__ import annotations

from .request import Step

# Seconds of a step that reads a part of a prompt beside decoding requests: the time between two tokens of their
# streams. Four tokens a second can still be read along; shorter steps would read the prompt at a lower speed.
STEP_SECONDS = 0.25
# Tokens that such a step reads at least, and the number before any is measured. Fewer rows do not fill the CPU kernels:
# a prompt token costs more in steps of 16.
LEAST_TOKENS, FIRST_TOKENS = 32, 64


class PromptChunks:
    """The latest seconds per token of steps with many tokens, and the limit that follows from them."""

    def __init__(self, step_tokens: int) -> None:
        self.step_tokens = step_tokens  # of the largest step
        self.seconds_per_token: float | None = None

    def observe(self, step: Step, seconds: float) -> None:
        """Note the time of a step. Steps of few tokens are limited by memory and say nothing about prompts."""
        count = sum([row.size for row in step.rows])
        if step.decode_steps == 1 and count >= LEAST_TOKENS:
            self.seconds_per_token = seconds / count

    def limit(self, decoding: int) -> int:
        """Return the prompt tokens of a step beside `decoding` requests."""
        if self.seconds_per_token is None:
            return min(FIRST_TOKENS, self.step_tokens)
        affordable = int(STEP_SECONDS / max(self.seconds_per_token, 1e-9)) - decoding
        return min(max(affordable, LEAST_TOKENS), self.step_tokens)
