"""The command line. Torch is imported inside the commands, so that `outrider --help` answers at once."""

from __future__ import annotations

from typing import Annotated

import typer

from . import bench, chat, doctor, generate, pull, serve, trace, train, verify
from .say import Group, print_version

app = typer.Typer(
    name="outrider",
    help="An LLM inference engine built around speculative decoding.",
    cls=Group,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit")
    ] = False,
) -> None:
    """Run language models: fetch one, ask it, talk to it, serve it, measure it."""


app.command(name="pull")(pull.pull)
app.command(name="generate")(generate.generate)
app.command(name="chat")(chat.chat)
app.command(name="serve")(serve.serve)
app.command(name="train")(train.train)
app.command(name="trace")(trace.trace)
app.command(name="verify")(verify.verify)
app.command(name="doctor")(doctor.doctor)
app.add_typer(bench.app, name="bench")


def main() -> None:
    app()
