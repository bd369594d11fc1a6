"""`outrider demo`: answer one prompt plainly and with drafts, and compare texts and speeds."""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import UserError
from ..types import Output, SamplingParams, SpecStats
from . import console, options
from .options import DRAFT, DraftFlags, unfold
from .prompts import Prompt, collect
from .results import check_errors, suspension_note
from .word_wrap import WordWrap

if TYPE_CHECKING:
    from ..llm import LLM

ACCEPTED, QUIET = "black on cyan", "dim"  # both are readable on light and dark terminals
NO_COLOR = "reverse"  # instead of ACCEPTED, if the environment variable NO_COLOR is set
BAR = 32  # columns of the longest bar
PIPED = 100  # columns of a line if the output is not a terminal
# The answer repeats most of it, which is where drafts gain the most; even the smallest model corrects `freinds`.
PROMPT = """\
Correct the spelling mistakes in this text and return the whole text:
The harbour lay quiet in the morning. Two fishing boats had already left, and a third one was being loaded with nets \
and boxes of ice. On the pier an old man sat on a bollard, mended a net, and talked to the gulls as if they were old \
freinds. When the ferry came in, he folded the net, took his cap, and walked slowly up to the town."""


@unfold
def demo(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt to answer [default: a text to correct]", show_default=False)
    ] = None,
    model: options.Model = options.DEFAULT_MODEL,
    draft: DraftFlags = DRAFT,
    max_tokens: options.MaxTokens = 128,
    temperature: options.Temperature = 0.0,
    rounds: options.Repeats = 5,
    raw: options.Raw = False,
    quantize: options.Quantize = None,
    backend: options.Backend = options.DEFAULT_BACKEND,
    deterministic: options.Deterministic = False,
    threads: options.Threads = None,
    json: options.Json = False,
) -> None:
    """Answer a prompt plainly and with drafts: mark the accepted tokens, compare the texts and the speeds."""
    (asked,) = [Prompt(text=PROMPT)] if prompt is None else collect([prompt], None)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=0)
    config = {
        "quantize": quantize,
        "backend": backend,
        "deterministic": deterministic,
        "threads": threads,
        **draft.fields(),
    }
    llm = options.open_model(model, **config)
    if not llm.engine.spec_manager.plan.method:
        raise UserError("`--speculate` is `none`, or `auto`, which knows no faster method here: name a method")
    tokens = asked.tokens(llm, raw, None)
    drawn = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else PIPED, quiet=json)
    show_prompt(drawn, llm, draft, asked)
    texts = {}
    for drafting in (False, True):
        headline(drawn, title(drawn, llm, drafting))
        texts[drafting] = answer(drawn, llm, tokens, replace(params, speculate=None if drafting else False))
    del llm  # the measurement opens engines of its own
    found = measured(model, config, tokens, params, rounds)
    plain, drafted = texts[False], texts[True]
    found["texts_equal"] = same_tokens(plain, drafted) and not found["different_texts"]
    show_figures(drawn, drafted, found)
    if json:
        console.json_line({"prompt": asked.text, "text": drafted.completions[0].text, **found})


def answer(drawn: Console, llm: LLM, prompt: list[int] | str, params: SamplingParams) -> Output:
    """Answer the prompt; show the text as it is generated, with the accepted draft tokens marked."""
    shown, stream, count, output = MarkedText(drawn), llm.tokenizer.stream(), 0, None
    for output in llm.stream(prompt, replace(params, trace=True)):
        steps = output.completions[0].steps or []
        for step in steps[count:]:
            accepted = 0 if step.draft is None else len(step.draft.path(step.tokens))
            for index, token in enumerate(step.tokens):
                shown.add(stream.push(token), accepted_style(drawn) if index < accepted else "")
        count = len(steps)
    assert output is not None, "a request gives at least one output"
    shown.add(stream.flush(), "")
    shown.close()
    check_errors([output])
    return output


def measured(
    model: str, config: dict[str, Any], prompt: list[int] | str, params: SamplingParams, rounds: int
) -> dict[str, Any]:
    """Measure both speeds in turn, with a new engine for each round; a terminal shows which round runs."""
    from ..bench.speculation import measure
    from ..llm import LLM

    begun = iter(range(rounds))
    with console.bar("measuring") as progress:

        def open_model() -> LLM:
            done = next(begun)
            progress(done, rounds, f"measuring both speeds, round {done + 1} of {rounds}")
            return LLM(model, **config)

        return measure(open_model, lambda llm: [prompt], params, rounds)


