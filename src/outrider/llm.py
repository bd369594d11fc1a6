"""LLM: generate text with one model in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from .config import EngineConfig, EngineOptions, ResolvedConfig, make_config
from .engine import Engine
from .errors import UserError
from .input_processor import Prompt as Prompt
from .shared_engine import Inbox, SharedEngine
from .structured_output import Grammar
from .tokenizer import Tokenizer
from .types import Output, Progress, SamplingParams, SpecStats, unwatched

Message = Mapping[str, Any]


class LLM:
    """Generate text with one model in this process. Threads may call its methods at the same time.

    >>> LLM("smollm2-135m").generate("The sea is", SamplingParams(max_tokens=8))
    """

    def __init__(
        self, model: str | Path = EngineConfig.model, progress: Progress = unwatched, **options: Unpack[EngineOptions]
    ) -> None:
        self.engine = Engine(make_config(model, options), progress)
        self.shared = SharedEngine(self.engine)  # all requests of this object go through it

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    @property
    def resolved(self) -> ResolvedConfig:
        """Return the configuration in force."""
        return self.engine.resolved

    @property
    def plan(self) -> ResolvedConfig:  # deprecated alias
        """Return `resolved` under its deprecated name."""
        return self.resolved

    @property
    def method_stats(self) -> Mapping[str, SpecStats]:
        """Return the speculation stats of all finished requests, by method."""
        return self.engine.spec_manager.method_stats

    @property
    def tallies(self) -> Mapping[str, SpecStats]:  # deprecated alias
        """Return `method_stats` under its deprecated name."""
        return self.method_stats

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: Callable[[Output], None] | None = None,
    ) -> list[Output]:
        """Return one output per prompt, in order. A prompt is a text or a list of token ids.

        `progress` is called with each output as it grows.
        """
        prompt_list = as_prompts(prompts)
        params_list = as_params(params, len(prompt_list))
        inbox = Inbox(self.shared, partial=progress is not None)
        ids: list[str] = []
        unfinished: set[str] = set()
        done: dict[str, Output] = {}

        def add_all() -> None:
            for prompt, prompt_params in zip(prompt_list, params_list, strict=True):
                ids.append(self.shared.add(prompt, prompt_params, inbox))
                unfinished.add(ids[-1])

        grammars = self._compile(params_list)
        try:
            self.shared.call(add_all)
            del grammars  # holding them kept the compiler's entries alive until `add` had found them
            while unfinished:
                for output in inbox.wait():
                    if progress is not None:
                        progress(output)
                    if output.finished:
                        done[output.request_id] = output
                        unfinished.remove(output.request_id)
        finally:
            self.shared.abort(unfinished)
        return [done[request_id] for request_id in ids]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Output]:
        """Yield the output as it grows; each item holds the whole text so far."""
        params = params or SamplingParams()
        inbox = Inbox(self.shared, partial=True)
        unfinished: list[str] = []
        grammars = self._compile([params])
        try:
            self.shared.call(lambda: unfinished.append(self.shared.add(prompt, params, inbox)))
            del grammars
            while unfinished:
                for output in inbox.wait():
                    if output.finished:
                        unfinished.clear()
                    yield output
        finally:
            self.shared.abort(unfinished)

    def _compile(self, params: Sequence[SamplingParams]) -> list[Grammar]:
        """Compile the grammars of requests on this thread, so that the requests of other threads do not wait for it."""
        return [self.engine.compiler.compile(each.structured) for each in params if each.structured is not None]

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a conversation, as the model's chat template writes it."""
        text = self.tokenizer.apply_chat(messages)
        # The template has written the special tokens.
        return self.tokenizer.encode(text, add_special=False)

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Output:
        return self.generate([self.chat_prompt(messages)], params)[0]


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [[int(token) for token in prompts]]  # type: ignore[arg-type]
    return list(prompts)  # type: ignore[arg-type]


def as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise UserError(f"{count} prompts came with {len(params)} parameter sets: give one for each, or one for all")
    return list(params)
