"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from ...types import Completion, FinishReason, TokenLogprobs
from ..context import Context, context_of
from .errors import ApiError
from .generation import respond
from .requests import CompletionRequest, read_body
from .responses import (
    PromptLogprobs,
    ResponseBody,
    ResponseBuilder,
    SpeculationTrace,
    finite,
    prompt_logprobs,
    with_sampled,
)
from .translate import EngineInput, check_completion, completion_inputs, prompts_of


class CompletionLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]

    def add(self, token: str, logprob: float | None, top: dict[str, float] | None, offset: int) -> None:
        self.tokens.append(token)
        self.token_logprobs.append(logprob)
        self.top_logprobs.append(top)
        self.text_offset.append(offset)


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    speculation: SpeculationTrace | UnsetType = UNSET


async def create(http_request: Request) -> Response:
    context = context_of(http_request)
    request = await read_body(http_request, CompletionRequest)
    model = context.check_model(request.model)
    check_completion(request)
    return await respond(http_request, CompletionResponseBuilder(request, context, model))


class CompletionResponseBuilder(ResponseBuilder):
    id_prefix, object_name, chunk_object_name = "cmpl-", "text_completion", "text_completion"
    request: CompletionRequest

    def __init__(self, request: CompletionRequest, context: Context, model: str) -> None:
        super().__init__(request, context, model)
        self.prompts = prompts_of(request)
        self._prompt_lists: dict[int, PromptLogprobs] = {}  # by prompt
        limit = context.options.max_waiting + context.llm.llm.resolved.max_requests
        if self.num_sequences > limit:
            count = self.num_sequences
            message = f"`prompt` and `n` ask for {count} completions at once: this server accepts at most {limit}"
            raise ApiError(400, message, param="prompt")

    @property
    def num_sequences(self) -> int:
        return len(self.prompts) * (self.request.n or 1)

    async def prepare(self) -> list[EngineInput]:
        return await completion_inputs(self.request, self.prompts, self.context)

    def visible(self, completion: Completion) -> Completion:
        """Remove the one token that the engine generates for `max_tokens` 0."""
        if self.request.max_tokens != 0:
            return completion
        reason = completion.finish_reason and FinishReason.LENGTH.value
        logprobs: list[TokenLogprobs] | None = None if completion.logprobs is None else []
        empty = replace(completion, text="", token_ids=[], logprobs=logprobs, steps=None)
        return replace(empty, finish_reason=reason, stop_reason=None)

    def choice(self, index: int, prompt: int, completion: Completion) -> CompletionChoice:
        return CompletionChoice(
            index,
            self.inputs[prompt].echo + completion.text,
            self._logprobs(index, prompt, completion),
            completion.finish_reason,
            completion.stop_reason,
            prompt_logprobs=self._prompt_logprobs(prompt),
            token_ids=self.token_ids(completion),
            prompt_token_ids=self.inputs[prompt].tokens if self.request.return_token_ids else UNSET,
            speculation=self.trace(completion),
        )

    def chunks(self, index: int, prompt: int, completion: Completion) -> Iterator[ResponseBody]:
        sent = self.sent[index]
        text = completion.text[sent.text :]
        opens = not sent.begun and (self.inputs[prompt].echo or self._has_prompt_fields)
        if sent.ended or not (text or opens or completion.finish_reason or self.has_new_details(sent, completion)):
            return
        choice = CompletionChoice(
            index,
            text if sent.begun else self.inputs[prompt].echo + text,
            self._logprobs(index, prompt, completion),
            completion.finish_reason,
            completion.stop_reason,
            token_ids=self.token_ids(completion, sent.tokens),
        )
        if not sent.begun:
            choice.prompt_logprobs = self._prompt_logprobs(prompt)
            choice.prompt_token_ids = self.inputs[prompt].tokens if self.request.return_token_ids else UNSET
        trace = self.trace(completion, sent.steps)
        sent.update(completion)
        yield ResponseBody([choice], speculation=trace)

    @property
    def _has_prompt_fields(self) -> bool:
        return self.request.prompt_logprobs is not None or bool(self.request.return_token_ids)

    def _prompt_logprobs(self, prompt: int) -> PromptLogprobs | UnsetType:
        """Return the list of a prompt, which all of its choices share."""
        if self.request.prompt_logprobs is None:
            return UNSET
        if prompt in self._prompt_lists:
            return self._prompt_lists[prompt]
        made = prompt_logprobs(self.latest[prompt], self.texts)
        if isinstance(made, list) and len(made) == len(self.inputs[prompt].tokens):
            self._prompt_lists[prompt] = made
        return made

    def _logprobs(self, index: int, prompt: int, completion: Completion) -> CompletionLogprobs | None:
        """Return the logprobs of the tokens that were not sent yet; with `echo`, those of the prompt first."""
        if completion.logprobs is None:
            return None
        sent = self.sent[index]
        logprobs = CompletionLogprobs([], [], [], [])
        if self.request.echo and not sent.begun:
            output = self.latest[prompt]
            first = output.prompt_token_ids[:1]
            logprobs.add(self.texts.name(first[0]), None, None, sent.characters)
            sent.characters += len(self.texts.of(first)[0])
            entries = [entry for entry in output.prompt_logprobs or () if entry is not None]
            sent.characters = self._add_all(logprobs, entries, first, sent.characters)
        before = completion.token_ids[: sent.tokens]
        sent.characters = self._add_all(logprobs, completion.logprobs[sent.tokens :], before, sent.characters)
        return logprobs

    def _add_all(
        self, logprobs: CompletionLogprobs, entries: Sequence[TokenLogprobs], before: Sequence[int], offset: int
    ) -> int:
        """Add the entries of tokens that follow those `before`, and return the offset in the text after them."""
        texts = self.texts.of([entry.token for entry in entries], before)
        for entry, text in zip(entries, texts, strict=True):
            top: dict[str, float] = {}
            for token, logprob in with_sampled(entry):
                top.setdefault(self.texts.name(token), finite(logprob))  # equal texts: the most probable token counts
            logprobs.add(self.texts.name(entry.token), finite(entry.logprob), top, offset)
            offset += len(text)
        return offset
