"""LLM: generate text with one model in this process."""

from __future__ import annotations

import gc
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any, Self, Unpack, overload

from .adapters import LoRARequest
from .config import EngineConfig, EngineOptions, ResolvedConfig, make_config
from .engine import Engine
from .errors import PromptError, UserError
from .harmony import OutputSplitter, is_harmony
from .input_processor import FORMS, PromptInput, read_prompt
from .input_processor import Prompt as Prompt
from .shared_engine import EngineStoppedError, Inbox, SharedEngine
from .structured_output.matcher import Grammar
from .tokenizer import Tokenizer
from .types import Completion, FinishReason, Output, Progress, SamplingParams, SpecStats, Stats, unwatched

Message = Mapping[str, Any]
Conversation = Sequence[Message]
Params = SamplingParams | Sequence[SamplingParams]
Lora = LoRARequest | str  # an adapter, or the name of one that is loaded
Loras = Lora | None | Sequence[Lora | None]


class LLM:
    """Generate text with one model in this process. Threads may call its methods at the same time.

    >>> with LLM("smollm2-135m") as llm:
    ...     llm.generate("The sea is", SamplingParams(max_tokens=8))
    """

    def __init__(
        self, model: str | Path = EngineConfig.model, progress: Progress = unwatched, **options: Unpack[EngineOptions]
    ) -> None:
        self._shared: SharedEngine | None = SharedEngine(Engine(make_config(model, options), progress))

    @property
    def shared(self) -> SharedEngine:
        """Return the engine in the form that threads share. All requests of this object go through it."""
        if self._shared is None:
            raise EngineStoppedError("the engine is closed: start a new one")
        return self._shared

    @property
    def engine(self) -> Engine:
        """Return the engine. It is not thread-safe."""
        return self.shared.engine

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
    def adapter_stats(self) -> Mapping[str, Mapping[str, SpecStats]]:
        """Return the speculation stats of all finished requests with an adapter, by adapter and method."""
        return self.engine.spec_manager.adapter_stats

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter for later requests. Its path is read on this thread; steps of other threads go on."""
        shared, manager = self.shared, self.engine.adapters
        pairs = manager.read(lora_request.lora_path)
        shared.call(lambda: manager.add(lora_request.lora_name, lora_request.lora_path, pairs))
        return True

    def remove_lora(self, name: str) -> bool:
        """Unload an adapter. Its unfinished requests go on with it."""
        self.shared.call(lambda: self.engine.adapters.remove(name))
        return True

    @property
    def tallies(self) -> Mapping[str, SpecStats]:  # deprecated alias
        """Return `method_stats` under its deprecated name."""
        return self.method_stats

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: Params | None = None,
        progress: Callable[[Output], None] | None = None,
        *,
        sampling_params: Params | None = None,
        keep_going: bool = False,
        lora_request: Loras = None,
    ) -> list[Output]:
        """Return one output per prompt, in order.

        A prompt is a text, a list of token ids, or one of vLLM's mappings with `prompt` or `prompt_token_ids`.
        `params` (or `sampling_params`) is one for all prompts or one for each. `progress` is called with each output as
        it grows. With `keep_going`, a prompt that is empty or too long does not fail the call: its output has the
        finish reason `error`, and `stop_reason` says why. `lora_request` is the adapter of all prompts, or of each.
        """
        inputs = as_prompts(prompts)
        used = either(params, sampling_params)
        return self._generate(inputs, used, progress, keep_going, "prompts", lora_request)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        lora_request: Lora | None = None,
    ) -> Iterator[Output]:
        """Yield the output as it grows; each item holds the whole text so far."""
        (used,) = as_params(either(params, sampling_params), 1)
        inbox = Inbox(self.shared, partial=True)
        shared, unfinished = self.shared, list[str]()
        grammars = self._compile([used])
        try:
            shared.call(lambda: unfinished.append(shared.add(prompt, used, inbox, None, lora_request)))
            del grammars
            while unfinished:
                for output in inbox.wait():
                    if output.finished:
                        unfinished.clear()
                    yield output
        finally:
            shared.abort(unfinished)

    def chat_prompt(self, messages: Conversation) -> list[int]:
        """Return the tokens of a conversation, as the model's chat template writes it."""
        return self.tokenizer.encode_chat(self.tokenizer.chat_prompt(messages))

    @overload
    def chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        lora_request: Lora | None = None,
    ) -> Output: ...

    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        params: Params | None = None,
        *,
        sampling_params: Params | None = None,
        keep_going: bool = False,
        lora_request: Loras = None,
    ) -> list[Output]: ...

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: Params | None = None,
        *,
        sampling_params: Params | None = None,
        keep_going: bool = False,
        lora_request: Loras = None,
    ) -> Output | list[Output]:
        """Answer a conversation, a list of messages, with one output; a list of conversations with one for each.

        The other arguments are those of `generate`. Answers in the harmony format (gpt-oss) are split into `text` and
        `reasoning`, unless the parameters keep special tokens.
        """
        used = either(params, sampling_params)
        if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
            raise UserError(f"`messages` is {reprlib.repr(messages)}: expected a list of messages")
        if not messages or isinstance(messages[0], Mapping):
            prompt = PromptInput(tokens=self.chat_prompt(messages))  # type: ignore[arg-type]
            (output,) = self._answer([prompt], used, False, lora_request)
            return output
        inputs = [self._read_conversation(index, each) for index, each in enumerate(messages)]
        return self._answer(inputs, used, keep_going, lora_request)

    def close(self) -> None:
        """End all requests, and release the model. Every later call raises EngineStoppedError."""
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.close()
            del shared
            gc.collect()  # the engine's objects refer to each other

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(
        self, inputs: Sequence[PromptInput], params: Params | None, keep_going: bool, lora_request: Loras
    ) -> list[Output]:
        """Answer conversations."""
        given = as_params(params, len(inputs))
        kept, splitters = zip(*(channel_splitter(own, self.tokenizer) for own in given), strict=True)
        outputs = self._generate(inputs, kept, None, keep_going, "messages", lora_request)
        pairs = zip(splitters, outputs, strict=True)
        return [output if splitter is None else splitter.push(output) for splitter, output in pairs]

    def _generate(
        self,
        inputs: Sequence[PromptInput],
        params: Params | None,
        progress: Callable[[Output], None] | None,
        keep_going: bool,
        name: str,
        lora_request: Loras = None,
    ) -> list[Output]:
        """Answer all inputs. `name` is what errors call the list of them."""
        params_list, loras = as_params(params, len(inputs)), as_loras(lora_request, len(inputs))
        shared, inbox = self.shared, Inbox(self.shared, partial=progress is not None)
        ids: list[str] = []
        unfinished: set[str] = set()
        done: dict[str, Output] = {}

        def add_all() -> None:
            for index, (prompt, own, lora) in enumerate(zip(inputs, params_list, loras, strict=True)):
                try:
                    ids.append(shared.add(prompt, own, inbox, None, lora))
                    unfinished.add(ids[-1])
                except PromptError as error:
                    named = name_prompt(error, f"`{name}[{index}]`", len(inputs) > 1, keep_going)
                    if not keep_going:
                        raise named from None
                    ids.append(f"refused-{index}")
                    done[ids[-1]] = refused_output(ids[-1], own.n, str(named), prompt.text, error.tokens)

        grammars = self._compile(params_list)
        try:
            shared.call(add_all)
            del grammars  # holding them kept the compiler's entries alive until `add` had found them
            if progress is not None:
                for output in list(done.values()):
                    progress(output)
            while unfinished:
                for output in inbox.wait():
                    if progress is not None:
                        progress(output)
                    if output.finished:
                        done[output.request_id] = output
                        unfinished.remove(output.request_id)
        finally:
            shared.abort(unfinished)
        return [done[request_id] for request_id in ids]

    def _compile(self, params: Sequence[SamplingParams]) -> list[Grammar]:
        """Compile the grammars of requests on this thread, so that the requests of other threads do not wait for it."""
        return [self.engine.compiler.compile(each.structured) for each in params if each.structured is not None]

    def _read_conversation(self, index: int, messages: object) -> PromptInput:
        if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
            raise UserError(f"`messages[{index}]` is {reprlib.repr(messages)}: expected a list of messages")
        try:
            return PromptInput(tokens=self.chat_prompt(messages))
        except UserError as error:
            raise UserError(f"`messages[{index}]` cannot be used: {error}") from None


