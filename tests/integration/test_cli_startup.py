"""Start of commands: imports are minimal, and a command is the same with and without the others."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from outrider.cli import COMMANDS, app, build
from outrider.device import HOST
from outrider.diagnostics import machine

ONE_COMMAND = """
import sys
from outrider import cli
sys.argv = ["outrider", "generate", "--max-tokens", "none", "hello"]
try:
    cli.main()
finally:
    loaded = {name.partition(".")[0] for name in sys.modules}
    assert not loaded & {"rich", "torch", "numpy"}, loaded
    assert [name for name in cli.COMMANDS if f"outrider.cli.{name}" in sys.modules] == ["generate"]
"""

IMPORTING = """
import gc, sys
from outrider.cli import options
try:
    with options.importing():
        raise KeyError
except KeyError:
    assert gc.isenabled()
count = gc.get_freeze_count()
with options.importing():
    assert not gc.isenabled()
    import torch
assert gc.isenabled() and gc.get_freeze_count() > count + 100_000
count = gc.get_freeze_count()
mine = [[] for _ in range(1000)]
with options.importing():
    assert gc.isenabled()
assert gc.get_freeze_count() == count, "what came later can be garbage"
"""


def test_a_command_imports_no_other_command_and_no_torch() -> None:
    found = subprocess.run([sys.executable, "-c", ONE_COMMAND], capture_output=True, text=True)
    assert found.returncode == 2 and "--max-tokens" in found.stderr, found.stderr
    assert "AssertionError" not in found.stderr, found.stderr


def test_torch_is_imported_without_garbage_collection() -> None:
    subprocess.run([sys.executable, "-c", IMPORTING], check=True)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_the_same_help_when_built_alone(name: str) -> None:
    alone, whole = (CliRunner().invoke(each, [name, "--help"]) for each in (build([name]), app))
    assert alone.exit_code == whole.exit_code == 0
    assert alone.output == whole.output and name in alone.output


def test_the_bandwidth_buffer_is_limited() -> None:
    small, large = (machine.bandwidth_meter(HOST, size) for size in (2**20, 2**40))
    assert isinstance(small, machine.HostBandwidthMeter) and isinstance(large, machine.HostBandwidthMeter)
    assert small.buffer.nbytes == 2**20 and large.buffer.nbytes == machine.BUFFER_BYTES
