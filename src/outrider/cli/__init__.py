"""The command line: `outrider COMMAND ...`. `app`, the Typer application with all commands, is built on first use."""

from .root import COMMANDS, __getattr__, build, main

__all__ = ["COMMANDS", "__getattr__", "app", "build", "main"]