def as_prompts(prompts: Prompt | Iterable[Prompt]) -> list[PromptInput]:
    """Read one prompt or several; refuse other types."""
    if isinstance(prompts, str | bytes | Mapping | set | frozenset) or not isinstance(prompts, Iterable):
        return [read_prompt(prompts, "prompts", f"{FORMS}, or a list of these")]  # type: ignore[arg-type]
    items: list[Any] = list(prompts)
    if items and all(isinstance(item, Integral) and not isinstance(item, bool) for item in items):
        return [PromptInput(tokens=[int(item) for item in items])]
    return [read_prompt(item, f"prompts[{index}]") for index, item in enumerate(items)]


def either(params: Params | None, sampling_params: Params | None) -> Params | None:
    """Return the value of whichever of the two names was used."""
    if params is not None and sampling_params is not None:
        raise UserError("`sampling_params` is another name of `params`: pass only one of them")
    return params if params is not None else sampling_params


def as_params(params: Params | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or isinstance(params, str | bytes):
        raise UserError(f"`params` is {reprlib.repr(params)}: expected SamplingParams, or a list of them")
    for index, each in enumerate(params):
        if not isinstance(each, SamplingParams):
            raise UserError(f"`params[{index}]` is {reprlib.repr(each)}: expected SamplingParams")
    if len(params) != count:
        raise UserError(f"{count} prompts came with {len(params)} parameter sets: give one for each, or one for all")
    return list(params)


def channel_splitter(params: SamplingParams, tokenizer: Tokenizer) -> tuple[SamplingParams, OutputSplitter | None]:
    """Return the parameters that keep the marks of channels, and the splitter that removes them.

    For other models, and if `params` keeps special tokens, the parameters stay as they are, and nothing is split.
    """
    if not params.skip_special_tokens or not is_harmony(tokenizer.chat_template):
        return params, None
    return replace(params, skip_special_tokens=False), OutputSplitter(params.n)


def as_loras(lora_request: Loras, count: int) -> list[Lora | None]:
    if lora_request is None or isinstance(lora_request, LoRARequest | str):
        return [lora_request] * count
    if not isinstance(lora_request, Sequence):
        raise UserError(f"`lora_request` is {reprlib.repr(lora_request)}: expected a LoRARequest, or a list of them")
    if len(lora_request) != count:
        raise UserError(f"{count} prompts came with {len(lora_request)} adapters: give one for each, or one for all")
    return list(lora_request)


def name_prompt(error: PromptError, name: str, several: bool, keep_going: bool) -> PromptError:
    """Say in an error which of several prompts it concerns, and how the others can be answered."""
    if not several:
        return error
    reason = error.reason if keep_going else f"{error.reason}; `keep_going=True` answers the others"
    return type(error)(reason, name, error.tokens)


def refused_output(
    request_id: str, samples: int, reason: str, text: str | None = None, tokens: Sequence[int] = ()
) -> Output:
    """Return the output of a prompt that cannot be served."""
    completions = [Completion(n, "", [], FinishReason.ERROR.value, reason) for n in range(samples)]
    stats = Stats(0, 0.0, 0.0, 0.0, 0, 0)
    return Output(request_id, text, list(tokens), completions, finished=True, stats=stats)
