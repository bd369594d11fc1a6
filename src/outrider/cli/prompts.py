"""Prompts from the command line and from files."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..errors import UserError
from .console import read_text

if TYPE_CHECKING:
    from ..llm import LLM
    from ..tokenizer import Tokenizer


MISSING_PROMPT = "pass a prompt, `-` to read one from stdin, or a file of prompts with `--file`"
# A text without white space that has a folder or ends in a suffix, such as `old.py` or `src/old`.
FILE_NAME = re.compile(r"(?=\S*(/|\.\w{1,8}$))[\w~./-]+", re.ASCII)


@dataclass(frozen=True)
class Prompt:
    """A prompt of the user: a text, or the messages of a chat."""

    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    prediction: str | None = None  # expected output, to draft from
    location: str = field(default="", compare=False)  # file and line, or number, for errors; empty: the only prompt

    def tokens(self, llm: LLM, raw: bool, system: str | None) -> list[int] | str:
        """Return the engine's input: the tokens of the chat template, or the text as it is.

        If the prompt cannot be served, raise UserError with its location.
        """
        try:
            tokens = self._input(llm, raw, system)
            llm.engine.input_processor.check_prompt(llm.tokenizer.encode(tokens) if isinstance(tokens, str) else tokens)
        except UserError as error:
            raise (UserError(f"{self.location}: {error}") if self.location else error) from None
        return tokens

    def _input(self, llm: LLM, raw: bool, system: str | None) -> list[int] | str:
        messages = self.conversation(llm.tokenizer, raw, system)
        if messages is not None:
            return llm.chat_prompt(messages)
        if system is not None:
            reason = "`--raw` turns it off" if raw else f"`{llm.resolved.model}` has none"
            raise UserError(f"`--system` needs a chat template, but {reason}: put the instruction into the prompt")
        assert self.text is not None
        return self.text

    def conversation(self, tokenizer: Tokenizer, raw: bool, system: str | None = None) -> list[dict[str, Any]] | None:
        """Return the messages for the chat template; None if the text is used as it is."""
        if self.messages is not None and raw:
            raise UserError("`messages` need the chat template: remove `--raw`, or use `prompt` instead")
        if self.messages is None and (raw or tokenizer.chat_template is None):
            return None
        opening = [] if system is None else [{"role": "system", "content": system}]
        return opening + ([{"role": "user", "content": self.text}] if self.messages is None else self.messages)


def collect(prompts: list[str] | None, file: Path | None) -> list[Prompt]:
    """Return the prompts of the command line, then those of the file; if there are neither, what stdin holds."""
    texts = [piped_prompt() if text == "-" else text for text in prompts or []]
    if not texts and file is None and sys.stdin is not None and not sys.stdin.isatty():
        texts = [piped_prompt()]
    locations = [f"prompt {number}" if len(texts) > 1 else "" for number in range(1, len(texts) + 1)]
    collected = [Prompt(text=text, location=location) for text, location in zip(texts, locations, strict=True)]
    collected += read_file(file) if file is not None else []
    if not collected:
        raise typer.BadParameter(MISSING_PROMPT)
    return collected


def piped_prompt() -> str:
    """Read the whole of stdin as one prompt, without the line breaks at its end."""
    text = read_stdin().rstrip("\r\n")
    if not text.strip():
        raise typer.BadParameter(f"stdin is empty: {MISSING_PROMPT}")
    return text


def read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise UserError("cannot read stdin: it is not UTF-8 text") from error


def collect_sets(
    prompts: list[str] | None, sets: Sequence[str], file: Path | None, limit: int | None
) -> dict[str, list[Prompt]]:
    """Return the sets of prompts by name; prompts of the command line and `--file` form one more set."""
    collected: dict[str, list[Prompt]] = {}
    for argument in sets:
        name, equals, path = argument.partition("=")
        if not (name and equals and path):
            raise UserError(f"`--sets` is `{argument}`: write NAME=FILE")
        if name in collected:
            raise UserError(f"two of `--sets` are called `{name}`: use different names")
        collected[name] = read_file(Path(path))[:limit]
    if prompts or file is not None or not collected:
        name = "prompts" if file is None or str(file) == "-" else file.stem
        if name in collected:
            raise UserError(f"`--file` and one of `--sets` are both called `{name}`: pass it as `--sets NAME=FILE` too")
        collected[name] = collect(prompts, file)[:limit]
    return collected


def read_file(path: Path) -> list[Prompt]:
    """Read one prompt per line: text, or an object with `prompt` or `messages`, and optionally `prediction`."""
    content = read_stdin() if str(path) == "-" else read_text(path)
    collected = [
        read_line(line, f"`{path}` line {number}")
        for number, line in enumerate(content.split("\n"), start=1)
        if line.strip()
    ]
    if not collected:
        raise UserError(f"`{path}` contains no prompt: write one on each line")
    return collected


def read_prediction(argument: str) -> str:
    """Return the content of the file of that name, else the argument itself."""
    path = Path(argument)
    with contextlib.suppress(OSError):  # the text is too long for a file name
        if path.is_file():
            return read_text(path)
    if FILE_NAME.fullmatch(argument):
        raise UserError(
            f"`--prediction` is `{argument}`, but there is no such file: check its name, "
            "or put a text that looks like a file name into the `prediction` field of a line of `--file`"
        )
    return argument


def read_line(line: str, location: str) -> Prompt:
    """Parse one line of a file of prompts. location: the file and line, for errors."""
    if not line.lstrip().startswith("{"):
        return Prompt(text=line.rstrip("\r"), location=location)
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f'{location} starts like a JSON object but is not one: write `{{"prompt": "..."}}` on one line'
        ) from error
    prediction = value.get("prediction")
    if prediction is not None and not isinstance(prediction, str):
        raise UserError(f"{location} has a `prediction` that is not text: write the expected output as a string")
    if prediction is not None and any("\ud800" <= character <= "\udfff" for character in prediction):
        raise UserError(f"{location} has a `prediction` with a lone surrogate: write valid Unicode")
    if isinstance(value.get("prompt"), str) and "messages" not in value:
        return Prompt(text=value["prompt"], prediction=prediction, location=location)
    if isinstance(value.get("messages"), list) and "prompt" not in value:
        return Prompt(messages=value["messages"], prediction=prediction, location=location)
    raise UserError(f"{location} needs either `prompt`, a string, or `messages`, a list")
