"""`outrider top`: watch a running server in the terminal."""

from __future__ import annotations

import importlib.util
import os
from contextlib import nullcontext
from time import sleep
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UserError
from ..server.options import ServerOptions
from . import console, options

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..diagnostics.live import History, Server

DEFAULT_URL = f"http://localhost:{ServerOptions.port}"
BAR = 24  # characters of the bar of KV pages
NEARLY_FULL = 0.9  # share of the KV pages above which requests may soon be preempted
BLOCKS = " ▁▂▃▄▅▆▇█"


def top(
    url: Annotated[str, typer.Argument(help="Address of the server")] = DEFAULT_URL,
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="API key of the server [default: OUTRIDER_KEY]")
    ] = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two readings")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the figures of one interval and exit")] = False,
    json: options.Json = False,
) -> None:
    """Watch a running server: its requests, tokens per second, KV pages, acceptance and latencies.

    Speeds and means are those of the last 10 seconds. Ctrl-C ends it.
    """
    if importlib.util.find_spec("prometheus_client") is None:
        raise UserError("`outrider top` needs `prometheus_client`: run `pip install 'outrider[server]'`")
    from ..diagnostics.live import History, Server, UnreachableError, summarize

    server, history = Server(url, api_key or os.environ.get("OUTRIDER_KEY")), History()
    try:
        history.add(server.read())
        if once:
            sleep(interval)
            history.add(server.read())
    except UnreachableError as error:
        raise UserError(f"`{server.url}` does not answer ({error}): start `outrider serve`, or pass its URL") from None
    if once and json:
        console.json_line(summarize(history, server))
    elif once:
        print_frame(history, server)
    else:
        watch(history, server, interval, json)


def watch(history: History, server: Server, interval: float, json: bool) -> None:
    """Read and show until Ctrl-C. While the server does not answer, keep the last figures and say so."""
    from rich.console import Console
    from rich.live import Live

    from ..diagnostics.live import UnreachableError, summarize

    screen = Console(highlight=False)
    drawn = screen.is_terminal and not json
    with Live(console=screen, auto_refresh=False, screen=True) if drawn else nullcontext() as live:
        lost = None
        while True:
            if json:
                away = {"url": server.url, "health": f"no answer: {lost}"}
                console.json_line(summarize(history, server) if lost is None else away)
            elif live is not None:
                live.update(frame(history, server, lost), refresh=True)
            else:
                screen.print(frame(history, server, lost))
            sleep(interval)
            try:
                history.add(server.read())
                lost = None
            except UnreachableError as error:
                lost = str(error)


def print_frame(history: History, server: Server) -> None:
    from rich.console import Console

    Console(highlight=False).print(frame(history, server))


def frame(history: History, server: Server, lost: str | None = None) -> RenderableType:
    """Draw the newest figures; `lost` is the reason why the server does not answer."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from ..diagnostics.live import summarize

    found = summarize(history, server)
    style, status = status_of(found, lost)
    title = Text.assemble((found["model"], "bold"), f"  {found['url']}  ", (status, style))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="cyan", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in lines(found, history):
        grid.add_row(Text(label), Text(text) if isinstance(text, str) else text)
    return Group(title, Text(), grid)


def status_of(found: dict[str, Any], lost: str | None) -> tuple[str, str]:
    """Return the style and the text of the status."""
    if lost is not None:
        return "bold red", f"no answer ({lost}): trying again"
    if found["health"] != "ok":
        return "bold red", found["health"]
    if found["paused"]:
        return "yellow", "paused"
    return "green", "ok"


def lines(found: dict[str, Any], history: History) -> list[tuple[str, Any]]:
    """Return the labels and texts of all lines; at 80 columns none of them wraps unless counts are huge."""
    from rich.text import Text

    finished = ", ".join(f"{reason} {count:,}" for reason, count in found["finished"].items() if count)
    lost = [f"{found[name]:,} {name}" for name in ("refused", "preempted") if found[name]]
    share = found["pages_used"] / found["pages"] if found["pages"] else 0.0
    filled = round(share * BAR)
    rows: list[tuple[str, Any]] = [
        ("requests", f"{found['running']} running   {found['waiting']} waiting"),
        (
            "",
            "   ".join([f"{sum(found['finished'].values()):,} finished{f' ({finished})' if finished else ''}", *lost]),
        ),
        (
            "speed",
            Text.assemble(
                (f"{console.digits(found['generated_tokens_per_second'])} tokens/s", "bold"),
                f"   prompts {console.digits(found['prompt_tokens_per_second'])} tokens/s",
            ),
        ),
        ("", Text(chart(list(history.speeds)), style="green")),
        ("", f"{found['generated_tokens']:,} tokens generated, {found['prompt_tokens']:,} of prompts, since the start"),
        (
            "KV cache",
            Text.assemble(
                ("█" * filled, "yellow" if share > NEARLY_FULL else "green"),
                ("░" * (BAR - filled), "dim"),
                f" {share:.0%}   {found['pages_used']:,} of {found['pages']:,} pages",
            ),
        ),
        ("", f"{found['page_size']} tokens per page   prefix cache hits {percent(found['prefix_cache_hit_rate'])}"),
    ]
    if not found["methods"]:
        rows.append(("drafts", "none: plain decoding"))
    else:
        length = found["mean_acceptance_length"]
        rows += [
            (
                "drafts",
                f"{', '.join(found['methods'])}   acceptance {percent(found['acceptance_rate'])}"
                + ("" if length is None else f"   {length:.2f} tokens per drafted step"),
            ),
            ("", f"{found['drafted_tokens']:,} drafted, {found['accepted_tokens']:,} accepted, since the start"),
        ]
    return [
        *rows,
        (
            "latency",
            f"first token {seconds(found['first_token_seconds'])}   token {seconds(found['per_token_seconds'])}",
        ),
        ("", f"queue {seconds(found['queue_seconds'])}   end to end {seconds(found['end_to_end_seconds'])}"),
    ]


def chart(values: list[float]) -> str:
    """Draw one character per value, scaled to the largest."""
    most = max(values, default=0.0) or 1.0
    return "".join(BLOCKS[round(max(value, 0.0) / most * (len(BLOCKS) - 1))] for value in values)


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"