def same_tokens(plain: Output, drafted: Output) -> bool:
    return plain.completions[0].token_ids == drafted.completions[0].token_ids


# ---- output ----


class MarkedText:
    """Prints text as it arrives, each character in its style; on a terminal, lines are wrapped at words."""

    def __init__(self, drawn: Console) -> None:
        self.drawn = drawn
        self.unprinted: deque[tuple[str, str]] = deque()  # characters that are not printed yet, and their styles
        self.wrap = WordWrap(self._write, lambda: drawn.width) if drawn.is_terminal else None

    def add(self, text: str, style: str) -> None:
        self.unprinted.extend((character, style) for character in text)
        (self._write if self.wrap is None else self.wrap.add)(text)

    def close(self) -> None:
        if self.wrap is None:
            self._write("\n")
        else:
            self.wrap.close()

    def _write(self, text: str) -> None:
        """Print the text, in which the wrap may have replaced spaces by line breaks."""
        styled: list[tuple[str, str]] = []
        for character in text:
            if character != "\n":
                styled.append(self.unprinted.popleft())
                continue
            while self.unprinted and self.unprinted[0][0].isspace() and self.unprinted.popleft()[0] != "\n":
                pass
            styled.append(("\n", ""))
        runs = groupby(styled, key=itemgetter(1))
        line = Text.assemble(*(("".join(character for character, _ in run), style) for style, run in runs))
        self.drawn.print(line, end="", soft_wrap=True)


def headline(drawn: Console, text: Text | str) -> None:
    drawn.print()
    drawn.rule(text, align="left", style=QUIET)


def title(drawn: Console, llm: LLM, drafting: bool) -> Text:
    """Return the title above an answer, which explains the marks in it."""
    if not drafting:
        return Text("Plain decoding")
    above = Text(f"With drafts by {llm.engine.spec_manager.plan.method}")
    return above.append(": ").append("drafted and accepted", accepted_style(drawn)) if drawn.is_terminal else above


def accepted_style(drawn: Console) -> str:
    return NO_COLOR if drawn.no_color else ACCEPTED


def show_prompt(drawn: Console, llm: LLM, draft: DraftFlags, asked: Prompt) -> None:
    from ..diagnostics.machine import machine_facts, machine_title

    drawn.print(f"{llm.resolved.model} on {machine_title(machine_facts(llm.engine.device))}")
    drawn.print(draft.drafting(llm))
    headline(drawn, "Prompt")
    drawn.print(Text(asked.text or "", QUIET))


def show_figures(drawn: Console, drafted: Output, found: dict[str, Any]) -> None:
    headline(drawn, "Result")
    speeds = {"plain": found["plain_tokens_per_second"], found["method"]: found["tokens_per_second"]}
    ratio = Text(f"{found['speedup']['median']:.2f} x", "bold")
    table = Table.grid(padding=(0, 2))
    for name, speed in speeds.items():
        figure = Text(f"{console.digits(speed)} tokens/s", justify="right")
        bar = Text("█" * round(BAR * speed / max(speeds.values())), QUIET if name == "plain" else "cyan")
        table.add_row(name, figure, bar, "" if name == "plain" else ratio)
    drawn.print(table)
    drawn.print()
    for line in conclusions(drafted, found):
        drawn.print(line, soft_wrap=True)


def conclusions(drafted: Output, found: dict[str, Any]) -> list[str]:
    """Return the result in sentences."""
    spec_stats = SpecStats() if drafted.stats is None else drafted.stats.speculation
    rounds = (
        f"median [lowest to highest] of {found['rounds']} interleaved rounds" if found["rounds"] > 1 else "one round"
    )
    texts = f"Texts equal: {len(drafted.completions[0].token_ids)} tokens, the same with and without drafts."
    if not found["texts_equal"]:
        texts = "TEXTS DIFFER: on a GPU, `--deterministic` makes them equal; elsewhere this is a bug."
    lines = [
        f"{console.figure(found['speedup'], 'x')} the speed of plain decoding, {rounds}.",
        f"{spec_stats.accepted} of {spec_stats.drafted} draft tokens accepted, "
        f"{spec_stats.tokens_per_step:.2f} tokens per step.",
        suspension_note(spec_stats),
        texts,
    ]
    return list(filter(None, lines))
