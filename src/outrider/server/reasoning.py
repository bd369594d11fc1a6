"""Split the reasoning block of an answer (`<think> ... </think>`) from its content, incrementally."""

from __future__ import annotations

from enum import Enum, auto

from ..harmony import is_harmony

OPEN, CLOSE = "<think>", "</think>"  # of Qwen, DeepSeek and most others


def has_reasoning(template: str | None) -> bool:
    """Return whether the models of this chat template write reasoning: in blocks, or in the harmony format."""
    return CLOSE in (template or "") or is_harmony(template)


def opens_reasoning(prompt: str) -> bool:
    """Return whether a prompt ends with an open reasoning block, which the answer then continues."""
    return prompt.rstrip().endswith(OPEN)


def leaves_open(message: str) -> bool:
    """Return whether an unfinished message has opened a reasoning block and not closed it."""
    return message.rfind(OPEN) > message.rfind(CLOSE)


class _State(Enum):
    START = auto()
    REASONING = auto()
    GAP = auto()  # white space after the block
    CONTENT = auto()


class ReasoningStream:
    """The incremental splitter of one answer. The pieces add up to the same texts however the answer is cut.

    Only a block at the start of the answer counts. White space around the block is dropped.
    """

    def __init__(self, opened: bool = False) -> None:
        """Set the state. opened: the prompt has opened the block."""
        self._opened = opened
        self._state = _State.START
        self._text = ""  # not decided yet
        self._begun = False
        self.end: int | None = None  # characters of the answer up to the end of the block, once it has ended
        self._length = 0

    @property
    def inside(self) -> bool:
        """Whether the answer so far is all reasoning."""
        return self._state is _State.REASONING

    def push(self, text: str, final: bool = False) -> tuple[str, str]:
        """Consume new text; return the reasoning and the content that are certain. final: the answer ends here."""
        self._text += text
        self._length += len(text)
        reasoning = content = ""
        if self._state is _State.START and not self._start(final):
            return "", ""
        if self._state is _State.REASONING:
            reasoning = self._reasoning(final)
        if self._state is _State.GAP:
            self._text = self._text.lstrip()
            self._state = _State.CONTENT if self._text else _State.GAP
        if self._state is _State.CONTENT:
            content, self._text = self._text, ""
        return reasoning, content

    def _start(self, final: bool) -> bool:
        """Look for the opening tag; return whether the state is decided."""
        begin = self._text.lstrip()
        if begin.startswith(OPEN):
            self._text, self._state = begin[len(OPEN) :], _State.REASONING
        elif final or not OPEN.startswith(begin):
            self._state = _State.REASONING if self._opened else _State.CONTENT
        return self._state is not _State.START

    def _reasoning(self, final: bool) -> str:
        before, close, rest = self._text.partition(CLOSE)
        if close or final:
            if close:
                self._state, self.end = _State.GAP, self._length - len(rest)
            certain, self._text = before.rstrip(), rest
        else:
            certain = before[: len(before) - _begun_tag(before)].rstrip()
            self._text = before[len(certain) :]
        if not self._begun:
            # White space at the start is dropped with the text that follows it.
            certain = certain.lstrip()
            self._begun = bool(certain)
        return certain


def _begun_tag(text: str) -> int:
    """Return the length of the longest end of `text` that the closing tag may begin with."""
    longest = min(len(CLOSE) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if CLOSE.startswith(text[-size:])), 0)
