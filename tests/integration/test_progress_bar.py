"""The progress bar of model loading: shown on a terminal, absent in a pipe."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from outrider import LLM
from outrider.cli import console
from waiting import TIMEOUT

ESCAPE = "\x1b["
LABELS = re.compile(r"(opening \S*|loading weights|warming up)\s")


@contextmanager
def terminal() -> Iterator[tuple[int, int]]:
    """Open a pseudo-terminal; yield both ends."""
    ours, theirs = pty.openpty()
    try:
        yield ours, theirs
    finally:
        os.close(ours)


def environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TERM": "xterm", "COLUMNS": "400"}


def read_until(end: int, wanted: str) -> str:
    heard = b""
    while wanted not in heard.decode(errors="ignore"):
        try:
            data = os.read(end, 2**16)
        except OSError:  # the other end is closed
            break
        heard += data
    return heard.decode(errors="replace")


def strip_escapes(text: str) -> str:
    """Remove colors and cursor movements."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def test_progress_covers_loading_and_warm_up(model) -> None:
    reported: list[tuple[int, int, str]] = []
    llm = LLM(str(model), lambda *moment: reported.append(moment), speculate="ngram")
    parts = llm.engine.model.config.layers + 1
    assert reported == [
        *((done, parts, "loading weights") for done in range(parts + 1)),
        *((done, 2, "warming up") for done in range(3)),
    ]


@pytest.mark.parametrize("command", ["generate", "serve"])
def test_a_terminal_shows_the_bar_and_removes_it(model, command: str) -> None:
    arguments = ["serve", str(model), "--port", "0"]
    if command == "generate":
        arguments = ["generate", "--model", str(model), "--max-tokens", "2", "hi"]
    with terminal() as (ours, theirs):
        line = [sys.executable, "-m", "outrider", *arguments]
        process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=theirs, env=environment(), text=True)
        os.close(theirs)
        try:
            shown = read_until(ours, "tokens/s" if command == "generate" else "try: curl")
            process.send_signal(signal.SIGTERM)
            written, _ = process.communicate(timeout=TIMEOUT)
        finally:
            process.kill()
            process.wait()
    before, _, after = shown.rpartition(ESCAPE)
    assert re.search(r"warming up ━.* 100%", strip_escapes(before))  # the last state is always drawn
    assert not LABELS.search(after) and not LABELS.search(written) and ESCAPE not in written


def test_a_pipe_gets_no_progress_bar(outrider, model) -> None:
    result = outrider("generate", "--model", model, "--max-tokens", 2, "hi")
    assert result.exit_code == 0
    for output in (result.stdout, result.stderr):
        assert not LABELS.search(output) and ESCAPE not in output


def test_the_bar_shows_the_reported_progress(monkeypatch) -> None:
    with terminal() as (ours, theirs), os.fdopen(theirs, "w") as screen:
        monkeypatch.setattr(sys, "stderr", screen)
        monkeypatch.setenv("TERM", "xterm")
        with console.bar("first") as progress:
            progress(1, 4, "second")
        screen.write("over")
        screen.flush()
        assert re.search(r"second ━.* 25%", strip_escapes(read_until(ours, "over")))
        with console.bar("first", quiet=True) as progress:
            progress(1, 4, "third")
        screen.write("and out")
        screen.flush()
        assert read_until(ours, "out") == "and out"
