"""OpenAI's Responses API: `POST /v1/responses`, and `GET` and `DELETE /v1/responses/ID`."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

import msgspec
from msgspec import UNSET, to_builtins
from starlette.requests import Request
from starlette.responses import Response

from ...types import Completion, FinishReason
from ..context import Context, context_of
from ..response_store import StoredResponse
from .conversation import Answer, Conversation
from .errors import ApiError
from .generation import Generation, respond
from .requests import ChatRequest, FunctionCall, Message, ToolCallMessage, read_body
from .response_items import ResponsesRequest, as_chat_request, input_messages, without_effect
from .responses import count_usage
from .sse import EventStream
from .translate import EngineInput, check_chat

encode = msgspec.json.Encoder().encode
Event = dict[str, Any]


async def create(http_request: Request) -> Response:
    context = context_of(http_request)
    request = await read_body(http_request, ResponsesRequest)
    model = context.check_model(request.model)
    owner = context.admission.key_digest(http_request.headers)
    messages = [*previous_messages(context, request, owner), *input_messages(request.input)]
    chat = as_chat_request(request, messages)
    with ResponseGeneration.renamed_errors():
        check_chat(chat)
        generation = ResponseGeneration(request, chat, messages, context, model, owner)
    return await respond(http_request, generation)


async def retrieve(http_request: Request) -> Response:
    context, response_id = context_of(http_request), http_request.path_params["response_id"]
    found = context.responses.get(response_id, context.admission.key_digest(http_request.headers))
    if found is None:
        raise not_stored(404, response_id, "response_id")
    return Response(found.body, media_type="application/json")


async def delete(http_request: Request) -> Response:
    context, response_id = context_of(http_request), http_request.path_params["response_id"]
    if not context.responses.remove(response_id, context.admission.key_digest(http_request.headers)):
        raise not_stored(404, response_id, "response_id")
    body = {"id": response_id, "object": "response", "deleted": True}
    return Response(encode(body), media_type="application/json")


def previous_messages(context: Context, request: ResponsesRequest, owner: bytes) -> list[Message]:
    """Return the conversation that the request continues; raise 400 if it is not stored."""
    if request.previous_response_id is None:
        return []
    found = context.responses.get(request.previous_response_id, owner)
    if found is None:
        raise not_stored(400, request.previous_response_id, "previous_response_id")
    return list(found.messages)


def not_stored(status: int, response_id: str, field: str) -> ApiError:
    message = f"`{field}`: the response {response_id[:80]!r} is not stored here, or not any more"
    kind = "not_found_error" if status == 404 else "invalid_request_error"
    return ApiError(status, f"{message}: send the conversation as `input`", field, "previous_response_not_found", kind)


class ResponseGeneration(Generation):
    """Builds the response of one request, whole or as a stream of events."""

    field_names = (
        (r"\bmax_completion_tokens\b", "max_output_tokens"),
        (r"\bresponse_format\.json_schema\b", "text.format"),
        (r"\bresponse_format\b", "text.format"),
        (r"\b(tools\[\d+\]|tool_choice)\.function\b", r"\1"),
    )
    request: ChatRequest

    def __init__(
        self,
        given: ResponsesRequest,
        chat: ChatRequest,
        messages: list[Message],
        context: Context,
        model: str,
        owner: bytes,
    ) -> None:
        super().__init__(chat, context)
        self.given, self.messages, self.model, self.owner = given, messages, model, owner
        self.conversation = Conversation(chat, context)
        unread = {"reasoning_effort": "reasoning.effort"}
        self.ignored = [*without_effect(given), *(unread.get(name, name) for name in self.conversation.ignored)]
        self.id, self.created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self.output = OutputItems()
        self._events = 0

    @property
    def num_sequences(self) -> int:
        return 1

    async def prepare(self) -> list[EngineInput]:
        return [await self.conversation.prepare()]

    async def whole(self) -> bytes:
        await self.finish()
        [(_, _, completion)] = self.choices([0])
        answer = self.conversation.parse(completion.text)
        for _ in self.output.add_answer(answer):
            pass
        for _ in self.output.close(is_complete(completion)):
            pass
        return self._finished(completion, answer)

    def stream(self) -> EventStream:
        return EventStream(self.events(), end=b"", on_error=self._failure)

    async def events(self) -> AsyncGenerator[bytes, None]:
        parser, sent = None, 0
        async with aclosing(self.outputs()) as stream:
            async for _ in stream:
                [(_, _, completion)] = self.choices([0])
                events: list[Event] = []
                if parser is None:
                    parser = self.conversation.stream()
                    begun = self._body("in_progress")
                    events += [
                        {"type": "response.created", "response": begun},
                        {"type": "response.in_progress", "response": begun},
                    ]
                ends = completion.finish_reason is not None
                events += self.output.add(parser.push(completion.text[sent:], ends))
                sent = len(completion.text)
                if ends:
                    events += self.output.close(is_complete(completion))
                    body = self._finished(completion, self.conversation.parse(completion.text))
                    kind = "response.completed" if is_complete(completion) else "response.incomplete"
                    events.append({"type": kind, "response": msgspec.Raw(body)})
                if events:
                    yield b"".join(self._encode(event) for event in events)

    def _encode(self, event: Event) -> bytes:
        numbered = {"type": event["type"], "sequence_number": self._events, **event}
        self._events += 1
        return f"event: {event['type']}\ndata: ".encode() + encode(numbered) + b"\n\n"

    def _failure(self, error: ApiError) -> bytes:
        """Encode the event that ends a stream which has failed."""
        body = self._body("failed")
        body["error"] = {"code": "server_error" if error.status >= 500 else "invalid_prompt", "message": error.message}
        return self._encode({"type": "response.failed", "response": body})

    def _finished(self, completion: Completion, answer: Answer) -> bytes:
        """Return the encoded response, and store it if the request allows that."""
        body = self._body("completed" if is_complete(completion) else "incomplete")
        body["completed_at"] = int(time.time())
        if not is_complete(completion):
            is_cut = completion.finish_reason == FinishReason.LENGTH
            body["incomplete_details"] = {"reason": "max_output_tokens" if is_cut else None}
        body["output"], body["usage"] = self.output.items, self._usage(completion)
        encoded = encode(body)
        if self._stores:
            messages = [*self.messages, answer_message(answer)]
            size = len(encoded) + len(encode(messages))
            self.context.responses.add(self.id, StoredResponse(encoded, messages, size, self.owner))
        return encoded

    @property
    def _stores(self) -> bool:
        return self.given.store is not False and self.context.responses.limit > 0

    def _body(self, status: str) -> dict[str, Any]:
        given = self.given
        choice: Any = given.tool_choice or "auto"
        reasoning = given.reasoning
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": given.instructions,
            "max_output_tokens": given.max_output_tokens,
            "max_tool_calls": given.max_tool_calls,
            "metadata": given.metadata or {},
            "model": self.model,
            "output": [],
            "parallel_tool_calls": given.parallel_tool_calls is not False,
            "previous_response_id": given.previous_response_id,
            "reasoning": {"effort": reasoning.effort if reasoning is not None else None, "summary": None},
            "service_tier": "default",
            "store": self._stores,
            "temperature": 1.0 if given.temperature is None else given.temperature,
            "text": {"format": to_builtins(given.text and given.text.format) or {"type": "text"}},
            "tool_choice": to_builtins(choice),
            "tools": to_builtins(given.tools or []),
            "top_p": 1.0 if given.top_p is None else given.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": given.user,
        }

    def _usage(self, completion: Completion) -> dict[str, Any]:
        usage = count_usage(list(self.latest.values()), len(completion.token_ids), False)
        details = usage.prompt_tokens_details
        cached = details.cached_tokens if details is not UNSET else 0
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.conversation.reasoning_tokens(completion)},
            "total_tokens": usage.total_tokens,
        }


def is_complete(completion: Completion) -> bool:
    return completion.finish_reason == FinishReason.STOP


def answer_message(answer: Answer) -> Message:
    """Return an answer as a message of the conversation."""
    calls = [ToolCallMessage(FunctionCall(call.name, call.arguments), call.id) for call in answer.calls]
    message = Message(role="assistant", content=answer.content, tool_calls=calls or None)
    message.reasoning_content = answer.reasoning or None
    return message


class OutputItems:
    """The output items of a response, built piece by piece, and the events that report each piece."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open = False  # whether the last item may grow

    def add(self, delta: dict[str, Any]) -> Iterator[Event]:
        """Add the next piece of the answer."""
        for name, kind in (("reasoning_content", "reasoning"), ("content", "message")):
            if text := delta.get(name):
                yield from self._add_text(kind, text)
        for piece in delta.get("tool_calls", ()):
            function = piece["function"]
            if "id" in piece:
                yield from self._begin(
                    {"type": "function_call", "call_id": piece["id"], "name": function["name"], "arguments": ""}
                )
            if function["arguments"]:
                self.items[-1]["arguments"] += function["arguments"]
                yield self._event("function_call_arguments.delta", delta=function["arguments"])

    def add_answer(self, answer: Answer) -> Iterator[Event]:
        """Add a whole answer."""
        calls = [{"index": index, **call.as_json()} for index, call in enumerate(answer.calls)]
        yield from self.add(
            {"reasoning_content": answer.reasoning, "content": answer.content or "", "tool_calls": calls}
        )

    def close(self, complete: bool) -> Iterator[Event]:
        """End the response: an answer without any text still has a message."""
        if not self.items or (complete and self.items[-1]["type"] == "reasoning"):
            yield from self._begin(new_item("message"))
        yield from self._end("completed" if complete else "incomplete")

    def _add_text(self, kind: str, text: str) -> Iterator[Event]:
        if not self._open or self.items[-1]["type"] != kind:
            yield from self._begin(new_item(kind))
        part = self.items[-1]["content"][0]
        part["text"] += text
        yield self._event(f"{part['type']}.delta", content_index=0, delta=text, **more_fields(kind))

    def _begin(self, item: dict[str, Any]) -> Iterator[Event]:
        if self._open:
            yield from self._end("completed")
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[item["type"]]
        begun = {"id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress", **item}
        self.items.append(begun)
        self._open = True
        parts = begun.get("content", [])
        yield self._item_event("output_item.added", {**begun, "content": []} if parts else dict(begun))
        for index, part in enumerate(parts):
            yield self._event("content_part.added", content_index=index, part=dict(part))

    def _end(self, status: str) -> Iterator[Event]:
        """Report the end of the last item."""
        item = self.items[-1]
        item["status"], self._open = status, False
        if item["type"] == "function_call":
            named = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("function_call_arguments.done", **named)
        for index, part in enumerate(item.get("content", ())):
            more = more_fields(item["type"])
            yield self._event(f"{part['type']}.done", content_index=index, text=part["text"], **more)
            yield self._event("content_part.done", content_index=index, part=dict(part))
        yield self._item_event("output_item.done", dict(item))

    def _event(self, kind: str, **fields: Any) -> Event:
        """Return an event about the last item."""
        item_id = self.items[-1]["id"]
        return {"type": f"response.{kind}", "item_id": item_id, "output_index": len(self.items) - 1, **fields}

    def _item_event(self, kind: str, item: dict[str, Any]) -> Event:
        return {"type": f"response.{kind}", "output_index": len(self.items) - 1, "item": item}


def more_fields(kind: str) -> dict[str, Any]:
    """Return the fields that events about the text of a message have in addition."""
    return {"logprobs": []} if kind == "message" else {}


def new_item(kind: str) -> dict[str, Any]:
    """Return an item for text, still without any."""
    if kind == "reasoning":
        return {"type": kind, "summary": [], "content": [{"type": "reasoning_text", "text": ""}]}
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {"type": kind, "role": "assistant", "content": [part]}
