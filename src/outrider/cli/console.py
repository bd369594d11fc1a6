"""Console and file output of the commands: JSON lines, text, notes, tables, progress bars, one-sentence errors."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from ..errors import UserError
from ..types import Progress, unwatched
from .peer_flags import explain

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

MAX_SUMMARY = 300  # characters of a command's first sentence in the list of commands


class SummaryGroup(TyperGroup):
    """Lists its commands with their whole first sentence; Typer cuts it off at the end of the line."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, one.get_short_help_str(MAX_SUMMARY)) for name, one in commands if one])


class CommandGroup(SummaryGroup):
    """Reports a UserError or a full disk as one sentence with exit code 1, and exits with 130 after Ctrl-C."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            discard_output()
            typer.echo(f"error: cannot write the output: {error.strerror}", err=True)
            raise typer.Exit(1) from None
        except Exception as error:
            explain(error)
            raise


def discard_output() -> None:
    """Let stdout drop what it still holds: it could not be written, and Python would try again at its exit."""
    with suppress(OSError):  # a stream without a file, as in tests
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"outrider {__version__}")
        raise typer.Exit()


def json_line(value: dict[str, Any]) -> None:
    """Print an object on one line and flush, so that the reader of a pipe gets it at once."""
    unicode = (sys.stdout.encoding or "utf-8").lower() == "utf-8"
    sys.stdout.write(json.dumps(value, ensure_ascii=not unicode) + "\n")
    sys.stdout.flush()


def text(value: str) -> None:
    """Print text without a line break, and flush."""
    sys.stdout.write(value)
    sys.stdout.flush()


def note(line: str) -> None:
    """Print a remark to stderr, so that stdout carries only the output."""
    typer.echo(line, err=True)


def aside(line: str) -> None:
    """Print a remark between two answers to stderr, dimmed on a terminal."""
    typer.secho(line, err=True, dim=True)


@contextmanager
def bar(label: str, *columns: ProgressColumn, quiet: bool = False) -> Iterator[Progress]:
    """Show a progress bar on stderr until the block ends; nothing if stderr is not a terminal."""
    if quiet or not sys.stderr.isatty():
        yield unwatched
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    shown = columns or (TaskProgressColumn(), TimeElapsedColumn())
    label_column = Column(no_wrap=True, overflow="ellipsis")
    description = TextColumn("{task.description}", markup=False, table_column=label_column)
    with Bar(description, BarColumn(), *shown, console=Console(stderr=True), transient=True) as drawn:
        task = drawn.add_task(label, total=None)

        def progress(done: int, total: int, label: str) -> None:
            drawn.update(task, completed=done, total=total or None, description=label)

        yield progress


def download_bar(label: str, quiet: bool = False) -> AbstractContextManager[Progress]:
    """Show a progress bar with bytes and speed."""
    if quiet or not sys.stderr.isatty():
        return nullcontext(unwatched)
    from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

    return bar(label, DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> None:
    """Print a table. The first `words` columns are text and left-aligned, the others are numbers."""
    from rich.console import Console
    from rich.table import Table

    drawn = Table(title=title or None, title_justify="left", box=None, pad_edge=False, show_header=any(columns))
    for index, column in enumerate(columns):
        drawn.add_column(column, justify="left" if index < words else "right", overflow="fold")
    for row in rows:
        drawn.add_row(*row)
    Console(markup=False, highlight=False).print(drawn)


def columns(rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> None:
    """Print aligned columns without wrapping, for other programs and for copying; `numbers` are right-aligned."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))] if rows else []
    for row in rows:
        cells = [
            cell.rjust(width) if index in numbers else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        text("  ".join(cells).rstrip() + "\n")


def size(count: float) -> str:
    """Format a number of bytes with a decimal unit."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def figure(spread: dict[str, float] | None, unit: str) -> str:
    """Format a repeated measurement: the median, and the range in brackets."""
    if spread is None:
        return "not measured"
    return f"{digits(spread['median'])} {unit} [{digits(spread['low'])} to {digits(spread['high'])}]".replace("  ", " ")


def digits(value: float) -> str:
    """Format with three significant digits, without decimals from 100 on."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


# ---- files that the user names ----


def read_text(path: Path) -> str:
    try:
        content = path.read_bytes()
        return content.decode().replace("\r\n", "\n").replace("\r", "\n")
    except OSError as error:
        raise UserError(f"cannot read `{path}`: {os_reason(error)}") from error
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise UserError(f"cannot read `{path}`: line {line} is not UTF-8 text") from error


def write(path: Path, content: str | bytes, done: str) -> None:
    """Write a file, and print a note that begins with `done`."""
    try:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise UserError(f"cannot write `{path}`: {os_reason(error)}") from error
    note(f"{done}: {path}")


def check_plot(path: Path) -> None:
    """Check the path of `--plot` before a long measurement begins."""
    if path.suffix != ".svg":
        raise UserError(f"`--plot` is `{path}`: figures are written as SVG, so use a name that ends in .svg")
    if not path.parent.is_dir():
        raise UserError(f"`--plot` is `{path}`, but the folder `{path.parent}` does not exist: create it first")


def os_reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
