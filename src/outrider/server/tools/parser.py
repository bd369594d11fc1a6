"""Tool calls in what a model writes, whole or as it comes.

ToolParser.parse(text, index=0) -> (content | None, list[ToolCall])
ToolParser.stream(index=0) -> ToolStream    one for each of the `n` answers, which `index` numbers
ToolStream.push(text) -> Delta              `text`: only what is new. The delta of a chunk in OpenAI's shape: `content`,
                                            `tool_calls`, both or neither (nothing to send)
ToolStream.finish(text="") -> Delta         the same with the last text, and all that was held back
ToolStream.called: bool                     then the answer's finish reason is `tool_calls` instead of `stop`

However a text is cut into pieces, the pieces add up to the same content and calls.
What only looks like a call is content. What is a call is told as soon as that is certain (see CallReader); if its
arguments break off or go wrong after that, they are passed on as the model wrote them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .call_reader import SPACE, CallReader

Delta = dict[str, Any]
HEAD = re.compile(r"\s*([a-zA-Z0-9_-]{1,64})\s*(?:\[CALL_ID\]\s*[\w-]*\s*)?(?:\[ARGS\]\s*)?", re.ASCII)
HEAD_LIMIT = 200  # characters from a marker to the arguments


@dataclass(frozen=True)
class Style:
    """How a family of models writes its calls."""

    name: str
    markers: Mapping[str, str] = field(default_factory=dict)  # what opens a call anywhere, and what closes it
    bare: str = ""  # characters that open a call where they begin the answer
    separators: str = ""  # between calls that nothing else separates
    named: bool = False  # a marker may be followed by the name alone, and then the arguments
    id_length: int = 24
    id_prefix: str = "call_"


HERMES = Style("hermes", {"<tool_call>": "</tool_call>"})
LLAMA = Style("llama", {"<|python_tag|>": ""}, bare="{", separators=";")
# Its template refuses ids of any other form.
MISTRAL = Style("mistral", {"[TOOL_CALLS]": ""}, named=True, id_length=9, id_prefix="")
GENERIC = Style("json", {"<tool_call>": "</tool_call>", "```json": "```"}, bare="{[", separators=";")
FORCED = Style("forced", bare="{[")


@dataclass(frozen=True)
class ToolCall:
    id: str
    name: str
    arguments: str  # JSON

    def as_json(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class ToolParser:
    style: Style
    names: frozenset[str]
    make_id: Callable[[int, int], str]  # of answer and call
    parallel: bool = True  # else only the first call counts
    ends: tuple[str, ...] = ()  # special tokens that end an answer, where the text shows them

    def parse(self, text: str, index: int = 0) -> tuple[str | None, list[ToolCall]]:
        delta = self.stream(index).finish(text)
        told = [(piece["id"], piece["function"]) for piece in delta.get("tool_calls", ())]
        calls = [ToolCall(name, function["name"], function["arguments"]) for name, function in told]
        return delta.get("content", None if calls else ""), calls

    def stream(self, index: int = 0) -> ToolStream:
        return ToolStream(self, index)


class ToolStream:
    """Each step takes what it can judge from `_text`, and says whether there may be more to judge."""

    def __init__(self, parser: ToolParser, index: int) -> None:
        self._parser, self._style, self._index = parser, parser.style, index
        self._step: Callable[[], bool] = self._start if self._style.bare else self._content
        self._text = ""  # not judged yet
        self._space = ""  # the end of the content so far: nothing, if a call comes next
        self._said = False
        self._opener = self._held = ""  # what became of `_text` while it may be a call
        self._close, self._listed = "", False
        self._reader = CallReader(parser.names)
        self._delta: Delta = {}
        self._calls = 0

    @property
    def called(self) -> bool:
        return self._calls > 0

    def push(self, text: str) -> Delta:
        self._text += text
        while self._step():
            pass
        return self._taken()

    def finish(self, text: str = "") -> Delta:
        self._text += text
        while self._step():
            pass
        if self._step in (self._open, self._read):
            # It never became a call. As one more of a list, cut off, it is not worth a word.
            if self._reader.name is None and self._opener != ",":
                self._say(self._opener + self._held + self._text)
        elif self._step in (self._start, self._content):
            self._say(self._text)
        elif self._step == self._broken:
            self._tell(self._text)
        if not self._calls:
            self._write(self._space)
        self._text, self._space, self._step = "", "", self._ended
        return self._taken()

    def _taken(self) -> Delta:
        delta, self._delta = self._delta, {}
        return delta

    # Steps

    def _start(self) -> bool:
        begin = self._text.lstrip(SPACE)
        if not begin:
            return False
        if begin[0] in self._style.bare:
            self._say(self._text[: -len(begin)])
            return self._opened(len(self._text) - len(begin), "", "")
        self._step = self._content
        return True

    def _content(self) -> bool:
        """Pass text on until a marker comes."""
        found = self._find((*self._style.markers, *self._parser.ends), self._say)
        if found is None:
            return False
        at, marker = found
        self._say(self._text[:at])
        if marker in self._parser.ends:
            self._text, self._step = "", self._ended
            return False
        return self._opened(at, marker, self._style.markers[marker])

    def _find(self, markers: tuple[str, ...], pass_on: Callable[[str], None]) -> tuple[int, str] | None:
        """The first marker in the text; else what cannot be the beginning of one is passed on."""
        found = [(at, marker) for marker in markers if (at := self._text.find(marker)) >= 0]
        if found:
            return min(found)
        longest = max((len(marker) for marker in markers), default=1) - 1
        size = len(self._text)
        tails = range(max(0, size - longest), size)
        held = next((at for at in tails if any(marker.startswith(self._text[at:]) for marker in markers)), size)
        pass_on(self._text[:held])
        self._text = self._text[held:]
        return None

    def _opened(self, at: int, opener: str, close: str) -> bool:
        self._opener, self._held, self._close = opener, "", close
        self._text = self._text[at + len(opener) :]
        self._listed = False
        self._reader = CallReader(self._parser.names)
        self._step = self._open
        return True

    def _open(self) -> bool:
        """After what opens a call: its object, a list of them, or its name."""
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
        at = self._text.find("{")
        if max(at, 0 if at >= 0 else len(self._text)) > HEAD_LIMIT:
            return self._reject()
        if at < 0:
            return False
        head = HEAD.fullmatch(self._text[:at])
        if head is None or head[1] not in self._parser.names:
            return self._reject()
        self._hold(at)
        self._reader = CallReader(self._parser.names, bare_arguments_of=head[1])
        self._step = self._read
        return True

    def _read(self) -> bool:
        reader, known = self._reader, self._reader.name is not None
        for at, character in enumerate(self._text):
            if not reader.feed(character):
                if reader.name is None:
                    return self._reject()
                return self._read_until(at, known, self._broken if reader.inside else self._between)
            if reader.done:
                return self._read_until(at + 1, known, self._between)
        self._read_until(len(self._text), known, self._read)
        return False

    def _read_until(self, at: int, known: bool, step: Callable[[], bool]) -> bool:
        """Everything before `at` belongs to the call, or may."""
        self._hold(at)
        if self._reader.name is not None:
            if not known:
                self._announce(self._reader.name)
            self._tell(self._reader.take())
        self._step = self._ended if step == self._between and not self._parser.parallel else step
        return True

    def _broken(self) -> bool:
        """Arguments that went wrong: the rest of the call is passed on as it is."""
        stops = tuple(filter(None, (self._close, *self._style.markers, *self._parser.ends)))
        found = self._find(stops, self._tell)
        if found is None:
            return False
        at, _ = found
        self._tell(self._text[:at])
        self._text = self._text[at:]
        self._step = self._between if self._parser.parallel else self._ended
        return True

    def _between(self) -> bool:
        """After a call: what closes it, another one, or content."""
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
            return self._another(space, ",")
        if begin[0] in self._style.separators:
            return self._another(space, begin[0])
        if begin[0] == "{" and begin[0] in self._style.bare:
            return self._another(space, "")
        self._step = self._content
        return True

    def _another(self, space: int, separator: str) -> bool:
        close, listed = self._close, self._listed
        self._say(self._text[:space])
        self._opened(space, separator, close)
        self._listed = listed
        return True

    def _ended(self) -> bool:
        self._text = ""
        return False

    def _reject(self) -> bool:
        """It was no call: what opened it is content, and the rest is read again."""
        self._say(self._opener)
        self._text = self._held + self._text
        self._step = self._content
        return True

    # What comes of them

    def _hold(self, count: int) -> None:
        if self._reader.name is None:
            self._held += self._text[:count]
        self._text = self._text[count:]

    def _say(self, text: str) -> None:
        """Content. White space next to a call is none, unless it stands between words."""
        text = self._space + text
        words = text.rstrip()
        self._space = text[len(words) :]
        if words and self._calls and not self._said:
            words = words.lstrip()
        self._write(words)

    def _write(self, text: str) -> None:
        if text:
            self._delta["content"] = self._delta.get("content", "") + text
            self._said = True

    def _announce(self, name: str) -> None:
        function = {"name": name, "arguments": ""}
        call_id = self._parser.make_id(self._index, self._calls)
        piece = {"index": self._calls, "id": call_id, "type": "function", "function": function}
        self._delta.setdefault("tool_calls", []).append(piece)
        self._space = ""
        self._calls += 1

    def _tell(self, arguments: str) -> None:
        """More of the arguments of the latest call."""
        if not arguments:
            return
        pieces = self._delta.setdefault("tool_calls", [])
        if not pieces or pieces[-1]["index"] != self._calls - 1:
            pieces.append({"index": self._calls - 1, "function": {"arguments": ""}})
        pieces[-1]["function"]["arguments"] += arguments
