"""`outrider serve`: from the command line to an answer, and back to the prompt of the shell."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import httpx
from live import PATIENCE


def test_a_served_model_answers_and_goes(model) -> None:
    command = [sys.executable, "-m", "outrider.cli", "serve", str(model), "--port", "0", "--served-model-name", "tiny"]
    environment = {**os.environ, "OUTRIDER_KEY": "sesame", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen([*command, "--speculate", "ngram"], stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stderr is not None
        told: list[str] = []
        while not told or not told[-1].startswith("try: "):
            told.append(process.stderr.readline())
            assert told[-1], told
        assert told[0].startswith("loaded ") and "drafting: ngram\n" in told
        [page] = [line.split()[1] for line in told if line.startswith("playground: ")]
        asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        with httpx.Client(base_url=page, timeout=PATIENCE) as client:
            assert client.post("v1/chat/completions", json=asked).status_code == 401
            client.headers["Authorization"] = "Bearer sesame"
            answer = client.post("v1/chat/completions", json=asked).json()
        assert answer["model"] == "tiny" and answer["usage"]["completion_tokens"] <= 3
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()


def test_mistakes_are_told_before_the_model_is_loaded(outrider) -> None:
    for arguments, culprit in ((["--port", "70000"], "port"), (["--max-waiting", "0"], "max_waiting")):
        result = outrider("serve", "no-such-model", *arguments)
        assert result.exit_code == 1
        assert f"`{culprit}`" in result.stderr
    assert "no-such-model" in outrider("serve", "no-such-model", "--port", "0").stderr
