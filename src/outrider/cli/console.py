"""How the commands speak: one JSON object a line, one sentence for a mistake, tables for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from ..errors import UserError
from ..types import Progress, unwatched

if TYPE_CHECKING:
    from rich.progress import ProgressColumn


class Group(TyperGroup):
    """A user's mistake ends in one sentence and exit code 1; Ctrl-C ends quietly with 130."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


def print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"outrider {__version__}")
        raise typer.Exit()


def json_line(value: dict[str, Any]) -> None:
    """One object on one line, flushed, so that a reader at the other end of a pipe sees it now."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def text(value: str) -> None:
    """Text as it comes, without a line break."""
    sys.stdout.write(value)
    sys.stdout.flush()


def note(line: str) -> None:
    """A remark beside the output: it goes to stderr, so that a pipe carries the text alone."""
    typer.echo(line, err=True)


@contextmanager
def bar(label: str, *columns: ProgressColumn, quiet: bool = False) -> Iterator[Progress]:
    """Progress as a bar on stderr, which goes when it is over. Nothing at all where stderr is no terminal."""
    if quiet or not sys.stderr.isatty():
        yield unwatched
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    shown = columns or (TaskProgressColumn(), TimeElapsedColumn())
    words = TextColumn("{task.description}", markup=False)
    with Bar(words, BarColumn(), *shown, console=Console(stderr=True), transient=True) as drawn:
        task = drawn.add_task(label, total=None)

        def progress(done: int, total: int, label: str) -> None:
            drawn.update(task, completed=done, total=total or None, description=label)

        yield progress


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> None:
    """The first `words` columns are text, the others are figures."""
    from rich.console import Console
    from rich.table import Table

    drawn = Table(title=title or None, title_justify="left", box=None, pad_edge=False, show_header=any(columns))
    for index, column in enumerate(columns):
        drawn.add_column(column, justify="left" if index < words else "right", overflow="fold")
    for row in rows:
        drawn.add_row(*row)
    Console(markup=False, highlight=False).print(drawn)


def size(count: float) -> str:
    """Bytes in the unit that a reader expects."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def figure(spread: dict[str, float] | None, unit: str) -> str:
    """What several rounds came to: the median, and how far they lie apart."""
    if spread is None:
        return "not measured"
    return f"{digits(spread['median'])} {unit} [{digits(spread['low'])} to {digits(spread['high'])}]".replace("  ", " ")


def digits(value: float) -> str:
    """Three significant digits, and whole numbers from a hundred on."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read `{path}`: {cause(error)}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read `{path}`: it is not UTF-8 text") from error


def write(path: Path, content: str | bytes, done: str) -> None:
    """done: what a note says has become of it."""
    try:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise UserError(f"cannot write `{path}`: {cause(error)}") from error
    note(f"{done}: {path}")


def check_plot(path: Path) -> None:
    """Before hours are spent on what it shows."""
    if path.suffix != ".svg":
        raise UserError(f"`--plot` is `{path}`: figures are drawn as SVG, so let the name end in .svg")
    if not path.parent.is_dir():
        raise UserError(f"`--plot` is `{path}`, and there is no folder `{path.parent}`: make it first")


def cause(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
