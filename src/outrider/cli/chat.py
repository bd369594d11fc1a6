"""`outrider chat`: a conversation in the terminal."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, get_type_hints

from ..errors import UserError
from ..types import Output, SamplingParams
from . import console, options
from .answers import AnswerText, content, shown, with_channels
from .conversation import SUMMARY_TOKENS, Conversation, answer_figures, message_count
from .options import DRAFT, ENGINE, DraftFlags, EngineFlags, SamplingFlags, unfold
from .prompts import Prompt
from .results import check_errors, output_json, suspension_note
from .word_wrap import WordWrap

if TYPE_CHECKING:
    from ..llm import LLM

SAMPLING = SamplingFlags(max_tokens=512, temperature=0.7, top_p=0.95)
SETTINGS = [field.name for field in fields(SamplingFlags)]
QUOTES = '"""'  # around a message of several lines
EXITS = ("/exit", "/quit", "/bye")
HELP = f"""\
/help              show this list
/reset             start a new conversation
/retry             answer the last message again
/system [TEXT]     show or set the system message; none removes it
/set [NAME VALUE]  show or set {", ".join(SETTINGS)}
/shift             drop the oldest messages, until half of the context is free
/summarize         replace the conversation by a summary that the model writes
/save FILE         write the conversation to a file
/load FILE         continue the conversation of a file
/exit              end the chat, as Ctrl-D does
{QUOTES}                begin and end a message of several lines, or one that begins with /
Ctrl-C             stop an answer, or drop what you typed"""


@unfold
def chat(
    model: options.Model = options.DEFAULT_MODEL,
    system: options.System = None,
    sampling: SamplingFlags = SAMPLING,
    engine: EngineFlags = ENGINE,
    max_context: options.MaxContext = None,
    draft: DraftFlags = DRAFT,
    lora: options.Adapter = None,
    json: options.Json = False,
) -> None:
    """Chat with a model. /help lists the commands, /exit or Ctrl-D ends the chat, Ctrl-C stops an answer."""
    adapter = options.adapter_fields(lora)
    llm = options.open_model(model, max_context=max_context, **vars(engine), **draft.fields(), **adapter)
    if llm.tokenizer.chat_template is None:
        raise UserError(
            f"`{model}` has no chat template: use `outrider generate PROMPT --model {model}`, or a model tuned for chat"
        )
    if draft.is_auto and not json:
        console.note(draft.drafting(llm))
    if sys.stdin.isatty() and not json:
        console.note("/help lists the commands")
    params = with_channels(SamplingParams(**vars(sampling)), llm)
    session = ChatSession(llm, Conversation(system), params, json, lora)
    session.run()
    console.note(session.conversation.summary())


