"""`outrider serve` as a process, and its option errors."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import tiny_heads
from outrider import LLM
from outrider.cli.options import DraftFlags
from waiting import TIMEOUT


@contextmanager
def served(model: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """Yield a server process, its address, and the lines that it wrote up to the end of its start."""
    command = [sys.executable, "-m", "outrider", "serve", str(model), "--port", "0", "--served-model-name", "tiny"]
    environment = {**os.environ, "OUTRIDER_KEY": "sesame", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stderr is not None
        lines: list[str] = []
        while not lines or not lines[-1].startswith("try: "):
            lines.append(process.stderr.readline())
            assert lines[-1], lines
        [page] = [line.split()[1] for line in lines if line.startswith("playground: ")]
        yield process, page, lines
    finally:
        process.kill()
        process.communicate()


ASKED: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
KEY = {"Authorization": "Bearer sesame"}


def test_serve_answers_and_exits_on_sigterm(model) -> None:
    with served(model, "--speculate", "ngram") as (process, page, lines):
        assert lines[0].startswith("loaded ") and "drafting: ngram\n" in lines
        with httpx.Client(base_url=page, timeout=TIMEOUT) as client:
            assert client.post("v1/chat/completions", json=ASKED).status_code == 401
            client.headers.update(KEY)
            answer = client.post("v1/chat/completions", json=ASKED).json()
        assert answer["model"] == "tiny" and answer["usage"]["completion_tokens"] <= 3
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0


def test_a_grammar_that_never_ends_is_refused_and_does_not_hold_up_the_exit(model) -> None:
    """It took the one thread that compiles, for minutes, and gigabytes."""
    endless = {**ASKED, "guided_json": {"type": "integer", "multipleOf": 99999999}}
    with (
        served(model) as (process, page, _),
        httpx.Client(base_url=page, timeout=TIMEOUT, headers=KEY) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(client.post, "v1/chat/completions", json=endless)
        assert client.get("health").status_code == 200
        assert client.post("v1/chat/completions", json={**ASKED, "guided_choice": ["a"]}).status_code == 200
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
        assert process.returncode == 0
        assert waiting.result().status_code == 400 and "more than" in waiting.result().json()["error"]["message"]


def test_invalid_options_are_reported_before_the_model_is_loaded(outrider) -> None:
    for arguments, culprit in ((["--port", "70000"], "port"), (["--max-waiting", "0"], "max_waiting")):
        result = outrider("serve", "no-such-model", *arguments)
        assert result.exit_code == 1
        assert f"`{culprit}`" in result.stderr
    assert "no-such-model" in outrider("serve", "no-such-model", "--port", "0").stderr


@pytest.mark.parametrize(
    ("written", "layers", "source"),
    [("", "1, 2, 3", "`{head}`"), (",aux_layers=0/1/2", "0, 1, 2", "`aux_layers`")],
)
def test_the_start_up_log_names_the_layers_that_a_head_reads(
    model, tmp_path: Path, caplog, written: str, layers: str, source: str
) -> None:
    head = tmp_path / "head"
    tiny_heads.make("eagle3", head, own_head=False, draft_vocabulary=None)
    caplog.set_level(logging.INFO, "outrider")
    flags = DraftFlags(speculate=f"eagle3:model={head}{written}")
    line = flags.drafting(LLM(str(model), **flags.fields()))
    assert line == f"drafting: eagle3 with {head}, which reads the states that enter layers {layers}"
    assert (
        f"`{head}` reads the states that enter layers {layers}, named by {source.format(head=head)}" in caplog.messages
    )
