"""Outrider itself, run in the same way as its peers."""

from __future__ import annotations

from typing import Any

import outrider

SPARE = 64  # cache slots of a request beyond its text, for drafts


class Worker:
    def open(
        self, model: str, threads: int, context: int, batch: int, speculate: bool, method: str, **fields: Any
    ) -> dict[str, Any]:
        self.llm = outrider.LLM(
            model,
            backend="cpu",
            threads=threads,
            max_requests=batch,
            cache_tokens=batch * (context + SPARE),
            prefix_cache=False,  # prompts repeat
            speculate=method if speculate else "none",
            **fields,
        )
        return {"version": outrider.__version__, "weights": "as given"}

    def complete(self, prompts: list[list[int]], tokens: int, width: int | None) -> list[list[int]]:
        params = outrider.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        return [list(output.completions[0].token_ids) for output in self.llm.generate(prompts, params)]
