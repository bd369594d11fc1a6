"""`outrider chat`: history, commands, summary."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from outrider.cli.chat import Interruption
from outrider.cli.word_wrap import WordWrap
from waiting import TIMEOUT


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
    figures, summary = found.stderr.splitlines()
    assert re.fullmatch(r"\[\d+ tokens, \d+\.\d tokens/s, \d+ of \d+ in the context(, cut off by .*)?\]", figures)
    assert re.fullmatch(r"1 answer, \d+ tokens, \d+\.\d tokens/s", summary)


def test_auto_is_named_before_the_first_answer(chat) -> None:
    suspended = r"(drafts suspended in .*\n)?"  # depends on the times of this machine
    assert re.match(rf"drafting: .*auto.*\n\[.*\]\n{suspended}1 answer, ", chat("hello\n").stderr)
    assert "drafting" not in chat("hello\n", "--json").stderr


def test_the_summary_adds_up_the_speculation_stats(chat) -> None:
    extra = ("--speculate", "ngram:adaptive=no", "--max-tokens", "40")
    body = answers(chat("abab\nand\n", "--json", *extra))
    first, second, *summary = chat("abab\nand\n", *extra).stderr.splitlines()
    assert summary[0].startswith("2 answers, ")
    drafted, kept = (sum(one["stats"][name] for one in body) for name in ("drafted", "accepted"))
    assert f" tokens per step with ngram: drafted {drafted}, accepted {kept}; by depth " in summary[1]
    for figures, one in zip((first, second), body, strict=True):
        counts = f"{one['stats']['accepted']} of {one['stats']['drafted']} drafted by ngram accepted"
        assert f" tokens per step, {counts}, " in figures


def test_the_reason_of_suspended_drafts_is_given_once(chat, monkeypatch) -> None:
    """Verifying one more row is made to look ten times as long as a plain step, so no draft pays."""
    seconds = lambda self, batch_size, drafted: [1.0 + 9.0 * count for count in range(drafted + 1)]  # noqa: E731
    monkeypatch.setattr("outrider.speculation.adaptive.latency_model.LatencyModel.table", seconds)
    printed = chat("abab\nabab\n", "--speculate", "ngram", "--max-tokens", "40").stderr.splitlines()
    reasons = [line.startswith("drafts suspended in ") for line in printed]
    assert [index for index, one in enumerate(reasons) if one] == [1, len(printed) - 1], (
        "after an answer, and at the end"
    )
    assert "`--always-draft` forces them" in printed[1]


def test_a_rejected_message_leaves_the_conversation_unchanged(chat) -> None:
    found = chat(f"hello\n{'x' * 500}\n/nonsense\nand\n", "--json")
    first, second = answers(found)
    assert "the conversation has " in found.stderr and "/shift drops the oldest messages" in found.stderr
    assert "no command called `/nonsense`" in found.stderr
    assert [message["content"] for message in second["messages"]] == ["hello", first["text"], "and"]


def contents(answer) -> list[str]:
    return [message["content"] for message in answer["messages"]]


def test_a_full_context_can_be_shifted(chat) -> None:
    long = "x" * 50
    found = chat(f"first\nsecond\n{long}\n/shift\n/retry\n", "--json")
    first, second, last = answers(found)
    assert contents(second) == ["first", first["text"], "second"]
    assert contents(last) == ["second", second["text"], long] or contents(last) == [long]
    assert re.search(r"error: the conversation has \d+ tokens and the context holds 128", found.stderr)
    assert re.search(r"dropped \d messages; the conversation has \d+ of 128 tokens", found.stderr)


def test_shifting_keeps_the_system_message(chat) -> None:
    found = chat("first\nsecond\n/shift\nthird\n", "--json", "--max-context", "120", "--system", "be brief")
    last = answers(found)[-1]
    assert contents(last)[0] == "be brief" and contents(last)[-1] == "third" and len(contents(last)) < 6


def test_a_message_longer_than_the_context_is_refused(chat) -> None:
    found = chat("x" * 300 + "\n")
    assert re.search(r"error: the message has 3\d\d tokens .* context holds 128: shorten it", found.stderr)


def test_a_conversation_can_be_summarized(outrider, model, tmp_path) -> None:
    folder = tmp_path / "roomy"
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1024}))

    def chat(stdin: str):
        return outrider("chat", "-m", folder, "--max-tokens", 6, "--json", stdin=stdin)

    last = answers(chat("first\nsecond\n/summarize\nthird\n"))[-1]
    assert contents(last)[0].startswith("Summary of our conversation so far: ")
    assert [message["role"] for message in last["messages"]] == ["user", "assistant", "user"]
    assert contents(last)[-1] == "third"
    assert "nothing to summarize" in chat("/summarize\n").stderr


def test_retry_answers_the_last_message_again(chat) -> None:
    first, again = answers(chat("hello\n/retry\n", "--json"))
    assert first["messages"] == again["messages"] and first["token_ids"] == again["token_ids"]
    assert "there is no message to answer again" in chat("/retry\n").stderr


def test_sampling_parameters_can_be_set(chat) -> None:
    found = chat(
        "/set max_tokens 3\nhello\n/set seed=7\n/set seed none\n/set temprature 1\n/set top_p 7\n/set\n", "--json"
    )
    assert len(answers(found)[0]["token_ids"]) == 3
    said = found.stderr.splitlines()
    assert said[:3] == ["max_tokens 3", "seed 7", "seed None"]
    assert said[3].startswith("error: no setting called `temprature` (did you mean `temperature`?)")
    assert said[4].startswith("error: `top_p` is 7.0")
    assert said[5].startswith("max_tokens 3, temperature 0.0, ")


def test_the_system_message_can_be_changed(chat) -> None:
    first, second, third = answers(chat("hello\n/system be brief\nand\n/system none\nso\n", "--json"))
    assert [one["messages"][0]["role"] for one in (first, second, third)] == ["user", "system", "user"]
    assert contents(second)[0] == "be brief"


def test_a_saved_conversation_is_continued(chat, outrider, model, tmp_path) -> None:
    file = tmp_path / "talk with me.json"
    (first,) = answers(chat(f"hello\n/save {file}\n", "--json", "--system", "be brief"))
    (second,) = answers(chat(f"/load {file}\nand\n", "--json"))
    assert contents(second) == ["be brief", "hello", first["text"], "and"]
    assert outrider("generate", "-m", model, "--file", file, "--max-tokens", 2).exit_code == 0
    (tmp_path / "bad.json").write_text('{"messages": [{"role": 3}]}')
    found = chat(f"/load {tmp_path / 'bad.json'}\n/load {tmp_path / 'none.json'}\n/save\n/load {model}\n")
    assert found.stderr.count("error: ") == 4 and found.exit_code == 0
    assert "none.json`: no such file" in found.stderr


def test_a_message_may_have_several_lines(chat) -> None:
    found = answers(chat('"""one\n  two\n\n/three"""\n"""/reset"""\n"""\nopen', "--json"))
    assert contents(found[0]) == ["one\n  two\n\n/three"]
    assert [contents(one)[-1] for one in found[1:]] == ["/reset", "open"]


