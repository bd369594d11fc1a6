"""Progress of a training run on a terminal: a bar, and a table with the latest metrics of each head."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from ..train.loop import ProgressEvent

TEXT_COLUMNS = ("head", "text", "accepted by depth")  # left-aligned


class Screen:
    """A ProgressReporter on a terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[status]}", markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
        )
        self.task = self.bar.add_task("", total=None, status="")
        self.latest: dict[str, ProgressEvent] = {}
        self.live = Live(self.bar, console=self.console, refresh_per_second=4)

    def __enter__(self) -> Screen:
        self.live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.live.__exit__(kind, error, trace)

    def stage(self, text: str) -> None:
        self.bar.reset(self.task, total=None, description=text, status="")

    def note(self, text: str) -> None:
        self.console.print(f"note: {text}", markup=False)

    def answers(self, documents: int, tokens: int, wanted: int) -> None:
        self.bar.update(self.task, total=wanted, completed=tokens, status=f"{documents} answers, {tokens} tokens")

    def event(self, event: ProgressEvent) -> None:
        self.latest[event.kind] = event
        of = f" of {event.steps}" if event.steps else ""
        self.bar.update(self.task, total=event.steps, completed=event.step, status=f"step {event.step}{of}")
        self.live.update(Group(self.bar, metrics_table(self.latest)))


def metrics_table(latest: Mapping[str, ProgressEvent]) -> Table:
    from ..train.progress import percentages

    table = Table(box=None, pad_edge=False)
    for column in ("head", "text", "loss", "tokens a step", "accepted by depth", "tokens/s", "rate"):
        table.add_column(column, justify="left" if column in TEXT_COLUMNS else "right")
    for kind, event in latest.items():
        for name, metrics in event.metrics.items():
            speed = f"{event.tokens_per_second:.0f}" if event.tokens_per_second else ""
            rate = f"{event.rates[name]:.1e}" if kind == "train" else ""
            table.add_row(
                name, kind, f"{metrics.loss:.3f}", f"{metrics.length:.2f}", percentages(metrics.acceptance), speed, rate
            )
    return table
