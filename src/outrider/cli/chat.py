"""`outrider chat`: a conversation in the terminal."""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from ..errors import UserError
from ..types import Output, SamplingParams, SpecStats
from . import console, options
from .options import DRAFT, ENGINE, DraftFlags, EngineFlags, SamplingFlags, unfold
from .prompts import Prompt
from .results import check_errors, output_json, speculation_summary

if TYPE_CHECKING:
    from ..llm import LLM

SAMPLING = SamplingFlags(max_tokens=512, temperature=0.7, top_p=0.95)


@dataclass
class Conversation:
    system: str | None
    history: list[dict[str, Any]] = field(default_factory=list)
    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0
    method: str = ""
    spec_stats: SpecStats = field(default_factory=SpecStats)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.history = [] if self.system is None else [{"role": "system", "content": self.system}]

    def add(self, output: Output) -> None:
        completion = output.completions[0]
        self.history.append({"role": "assistant", "content": completion.text})
        self.answers += 1
        self.tokens += len(completion.token_ids)
        if output.stats is not None:
            self.seconds += output.stats.seconds
            self.method = output.stats.method or self.method
            self.spec_stats.add(output.stats.speculation)

    def summary(self) -> str:
        rate = self.tokens / self.seconds if self.seconds else 0.0
        answers = "1 answer" if self.answers == 1 else f"{self.answers} answers"
        speed = f"{answers}, {self.tokens} tokens, {rate:.1f} tokens/s"
        return f"{speed}\n{speculation_summary(self.method, self.spec_stats)}" if self.method else speed


@unfold
def chat(
    model: options.Model = options.DEFAULT_MODEL,
    system: options.System = None,
    sampling: SamplingFlags = SAMPLING,
    engine: EngineFlags = ENGINE,
    max_context: options.MaxContext = None,
    draft: DraftFlags = DRAFT,
    json: options.Json = False,
) -> None:
    """Chat with a model. /reset starts a new conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer."""
    params = SamplingParams(**vars(sampling))
    llm = options.open_model(model, max_context=max_context, **vars(engine), **draft.fields())
    if llm.tokenizer.chat_template is None:
        raise UserError(
            f"`{model}` has no chat template: use `outrider generate PROMPT --model {model}`, or a model tuned for chat"
        )
    if draft.is_auto and not json:
        console.note(draft.drafting(llm))
    conversation = Conversation(system)
    while (line := read_line(prompt="" if json else "> ")) is not None:
        if line == "/exit":
            break
        if line == "/reset":
            conversation.reset()
        elif line.startswith("/"):
            console.note(f"error: no command called `{line}`: use /reset or /exit")
        elif line:
            exchange(llm, conversation, line, params, json)
    console.note(conversation.summary())


def read_line(prompt: str) -> str | None:
    """Return the next line without surrounding white space; None at the end of the input."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.strip() if line else None
    import readline  # noqa: F401  (importing it gives `input` its line editing)

    try:
        return input(prompt).strip()
    except EOFError:
        console.text("\n")
        return None


def exchange(llm: LLM, conversation: Conversation, line: str, params: SamplingParams, json: bool) -> None:
    """Answer one message. After an error the conversation is as it was before."""
    conversation.history.append({"role": "user", "content": line})
    try:
        output = generate_answer(llm, conversation.history, params, quiet=json)
        check_errors([output])
    except UserError as error:
        conversation.history.pop()
        console.note(f"error: {error}")
        return
    if json:
        console.json_line(output_json(Prompt(messages=list(conversation.history)), output))
    conversation.add(output)


def generate_answer(llm: LLM, history: list[dict[str, Any]], params: SamplingParams, quiet: bool) -> Output:
    """Stream one answer. Ctrl-C ends the answer, not the conversation."""
    shown = ""
    with Interruption() as interruption:
        for output in llm.stream(llm.chat_prompt(history), params):
            text = output.completions[0].text
            if not quiet:
                console.text(text[len(shown) :])
            shown = text
            if interruption.requested:
                break
    if not quiet:
        console.text("\n")
    return output


class Interruption:
    """Records the first Ctrl-C, so that the current step can finish; the second one raises KeyboardInterrupt."""

    def __enter__(self) -> Self:
        self.requested = False
        self.previous = signal.signal(signal.SIGINT, self._record)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self.previous)

    def _record(self, *_: object) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, self.previous)
