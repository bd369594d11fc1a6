"""An engine that generates a given text, for tests of what the server makes of answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from outrider import AsyncLLM, SamplingParams
from outrider.types import Completion, Output


class Scripted(AsyncLLM):
    """An engine that generates a given text, a few characters per step."""

    script = ""
    prompt: list[int]
    params: SamplingParams

    async def generate(self, prompt: Any, params: Any = None, *rest: Any, **more: Any) -> AsyncIterator[Output]:
        self.prompt, self.params = prompt, params
        for end in range(0, len(self.script) + 4, 4):
            last = end >= len(self.script)
            one = Completion(0, self.script[:end], [5] * (end // 4 + 1), "stop" if last else None)
            yield Output("1", None, prompt, [one], finished=last)
