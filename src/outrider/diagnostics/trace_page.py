"""A trace as one page that needs nothing else: no script, no other host, light or dark as the reader's screen is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path

from .machine import machine_title
from .trace import AnswerStep, AnswerTrace, Ending, sentence, visible
from .trace_svg import NUMBERED, PARTS, times_figure, tree_figure

STYLES = (Path(__file__).parent.parent / "pages.css", Path(__file__).parent / "trace_page.css")
LEGEND = {
    "kept": "drafted, and kept",
    "corrected": "the model's own, against the draft",
    "bonus": "the model's own, after a draft that was kept whole",
    "plain": "the model's own, without a draft",
}
DEEPEST = 16  # positions that are listed


def page(trace: AnswerTrace) -> str:
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
    keys = (f'<li><span class="token {kind}">token</span> {told}</li>' for kind, told in LEGEND.items())
    yield f'<h2>Answer</h2><ul class="legend">{"".join(keys)}</ul>'
    yield f'<p class="answer">{"".join(answer(trace.steps))}</p></section>'


def answer(steps: Iterable[AnswerStep]) -> Iterator[str]:
    """The text, each step a way to where it is told below."""
    for step in steps:
        tokens = "".join(
            f'<span class="token {"kept" if place < step.kept else step.own}">{escape(words)}</span>'
            for place, words in enumerate(step.shown)
            if words
        )
        told = escape(f"Step {step.number}: {sentence(step)}", quote=True)
        yield f'<a class="step" href="#s{step.number}" title="{told}">{tokens}</a>'


def figures(trace: AnswerTrace) -> Iterator[str]:
    count = max(len(trace.steps), 1)
    share = f"{trace.kept / trace.drafted:.0%}" if trace.drafted else "none"
    told = {
        "tokens": str(trace.tokens),
        "steps": str(len(trace.steps)),
        "tokens a step": f"{trace.tokens / count:.2f}",
        "drafts kept": f"{share} <small>{trace.kept} of {trace.drafted}</small>",
        "tokens a second": f"{trace.tokens_per_second:.1f}",
        "the prompt": f"{1000 * trace.first_step_seconds:.0f} ms <small>{trace.prompt_tokens} tokens</small>",
    }
    listed = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in told.items())
    yield f'<section><dl class="figures">{listed}</dl></section>'
    if trace.later:
        yield f"<section><h2>Where the time went</h2>{shares(trace)}{times_figure(trace.later)}"
        above = "; above it, the tokens that it gave" if len(trace.later) <= NUMBERED else ""
        yield f'<p class="note quiet">A bar for each step after the prompt{above}.</p></section>'
    if trace.drafted:
        yield f'<section><h2>Kept by position</h2><ol class="positions">{"".join(positions(trace))}</ol></section>'


def shares(trace: AnswerTrace) -> str:
    """One bar for draft, verify and host together, and what each is."""
    spent = {part: sum(getattr(step, part) for step in trace.later) for part in PARTS}
    whole = sum(spent.values()) or 1.0
    bar = "".join(f'<span class="{part}" style="flex:{seconds / whole:.4f}"></span>' for part, seconds in spent.items())
    keys = "".join(
        f'<li><i class="{part}"></i>{part} <b>{seconds / whole:.1%}</b> '
        f'<span class="quiet">{1000 * seconds / len(trace.later):.2f} ms a step</span></li>'
        for part, seconds in spent.items()
    )
    return f'<div class="bar" aria-hidden="true">{bar}</div><ul class="parts">{keys}</ul>'


def positions(trace: AnswerTrace) -> Iterator[str]:
    for depth, (tried, kept) in enumerate(trace.rates()[:DEEPEST], 1):
        yield (
            f'<li><span class="place">{depth}</span><span class="track"><span style="width:{kept / tried:.1%}"></span>'
            f'</span><span class="share">{kept / tried:.0%}</span><span class="quiet">{kept} of {tried}</span></li>'
        )


def steps(trace: AnswerTrace) -> Iterator[str]:
    """Each step in full; what to show is chosen by the style sheet alone."""
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
    """A step without a draft is a single line."""
    yield f'<li class="card {kind(step.ending)}" id="s{step.number}"><p class="line"><b>{step.number}</b>'
    if step.nodes:
        yield f'<span class="ending">{step.ending.value}</span><span>{step.kept} of {len(step.nodes)} kept</span>'
    else:
        told = f"the prompt, {prompt} tokens" if prompt else step.ending.value
        yield f'<span class="ending">{told}</span><span class="chips">{said(step)}</span>'
    yield '<span class="spent quiet">'
    yield " · ".join(f"{part}&nbsp;{1000 * getattr(step, part):.2f}" for part in PARTS)
    yield "&nbsp;ms</span></p>"
    if step.nodes:
        if step.branches:
            yield f'<div class="scroll" tabindex="0">{tree_figure(step)}</div><p class="chips">{said(step)}</p>'
        else:
            drafted = "".join(chip(node.text, "kept" if node.kept else "thrown") for node in step.nodes)
            yield f'<p class="chips">{drafted}{said(step) if len(step.texts) > step.kept else ""}</p>'
        yield f'<p class="quiet">{escape(sentence(step))}</p>'
    yield "</li>\n"


def said(step: AnswerStep) -> str:
    """What the model added to the kept tokens; of a tree, these too."""
    first = 0 if step.branches else step.kept
    words = (chip(text, "kept" if at < step.kept else step.own) for at, text in enumerate(step.texts) if at >= first)
    return f'<span class="then">→</span>{"".join(words)}'


def chip(text: str, kind: str) -> str:
    tag = "s" if kind == "thrown" else "span"
    return f'<{tag} class="chip {kind}">{escape(visible(text))}</{tag}>'


def kind(ending: Ending) -> str:
    return ending.value.replace(" ", "-")
