"""`outrider chat`: history, commands, summary."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator

import pytest

from outrider.cli.chat import Interruption


def answers(result):
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture
def chat(outrider, model):
    def run(stdin: str, *arguments: str):
        return outrider("chat", "-m", model, "--max-tokens", 6, "--temperature", 0, *arguments, stdin=stdin)

    return run


def test_history_grows_until_reset(chat) -> None:
    first, second, third = answers(chat("hello\nand\n/reset\nhello\n/exit\nnever read\n", "--json"))
    assert first["messages"] == [{"role": "user", "content": "hello"}]
    assert second["messages"] == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": first["text"]},
        {"role": "user", "content": "and"},
    ]
    assert third["messages"] == first["messages"]
    assert third["token_ids"] == first["token_ids"]


def test_the_system_message_survives_reset(chat) -> None:
    first, second = answers(chat("hello\n/reset\nhello\n", "--json", "--system", "be brief"))
    assert first["messages"] == second["messages"]
    assert first["messages"][0] == {"role": "system", "content": "be brief"}


def test_text_and_final_speed_are_printed(chat) -> None:
    (body,) = answers(chat("hello\n", "--json"))
    found = chat("hello\n\n", "--speculate", "none")
    assert found.stdout == body["text"] + "\n"
    assert re.fullmatch(r"1 answer, \d+ tokens, \d+\.\d tokens/s\n", found.stderr)


def test_auto_is_named_before_the_first_answer(chat) -> None:
    assert re.match(r"drafting: .*auto.*\n1 answer, ", chat("hello\n").stderr)
    assert "drafting" not in chat("hello\n", "--json").stderr


def test_the_summary_adds_up_the_speculation_stats(chat) -> None:
    extra = ("--speculate", "ngram:adaptive=no", "--max-tokens", "40")
    body = answers(chat("abab\nand\n", "--json", *extra))
    found = chat("abab\nand\n", *extra).stderr.splitlines()
    assert found[0].startswith("2 answers, ")
    drafted, kept = (sum(one["stats"][name] for one in body) for name in ("drafted", "accepted"))
    assert f" tokens per step with ngram: drafted {drafted}, accepted {kept}; by depth " in found[1]


def test_a_rejected_message_leaves_the_conversation_unchanged(chat) -> None:
    found = chat(f"hello\n{'x' * 500}\n/nonsense\nand\n", "--json")
    first, second = answers(found)
    assert "the prompt has" in found.stderr
    assert "no command called `/nonsense`" in found.stderr
    assert [message["content"] for message in second["messages"]] == ["hello", first["text"], "and"]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Handle interrupts as in a terminal; a shell that runs the tests in the background ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_the_first_interrupt_is_recorded_and_the_second_raises() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interruption() as interruption:
        assert not interruption.requested
        os.kill(os.getpid(), signal.SIGINT)
        assert interruption.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
