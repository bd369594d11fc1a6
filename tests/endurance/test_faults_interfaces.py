"""What a user at the command line hears of an answer that broke off: its beginning, why it ended, a failing exit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from endurance.sabotage import CAUSE
from outrider.cli import app
from outrider.request import RowResult, Step
from outrider.runner import Runner

TEMPLATE = "{% for message in messages %}{{ message.content }}|{% endfor %}"
OPTIONS = ["--max-tokens", "12", "--backend", "cpu"]


@pytest.fixture
def model(tiny_folder: Callable[..., Path], tmp_path: Path) -> str:
    folder = tmp_path / "chatty"
    shutil.copytree(tiny_folder(), folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": TEMPLATE}))
    return str(folder)


@pytest.fixture
def breaking(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels fail on any text that begins with `q`, from its sixth token on."""
    whole = Runner.step

    def step(runner: Runner, asked: Step) -> list[RowResult]:
        if any(row.request.prompt[0] == ord("q") - 29 and len(row.request.output) > 5 for row in asked.rows):
            raise MemoryError(CAUSE)
        return whole(runner, asked)

    monkeypatch.setattr(Runner, "step", step)


@pytest.mark.usefixtures("breaking")
@pytest.mark.parametrize("prompts", [["quick"], ["slow", "quick"]])
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_generate(model: str, prompts: list[str], form: list[str]) -> None:
    done = CliRunner().invoke(app, ["generate", "--model", model, "--raw", "--ignore-eos", *OPTIONS, *form, *prompts])
    assert done.exit_code != 0
    assert f"1 of {len(prompts)} outputs failed: {CAUSE}" in done.stderr
    if form:
        reasons = [json.loads(line)["finish_reason"] for line in done.stdout.splitlines()]
        assert reasons == ["length", "error"][-len(prompts) :]
    else:
        assert len(done.stdout.strip()) >= 4


@pytest.mark.usefixtures("breaking")
def test_chat_goes_on_after_it(model: str) -> None:
    typed = "\n".join(["quick", "slow", "/exit", ""])
    done = CliRunner().invoke(app, ["chat", "--model", model, *OPTIONS], input=typed)
    assert done.exit_code == 0, done.output
    assert f"error: 1 of 1 outputs failed: {CAUSE}" in done.stderr
    assert len(done.stdout.splitlines()) >= 2
