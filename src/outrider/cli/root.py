"""Build the command line from one module per command.

Commands import torch only when they run, so that `outrider --help` is fast.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import Annotated, Any

import typer

from .console import CommandGroup, print_version
from .options import METHOD_NAMES

COMMANDS = (
    "pull",
    "list",
    "show",
    "rm",
    "generate",
    "chat",
    "serve",
    "top",
    "train",
    "trace",
    "verify",
    "doctor",
    "bench",
    "demo",
)  # a module each


def root(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit")
    ] = False,
) -> None:
    """Run language models with speculative decoding: download, generate, chat, serve, train, measure."""


def build(names: Sequence[str] = COMMANDS) -> typer.Typer:
    """Build the command line with these commands; importing a command takes time."""
    app = typer.Typer(
        name="outrider",
        help="An LLM inference engine built around speculative decoding.",
        cls=CommandGroup,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog=f"Drafting methods of --speculate: {METHOD_NAMES}, several as a+b, or a module of your own.",
    )
    app.callback()(root)
    for name in names:
        module = import_module(f".{name}", __package__)
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name)
        else:
            app.command(name=name)(getattr(module, name))
    return app


def __getattr__(name: str) -> Any:
    if name == "app":  # the whole command line, for tools that inspect it
        return build()
    raise AttributeError(f"module `outrider.cli` has no attribute `{name}`")


def main() -> None:
    if isinstance(sys.stdout, TextIOWrapper):  # print `?` for characters that the terminal's encoding lacks
        sys.stdout.reconfigure(errors="replace")
    requested = [name for name in sys.argv[1:2] if name in COMMANDS]
    build(requested or COMMANDS)()
