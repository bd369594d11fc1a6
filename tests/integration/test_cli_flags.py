"""Groups of flags: flags reach the engine, and omitted flags have the engine's defaults."""

from __future__ import annotations

import re
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from outrider.cli import options
from outrider.cli.options import DraftFlags, SamplingFlags, unfold
from outrider.cli.peer_flags import LLAMA_CPP_FLAGS, OLLAMA_COMMANDS, VLLM_FLAGS
from outrider.config import EngineConfig
from outrider.speculation import available
from outrider.train.methods import TRAINABLE

COMMANDS = [("generate", "hello"), ("chat",), ("serve", "--port", "0")]
FLAGS = (
    "--backend",
    "cuda",
    "--deterministic",
    "--cudagraph-mode",
    "FULL_DECODE_ONLY",
    "--enforce-eager",
    "--decode-steps",
    "3",
)
MEANT = {
    "backend": "cuda",
    "deterministic": True,
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "enforce_eager": True,
    "decode_steps": 3,
}


class OpenedError(Exception):
    """Raised instead of opening a model; carries the options that the command passed."""


@pytest.fixture
def asked(outrider: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    def refuse(model: str, **fields: Any) -> None:
        raise OpenedError(fields)

    monkeypatch.setattr(options, "open_model", refuse)

    def ask(*arguments: str) -> dict[str, Any]:
        with pytest.raises(OpenedError) as found:
            outrider(*arguments)
        fields: dict[str, Any] = found.value.args[0]
        return fields

    return ask


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_engine_flags_reach_the_engine(asked: Any, command: tuple[str, ...]) -> None:
    assert MEANT.items() <= asked(*command, *FLAGS).items()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_omitted_flags_have_the_engines_defaults(asked: Any, command: tuple[str, ...]) -> None:
    fields = asked(*command)
    assert {name: fields[name] for name in MEANT} == {name: getattr(EngineConfig(), name) for name in MEANT}


@pytest.mark.parametrize("command", [*COMMANDS, ("trace", "hello")], ids=lambda command: command[0])
def test_the_engine_chooses_the_method_unless_one_is_named(asked: Any, command: tuple[str, ...]) -> None:
    assert asked(*command)["speculate"] == "auto"
    assert asked(*command, "--speculate", "none")["speculate"] == "none"
    assert asked(*command, "--speculative-config", "{}")["speculate"] == "none"


@pytest.mark.parametrize("command", [*COMMANDS, ("trace", "hello")], ids=lambda command: command[0])
def test_always_draft_works_with_and_without_a_named_method(asked: Any, command: tuple[str, ...]) -> None:
    assert asked(*command)["always_draft"] is False
    fields = asked(*command, "--always-draft")
    assert (fields["speculate"], fields["always_draft"]) == ("auto", True)
    fields = asked(*command, "--always-draft", "--speculate", "suffix")
    assert (fields["speculate"], fields["always_draft"]) == ("suffix", True)


def test_serve_takes_the_model_as_a_flag_too(outrider: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def refuse(model: str, **fields: Any) -> None:
        opened.append(model)
        raise OpenedError(fields)

    monkeypatch.setattr(options, "open_model", refuse)
    for arguments in (("tiny",), ("--model", "tiny"), ("-m", "tiny"), ("tiny", "--model", "tiny"), ()):
        with pytest.raises(OpenedError):
            outrider("serve", *arguments, "--port", "0")
    assert opened == ["tiny"] * 4 + [EngineConfig.model]
    refused = outrider("serve", "tiny", "--model", "other")
    assert refused.exit_code == 2 and "pass one of them" in refused.stderr


def documented_flags() -> list[str]:
    """Return vLLM's flags of the table in docs/from-vllm.md."""
    table = (Path(__file__).parents[2] / "docs" / "from-vllm.md").read_text().split("## speculative_config")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `--")]
    return sorted({flag for row in rows for flag in re.findall(r"--[a-z-]+", row)})


@pytest.mark.parametrize("flag", documented_flags())
def test_vllms_flags_work_or_get_the_answer_of_the_docs(outrider: Any, flag: str) -> None:
    known = flag in outrider("serve", "--help").stdout
    assert known or flag in VLLM_FLAGS
    for command in (("generate", "hello"), ("serve",)) if flag in VLLM_FLAGS and not known else ():
        found = outrider(*command, f"{flag}=1")
        assert found.exit_code == 2
        assert VLLM_FLAGS[flag] in found.stderr and f"No such option: {flag}: " in found.stderr


def llama_cpp_flags() -> list[str]:
    """Return llama.cpp's flags of the first table of flags in docs/from-llama-cpp.md, without those of speculation."""
    page = (Path(__file__).parents[2] / "docs" / "from-llama-cpp.md").read_text()
    table = page.split("## Flags")[1].split("## Speculation")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `-")]
    return sorted({flag for row in rows for flag in re.findall(r"--[a-z-]+", row)})


@pytest.mark.parametrize("flag", llama_cpp_flags())
def test_llama_cpps_flags_work_or_get_the_answer_of_the_docs(outrider: Any, flag: str) -> None:
    known = [flag in re.findall(r"--[a-z-]+", outrider(name, "--help").stdout) for name in ("generate", "serve")]
    assert any(known) or flag in LLAMA_CPP_FLAGS
    if not known[0] and flag in LLAMA_CPP_FLAGS:
        found = outrider("generate", "hello", f"{flag}=1")
        assert found.exit_code == 2 and LLAMA_CPP_FLAGS[flag] in found.stderr


@pytest.mark.parametrize("command", OLLAMA_COMMANDS)
def test_ollamas_commands_get_an_answer(outrider: Any, command: str) -> None:
    found = outrider(command, "tiny")
    assert found.exit_code == 2 and OLLAMA_COMMANDS[command] in found.stderr


def test_short_flags_get_an_answer_and_h_is_help(outrider: Any) -> None:
    assert "use `--max-context N`" in outrider("serve", "-c", "2048").stderr
    assert "`--backend cuda`" in outrider("serve", "-ngl", "99").stderr
    assert outrider("-h").exit_code == outrider("bench", "speed", "-h").exit_code == 0


def test_help_lists_methods_and_whole_summaries(outrider: Any) -> None:
    bench = (("bench", name) for name in ("acceptance", "speculation", "speed"))
    for command in ((), ("generate",), ("chat",), ("serve",), ("trace",), ("verify",), *bench):
        listed = " ".join(outrider(*command, "--help").stdout.split())
        assert all(name in listed for name in available())
    assert available() == options.METHODS
    assert all(name in outrider("train", "--help").stdout for name in TRAINABLE)
    for command in ((), ("bench",)):
        assert "..." not in outrider(*command, "--help").stdout.split("Commands:")[1]


def test_a_group_unfolds_to_flags_with_the_commands_defaults() -> None:
    heard: list[tuple[str, SamplingFlags, bool]] = []

    @unfold
    def say(word: str, sampling: SamplingFlags = SamplingFlags(max_tokens=5, top_p=0.5), last: bool = False) -> None:  # noqa: B008
        heard.append((word, sampling, last))

    parameters = signature(say).parameters
    assert list(parameters) == ["word", *(field.name for field in fields(SamplingFlags)), "last"]
    assert (parameters["max_tokens"].default, parameters["top_p"].default, parameters["top_k"].default) == (5, 0.5, 0)
    given = {name: one.default for name, one in parameters.items() if name != "word"}
    say(word="hi", **{**given, "top_k": 3})
    assert heard == [("hi", SamplingFlags(max_tokens=5, top_k=3, top_p=0.5), False)]


@pytest.mark.parametrize(("flags", "drafter"), [((), "ngram"), (("x:y=1", None), "x:y=1"), ((None, "{}"), "none")])
def test_the_default_method_applies_when_no_flag_is_set(flags: tuple[str | None, ...], drafter: str) -> None:
    assert DraftFlags(*flags).fields(default="ngram")["speculate"] == drafter
