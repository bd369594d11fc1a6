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
from ..tools.parser import ToolStream
from ..tools.resolve import ResolvedTools, resolve_tools
from .requests import ChatRequest, read_body
from .responses import ResponseBody, ResponseBuilder, SpeculationTrace, finite, prompt_logprobs, respond
from .translate import EngineInput, chat_input, check_chat


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
        self.tools: ResolvedTools = resolve_tools(request, context.llm.llm.tokenizer)
        self.streams: dict[int, ToolStream] = {}  # by choice

    @property
    def num_sequences(self) -> int:
        return self.request.n or 1

    async def prepare(self) -> list[EngineInput]:
        return [await chat_input(self.request, self.tools, self.context)]

    def choice(self, index: int, prompt: int, completion: Completion) -> ChatChoice:
        message = ResponseMessage("assistant", completion.text)
        has_calls = False
        if self.tools.parser is not None:
            message.content, calls = self.tools.parser.parse(completion.text, index)
            has_calls = bool(calls)
            message.tool_calls = [call.as_json() for call in calls] if calls else UNSET
        return ChatChoice(
            index,
            message,
            self._logprobs(completion, 0),
            finish_reason(completion, has_calls),
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
        delta = self._delta(index, completion.text[sent.text :], ends)
        sent.text = len(completion.text)  # the parser has this text, even if it holds it back
        if not (delta or ends or self.has_new_details(sent, completion)):
            return
        choice = ChatChunkChoice(index, ChatDelta(**delta), self._logprobs(completion, sent.tokens))
        choice.token_ids = self.token_ids(completion, sent.tokens)
        if ends:
            has_calls = index in self.streams and self.streams[index].called
            choice.finish_reason, choice.stop_reason = finish_reason(completion, has_calls), completion.stop_reason
        trace = self.trace(completion, sent.steps)
        sent.update(completion)
        yield ResponseBody([choice], speculation=trace)

    def _delta(self, index: int, text: str, ends: bool) -> dict[str, Any]:
        """Return the new text as content and tool calls; empty if there is nothing to send."""
        if self.tools.parser is None:
            return {"content": text} if text else {}
        stream = self.streams.setdefault(index, self.tools.parser.stream(index))
        return stream.finish(text) if ends else stream.push(text)

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
