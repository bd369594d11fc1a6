"""LLM: generate text with one model in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from .config import EngineConfig, ResolvedConfig, current_names
from .engine import Engine
from .errors import UserError
from .input_processor import Prompt as Prompt
from .tokenizer import Tokenizer
from .types import Output, Progress, SamplingParams, SpecStats, unwatched

Message = Mapping[str, Any]


class LLM:
    """Generate text with one model in this process.

    >>> LLM("smollm2-135m").generate("The sea is", SamplingParams(max_tokens=8))
    """

    def __init__(self, model: str = EngineConfig.model, progress: Progress = unwatched, **options: Any) -> None:
        self.engine = Engine(make_config(model, options), progress)

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
        ids: list[str] = []
        done: dict[str, Output] = {}
        try:
            for prompt, prompt_params in zip(prompt_list, params_list, strict=True):
                ids.append(self.engine.add(prompt, prompt_params))
            while len(done) < len(ids):
                for output in self.engine.step(quiet=progress is None):
                    if progress is not None:
                        progress(output)
                    if output.finished:
                        done[output.request_id] = output
        finally:
            for request_id in ids:
                if request_id not in done:
                    self.engine.abort(request_id)
        return [done[request_id] for request_id in ids]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Output]:
        """Yield the output as it grows; each item holds the whole text so far."""
        request_id = self.engine.add(prompt, params or SamplingParams())
        try:
            while request_id in self.engine.parents:
                yield from (output for output in self.engine.step() if output.request_id == request_id)
        finally:
            self.engine.abort(request_id)

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a conversation, as the model's chat template writes it."""
        text = self.tokenizer.apply_chat(messages)
        # The template has written the special tokens.
        return self.tokenizer.encode(text, add_special=False)

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Output:
        return self.generate([self.chat_prompt(messages)], params)[0]


def make_config(model: str, options: Mapping[str, Any]) -> EngineConfig:
    """Build an EngineConfig from keyword options; refuse unknown ones."""
    options = current_names(options)
    known = {field.name for field in fields(EngineConfig)}
    unknown = sorted(options.keys() - known)
    if unknown:
        raise UserError(f"no option called `{unknown[0]}`: expected one of {', '.join(sorted(known))}")
    return replace(EngineConfig(model=model), **options)


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
