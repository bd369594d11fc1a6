"""`outrider top` shows what a running server counts, and survives its absence."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from live_server import serving

from outrider.cli import top
from outrider.diagnostics.live import History, Reading, normalize
from outrider.errors import UserError
from waiting import TIMEOUT

ENGINE = {"speculate": "ngram:width=3,adaptive=no"}
ASK: dict[str, Any] = {"prompt": [5, 6, 7] * 4, "max_tokens": 30, "temperature": 0, "ignore_eos": True}


def test_one_frame_has_the_counts_of_the_server(llm, outrider) -> None:
    with serving(llm, names=("tiny",)) as url:
        answer = httpx.post(f"{url}/v1/completions", json={**ASK, "n": 2}, timeout=TIMEOUT).json()
        found = json.loads(outrider("top", url, "--once", "--json", "--interval", 0.1).stdout)
        text = outrider("top", url, "--once", "--interval", 0.1).stdout
    assert (found["model"], found["health"], found["running"], found["waiting"]) == ("tiny", "ok", 0, 0)
    assert found["finished"]["length"] == 1 and found["generated_tokens"] == 60 and found["prompt_tokens"] == 12
    assert found["pages"] == llm.llm.resolved.pages and found["pages_used"] == 0
    counted = answer["metrics"]["speculative_decoding"]
    assert found["methods"] == ["ngram"] and found["drafted_tokens"] == llm.llm.method_stats["ngram"].drafted
    assert found["acceptance_rate"] == pytest.approx(counted["draft_acceptance_rate"])
    assert found["mean_acceptance_length"] == pytest.approx(counted["mean_acceptance_length"])
    assert 0 < found["queue_seconds"] < found["first_token_seconds"] < found["end_to_end_seconds"]
    for part in ("tiny", "ok", "1 finished (length 1)", "60 tokens generated", "ngram", "pages"):
        assert part in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_server_that_goes_away_is_reported_and_awaited(llm, outrider, monkeypatch) -> None:
    with ExitStack() as servers:
        url = servers.enter_context(serving(llm, names=("tiny",)))
        pauses = 0

        def sleep(seconds: float) -> None:
            nonlocal pauses
            pauses += 1
            if pauses == 1:
                servers.close()
            if pauses == 3:
                raise KeyboardInterrupt

        monkeypatch.setattr(top, "sleep", sleep)  # not `time.sleep`: other threads use it
        done = outrider("top", url, "--json")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["health"] for line in lines] == [
        "ok",
        "no answer: Connection refused",
        "no answer: Connection refused",
    ]
    assert done.exit_code == 130


def test_the_view_keeps_the_last_figures_of_a_lost_server(llm, outrider, monkeypatch) -> None:
    with ExitStack() as servers:
        url = servers.enter_context(serving(llm, names=("tiny",)))
        pauses = iter([servers.close])

        def sleep(seconds: float) -> None:
            if (action := next(pauses, None)) is None:
                raise KeyboardInterrupt
            action()

        monkeypatch.setattr(top, "sleep", sleep)  # not `time.sleep`: other threads use it
        done = outrider("top", url)
    assert "tiny" in done.stdout and "no answer (Connection refused): trying again" in done.stdout
    assert done.exit_code == 130


def reading(seconds: float, tokens: float, latency: float = 0.0, count: float = 0.0) -> Reading:
    values = {"vllm:generation_tokens_total": tokens, "latency_sum": latency, "latency_count": count}
    return Reading(seconds, {name: {(): value} for name, value in values.items()}, "ok")


def test_rates_and_means_are_those_of_the_window() -> None:
    history = History()
    for second in range(30):
        history.add(reading(second, 10.0 * second**2, latency=float(second), count=2.0 * second))
    assert history.rate("vllm:generation_tokens_total") == pytest.approx(10 * (29**2 - 19**2) / 10)
    assert history.mean("latency") == pytest.approx(0.5)
    assert history.speeds[-1] == pytest.approx(10 * (29**2 - 28**2))


def test_a_restarted_server_gives_no_negative_rate() -> None:
    history = History()
    history.add(reading(0, 500))
    history.add(reading(1, 20))
    assert history.rate("vllm:generation_tokens_total") == 0 and not history.speeds
    history.add(reading(2, 30))
    assert history.rate("vllm:generation_tokens_total") == 10


@pytest.mark.parametrize(
    ("written", "address"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("http://host/v1/", "http://host"),
        ("https://host", "https://host"),
    ],
)
def test_addresses(written: str, address: str) -> None:
    assert normalize(written) == address


def test_what_is_no_server_of_ours_is_refused(llm, outrider) -> None:
    with pytest.raises(UserError, match="`file:///etc` is not the address of a server"):
        normalize("file:///etc")
    done = outrider("top", "localhost:9", "--once")
    assert done.exit_code == 1 and "does not answer (Connection refused): start `outrider serve`" in done.stderr
    with serving(llm, api_keys=("key",)) as url:
        done = outrider("top", url, "--once")
        assert done.exit_code == 1 and "requires an API key: pass `--api-key`, or set `OUTRIDER_KEY`" in done.stderr
        assert outrider("top", url, "--once", "--interval", 0.1, "--api-key", "key").exit_code == 0
        done = outrider("top", f"{url}/page", "--once", "--api-key", "key")
        assert done.exit_code == 1 and "(status 404) is not that of `outrider serve`: check the URL" in done.stderr
