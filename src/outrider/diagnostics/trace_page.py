"""Render a trace as one self-contained HTML page: no scripts, no external files, light and dark mode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path

from .machine import machine_title
from .trace import AnswerStep, AnswerTrace, Ending, sentence, visible
from .trace_svg import NUMBERED, PARTS, times_figure, tree_figure

STYLES = (Path(__file__).parent.parent / "pages.css", Path(__file__).parent / "trace_page.css")
LEGEND = {
    "kept": "drafted and accepted",
    "corrected": "chosen by the model where the draft was rejected",
    "bonus": "chosen by the model after a fully accepted draft",
    "plain": "chosen by the model without a draft",
}
MAX_DEPTH = 16  # depths in the table of acceptance rates


def page(trace: AnswerTrace) -> str:
    """Return the page as HTML."""
    name = escape(trace.model.rpartition("/")[2])
    body = "\n".join([*head(trace, name), *figures(trace), *steps(trace)])
    style = "\n".join(path.read_text(encoding="utf-8") for path in STYLES)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{name} with {escape(trace.method)}, step by step</title>\n"
        f"<style>\n{style}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def head(trace: AnswerTrace, name: str) -> Iterator[str]:
    drafts = "without drafts" if trace.method == "none" else f"with drafts by <b>{escape(trace.method)}</b>"
    where = escape(machine_title(trace.machine))
    yield f"<header><h1>{name}</h1><p>{drafts}, temperature {trace.temperature:g}, on {where}</p></header>"
    yield f'<section><h2>Prompt</h2><p class="prompt">{escape(trace.prompt)}</p>'
    keys = (f'<li><span class="token {kind}">token</span> {meaning}</li>' for kind, meaning in LEGEND.items())
    yield f'<h2>Answer</h2><ul class="legend">{"".join(keys)}</ul>'
    yield f'<p class="answer">{"".join(answer(trace.steps))}</p></section>'


def answer(steps: Iterable[AnswerStep]) -> Iterator[str]:
    """Yield the text of each step as a link to its details."""
    for step in steps:
        tokens = "".join(
            f'<span class="token {"kept" if index < step.kept else step.own}">{escape(words)}</span>'
            for index, words in enumerate(step.shown)
            if words
        )
        title = escape(f"Step {step.number}: {sentence(step)}", quote=True)
        yield f'<a class="step" href="#s{step.number}" title="{title}">{tokens}</a>'


def figures(trace: AnswerTrace) -> Iterator[str]:
    count = max(len(trace.steps), 1)
    share = f"{trace.kept / trace.drafted:.0%}" if trace.drafted else "none"
    values = {
        "tokens": str(trace.tokens),
        "steps": str(len(trace.steps)),
        "tokens per step": f"{trace.tokens / count:.2f}",
        "accepted": f"{share} <small>{trace.kept} of {trace.drafted}</small>",
        "tokens per second": f"{trace.tokens_per_second:.1f}",
        "prefill": f"{1000 * trace.first_step_seconds:.0f} ms <small>{trace.prompt_tokens} tokens</small>",
    }
    items = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in values.items())
    yield f'<section><dl class="figures">{items}</dl></section>'
    if trace.later:
        yield f"<section><h2>Time by phase</h2>{shares(trace)}{times_figure(trace.later)}"
        above = "; above it, its number of tokens" if len(trace.later) <= NUMBERED else ""
        yield f'<p class="note quiet">One bar for each step after prefill{above}.</p></section>'
    if trace.drafted:
        listed = "".join(positions(trace))
        yield f'<section><h2>Acceptance rate by depth</h2><ol class="positions">{listed}</ol></section>'


def shares(trace: AnswerTrace) -> str:
    """Return a stacked bar of the time in draft, verify and host, with a legend."""
    spent = {part: sum(getattr(step, part) for step in trace.later) for part in PARTS}
    whole = sum(spent.values()) or 1.0
    bar = "".join(f'<span class="{part}" style="flex:{seconds / whole:.4f}"></span>' for part, seconds in spent.items())
    keys = "".join(
        f'<li><i class="{part}"></i>{part} <b>{seconds / whole:.1%}</b> '
        f'<span class="quiet">{1000 * seconds / len(trace.later):.2f} ms per step</span></li>'
        for part, seconds in spent.items()
    )
    return f'<div class="bar" aria-hidden="true">{bar}</div><ul class="parts">{keys}</ul>'


def positions(trace: AnswerTrace) -> Iterator[str]:
    for depth, (drafted, accepted) in enumerate(trace.rates()[:MAX_DEPTH], 1):
        rate = accepted / drafted
        yield (
            f'<li><span class="depth">{depth}</span><span class="track"><span style="width:{rate:.1%}"></span></span>'
            f'<span class="share">{rate:.0%}</span><span class="quiet">{accepted} of {drafted}</span></li>'
        )


def steps(trace: AnswerTrace) -> Iterator[str]:
    """Yield the list of steps; radio buttons filter it through the style sheet alone."""
    known = [ending for ending in Ending if any(step.ending is ending for step in trace.steps)]
    yield '<section class="steps"><h2>Step by step</h2><fieldset><legend>Show</legend>'
    yield '<label><input type="radio" name="show" id="show-all" checked> all</label>'
    for ending in known:
        count = sum(step.ending is ending for step in trace.steps)
        yield (
            f'<label><input type="radio" name="show" id="show-{kind(ending)}"> {ending.value} '
            f'<span class="quiet">{count}</span></label>'
        )
    yield "</fieldset><ol>"
    for step in trace.steps:
        yield "".join(one_step(step, trace.prompt_tokens if step.number == 1 else 0))
    yield "</ol></section>"


def one_step(step: AnswerStep, prompt: int) -> Iterator[str]:
    """Yield the card of a step; without a draft it is a single line."""
    yield f'<li class="card {kind(step.ending)}" id="s{step.number}"><p class="line"><b>{step.number}</b>'
    if step.nodes:
        yield f'<span class="ending">{step.ending.value}</span><span>{step.kept} of {len(step.nodes)} accepted</span>'
    else:
        reason = f"prefill, {prompt} tokens" if prompt else step.ending.value
        yield f'<span class="ending">{reason}</span><span class="chips">{added(step)}</span>'
    yield '<span class="spent quiet">'
    yield " · ".join(f"{part}&nbsp;{1000 * getattr(step, part):.2f}" for part in PARTS)
    yield "&nbsp;ms</span></p>"
    if step.nodes:
        if step.branches:
            yield f'<div class="scroll" tabindex="0">{tree_figure(step)}</div><p class="chips">{added(step)}</p>'
        else:
            drafted = "".join(chip(node.text, "kept" if node.kept else "thrown") for node in step.nodes)
            yield f'<p class="chips">{drafted}{added(step) if len(step.texts) > step.kept else ""}</p>'
        yield f'<p class="quiet">{escape(sentence(step))}</p>'
    yield "</li>\n"


def added(step: AnswerStep) -> str:
    """Return the tokens that the model added to the accepted ones; for a tree, the accepted ones too."""
    first = 0 if step.branches else step.kept
    chips = (
        chip(text, "kept" if index < step.kept else step.own) for index, text in enumerate(step.texts) if index >= first
    )
    return f'<span class="then">→</span>{"".join(chips)}'


def chip(text: str, kind: str) -> str:
    tag = "s" if kind == "thrown" else "span"
    return f'<{tag} class="chip {kind}">{escape(visible(text))}</{tag}>'


def kind(ending: Ending) -> str:
    return ending.value.replace(" ", "-")
