"""`outrider serve` as a process, and its option errors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import httpx
from live_server import TIMEOUT


def test_serve_answers_and_exits_on_sigterm(model) -> None:
    command = [sys.executable, "-m", "outrider.cli", "serve", str(model), "--port", "0", "--served-model-name", "tiny"]
    environment = {**os.environ, "OUTRIDER_KEY": "sesame", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen([*command, "--speculate", "ngram"], stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stderr is not None
        lines: list[str] = []
        while not lines or not lines[-1].startswith("try: "):
            lines.append(process.stderr.readline())
            assert lines[-1], lines
        assert lines[0].startswith("loaded ") and "drafting: ngram\n" in lines
        [page] = [line.split()[1] for line in lines if line.startswith("playground: ")]
        asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        with httpx.Client(base_url=page, timeout=TIMEOUT) as client:
            assert client.post("v1/chat/completions", json=asked).status_code == 401
            client.headers["Authorization"] = "Bearer sesame"
            answer = client.post("v1/chat/completions", json=asked).json()
        assert answer["model"] == "tiny" and answer["usage"]["completion_tokens"] <= 3
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()


def test_invalid_options_are_reported_before_the_model_is_loaded(outrider) -> None:
    for arguments, culprit in ((["--port", "70000"], "port"), (["--max-waiting", "0"], "max_waiting")):
        result = outrider("serve", "no-such-model", *arguments)
        assert result.exit_code == 1
        assert f"`{culprit}`" in result.stderr
    assert "no-such-model" in outrider("serve", "no-such-model", "--port", "0").stderr
