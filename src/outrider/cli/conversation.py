"""The conversation of `outrider chat`: its messages, its file, its totals, and how it is shortened."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..types import Output, SpecStats
from . import console
from .results import speculation_summary, suspension_note

Messages = list[dict[str, Any]]
Counter = Callable[[Messages], int]  # the tokens of a conversation in the chat template

SUMMARY_TOKENS = 256  # limit of a summary: a few sentences, small beside any context
SUMMARY_REQUEST = "Summarize our conversation so far in a few sentences. Keep names, numbers and decisions."
SUMMARY_ANSWER = "Thank you. Let us continue from there."


@dataclass
class Conversation:
    system: str | None
    history: Messages = field(default_factory=list)  # without the system message
    refused: str | None = None  # the last message, if it did not fit the context
    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0
    method: str = ""
    spec_stats: SpecStats = field(default_factory=SpecStats)

    @property
    def messages(self) -> Messages:
        opening = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*opening, *self.history]

    def reset(self) -> None:
        self.history, self.refused = [], None

    def ask(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def withdraw(self) -> str:
        """Remove the last message and return its text."""
        content: str = self.history.pop()["content"]
        return content

    def add(self, output: Output, content: str) -> None:
        """Append the content of an answer, and count its tokens."""
        completion = output.completions[0]
        self.history.append({"role": "assistant", "content": content})
        self.refused = None
        self.answers += 1
        self.tokens += len(completion.token_ids)
        if output.stats is not None:
            self.seconds += output.stats.seconds
            self.method = output.stats.method or self.method
            self.spec_stats.add(output.stats.speculation)

    def summary(self) -> str:
        """Describe all answers in one line, their drafts in a second one, and why drafts were suspended in a third."""
        rate = self.tokens / self.seconds if self.seconds else 0.0
        answers = "1 answer" if self.answers == 1 else f"{self.answers} answers"
        speed = f"{answers}, {self.tokens} tokens, {rate:.1f} tokens/s"
        if not self.method:
            return speed
        drafts = speculation_summary(self.method, self.spec_stats), suspension_note(self.spec_stats)
        return "\n".join([speed, *filter(None, drafts)])

    def unanswered(self) -> str:
        """Remove the last question, with its answer if it has one, and return it, to be asked again."""
        if self.refused is not None:
            return self.refused
        if self.history and self.history[-1]["role"] == "assistant":
            self.history.pop()
        if not self.history or self.history[-1]["role"] != "user":
            raise UserError("there is no message to answer again: write one first")
        return self.withdraw()

    # ---- a full context ----

    def shift(self, count: Counter, limit: int) -> int:
        """Drop the oldest exchanges until at most `limit` tokens are left; return the number of dropped messages."""
        before = len(self.history)
        while self.history and count(self.messages) > limit:
            following = (index for index, message in enumerate(self.history) if index and message["role"] == "user")
            del self.history[: next(following, len(self.history))]
        return before - len(self.history)

    def summary_request(self, count: Counter, limit: int) -> Messages:
        """Return the messages that ask for a summary, without the oldest ones that exceed `limit` tokens."""
        part = Conversation(self.system, [*self.history, {"role": "user", "content": SUMMARY_REQUEST}])
        part.shift(count, limit)
        if len(part.history) < 2:
            raise UserError("there is nothing to summarize: no exchange of this conversation fits the context")
        return part.messages

    def replace(self, summary: str) -> None:
        """Replace all messages by a summary, as an exchange that any chat template takes."""
        self.history = [
            {"role": "user", "content": f"Summary of our conversation so far: {summary}"},
            {"role": "assistant", "content": SUMMARY_ANSWER},
        ]

    # ---- its file ----

    def save(self, path: Path, model: str) -> None:
        """Write the conversation on one line, as a file of prompts that `outrider generate --file` reads, too."""
        line = json.dumps({"model": model, "messages": self.messages}, ensure_ascii=False)
        console.write(path, line + "\n", "saved")

    def load(self, path: Path, check: Callable[[Messages], object]) -> None:
        """Read a conversation: a list of messages, or an object with `messages`. check: refuses malformed messages."""
        text = console.read_text(path)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"cannot read `{path}`: it is not JSON") from error
        messages = value.get("messages") if isinstance(value, dict) else value
        if not isinstance(messages, list) or not messages:
            raise UserError(f"`{path}` holds no conversation: write a list of messages, or an object with `messages`")
        check(messages)
        has_system = messages[0]["role"] == "system"
        self.reset()
        self.system = messages[0]["content"] if has_system else None
        self.history = messages[1:] if has_system else messages


def unfinished_remark(output: Output, context: int) -> str:
    """Say why an answer was cut off; empty if it was not."""
    completion = output.completions[0]
    if completion.finish_reason is None:
        return ", stopped"
    if completion.finish_reason != "length":
        return ""
    if len(output.prompt_token_ids) + len(completion.token_ids) >= context:
        return ", cut off: the context is full (/shift or /summarize make room)"
    return ", cut off by max_tokens (/set max_tokens NUMBER)"


def answer_figures(output: Output, context: int) -> str:
    """Describe the speed of one answer and its accepted drafts in one line."""
    tokens, remark = len(output.completions[0].token_ids), unfinished_remark(output, context)
    used = f"{len(output.prompt_token_ids) + tokens} of {context} in the context"
    if output.stats is None:  # interrupted
        return f"[{tokens} tokens, {used}{remark}]"
    drafts, spec_stats = "", output.stats.speculation
    if output.stats.method:
        accepted = f"{spec_stats.accepted} of {spec_stats.drafted} drafted by {output.stats.method} accepted"
        drafts = f", {spec_stats.tokens_per_step:.1f} tokens per step, {accepted}"
        if not spec_stats.drafted:
            drafts = f", nothing drafted by {output.stats.method}"
    return f"[{tokens} tokens, {output.stats.tokens_per_second:.1f} tokens/s{drafts}, {used}{remark}]"


def message_count(count: int) -> str:
    return "1 message" if count == 1 else f"{count} messages"
