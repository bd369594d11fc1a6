"""A conversation on its way to the engine and back: its prompt, and the parts of the answers.

Chat completions, responses and Ollama's chats are all translated to a `ChatRequest` and answered through this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...harmony import HarmonyStream, is_harmony
from ...tokenizer import Tokenizer
from ...types import Completion
from ..context import Context
from ..reasoning import ReasoningStream, has_reasoning, leaves_open, opens_reasoning
from ..tools.parser import Delta, ToolCall, ToolStream
from ..tools.resolve import ResolvedTools, resolve_tools
from .errors import ApiError
from .requests import ChatRequest
from .translate import EngineInput, chat_input


@dataclass
class Answer:
    """The parts of a whole answer."""

    content: str | None  # None: the answer has calls only
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)


class AnswerStream:
    """Splits the text of one choice into reasoning, content and tool calls, incrementally."""

    def __init__(
        self, reasoning: ReasoningStream | None, tools: ToolStream | None, harmony: HarmonyStream | None = None
    ) -> None:
        """Set the parsers. harmony: of an answer in that format, which takes the place of both others."""
        self.reasoning, self.tools, self.harmony = reasoning, tools, harmony

    @property
    def called(self) -> bool:
        if self.harmony is not None:
            return self.harmony.called
        return self.tools is not None and self.tools.called

    def push(self, text: str, final: bool = False) -> Delta:
        """Consume new text; return what is certain as `reasoning_content`, `content` and `tool_calls`."""
        if self.harmony is not None:
            return self.harmony.push(text, final)
        delta: Delta = {}
        if self.reasoning is not None:
            reasoning, text = self.reasoning.push(text, final)
            if reasoning:
                delta["reasoning_content"] = reasoning
        if self.tools is None:
            return {**delta, "content": text} if text else delta
        return delta | (self.tools.finish(text) if final else self.tools.push(text))


class Conversation:
    """One chat request: its tools, its prompt, and the parser of its answers."""

    def __init__(self, request: ChatRequest, context: Context) -> None:
        self.request, self.context = request, context
        tokenizer = context.llm.llm.tokenizer
        count, most = len(request.messages), context.llm.llm.resolved.max_context
        if count > most:  # each has a token at least: to render them first would hold up other requests
            message = f"`messages` has {count} messages and the context {most} tokens: send fewer messages"
            raise ApiError(400, message, param="messages", code="context_length_exceeded")
        self.tools: ResolvedTools = resolve_tools(request, tokenizer)
        self.variables, self.ignored = template_variables(request, tokenizer)
        wanted = request.reasoning_format or context.options.reasoning_format
        # A forced format begins with the first token, so such an answer has no reasoning block.
        self.has_reasoning = (
            wanted != "none" and self.tools.structured is None and has_reasoning(tokenizer.chat_template)
        )
        self.harmony = self.has_reasoning and is_harmony(tokenizer.chat_template)
        if self.harmony:
            self.tools = replace(self.tools, keep_special=True)
        self._opened = False

    async def prepare(self) -> EngineInput:
        prompt, engine_input = await chat_input(self.request, self.tools, self.variables, self.context)
        if self.harmony:
            self._opened = bool(self.request.continue_final_message)
        elif self.request.continue_final_message:
            self._opened = leaves_open(self.tools.messages[-1]["content"] or "")
        else:
            self._opened = opens_reasoning(prompt)
        self._release()
        return engine_input

    def _release(self) -> None:
        """Drop what only the prompt needed: the objects of a body take thirty times its bytes while requests wait."""
        self.request.messages, self.request.tools, self.variables = [], None, {}
        self.tools = replace(self.tools, messages=[], tools=None)

    def stream(self, index: int = 0) -> AnswerStream:
        """Return the parser of one choice; call it after `prepare`."""
        if self.harmony:
            return AnswerStream(None, None, HarmonyStream(self.tools.parser, index, self._opened))
        reasoning = ReasoningStream(self._opened) if self.has_reasoning else None
        return AnswerStream(reasoning, self.tools.parser.stream(index) if self.tools.parser is not None else None)

    def parse(self, text: str, index: int = 0) -> Answer:
        """Return the parts of a whole answer."""
        return gather([self.stream(index).push(text, final=True)])

    def reasoning_tokens(self, completion: Completion) -> int:
        """Return the number of tokens in the reasoning block, its tags included."""
        if not self.has_reasoning:
            return 0
        tokens, texts = completion.token_ids, self.context.texts.of
        if self.harmony:
            answer = HarmonyStream(self.tools.parser, 0, self._opened)
            answer.push(completion.text, final=True)
            counts = (
                count_tokens(tokens, end, texts) - count_tokens(tokens, begin, texts) for begin, end in answer.reasoning
            )
            return sum(counts)
        stream = ReasoningStream(self._opened)
        stream.push(completion.text)
        if stream.end is None:
            return len(completion.token_ids) if stream.inside else 0
        return count_tokens(tokens, stream.end, texts)


def gather(deltas: Sequence[Delta]) -> Answer:
    """Join the deltas of one choice."""
    reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
    content = "".join(delta.get("content", "") for delta in deltas)
    calls: list[dict[str, Any]] = []
    for piece in (piece for delta in deltas for piece in delta.get("tool_calls", ())):
        if "id" in piece:
            calls.append({"id": piece["id"], **piece["function"]})
        else:
            calls[piece["index"]]["arguments"] += piece["function"]["arguments"]
    return Answer(content or (None if calls else ""), reasoning, [ToolCall(**call) for call in calls])


def count_tokens(tokens: Sequence[int], characters: int, texts: Callable[[Sequence[int]], list[str]]) -> int:
    """Return how many tokens the first characters of a text take."""
    if characters <= 0:
        return 0
    for count, text in enumerate(texts(tokens), 1):
        characters -= len(text)
        if characters <= 0:
            return count
    return len(tokens)


def template_variables(request: ChatRequest, tokenizer: Tokenizer) -> tuple[dict[str, Any], list[str]]:
    """Return the variables of the chat template, and the request's fields that this template does not read."""
    variables = dict(request.chat_template_kwargs or {})
    ignored = []
    if (effort := request.reasoning_effort) is not None:
        if "reasoning_effort" in tokenizer.chat_names:
            variables.setdefault("reasoning_effort", effort)
        elif effort == "none" and "enable_thinking" in tokenizer.chat_names:
            variables.setdefault("enable_thinking", False)
        else:
            ignored.append("reasoning_effort")
    if request.enable_thinking is not None:
        if "enable_thinking" in tokenizer.chat_names:
            variables.setdefault("enable_thinking", request.enable_thinking)
        else:
            ignored.append("enable_thinking")
    return variables, ignored
