"""Parse tool calls in generated text, at once (`ToolParser.parse`) or incrementally (`ToolStream`).

The pieces of a stream add up to the same content and calls however the text is cut. Text that only resembles a call is
content. A call is sent as soon as it is certain (see CallReader); if its arguments are cut off or invalid after that,
they are passed on as the model wrote them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .call_reader import SPACE, CallReader

Delta = dict[str, Any]  # a chunk's delta in OpenAI's format: `content`, `tool_calls`, both, or empty
CALL_HEAD = re.compile(r"\s*([a-zA-Z0-9_-]{1,64})\s*(?:\[CALL_ID\]\s*[\w-]*\s*)?(?:\[ARGS\]\s*)?", re.ASCII)
HEAD_LIMIT = 200  # characters between a marker and the arguments; a longer text is content


@dataclass(frozen=True)
class ToolCallStyle:
    """The notation of tool calls that a series of models uses."""

    name: str
    markers: Mapping[str, str] = field(default_factory=dict)  # opening marker, anywhere in the text -> closing marker
    bare: str = ""  # characters that open a call at the start of the text
    separators: str = ""  # characters between two calls
    named: bool = False  # a marker may be followed by the tool's name and then its arguments
    id_length: int = 24
    id_prefix: str = "call_"


HERMES = ToolCallStyle("hermes", {"<tool_call>": "</tool_call>"})
LLAMA = ToolCallStyle("llama", {"<|python_tag|>": ""}, bare="{", separators=";")
# Mistral's chat template accepts only ids of this form.
MISTRAL = ToolCallStyle("mistral", {"[TOOL_CALLS]": ""}, named=True, id_length=9, id_prefix="")
GENERIC = ToolCallStyle("json", {"<tool_call>": "</tool_call>", "```json": "```"}, bare="{[", separators=";")
FORCED = ToolCallStyle("forced", bare="{[")


@dataclass(frozen=True)
class ToolCall:
    id: str
    name: str
    arguments: str  # JSON

    def as_json(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class ToolParser:
    style: ToolCallStyle
    names: frozenset[str]
    make_id: Callable[[int, int], str]  # choice, call -> id
    parallel: bool = True  # False: only the first call counts
    end_texts: tuple[str, ...] = ()  # texts of the end-of-sequence tokens, if the output shows them

    def parse(self, text: str, index: int = 0) -> tuple[str | None, list[ToolCall]]:
        """Return content and calls of a whole text. `index`: the choice, which the ids of calls depend on."""
        delta = self.stream(index).finish(text)
        pieces = [(piece["id"], piece["function"]) for piece in delta.get("tool_calls", ())]
        calls = [ToolCall(call_id, function["name"], function["arguments"]) for call_id, function in pieces]
        return delta.get("content", None if calls else ""), calls

    def stream(self, index: int = 0) -> ToolStream:
        return ToolStream(self, index)


class ToolStream:
    """The incremental parser of one choice: a state machine over the generated text.

    `_step` is the current state: it consumes what it can decide from `_text`, and returns whether the next state should
    run at once.
    """

    def __init__(self, parser: ToolParser, index: int) -> None:
        self._parser, self._style, self._index = parser, parser.style, index
        self._step: Callable[[], bool] = self._start if self._style.bare else self._content
        self._text = ""  # not consumed yet
        self._space = ""  # trailing white space of the content: dropped if a call follows
        self._has_content = False
        self._opener = self._held = ""  # consumed text that may turn out to be content
        self._close, self._listed = "", False
        self._reader = CallReader(parser.names)
        self._delta: Delta = {}
        self._calls = 0

    @property
    def called(self) -> bool:
        """Whether a call was found; the finish reason is then `tool_calls` instead of `stop`."""
        return self._calls > 0

    def push(self, text: str) -> Delta:
        """Consume new text, and return the delta to send."""
        self._text += text
        while self._step():
            pass
        return self._take_delta()

    def finish(self, text: str = "") -> Delta:
        """Consume the last text, and return the delta with everything that was held back."""
        self._text += text
        while self._step():
            pass
        if self._step in (self._opening, self._read):
            # Not a call, so it is content; except the beginning of a further call in a list, which is dropped.
            if self._reader.name is None and self._opener != ",":
                self._add_content(self._opener + self._held + self._text)
        elif self._step in (self._start, self._content):
            self._add_content(self._text)
        elif self._step == self._broken:
            self._add_arguments(self._text)
        if not self._calls:
            self._append_content(self._space)
        self._text, self._space, self._step = "", "", self._ended
        return self._take_delta()

    def _take_delta(self) -> Delta:
        delta, self._delta = self._delta, {}
        return delta

    # ---- states ----

    def _start(self) -> bool:
        begin = self._text.lstrip(SPACE)
        if not begin:
            return False
        if begin[0] in self._style.bare:
            self._add_content(self._text[: -len(begin)])
            return self._open_call(len(self._text) - len(begin), "", "")
        self._step = self._content
        return True

    def _content(self) -> bool:
        """Pass text on as content until a marker begins."""
        match = self._find((*self._style.markers, *self._parser.end_texts), self._add_content)
        if match is None:
            return False
        index, marker = match
        self._add_content(self._text[:index])
        if marker in self._parser.end_texts:
            self._text, self._step = "", self._ended
            return False
        return self._open_call(index, marker, self._style.markers[marker])

    def _find(self, markers: tuple[str, ...], pass_on: Callable[[str], None]) -> tuple[int, str] | None:
        """Return the first marker; without one, pass on the text that cannot be the beginning of a marker."""
        matches = [(index, marker) for marker in markers if (index := self._text.find(marker)) >= 0]
        if matches:
            return min(matches)
        longest = max((len(marker) for marker in markers), default=1) - 1
        size = len(self._text)
        tails = range(max(0, size - longest), size)
        held = next(
            (index for index in tails if any(marker.startswith(self._text[index:]) for marker in markers)), size
        )
        pass_on(self._text[:held])
        self._text = self._text[held:]
        return None

    def _open_call(self, index: int, opener: str, close: str) -> bool:
        self._opener, self._held, self._close = opener, "", close
        self._text = self._text[index + len(opener) :]
        self._listed = False
        self._reader = CallReader(self._parser.names)
        self._step = self._opening
        return True

    def _opening(self) -> bool:
        """Parse the text after an opening marker: an object, a list of objects, or the name of a tool."""
        begin = self._text.lstrip(SPACE)
        if not begin:
            return False
        if begin[0] == "[" and not self._listed:
            self._hold(len(self._text) - len(begin) + 1)
            self._listed = True
            return True
        if begin[0] == "{":
            self._reader = CallReader(self._parser.names, may_omit=bool(self._opener))
            self._step = self._read
            return True
        return self._head() if self._style.named and not self._listed else self._reject()

    def _head(self) -> bool:
        index = self._text.find("{")
        if max(index, 0 if index >= 0 else len(self._text)) > HEAD_LIMIT:
            return self._reject()
        if index < 0:
            return False
        head = CALL_HEAD.fullmatch(self._text[:index])
        if head is None or head[1] not in self._parser.names:
            return self._reject()
        self._hold(index)
        self._reader = CallReader(self._parser.names, bare_arguments_of=head[1])
        self._step = self._read
        return True

    def _read(self) -> bool:
        reader, known = self._reader, self._reader.name is not None
        for index, character in enumerate(self._text):
            if not reader.feed(character):
                if reader.name is None:
                    return self._reject()
                return self._read_until(index, known, self._broken if reader.inside else self._between)
            if reader.done:
                return self._read_until(index + 1, known, self._between)
        self._read_until(len(self._text), known, self._read)
        return False

    def _read_until(self, end: int, known: bool, step: Callable[[], bool]) -> bool:
        """Consume the text before `end`, which belongs to the call or may belong to it."""
        self._hold(end)
        if self._reader.name is not None:
            if not known:
                self._begin_call(self._reader.name)
            self._add_arguments(self._reader.take())
        self._step = self._ended if step == self._between and not self._parser.parallel else step
        return True

    def _broken(self) -> bool:
        """Pass on invalid arguments as they are, until a marker."""
        stops = tuple(filter(None, (self._close, *self._style.markers, *self._parser.end_texts)))
        match = self._find(stops, self._add_arguments)
        if match is None:
            return False
        index, _ = match
        self._add_arguments(self._text[:index])
        self._text = self._text[index:]
        self._step = self._between if self._parser.parallel else self._ended
        return True

    def _between(self) -> bool:
        """Parse the text after a call: its closing marker, another call, or content."""
        begin = self._text.lstrip(SPACE)
        if self._close and begin.startswith(self._close):
            self._text, self._step = begin[len(self._close) :], self._content
            return True
        if not begin or self._close.startswith(begin):
            return False
        space = len(self._text) - len(begin)
        if self._listed and begin[0] == "]":
            self._text, self._listed = begin[1:], False
            return True
        if begin[0] == "," and self._listed:
            return self._next_call(space, ",")
        if begin[0] in self._style.separators:
            return self._next_call(space, begin[0])
        if begin[0] == "{" and begin[0] in self._style.bare:
            return self._next_call(space, "")
        self._step = self._content
        return True

    def _next_call(self, space: int, separator: str) -> bool:
        close, listed = self._close, self._listed
        self._add_content(self._text[:space])
        self._open_call(space, separator, close)
        self._listed = listed
        return True

    def _ended(self) -> bool:
        self._text = ""
        return False

    def _reject(self) -> bool:
        """Treat the opening of a call as content, and parse the rest again."""
        self._add_content(self._opener)
        self._text = self._held + self._text
        self._step = self._content
        return True

    # ---- output ----

    def _hold(self, count: int) -> None:
        if self._reader.name is None:
            self._held += self._text[:count]
        self._text = self._text[count:]

    def _add_content(self, text: str) -> None:
        """Add content; white space next to a call is dropped, unless it stands between words."""
        text = self._space + text
        words = text.rstrip()
        self._space = text[len(words) :]
        if words and self._calls and not self._has_content:
            words = words.lstrip()
        self._append_content(words)

    def _append_content(self, text: str) -> None:
        if text:
            self._delta["content"] = self._delta.get("content", "") + text
            self._has_content = True

    def _begin_call(self, name: str) -> None:
        function = {"name": name, "arguments": ""}
        call_id = self._parser.make_id(self._index, self._calls)
        piece = {"index": self._calls, "id": call_id, "type": "function", "function": function}
        self._delta.setdefault("tool_calls", []).append(piece)
        self._space = ""
        self._calls += 1

    def _add_arguments(self, arguments: str) -> None:
        """Add to the arguments of the latest call."""
        if not arguments:
            return
        pieces = self._delta.setdefault("tool_calls", [])
        if not pieces or pieces[-1]["index"] != self._calls - 1:
            pieces.append({"index": self._calls - 1, "function": {"arguments": ""}})
        pieces[-1]["function"]["arguments"] += arguments
