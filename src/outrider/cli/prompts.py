"""Prompts from the command line and from files, and the answers as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..types import Completion, Output, UserError
from .options import messages

if TYPE_CHECKING:
    from ..engine import LLM


@dataclass(frozen=True)
class Prompt:
    """What the user wrote: a text, or the messages of a chat."""

    text: str | None = None
    messages: list[dict[str, Any]] | None = None

    def tokens(self, llm: LLM, raw: bool, system: str | None) -> list[int] | str:
        """What the engine gets: the chat template's tokens, or the text as it is."""
        templated = not raw and llm.tokenizer.chat_template is not None
        if self.messages is not None:
            if raw:
                raise UserError("`messages` need a chat template: drop `--raw`, or write a `prompt`")
            opening = [] if system is None else [{"role": "system", "content": system}]
            return llm.chat_prompt([*opening, *self.messages])
        assert self.text is not None
        if templated:
            return llm.chat_prompt(messages(self.text, system))
        if system is not None:
            why = "`--raw` turns it off" if raw else f"`{llm.plan.model}` has none"
            raise UserError(f"`--system` needs a chat template, and {why}: put the instruction into the prompt")
        return self.text


def read_file(path: Path) -> list[Prompt]:
    """A prompt a line: plain text, or an object with `prompt` or `messages` (its other fields are left alone)."""
    try:
        content = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read `{path}`: {(error.strerror or str(error)).lower()}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read `{path}`: it is not UTF-8 text") from error
    found = [
        read_line(line, f"`{path}` line {number}")
        for number, line in enumerate(content.split("\n"), start=1)
        if line.strip()
    ]
    if not found:
        raise UserError(f"`{path}` holds no prompt: write one on each line")
    return found


def read_line(line: str, where: str) -> Prompt:
    if not line.lstrip().startswith("{"):
        return Prompt(text=line.rstrip("\r"))
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f'{where} starts like a JSON object but is not one: write `{{"prompt": "..."}}` on one line'
        ) from error
    if isinstance(value.get("prompt"), str) and "messages" not in value:
        return Prompt(text=value["prompt"])
    if isinstance(value.get("messages"), list) and "prompt" not in value:
        return Prompt(messages=value["messages"])
    raise UserError(f"{where} needs either `prompt`, a string, or `messages`, a list")


def describe(prompt: Prompt, output: Output) -> dict[str, Any]:
    """The JSON object of one answer; further samples of `--n` follow under `samples`."""
    given = {"messages": prompt.messages} if prompt.text is None else {"prompt": prompt.text}
    first = completion(output.completions[0])
    described = {"prompt": None, **given, **first, "stats": stats(output)}
    if len(output.completions) > 1:
        described["samples"] = [completion(one) for one in output.completions]
    return described


def completion(one: Completion) -> dict[str, Any]:
    described: dict[str, Any] = {
        "text": one.text,
        "token_ids": list(one.token_ids),
        "finish_reason": one.finish_reason,
    }
    if one.logprobs is not None:
        described["logprobs"] = [asdict(token) for token in one.logprobs]
    return described


def stats(output: Output) -> dict[str, Any]:
    """What the request cost. Plain decoding drafts nothing: every step gives one token."""
    spent = output.stats
    assert spent is not None, "a finished output carries its stats"
    tokens = sum(len(one.token_ids) for one in output.completions)
    return {
        "steps": spent.steps,
        "drafted": 0,
        "accepted": 0,
        "mean_acceptance_length": round(tokens / spent.steps, 4) if spent.steps else 0.0,
        "seconds": round(spent.seconds, 6),
        "tokens_per_second": round(spent.tokens_per_second, 3),
        "first_token_seconds": round(spent.first_token_seconds, 6),
        "cached_tokens": spent.cached_tokens,
        "preemptions": spent.preemptions,
    }