@dataclass
class ChatSession:
    llm: LLM
    conversation: Conversation
    params: SamplingParams
    json: bool
    lora: str | None = None  # the adapter that answers; None: the model itself
    explained: bool = False  # the user knows why the last answer had no drafts

    def run(self) -> None:
        """Answer messages and run commands until the end of the input. Errors are reported, and the chat continues."""
        while (message := read_message(prompt="" if self.json else "> ")) is not None:
            text, is_command = message
            if is_command and text in EXITS:
                return
            try:
                if is_command:
                    self.run_command(text)
                elif text:
                    self.answer(text)
            except UserError as error:
                console.note(f"error: {error}")

    @property
    def context(self) -> int:
        return self.llm.resolved.max_context

    def count(self, messages: list[dict[str, Any]]) -> int:
        return len(self.llm.chat_prompt(messages)) if messages else 0

    # ---- answers ----

    def answer(self, text: str) -> None:
        """Answer one message. After an error the conversation is as it was before."""
        conversation = self.conversation
        conversation.ask(text)
        try:
            self.check_fits(text)
            asked = list(conversation.messages)
            output = self.generate(asked, self.params, quiet=self.json)
            check_errors([output])
        except UserError:
            conversation.withdraw()
            raise
        if self.json:
            console.json_line(output_json(Prompt(messages=asked), shown(output, self.params)))
        else:
            console.aside(answer_figures(output, self.context))
            self.explain(output)
        conversation.add(output, content(output, self.params))

    def explain(self, output: Output) -> None:
        """Say why drafts are suspended, once until they are made again."""
        reason = "" if output.stats is None else suspension_note(output.stats.speculation)
        if reason and not self.explained:
            console.aside(reason)
        self.explained = bool(reason)

    def check_fits(self, text: str) -> None:
        """Refuse a message that leaves no token for the answer, and remember it for /retry."""
        size = self.count(self.conversation.messages)
        if size < self.context:
            return
        if len(self.conversation.history) == 1:
            raise UserError(
                f"the message has {size} tokens with the chat template and the context holds {self.context}: "
                "shorten it, or start with a larger `--max-context`"
            )
        self.conversation.refused = text
        raise UserError(
            f"the conversation has {size} tokens and the context holds {self.context}: /shift drops the oldest "
            "messages, /summarize replaces them by a summary, /reset drops all; then /retry sends this message again"
        )

    def generate(self, messages: list[dict[str, Any]], params: SamplingParams, quiet: bool) -> Output:
        """Stream one answer. Ctrl-C ends the answer, not the conversation."""
        answer = AnswerText(params)
        wrap = WordWrap(console.text) if sys.stdout.isatty() else None
        write = wrap.add if wrap else console.text
        with Interruption() as interruption:
            for output in self.llm.stream(self.llm.chat_prompt(messages), params, lora_request=self.lora):
                if not quiet:
                    write(answer.push(output.completions[0].text))
                if interruption.requested:
                    break
        if not quiet:
            write(answer.push(output.completions[0].text, final=True))
            wrap.close() if wrap else console.text("\n")
        return output

    # ---- commands ----

    def run_command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: console.note(HELP),
            "/reset": lambda _: self.conversation.reset(),
            "/retry": lambda _: self.retry(),
            "/system": self.set_system,
            "/set": self.set_parameter,
            "/shift": lambda _: self.shift(),
            "/summarize": lambda _: self.summarize(),
            "/save": lambda rest: self.conversation.save(file_of(name, rest), self.llm.resolved.model),
            "/load": self.load,
        }
        if name not in commands:
            raise UserError(f"no command called `{name}`: /help lists them; {QUOTES} begins a message with /")
        commands[name](rest.strip())

    def retry(self) -> None:
        before = list(self.conversation.history)
        try:
            self.answer(self.conversation.unanswered())
        except UserError:
            self.conversation.history = before
            raise

    def set_system(self, text: str) -> None:
        if text:
            self.conversation.system = None if text == "none" else text
        console.note(f"system message: {self.conversation.system or 'none'}")

    def set_parameter(self, text: str) -> None:
        """Set a sampling parameter, or show all of them."""
        from ..speculation.options import Setting, convert, hint

        name, _, value = text.replace("=", " ", 1).partition(" ")
        if name and name not in SETTINGS:
            raise UserError(f"no setting called `{name}`{hint(name, SETTINGS, {})}: expected {', '.join(SETTINGS)}")
        if value.strip():
            kind = get_type_hints(SamplingParams)[name]
            self.params = replace(self.params, **{name: convert(Setting(name, value.strip()), kind)})
        console.note(", ".join(f"{one} {getattr(self.params, one)}" for one in ([name] if name else SETTINGS)))

    def shift(self) -> None:
        dropped = self.conversation.shift(self.count, self.context // 2)
        size = self.count(self.conversation.messages)
        console.note(f"dropped {message_count(dropped)}; the conversation has {size} of {self.context} tokens")

    def summarize(self) -> None:
        messages = self.conversation.summary_request(
            self.count, self.context - 1 - min(SUMMARY_TOKENS, self.context // 4)
        )
        output = self.generate(messages, replace(self.params, max_tokens=SUMMARY_TOKENS), quiet=self.json)
        check_errors([output])
        self.conversation.replace(content(output, self.params).strip())
        size = self.count(self.conversation.messages)
        console.note(f"replaced the conversation by this summary; it has {size} of {self.context} tokens")

    def load(self, text: str) -> None:
        path = file_of("/load", text)
        self.conversation.load(path, self.llm.chat_prompt)
        console.note(f"loaded: {message_count(len(self.conversation.messages))} of {path}")


def file_of(command: str, text: str) -> Path:
    """Return the file that a command names; quotes around it are optional."""
    try:
        parts = shlex.split(text)
    except ValueError:
        parts = [text]
    if not parts:
        raise UserError(f"{command} needs the name of a file: write `{command} FILE`")
    return Path(text if len(parts) > 1 else parts[0]).expanduser()


# ---- input ----


def read_message(prompt: str) -> tuple[str, bool] | None:
    """Return the next message or command without surrounding white space, and whether it is a command.

    None at the end of the input. Ctrl-C at the prompt drops what was typed.
    """
    try:
        line = read_line(prompt)
        if line is None or not line.startswith(QUOTES):
            return None if line is None else (line, line.startswith("/"))
        lines = [line.removeprefix(QUOTES)]
        while not lines[-1].rstrip().endswith(QUOTES):
            if (line := read_line("." * len(prompt.rstrip()) + " " if prompt else "", strip=False)) is None:
                break
            lines.append(line)
        return "\n".join(lines).rstrip().removesuffix(QUOTES).strip(), False
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        console.text("\n")
        console.note("Ctrl-D or /exit ends the chat")
        return "", False


def read_line(prompt: str, strip: bool = True) -> str | None:
    """Return the next line; None at the end of the input."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        if not line:
            return None
        return line.strip() if strip else line.rstrip("\r\n")
    import readline  # noqa: F401  (importing it gives `input` its line editing)

    try:
        typed = input(prompt)
    except EOFError:
        console.text("\n")
        return None
    return typed.strip() if strip else typed


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
