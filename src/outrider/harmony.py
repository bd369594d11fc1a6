"""Split an answer in the harmony format (gpt-oss) into reasoning, content and tool calls, incrementally.

An answer is a list of messages: `<|channel|>analysis<|message|>...<|end|>`, then
`<|start|>assistant<|channel|>final<|message|>...<|return|>`. A tool call is a message to a function:
`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`. The prompt ends inside the first
header, after `<|start|>assistant`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from .types import Output

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
RECIPIENT_KEY = "to="
CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
FUNCTIONS = "functions."  # namespace of the tools of a request
HEADER_LIMIT = 300  # characters of a header; a longer text is content


def is_harmony(template: str | None) -> bool:
    """Return whether the models of this chat template answer in the harmony format."""
    return CHANNEL in (template or "") and MESSAGE in (template or "")


class Tools(Protocol):
    """The tools of a request."""

    @property
    def names(self) -> frozenset[str]: ...

    @property
    def make_id(self) -> Callable[[int, int], str]:
        """Return the function from choice and call to the id of the call."""

    @property
    def parallel(self) -> bool:
        """Return whether all calls count, not only the first."""


class HarmonyStream:
    """The incremental parser of one choice. The pieces add up to the same texts however the answer is cut.

    The channel `analysis` is reasoning. A message to a tool of the request is a call, whatever its channel. All other
    messages are content. Messages of one kind are joined by a line break.
    """

    def __init__(self, tools: Tools | None, index: int = 0, continued: bool = False) -> None:
        """Set the state. continued: the answer continues a message of the prompt, which is content."""
        self._tools, self._index = tools, index
        self._step: Callable[[bool], bool] = self._body if continued else self._header_or_content
        self._kind = "content"
        self._text = ""  # not consumed yet
        self._consumed = 0  # characters
        self._begin = 0  # characters before the message
        self._said = {"reasoning_content": False, "content": False}  # whether there is text of the kind
        self._new = True  # no text of the message was passed on yet
        self._calls = 0
        self._delta: dict[str, Any] = {}
        self.reasoning: list[tuple[int, int]] = []  # characters of the answer that are reasoning, with their headers

    @property
    def called(self) -> bool:
        """Whether a call was found; the finish reason is then `tool_calls` instead of `stop`."""
        return self._calls > 0

    def push(self, text: str, final: bool = False) -> dict[str, Any]:
        """Consume new text; return what is certain as a delta in OpenAI's format. final: the answer ends here."""
        self._text += text
        while self._step(final):
            pass
        if final and self._step == self._body:
            self._close()
        delta, self._delta = self._delta, {}
        return delta

    # ---- states: each consumes what it can decide, and returns whether the next state should run ----

    def _header_or_content(self, final: bool) -> bool:
        """Decide whether a header follows, as it should: at the start of the answer, or after a message."""
        begin = self._text.lstrip()
        openers = (START, CHANNEL, RECIPIENT_KEY)
        if begin.startswith(openers):
            self._begin, self._step = self._consumed, self._header
            return True
        if not begin or (not final and any(opener.startswith(begin) for opener in openers)):
            return False
        self._open("")
        return True

    def _header(self, final: bool) -> bool:
        size = self._text.find(MESSAGE, 0, HEADER_LIMIT)
        if size >= 0:
            header = self._take(size + len(MESSAGE))
            self._open(header)
            return True
        plain = self._text.lstrip().startswith(RECIPIENT_KEY)
        if len(self._text) < HEADER_LIMIT and not (final and plain):
            return False  # cut off: a header with marks is no content
        self._open("")
        self._pass_on(self._take(len(self._text) - len(self._text.lstrip()) + 1))  # so that no mark is found here again
        return True

    def _body(self, final: bool) -> bool:
        """Pass the text of a message on until it ends."""
        marks = (*ENDS, START, CHANNEL)
        found = [(index, mark) for mark in marks if (index := self._text.find(mark)) >= 0]
        if not found:
            held = 0 if final else _begun_mark(self._text, marks)
            self._pass_on(self._take(len(self._text) - held))
            return False
        index, mark = min(found)
        self._pass_on(self._take(index))
        if mark in ENDS:
            self._take(len(mark))
        self._close()
        self._step = self._header_or_content
        return True

    # ---- messages ----

    def _open(self, header: str) -> None:
        channel, recipient = CHANNEL_NAME.search(header), RECIPIENT.search(header)
        name = recipient[1].removeprefix(FUNCTIONS) if recipient else ""
        self._new, self._step = True, self._body
        if self._tools is not None and name in self._tools.names:
            self._kind = "call" if self._tools.parallel or not self._calls else "dropped"
        else:
            self._kind = "reasoning_content" if channel and channel[1] == "analysis" else "content"
        if self._kind == "call" and self._tools is not None:
            call_id = self._tools.make_id(self._index, self._calls)
            function = {"name": name, "arguments": ""}
            piece = {"index": self._calls, "id": call_id, "type": "function", "function": function}
            self._delta.setdefault("tool_calls", []).append(piece)
            self._calls += 1

    def _pass_on(self, text: str) -> None:
        if not text or self._kind == "dropped":
            return
        if self._kind == "call":
            self._add_arguments(text)
        else:
            separator = "\n" if self._new and self._said[self._kind] else ""
            self._delta[self._kind] = self._delta.get(self._kind, "") + separator + text
            self._said[self._kind] = True
        self._new = False

    def _add_arguments(self, text: str) -> None:
        pieces = self._delta.setdefault("tool_calls", [])
        if not pieces or pieces[-1]["index"] != self._calls - 1:
            pieces.append({"index": self._calls - 1, "function": {"arguments": ""}})
        pieces[-1]["function"]["arguments"] += text

    def _close(self) -> None:
        if self._kind == "call" and self._new:
            self._add_arguments("{}")
        if self._kind == "reasoning_content":
            self.reasoning.append((self._begin, self._consumed))
        self._kind, self._new = "content", True

    def _take(self, count: int) -> str:
        taken, self._text = self._text[:count], self._text[count:]
        self._consumed += count
        return taken


class OutputSplitter:
    """Splits the completions of one growing output into `text` and `reasoning`."""

    def __init__(self, samples: int) -> None:
        self._streams = [HarmonyStream(None) for _ in range(samples)]
        self._read = [0] * samples  # characters of each completion
        self._parts = [{"reasoning_content": "", "content": ""} for _ in range(samples)]

    def push(self, output: Output) -> Output:
        """Take the output so far, whose texts hold the marks, and return it with its texts split."""
        completions = []
        for one in output.completions:
            parts, new = self._parts[one.index], one.text[self._read[one.index] :]
            self._read[one.index] = len(one.text)
            delta = self._streams[one.index].push(new, final=one.finish_reason is not None)
            for kind in parts:
                parts[kind] += delta.get(kind, "")
            completions.append(replace(one, text=parts["content"], reasoning=parts["reasoning_content"]))
        return replace(output, completions=completions)


def _begun_mark(text: str, marks: tuple[str, ...]) -> int:
    """Return the length of the longest end of `text` that a mark may begin with."""
    longest = min(max(map(len, marks)) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if any(mark.startswith(text[-size:]) for mark in marks)), 0)
