"""`POST /v1/chat/completions`: a conversation, and its next message."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from ...types import Completion, FinishReason, TokenLogprobs
from ..context import Context, Texts, context_of
from ..tools.parser import ToolStream
from ..tools.resolve import ToolPlan, plan
from .requests import ChatRequest, read
from .responses import Answer, Body, Trace, finite, prompt_logprobs, respond
from .translate import Job, chat_jobs, check_chat


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(Struct):
    content: list[TokenLogprob]
    refusal: None = None


class Message(Struct):
    role: str
    content: str | None
    refusal: None = None
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET


class Choice(Struct):
    index: int
    message: Message
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    speculation: Trace | UnsetType = UNSET


class Delta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET


class ChunkChoice(Struct):
    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


async def create(request: Request) -> Response:
    context = context_of(request)
    asked = await read(request, ChatRequest)
    model = context.check_model(asked.model)
    check_chat(asked)
    return await respond(request, ChatAnswer(asked, context, model))


class ChatAnswer(Answer):
    prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    asked: ChatRequest

    def __init__(self, asked: ChatRequest, context: Context, model: str) -> None:
        super().__init__(asked, context, model)
        self.plan: ToolPlan = plan(asked, context.llm.llm.tokenizer)
        self.streams: dict[int, ToolStream] = {}  # by choice

    @property
    def places(self) -> int:
        return self.asked.n or 1

    async def prepare(self) -> list[Job]:
        return await chat_jobs(self.asked, self.plan, self.context)

    def choice(self, index: int, job: int, completion: Completion) -> Choice:
        message = Message("assistant", completion.text)
        called = False
        if self.plan.parser is not None:
            message.content, calls = self.plan.parser.parse(completion.text, index)
            called = bool(calls)
            message.tool_calls = [call.as_json() for call in calls] if calls else UNSET
        return Choice(
            index,
            message,
            self._logprobs(completion, 0),
            reason(completion, called),
            completion.stop_reason,
            token_ids=self.token_ids(completion),
            speculation=self.trace(completion),
        )

    def whole_body(self, body: Body) -> Body:
        if self.asked.prompt_logprobs is not None:
            body.prompt_logprobs = prompt_logprobs(self.latest[0], self.texts)
        return body

    def chunks(self, index: int, job: int, completion: Completion) -> Iterator[Body]:
        sent = self.sent[index]
        if sent.ended:
            return
        if not sent.begun:
            sent.begun = True
            yield self.whole_body(Body([ChunkChoice(index, Delta(role="assistant", content=""))]))
        ends = completion.finish_reason is not None
        delta = self._delta(index, completion.text[sent.text :], ends)
        sent.text = len(completion.text)  # the parser has it, even where it holds it back
        if not (delta or ends or self.has_news(sent, completion)):
            return
        choice = ChunkChoice(index, Delta(**delta), self._logprobs(completion, sent.tokens))
        choice.token_ids = self.token_ids(completion, sent.tokens)
        if ends:
            called = index in self.streams and self.streams[index].called
            choice.finish_reason, choice.stop_reason = reason(completion, called), completion.stop_reason
        trace = self.trace(completion, sent.steps)
        sent.note(completion)
        yield Body([choice], speculation=trace)

    def _delta(self, index: int, text: str, ends: bool) -> dict[str, Any]:
        """What is new as content and as calls; empty where nothing is."""
        if self.plan.parser is None:
            return {"content": text} if text else {}
        stream = self.streams.setdefault(index, self.plan.parser.stream(index))
        return stream.finish(text) if ends else stream.push(text)

    def _logprobs(self, completion: Completion, known: int) -> ChoiceLogprobs | None:
        if completion.logprobs is None:
            return None
        return ChoiceLogprobs([token_logprob(entry, self.texts) for entry in completion.logprobs[known:]])


def reason(completion: Completion, called: bool) -> str | None:
    """A call is a reason to stop of its own; one that was cut off is not."""
    ended = completion.finish_reason
    return "tool_calls" if called and ended == FinishReason.STOP else ended


def token_logprob(entry: TokenLogprobs, texts: Texts) -> TokenLogprob:
    top = [TopLogprob(*told(token, logprob, texts)) for token, logprob in entry.top]
    return TokenLogprob(*told(entry.token, entry.logprob, texts), top)


def told(token: int, logprob: float, texts: Texts) -> tuple[str, float, list[int]]:
    return texts.text(token), finite(logprob), texts.bytes(token)
