"""A run of training on a terminal: a bar, and the newest figures of each head below it."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from ..train.loop import Moment

WORDS = ("head", "text", "accepted by place")  # columns that are no figures


class Screen:
    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[figure]}", markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
        )
        self.task = self.bar.add_task("", total=None, figure="")
        self.newest: dict[str, Moment] = {}
        self.live = Live(self.bar, console=self.console, refresh_per_second=4)

    def __enter__(self) -> Screen:
        self.live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.live.__exit__(kind, error, trace)

    def stage(self, text: str) -> None:
        self.bar.reset(self.task, total=None, description=text, figure="")

    def note(self, text: str) -> None:
        self.console.print(f"note: {text}", markup=False)

    def answers(self, documents: int, tokens: int, wanted: int) -> None:
        self.bar.update(self.task, total=wanted, completed=tokens, figure=f"{documents} answers, {tokens} tokens")

    def moment(self, moment: Moment) -> None:
        self.newest[moment.kind] = moment
        of = f" of {moment.steps}" if moment.steps else ""
        self.bar.update(self.task, total=moment.steps, completed=moment.step, figure=f"step {moment.step}{of}")
        self.live.update(Group(self.bar, drawn(self.newest)))


def drawn(newest: Mapping[str, Moment]) -> Table:
    from ..train.progress import places

    table = Table(box=None, pad_edge=False)
    for column in ("head", "text", "loss", "tokens a step", "accepted by place", "tokens/s", "rate"):
        table.add_column(column, justify="left" if column in WORDS else "right")
    for kind, moment in newest.items():
        for name, figures in moment.figures.items():
            pace = f"{moment.pace:.0f}" if moment.pace else ""
            rate = f"{moment.rates[name]:.1e}" if kind == "train" else ""
            table.add_row(
                name, kind, f"{figures.loss:.3f}", f"{figures.length:.2f}", places(figures.acceptance), pace, rate
            )
    return table
