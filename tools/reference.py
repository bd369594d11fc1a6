"""Write the parts of docs/reference that the code knows, or, with --check, see that they are up to date.

The flags of every command go between two comments in commands.md, the metrics of the server into metrics.md.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import typer
from prometheus_client.core import Metric

from outrider.cli import app
from outrider.server.admission import Admission
from outrider.server.metrics import Metrics
from outrider.server.options import ServerOptions
from outrider.types import SpecStats
from pages import write_or_check

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
REGION = re.compile(r"(<!-- flags of (?P<name>[\w ]+) -->\n).*?(<!-- end of flags -->)", re.DOTALL)
MODEL_COMMAND = "outrider generate"  # flags that mean the same as here are not told again
METRICS = """# Metrics

What `GET /metrics` of `outrider serve` says, for Prometheus. Names that begin with `vllm:` are vLLM's and mean the
same, so that dashboards and gateways made for it work; those with `outrider_` have no name there. Every metric has the
label `model_name`. A counter's sample ends in `_total`, a histogram's in `_bucket`, `_sum` and `_count`. What to make
of them: [Read the numbers](../numbers.md#a-server). Written by `tools/reference.py` from the server itself.

"""


def commands() -> dict[str, Any]:
    """Every command by its full name."""

    def walk(command: Any, name: str) -> Iterator[tuple[str, Any]]:
        if not hasattr(command, "commands"):
            yield name, command
            return
        for key, inner in command.commands.items():
            yield from walk(inner, f"{name} {key}")

    return dict(walk(typer.main.get_command(app), "outrider"))


def options(command: Any) -> list[Any]:
    return [parameter for parameter in command.params if parameter.param_type_name == "option"]


def told(option: Any) -> tuple[str, str, str]:
    """Spellings, default and meaning of a flag; a help text may end in `[default: ...]`."""
    meaning, _, said = str(option.help or "").partition(" [default: ")
    default = said.removesuffix("]")
    if not default and option.default is not None:
        default = "off" if option.default is False else spelled(option.default)
    if not meaning.split(" ")[0][1:].isupper():  # an abbreviation stays as it is
        meaning = meaning[:1].lower() + meaning[1:]
    meaning = re.sub(r"(?<!`)(--[a-z-]+)", r"`\1`", meaning)
    return ", ".join(f"`{name}`" for name in option.opts), default, meaning.replace("|", "\\|")


def spelled(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value) if isinstance(value, int) else f"`{value}`"


def flags(name: str, known: dict[str, Any]) -> list[str]:
    """The table of a command's flags; those of `outrider generate` that mean the same share one row."""
    usual = {told(option) for option in options(known[MODEL_COMMAND])} if name != MODEL_COMMAND else set()
    rows = [told(option) for option in options(known[name])]
    lines = ["| flag | default | meaning |", "|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in rows if row not in usual]
    shared = ", ".join(row[0] for row in rows if row in usual)
    return lines + ([f"| {shared} | | as for `{MODEL_COMMAND}` |"] if shared else [])


def command_page(text: str) -> str:
    known = commands()
    missing = set(known) - {match["name"] for match in REGION.finditer(text)}
    if missing:
        sys.exit(f"commands.md has no place for the flags of {', '.join(sorted(missing))}")
    return REGION.sub(lambda match: match[1] + "\n" + "\n".join(flags(match["name"], known)) + "\n\n" + match[3], text)


def metrics() -> list[Metric]:
    """All that the server tells, of an engine that has not run: what they are called and what they mean."""
    resolved = SimpleNamespace(model="model", page_size=16, pages=1, kv_dtype="float16", prefix_cache=True)
    spec_stats = SpecStats(steps=1, drafted=1, accepted=1, drafted_per_depth=[1], accepted_per_depth=[1], widths={1: 1})
    engine = SimpleNamespace(
        scheduler=SimpleNamespace(cache=SimpleNamespace(lookups=0, hits=0, evictions=0)),
        spec_manager=SimpleNamespace(method_stats={"method": spec_stats}),
        parents={},
        times=SimpleNamespace(steps=0, seconds=0.0),
        runner=SimpleNamespace(multi_step=SimpleNamespace(busy=0.0)),
    )
    load = SimpleNamespace(running=0, waiting=0, pages_used=0, pages=1)
    llm: Any = SimpleNamespace(
        llm=SimpleNamespace(resolved=resolved), engine=engine, load=load, alive=True, paused=False
    )
    admission = Admission(ServerOptions(), llm)
    admission.refused["key"] = 1
    return list(Metrics(llm, admission=admission).collect())


def metric_page() -> str:
    lines = ["| name | kind | labels | meaning |", "|---|---|---|---|"]
    for metric in metrics():
        labels = dict.fromkeys(
            label for sample in metric.samples for label in sample.labels if label not in ("model_name", "le")
        )
        listed = ", ".join(f"`{label}`" for label in labels)
        lines.append(f"| `{metric.name}` | {metric.type} | {listed} | {metric.documentation} |")
    return METRICS + "\n".join(lines) + "\n"


def pages() -> dict[Path, str]:
    commands_file = FOLDER / "commands.md"
    return {
        commands_file: command_page(commands_file.read_text(encoding="utf-8")),
        FOLDER / "metrics.md": metric_page(),
    }


if __name__ == "__main__":
    write_or_check(pages())
