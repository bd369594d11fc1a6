"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from ...tokenizer import TokenTexts
from ...types import Completion, FinishReason, TokenLogprobs
from ..context import Context, context_of
from .conversation import AnswerStream, Conversation
from .generation import respond
from .requests import ChatRequest, read_body
from .responses import ResponseBody, ResponseBuilder, SpeculationTrace, Usage, finite, prompt_logprobs
from .translate import EngineInput, check_chat


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]
    refusal: None = None


class ResponseMessage(Struct):
    role: str
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: ResponseMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    speculation: SpeculationTrace | UnsetType = UNSET


class ChatDelta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


async def create(http_request: Request) -> Response:
    context = context_of(http_request)
    request = await read_body(http_request, ChatRequest)
    model = context.check_model(request.model)
    check_chat(request)
    return await respond(http_request, ChatResponseBuilder(request, context, model))


class ChatResponseBuilder(ResponseBuilder):
    id_prefix, object_name, chunk_object_name = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    request: ChatRequest

    def __init__(self, request: ChatRequest, context: Context, model: str) -> None:
        super().__init__(request, context, model)
        self.conversation = Conversation(request, context)
        self.ignored += self.conversation.ignored
        self.streams: dict[int, AnswerStream] = {}  # by choice

    @property
    def num_sequences(self) -> int:
        return self.request.n or 1

    async def prepare(self) -> list[EngineInput]:
        return [await self.conversation.prepare()]

    def choice(self, index: int, prompt: int, completion: Completion) -> ChatChoice:
        answer = self.conversation.parse(completion.text, index)
        message = ResponseMessage("assistant", answer.content)
        message.reasoning_content = answer.reasoning or UNSET
        message.tool_calls = [call.as_json() for call in answer.calls] or UNSET
        return ChatChoice(
            index,
            message,
            self._logprobs(completion, 0),
            finish_reason(completion, bool(answer.calls)),
            completion.stop_reason,
            token_ids=self.token_ids(completion),
            speculation=self.trace(completion),
        )

    def add_prompt_fields(self, body: ResponseBody) -> ResponseBody:
        if self.request.prompt_logprobs is not None:
            body.prompt_logprobs = prompt_logprobs(self.latest[0], self.texts)
        return body

    def chunks(self, index: int, prompt: int, completion: Completion) -> Iterator[ResponseBody]:
        sent = self.sent[index]
        if sent.ended:
            return
        if not sent.begun:
            sent.begun = True
            opening = ChatChunkChoice(index, ChatDelta(role="assistant", content=""))
            yield self.add_prompt_fields(ResponseBody([opening]))
        ends = completion.finish_reason is not None
        stream = self.streams.get(index) or self.streams.setdefault(index, self.conversation.stream(index))
        delta = stream.push(completion.text[sent.text :], ends)
        sent.text = len(completion.text)  # the parser has this text, even if it holds it back
        if not (delta or ends or self.has_new_details(sent, completion)):
            return
        choice = ChatChunkChoice(index, ChatDelta(**delta), self._logprobs(completion, sent.tokens))
        choice.token_ids = self.token_ids(completion, sent.tokens)
        if ends:
            choice.finish_reason, choice.stop_reason = finish_reason(completion, stream.called), completion.stop_reason
        trace = self.trace(completion, sent.steps)
        sent.update(completion)
        yield ResponseBody([choice], speculation=trace)

    def usage(self) -> Usage:
        usage = super().usage()
        if usage.completion_tokens_details is not UNSET and self.conversation.has_reasoning:
            counts = (self.conversation.reasoning_tokens(each) for _, _, each in self.choices(self.latest))
            usage.completion_tokens_details.reasoning_tokens = sum(counts)
        return usage

    def _logprobs(self, completion: Completion, start: int) -> ChatLogprobs | None:
        if completion.logprobs is None:
            return None
        return ChatLogprobs([token_logprob(entry, self.texts) for entry in completion.logprobs[start:]])


def finish_reason(completion: Completion, has_calls: bool) -> str | None:
    """Return the finish reason: `tool_calls` if the model stopped by itself after a call."""
    reason = completion.finish_reason
    return "tool_calls" if has_calls and reason == FinishReason.STOP else reason


def token_logprob(entry: TokenLogprobs, texts: TokenTexts) -> TokenLogprob:
    top = [TopLogprob(*describe(token, logprob, texts)) for token, logprob in entry.top]
    return TokenLogprob(*describe(entry.token, entry.logprob, texts), top)


def describe(token: int, logprob: float, texts: TokenTexts) -> tuple[str, float, list[int]]:
    return texts.text(token), finite(logprob), list(texts.spelling(token))
