"""The command line. Torch is imported inside the commands, so that `outrider --help` answers at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

from .console import Group, print_version

COMMANDS = ("pull", "generate", "chat", "serve", "train", "trace", "verify", "doctor", "bench")  # a module each


def root(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit")
    ] = False,
) -> None:
    """Run language models: fetch one, ask it, talk to it, serve it, measure it."""


def build(names: Sequence[str] = COMMANDS) -> typer.Typer:
    """The command line with these commands: each of them takes its time to be imported and described."""
    made = typer.Typer(
        name="outrider",
        help="An LLM inference engine built around speculative decoding.",
        cls=Group,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    made.callback()(root)
    for name in names:
        module = import_module(f".{name}", __package__)
        if hasattr(module, "app"):
            made.add_typer(module.app, name=name)
        else:
            made.command(name=name)(getattr(module, name))
    return made


def __getattr__(name: str) -> Any:
    if name == "app":  # all of it, for those who look at it from outside
        return build()
    raise AttributeError(f"module `outrider.cli` has no attribute `{name}`")


def main() -> None:
    asked = [name for name in sys.argv[1:2] if name in COMMANDS]
    build(asked or COMMANDS)()
