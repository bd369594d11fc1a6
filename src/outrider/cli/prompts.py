"""Prompts from the command line and from files, and the answers as JSON."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..types import Completion, Output, Tally, UserError
from .options import messages

if TYPE_CHECKING:
    from ..engine import LLM

DEPTHS = 8  # as many as one line has room for


@dataclass(frozen=True)
class Prompt:
    """What the user wrote: a text, or the messages of a chat."""

    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    prediction: str | None = None  # what the answer is expected to repeat

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


def collect(prompts: list[str] | None, file: Path | None) -> list[Prompt]:
    """The prompts of the command line, then those of the file."""
    found = [Prompt(text=one) for one in prompts or []] + (read_file(file) if file is not None else [])
    if not found:
        raise typer.BadParameter("give a prompt, or a file of prompts with `--file`")
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


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read `{path}`: {(error.strerror or str(error)).lower()}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read `{path}`: it is not UTF-8 text") from error


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


def describe(prompt: Prompt, output: Output) -> dict[str, Any]:
    """The JSON object of one answer; further samples of `--n` follow under `samples`."""
    given = {"messages": prompt.messages} if prompt.text is None else {"prompt": prompt.text}
    first = completion(output.completions[0])
    described = {"prompt": None, **given, **first, "stats": stats(output)}
    if len(output.completions) > 1:
        described["samples"] = [completion(one) for one in output.completions]
    return described


def check_endings(outputs: Sequence[Output]) -> None:
    """Once all that there is was shown: an answer that broke is no answer, and its reader hears why."""
    causes = [one.stop_reason for output in outputs for one in output.completions if one.finish_reason == "error"]
    if causes:
        raise UserError(f"{len(causes)} of {len(outputs)} answers broke off: {causes[0]}")


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
    """What the request cost. The mean length counts the token that the target adds to each step."""
    spent = output.stats
    assert spent is not None, "a finished output carries its stats"
    tally = spent.speculation
    return {
        "method": spent.method or "none",
        "steps": spent.steps,
        "drafted": tally.drafted,
        "accepted": tally.accepted,
        "mean_acceptance_length": round(tally.mean_length, 4),
        "acceptance_rates": [round(rate, 4) for rate in tally.rates],
        "widths": {str(width): tally.widths[width] for width in sorted(tally.widths)},
        "drafters": {name: asdict(credit) for name, credit in tally.drafters.items()},
        "seconds": round(spent.seconds, 6),
        "tokens_per_second": round(spent.tokens_per_second, 3),
        "first_token_seconds": round(spent.first_token_seconds, 6),
        "cached_tokens": spent.cached_tokens,
        "preemptions": spent.preemptions,
    }


def gain(method: str, tally: Tally) -> str:
    """What speculation gave, in words; the deepest drafts are left out."""
    if not tally.drafted:
        return f"nothing drafted by {method}"
    rates = [f"{rate:.0%}" for rate in tally.rates]
    more = " ..." if len(rates) > DEPTHS else ""
    whose = [f"{name} {credit.accepted} of {credit.drafted}" for name, credit in tally.drafters.items()]
    return (
        f"{tally.mean_length:.1f} tokens a step with {method}: drafted {tally.drafted}, kept {tally.accepted}; "
        f"by depth {' '.join(rates[:DEPTHS])}{more}{'; kept of each: ' if whose else ''}{', '.join(whose)}"
    )