def test_help_lists_the_commands(chat) -> None:
    said = chat("/help\n").stderr
    names = ("help", "reset", "save", "load", "set", "retry", "system", "shift", "summarize", "exit")
    assert all(f"/{name}" in said for name in names)


def wrapped(text: str, size: int) -> tuple[str, str]:
    """Return a text wrapped at 10 columns that arrives in pieces of `size`, and what is written before its end."""
    written: list[str] = []
    wrap = WordWrap(written.append, lambda: 10)
    for start in range(0, len(text), size):
        wrap.add(text[start : start + size])
    before = "".join(written)
    wrap.close()
    return "".join(written), before


@pytest.mark.parametrize("size", [1, 3, 100])
def test_words_wrap_at_the_width_but_code_does_not(size: int) -> None:
    code = "```\none two three four\n```\n"
    text = f"one two three four\n\n  five six seven\n{code}abcdefghijklm n  op"
    expected = f"one two\nthree four\n\n  five six\nseven\n{code}abcdefghijklm n  op\n"
    assert wrapped(text, size)[0] == expected


def test_scripts_without_spaces_are_not_held_back() -> None:
    for text in ("\u732b" * 40, "x" * 40):
        whole, before = wrapped(text, 1)
        assert whole == f"{text}\n" and len(before) >= 25


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_at_the_prompt_keeps_the_conversation(model, tmp_path) -> None:
    """Chat in a terminal: Ctrl-C at the prompt, then a second message."""
    master, terminal = pty.openpty()
    file = tmp_path / "talk.json"
    command = [sys.executable, "-m", "outrider", "chat", "-m", str(model), "--max-tokens", "3", "--backend", "cpu"]
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True)
    os.close(terminal)
    try:
        seen = wait_for(master, "> ")
        os.write(master, b"hello\n")
        seen += wait_for(master, r"in the context.*> ")
        os.write(master, b"dropped")
        seen += wait_for(master, "dropped")
        # CPython's readline loses an interrupt between two of its waits until the next key or interrupt.
        for _ in range(20):
            process.send_signal(signal.SIGINT)
            if select.select([master], [], [], 1)[0]:
                break
        seen += wait_for(master, "ends the chat")
        os.write(master, f"/save {file}\n/exit\n".encode())
        seen += wait_for(master, "1 answer")
        assert process.wait(TIMEOUT) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)
    first, answer = json.loads(file.read_text())["messages"]
    assert first["content"] == "hello" and answer["role"] == "assistant"
    assert "/help lists the commands" in seen


def wait_for(master: int, pattern: str) -> str:
    """Read from a terminal until a text appears."""
    seen = b""
    while not re.search(pattern, seen.decode(errors="replace"), re.DOTALL):
        assert select.select([master], [], [], TIMEOUT)[0], f"no `{pattern}` in {seen!r}"
        seen += os.read(master, 4096)
    return seen.decode(errors="replace")


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
