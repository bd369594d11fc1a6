"""Prompts from the command line and from files."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..errors import UserError
from .console import read_text

if TYPE_CHECKING:
    from ..llm import LLM
    from ..tokenizer import Tokenizer


@dataclass(frozen=True)
class Prompt:
    """What the user wrote: a text, or the messages of a chat."""

    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    prediction: str | None = None  # what the answer is expected to repeat

    def tokens(self, llm: LLM, raw: bool, system: str | None) -> list[int] | str:
        """What the engine gets: the chat template's tokens, or the text as it is."""
        messages = self.conversation(llm.tokenizer, raw, system)
        if messages is not None:
            return llm.chat_prompt(messages)
        if system is not None:
            why = "`--raw` turns it off" if raw else f"`{llm.resolved.model}` has none"
            raise UserError(f"`--system` needs a chat template, and {why}: put the instruction into the prompt")
        assert self.text is not None
        return self.text

    def conversation(self, tokenizer: Tokenizer, raw: bool, system: str | None = None) -> list[dict[str, Any]] | None:
        """The messages that the chat template makes a prompt of; None: the text stands as it is."""
        if self.messages is not None and raw:
            raise UserError("`messages` need a chat template: drop `--raw`, or write a `prompt`")
        if self.messages is None and (raw or tokenizer.chat_template is None):
            return None
        opening = [] if system is None else [{"role": "system", "content": system}]
        return opening + ([{"role": "user", "content": self.text}] if self.messages is None else self.messages)


def collect(prompts: list[str] | None, file: Path | None) -> list[Prompt]:
    """The prompts of the command line, then those of the file."""
    found = [Prompt(text=one) for one in prompts or []] + (read_file(file) if file is not None else [])
    if not found:
        raise typer.BadParameter("give a prompt, or a file of prompts with `--file`")
    return found


def collect_sets(
    prompts: list[str] | None, sets: Sequence[str], file: Path | None, limit: int | None
) -> dict[str, list[Prompt]]:
    """The sets by name; loose prompts and `--file` are one more."""
    found: dict[str, list[Prompt]] = {}
    for given in sets:
        name, equals, path = given.partition("=")
        if not (name and equals and path):
            raise UserError(f"`--sets` is `{given}`: write NAME=FILE")
        if name in found:
            raise UserError(f"two of `--sets` are called `{name}`: give each a name of its own")
        found[name] = read_file(Path(path))[:limit]
    if prompts or file is not None or not found:
        name = "prompts" if file is None or str(file) == "-" else file.stem
        if name in found:
            raise UserError(f"`--file` is called `{name}`, as one of `--sets` is: write it as `--sets NAME=FILE` too")
        found[name] = collect(prompts, file)[:limit]
    return found


def read_file(path: Path) -> list[Prompt]:
    """A prompt a line: text, or an object with `prompt` or `messages`, perhaps `prediction`; the rest is left alone."""
    content = sys.stdin.read() if str(path) == "-" else read_text(path)
    found = [
        read_line(line, f"`{path}` line {number}")
        for number, line in enumerate(content.split("\n"), start=1)
        if line.strip()
    ]
    if not found:
        raise UserError(f"`{path}` holds no prompt: write one on each line")
    return found


def read_prediction(given: str) -> str:
    """The file of that name, or else the text itself."""
    path = Path(given)
    with contextlib.suppress(OSError):  # a text too long to be a file's name
        if path.is_file():
            return read_text(path)
    return given


def read_line(line: str, where: str) -> Prompt:
    if not line.lstrip().startswith("{"):
        return Prompt(text=line.rstrip("\r"))
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f'{where} starts like a JSON object but is not one: write `{{"prompt": "..."}}` on one line'
        ) from error
    prediction = value.get("prediction")
    if prediction is not None and not isinstance(prediction, str):
        raise UserError(f"{where} has a `prediction` that is no text: write the answer that you expect as a string")
    if isinstance(value.get("prompt"), str) and "messages" not in value:
        return Prompt(text=value["prompt"], prediction=prediction)
    if isinstance(value.get("messages"), list) and "prompt" not in value:
        return Prompt(messages=value["messages"], prediction=prediction)
    raise UserError(f"{where} needs either `prompt`, a string, or `messages`, a list")
