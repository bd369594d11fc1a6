"""While a model loads, whoever watches a terminal sees how far it is; a pipe sees nothing of it."""

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
from live import PATIENCE

from outrider import LLM
from outrider.cli import console

ESCAPE = "\x1b["
SEEN = re.compile(r"(opening \S*|loading weights|warming up)\s")


@contextmanager
def terminal() -> Iterator[tuple[int, int]]:
    """Both ends."""
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


def bare(text: str) -> str:
    """Without colours and movements."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def test_progress_is_told_from_the_first_weight_to_the_last_step(model) -> None:
    told: list[tuple[int, int, str]] = []
    llm = LLM(str(model), lambda *moment: told.append(moment), speculate="ngram")
    parts = llm.engine.model.config.layers + 1
    assert told == [
        *((done, parts, "loading weights") for done in range(parts + 1)),
        *((done, 2, "warming up") for done in range(3)),
    ]


@pytest.mark.parametrize("command", ["generate", "serve"])
def test_a_terminal_shows_a_bar_and_takes_it_away(model, command: str) -> None:
    ask = ["serve", str(model), "--port", "0"]
    if command == "generate":
        ask = ["generate", "--model", str(model), "--max-tokens", "2", "hi"]
    with terminal() as (ours, theirs):
        line = [sys.executable, "-m", "outrider.cli", *ask]
        process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=theirs, env=environment(), text=True)
        os.close(theirs)
        try:
            shown = read_until(ours, "tokens/s" if command == "generate" else "try: curl")
            process.send_signal(signal.SIGTERM)
            written, _ = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
            process.wait()
    before, _, after = shown.rpartition(ESCAPE)
    assert re.search(r"warming up ━.* 100%", bare(before))  # the last picture is always drawn
    assert not SEEN.search(after) and not SEEN.search(written) and ESCAPE not in written


def test_a_pipe_sees_nothing_of_it(model) -> None:
    line = [sys.executable, "-m", "outrider.cli", "generate", "--model", str(model), "--max-tokens", "2", "hi"]
    result = subprocess.run(line, capture_output=True, text=True, env=environment(), timeout=4 * PATIENCE, check=True)
    for heard in (result.stdout, result.stderr):
        assert not SEEN.search(heard) and ESCAPE not in heard


def test_a_bar_follows_what_it_is_told(monkeypatch) -> None:
    with terminal() as (ours, theirs), os.fdopen(theirs, "w") as screen:
        monkeypatch.setattr(sys, "stderr", screen)
        monkeypatch.setenv("TERM", "xterm")
        with console.bar("first") as progress:
            progress(1, 4, "second")
        screen.write("over")
        screen.flush()
        assert re.search(r"second ━.* 25%", bare(read_until(ours, "over")))
        with console.bar("first", quiet=True) as progress:
            progress(1, 4, "third")
        screen.write("and out")
        screen.flush()
        assert read_until(ours, "out") == "and out"
