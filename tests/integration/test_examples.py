"""The examples and the README's session run on the real model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


def run(code: list[str]) -> str:
    done = subprocess.run([sys.executable, *code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_hello_example_prints_text() -> None:
    assert "The sea is" in run([str(ROOT / "examples" / "hello.py")])


def test_the_stream_example_prints_text() -> None:
    printed = run([str(ROOT / "examples" / "stream.py")])
    for question in ("Why is the sky blue?", "Why is the sea salty?"):
        pieces = re.findall(rf"^\[{re.escape(question)}\] (.*)$", printed, flags=re.MULTILINE)
        assert len(pieces) > 10


def test_the_example_of_an_own_method_drafts() -> None:
    printed = run(["-m", "examples.own_method"])
    (rate,) = re.findall(r"^([0-9.]+) tokens a step$", printed, flags=re.MULTILINE)
    assert "Wednesday, Thursday, Friday" in printed and float(rate) > 1.1


def test_the_batch_example_prints_every_answer(tmp_path: Path) -> None:
    prompts, answers = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    prompts.write_text("The capital of France is\nOne, two, three,")
    run([str(ROOT / "examples" / "batch.py"), str(prompts), str(answers)])
    found = {line["prompt"]: line["text"] for line in map(json.loads, answers.read_text().splitlines())}
    assert "Paris" in found["The capital of France is"] and "four" in found["One, two, three,"]


def test_the_session_of_the_readme_runs() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(run(["-c", block])) > 200


def test_generate_streams_an_answer() -> None:
    printed = run(["-m", "outrider", "generate", "What is the capital of France?", "--max-tokens", "32"])
    assert "Paris" in printed
