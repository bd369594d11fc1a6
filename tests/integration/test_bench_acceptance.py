"""`outrider bench acceptance`: its figures as JSON, as tables and as a picture, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from outrider import LLM, SamplingParams

LINES = ["one two one two one two", json.dumps({"prompt": "abc abc abc"}), json.dumps({"prompt": "to be or not to be"})]


@pytest.fixture
def sets(tmp_path: Path) -> list[str]:
    for name in ("letters", "words"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(LINES))
    (tmp_path / "words.jsonl").write_text(LINES[2])
    return ["--sets", f"letters={tmp_path / 'letters.jsonl'}", "--sets", f"words={tmp_path / 'words.jsonl'}"]


def lines(result: Any) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def small(model: Path, *drafters: str) -> list[object]:
    named = [part for drafter in drafters for part in ("--speculate", drafter)]
    return ["bench", "acceptance", "-m", model, *named, "--backend", "cpu", "--max-tokens", 24, "--batch", 2]


def test_json_has_figures_of_every_drafter_temperature_and_set(
    outrider: Callable[..., Any], model: Path, sets: list[str]
) -> None:
    itself = f"draft_model:model={model},width=3"
    found = lines(
        outrider(*small(model, itself, "ngram:width=2"), *sets, "--temperature", 0, "--temperature", 1, "--json")
    )
    assert [(one["drafter"], one["temperature"]) for one in found] == [
        (drafter, temperature) for drafter in (itself, "ngram:width=2") for temperature in (0, 1)
    ]
    for one in found:
        assert list(one["sets"]) == ["letters", "words"] and one["adaptive"] is False
        assert [one["sets"][name]["prompts"] for name in one["sets"]] == [3, 1]
    assert found[0]["mean"]["conditional_rates"] == pytest.approx([1, 1, 1], abs=0.2)
    assert "letters: " in outrider(*small(model, itself), *sets, "--limit", 1).stderr


def test_prompts_go_through_the_chat_template_unless_raw(
    outrider: Callable[..., Any], model: Path, tmp_path: Path
) -> None:
    """The counts are those of the engine over the same tokens."""
    file = tmp_path / "some.txt"
    file.write_text("hello hello hello")
    llm = LLM(str(model), backend="cpu", speculate="ngram:width=4,adaptive=false")
    params = SamplingParams(max_tokens=24, temperature=0)
    for raw in (False, True):
        asked = "hello hello hello" if raw else llm.chat_prompt([{"role": "user", "content": "hello hello hello"}])
        spec_stats = llm.generate([asked], params)[0].stats.speculation
        (one,) = lines(outrider(*small(model, "ngram:width=4"), "--file", file, "--json", *(["--raw"] if raw else [])))
        assert (
            one["sets"]["some"]["accepted"] == spec_stats.accepted
            and one["sets"]["some"]["drafted"] == spec_stats.drafted
        )


def test_tables_and_a_chart_are_written(
    outrider: Callable[..., Any], model: Path, sets: list[str], tmp_path: Path
) -> None:
    picture = tmp_path / "picture.svg"
    result = outrider(*small(model, "ngram:width=2", "suffix"), *sets, "--speed", "--plot", picture)
    assert result.exit_code == 0, result.stderr
    for word in ("ngram:width=2", "suffix", "letters", "words", "mean", "x plain speed", "undrafted", "depth"):
        assert word in result.stdout
    assert f"drawn: {picture}" in result.stderr
    assert ElementTree.fromstring(picture.read_text()).tag.endswith("svg")


def test_prompts_of_the_command_line_are_a_set(outrider: Callable[..., Any], model: Path) -> None:
    (one,) = lines(outrider(*small(model, "ngram:adaptive=true"), "a b a b", "c d c d", "--json"))
    assert one["sets"]["prompts"]["prompts"] == 2 and one["adaptive"] is True


MISTAKES: dict[str, tuple[list[object], str]] = {
    "plain decoding": (["--speculate", "none", "a"], "`--speculate` is `none`"),
    "a later drafter": (["--speculate", "ngram", "--speculate", "ngram:widht=3", "a"], "no option `widht`"),
    "a set without a name": (["--speculate", "ngram", "--sets", "file.txt"], "`--sets` is `file.txt`: write NAME=FILE"),
    "a set that is missing": (["--speculate", "ngram", "--sets", "a=nowhere.txt"], "cannot read `nowhere.txt`"),
    "a picture of another kind": (["--speculate", "ngram", "--plot", "a.png", "a"], "use a name that ends in .svg"),
    "a picture in no folder": (
        ["--speculate", "ngram", "--plot", "nowhere/a.svg", "a"],
        "the folder `nowhere` does not exist",
    ),
    "temperature": (["--speculate", "ngram", "--temperature", "-1", "a"], "`temperature` is -1.0"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_bad_arguments_are_refused_before_anything_runs(outrider: Callable[..., Any], mistake: str) -> None:
    arguments, fragment = MISTAKES[mistake]
    result = outrider("bench", "acceptance", "-m", "no/such/model", *arguments)
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.startswith("error: ") and fragment in result.stderr and result.stderr.count("\n") == 1


def test_two_sets_of_one_name_are_refused(outrider: Callable[..., Any], sets: list[str], tmp_path: Path) -> None:
    drafter = ("bench", "acceptance", "--speculate", "ngram")
    assert "called `letters`" in outrider(*drafter, *sets[:2], *sets[:2]).stderr
    assert "called `words`" in outrider(*drafter, *sets, "--file", tmp_path / "words.jsonl").stderr
    assert outrider(*drafter).exit_code == 2 and outrider("bench", "acceptance", "a").exit_code == 2
