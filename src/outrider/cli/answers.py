"""Answers in the harmony format (gpt-oss), shown as other models write theirs: reasoning in <think> tags, then text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ..harmony import START, HarmonyStream, is_harmony
from ..server.reasoning import CLOSE, OPEN
from ..types import Output, SamplingParams

if TYPE_CHECKING:
    from ..llm import LLM

MESSAGES = re.compile(f"(?={re.escape(START)})")


class AnswerText:
    """The text of one answer as it is shown, incrementally: as it is, unless its parameters keep special tokens."""

    def __init__(self, params: SamplingParams) -> None:
        self._stream = None if params.skip_special_tokens else HarmonyStream(None)
        self._read = 0  # characters of the answer
        self._tag = ""  # that closes the block
        self._said = False
        self.content = ""  # without reasoning

    def push(self, text: str, final: bool = False) -> str:
        """Take the answer so far, and return what is new. final: it ends here."""
        new, self._read = text[self._read :], len(text)
        if self._stream is None:
            self.content += new
            return new
        pieces = MESSAGES.split(new)  # a push returns the texts of both kinds, without their order
        deltas = [self._stream.push(piece) for piece in pieces]
        if final:
            deltas.append(self._stream.push("", final=True))
        parts = [part for delta in deltas for part in self._parts(delta)]
        return "".join(parts) + (self._close().rstrip() if final else "")

    def _parts(self, delta: dict[str, str]) -> Iterator[str]:
        if reasoning := delta.get("reasoning_content"):
            if not self._tag:
                yield ("\n\n" if self._said else "") + OPEN + "\n"
                self._tag = f"\n{CLOSE}\n\n"
            yield reasoning
        if content := delta.get("content"):
            self.content += content
            tag = self._close()
            yield tag + (content.removeprefix("\n") if tag else content)  # which separates it from earlier content
            self._said = True

    def _close(self) -> str:
        tag, self._tag = self._tag, ""
        return tag


def with_channels(params: SamplingParams, llm: LLM) -> SamplingParams:
    """Return the parameters of prompts in the chat template: they keep the marks of channels, if answers have any."""
    return replace(params, skip_special_tokens=not is_harmony(llm.tokenizer.chat_template))


def shown(output: Output, params: SamplingParams) -> Output:
    """Return an output with the texts that are shown."""
    texts = [AnswerText(params).push(one.text, final=True) for one in output.completions]
    completions = [replace(one, text=text) for one, text in zip(output.completions, texts, strict=True)]
    return replace(output, completions=completions)


def content(output: Output, params: SamplingParams) -> str:
    """Return what later prompts hold of an answer: its text without the reasoning in channels."""
    answer = AnswerText(params)
    answer.push(output.completions[0].text, final=True)
    return answer.content
