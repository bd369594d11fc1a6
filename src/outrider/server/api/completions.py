"""`POST /v1/completions`: a text, or tokens, and what comes after them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from ...types import Completion, FinishReason, TokenLogprobs
from ..context import Context, context_of
from .errors import ApiError
from .requests import CompletionRequest, read
from .responses import Answer, Body, PromptLogprobs, Trace, finite, prompt_logprobs, respond, with_chosen
from .translate import Job, check_completion, completion_jobs, prompts


class Logprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Choice(Struct):
    index: int
    text: str
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    speculation: Trace | UnsetType = UNSET


async def create(request: Request) -> Response:
    context = context_of(request)
    asked = await read(request, CompletionRequest)
    model = context.check_model(asked.model)
    check_completion(asked)
    return await respond(request, CompletionAnswer(asked, context, model))


class CompletionAnswer(Answer):
    prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"
    asked: CompletionRequest

    def __init__(self, asked: CompletionRequest, context: Context, model: str) -> None:
        super().__init__(asked, context, model)
        self.given = prompts(asked)
        most = context.options.max_waiting + context.llm.llm.resolved.max_requests
        if self.places > most:
            message = f"`prompt` and `n` ask for {self.places} texts at once: this server takes {most} at most"
            raise ApiError(400, message, param="prompt")

    @property
    def places(self) -> int:
        return len(self.given) * (self.asked.n or 1)

    async def prepare(self) -> list[Job]:
        return await completion_jobs(self.asked, self.given, self.context)

    def shown(self, completion: Completion) -> Completion:
        """Whoever asks for no token gets none, though the engine gave one."""
        if self.asked.max_tokens != 0:
            return completion
        reason = completion.finish_reason and FinishReason.LENGTH.value
        logprobs: list[TokenLogprobs] | None = None if completion.logprobs is None else []
        nothing = replace(completion, text="", token_ids=[], logprobs=logprobs, steps=None)
        return replace(nothing, finish_reason=reason, stop_reason=None)

    def choice(self, index: int, job: int, completion: Completion) -> Choice:
        return Choice(
            index,
            self.jobs[job].text + completion.text,
            self._logprobs(index, job, completion),
            completion.finish_reason,
            completion.stop_reason,
            prompt_logprobs=self._prompt_logprobs(job),
            token_ids=self.token_ids(completion),
            prompt_token_ids=self.jobs[job].tokens if self.asked.return_token_ids else UNSET,
            speculation=self.trace(completion),
        )

    def chunks(self, index: int, job: int, completion: Completion) -> Iterator[Body]:
        sent = self.sent[index]
        text = completion.text[sent.text :]
        opening = not sent.begun and (self.jobs[job].text or self._tells_prompt)
        if sent.ended or not (text or opening or completion.finish_reason or self.has_news(sent, completion)):
            return
        choice = Choice(
            index,
            text if sent.begun else self.jobs[job].text + text,
            self._logprobs(index, job, completion),
            completion.finish_reason,
            completion.stop_reason,
            token_ids=self.token_ids(completion, sent.tokens),
        )
        if not sent.begun:
            choice.prompt_logprobs = self._prompt_logprobs(job)
            choice.prompt_token_ids = self.jobs[job].tokens if self.asked.return_token_ids else UNSET
        trace = self.trace(completion, sent.steps)
        sent.note(completion)
        yield Body([choice], speculation=trace)

    @property
    def _tells_prompt(self) -> bool:
        return self.asked.prompt_logprobs is not None or bool(self.asked.return_token_ids)

    def _prompt_logprobs(self, job: int) -> PromptLogprobs | UnsetType:
        return prompt_logprobs(self.latest[job], self.texts) if self.asked.prompt_logprobs is not None else UNSET

    def _logprobs(self, index: int, job: int, completion: Completion) -> Logprobs | None:
        """Of the tokens that were not sent yet; with `echo` those of the prompt come first."""
        if completion.logprobs is None:
            return None
        sent = self.sent[index]
        told = Logprobs([], [], [], [])
        if self.asked.echo and not sent.begun:
            output = self.latest[job]
            first = output.prompt_token_ids[0]
            self._tell(told, self.texts.text(first), None, None, sent.characters)
            sent.characters += len(told.tokens[0])
            sent.characters = self._tell_all(told, output.prompt_logprobs or (), sent.characters)
        sent.characters = self._tell_all(told, completion.logprobs[sent.tokens :], sent.characters)
        return told

    def _tell_all(self, told: Logprobs, entries: Sequence[TokenLogprobs], offset: int) -> int:
        for entry in entries:
            top: dict[str, float] = {}
            for token, logprob in with_chosen(entry):
                top.setdefault(self.texts.text(token), finite(logprob))  # of tokens that read alike, the likeliest
            text = self.texts.text(entry.token)
            self._tell(told, text, finite(entry.logprob), top, offset)
            offset += len(text)
        return offset

    @staticmethod
    def _tell(told: Logprobs, text: str, logprob: float | None, top: dict[str, float] | None, offset: int) -> None:
        told.tokens.append(text)
        told.token_logprobs.append(logprob)
        told.top_logprobs.append(top)
        told.text_offset.append(offset)
