"""`outrider demo`: one prompt with and without drafts; marks only on a terminal, colors only where they are wanted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from rich.console import Console
from test_progress_bar import environment, read_until, strip_escapes, terminal

from outrider.cli.demo import ACCEPTED, MarkedText
from waiting import TIMEOUT

FLAGS = ("--max-tokens", "24", "--rounds", "1", "--speculate", "ngram:adaptive=no")
MARKED, REVERSED = "\x1b[30;46m", "\x1b[7m"  # of ACCEPTED and NO_COLOR


def test_the_demo_shows_both_texts_both_speeds_and_that_the_texts_are_equal(outrider, model) -> None:
    result = outrider("demo", "abab abab", "-m", model, *FLAGS)
    assert result.exit_code == 0, result.stderr
    shown = result.stdout
    assert "\x1b" not in shown, "a pipe gets no escape sequences"
    _, plain, drafted, figures = re.split(r"^(?:Plain decoding|With drafts by ngram|Result) ─+$", shown, flags=re.M)
    assert plain.strip() == drafted.strip() != ""
    assert re.search(r"^plain +[\d.]+ tokens/s +█+ *$", figures, re.M)
    assert re.search(r"^ngram +[\d.]+ tokens/s +█+ +\d\.\d\d x$", figures, re.M)
    assert re.search(r"^[1-9]\d* of \d+ draft tokens accepted, \d\.\d\d tokens per step\.$", figures, re.M)
    assert "Texts equal: 24 tokens, the same with and without drafts." in figures


def test_json_has_the_texts_and_the_figures(outrider, model) -> None:
    result = outrider("demo", "abab abab", "-m", model, *FLAGS, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["prompt"] == "abab abab" and found["texts_equal"] is True and found["rounds"] == 1
    assert found["plain_tokens_per_second"] > 0 and found["tokens_per_second"] > 0 and found["accepted"] > 0


def test_a_demo_without_drafts_is_refused(outrider, model) -> None:
    result = outrider("demo", "abab", "-m", model, "--speculate", "none")
    assert result.exit_code == 1 and "name a method" in result.stderr


@pytest.mark.parametrize("no_color", [False, True])
def test_a_terminal_marks_accepted_tokens(model, no_color: bool) -> None:
    line = [sys.executable, "-m", "outrider", "demo", "abab abab", "-m", str(model), *FLAGS]
    variables = {**environment(), "COLUMNS": "90", **({"NO_COLOR": "1"} if no_color else {})}
    with terminal() as (ours, theirs):
        process = subprocess.Popen(line, stdout=theirs, stderr=subprocess.PIPE, env=variables)
        os.close(theirs)
        try:
            shown = read_until(ours, "Texts equal")
            process.communicate(timeout=TIMEOUT)
        finally:
            process.kill()
            process.wait()
    _, _, drafted = shown.partition("With drafts by ngram")
    mark, other = (REVERSED, MARKED) if no_color else (MARKED, REVERSED)
    assert drafted.count(mark) > 1 and other not in drafted  # the first mark is that of the legend
    assert ("[36m" in drafted) is not no_color
    _, plain, _ = re.split(r"Plain decoding ─+|With drafts by ngram", strip_escapes(shown))
    assert plain.strip() and plain.strip() in strip_escapes(drafted)


def test_marks_survive_the_wrapping_at_words() -> None:
    drawn = Console(force_terminal=True, color_system="standard", width=12, _environ={"TERM": "xterm"})
    shown = MarkedText(drawn)
    with drawn.capture() as captured:
        for text, style in (
            ("one two", ""),
            (" three", ACCEPTED),
            (" four\n", ""),
            ("  five six", ACCEPTED),
            ("!", ""),
        ):
            shown.add(text, style)
        shown.close()
    assert strip_escapes(captured.get()) == "one two\nthree four\n  five six!\n"
    assert re.findall(re.escape(MARKED) + r"([^\x1b]*)", captured.get()) == ["three", "  five", " six"]
