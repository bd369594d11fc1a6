"""Errors of the command line: one sentence that names the value, exit code 1, no traceback, nothing on stdout."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from outrider.cli import console
from outrider.cli.console import CommandGroup
from outrider.errors import UserError

MISTAKES = {
    "unknown method": (("--speculate", "ngrem"), "no method called `ngrem` (did you mean `ngram`?): expected one of"),
    "unknown option": (("--speculate", "ngram:widht=3"), "no option `widht` (did you mean `width`?)"),
    "wrong option": (("--speculate", "ngram:width=wide"), "`width` is `wide`: expected a whole number"),
    "twice the same": (("--speculate", "ngram+ngram"), "`ngram+ngram` must name different methods"),
    "a tree of none": (("--speculate", "prediction:branches=2"), "`prediction` drafts chains, no trees"),
    "unknown key": (("--speculative-config", '{"method": "ngram", "n": 3}'), "has no key `n`"),
    "refused key": (
        ("--speculative-config", '{"method": "ngram", "tensor_parallel_size": 2}'),
        "`tensor_parallel_size`",
    ),
    "no JSON": (("--speculative-config", "{method"), "`--speculative-config` is not JSON"),
    "no object": (("--speculative-config", "[1]"), "`--speculative-config` must be an object"),
    "two ways": (("--speculate", "ngram", "--speculative-config", '{"method": "ngram"}'), "pass one of them"),
    "temperature": (("--temperature", "-1"), "`temperature` is -1.0"),
    "top_p": (("--top-p", "1.5"), "`top_p` is 1.5"),
    "max_tokens": (("--max-tokens", "0"), "`max_tokens` is 0"),
    "seed": (("--seed", "-3"), "`seed` is -3"),
    "n": (("--n", "0"), "`n` is 0"),
    "backend": (("--backend", "abacus"), "`backend` is `abacus`"),
    "pieces": (("--cudagraph-mode", "PIECEWISE"), "`cudagraph_mode` is `PIECEWISE`, but a step is captured whole"),
    "graphs": (
        ("--cudagraph-mode", "full"),
        "`cudagraph_mode` is `full`: expected one of NONE, FULL_DECODE_ONLY, FULL",
    ),
    "decode steps": (("--decode-steps", "0"), "`decode_steps` is 0"),
    "rounds": (("--rounds", "0"), "`decode_steps` is 0"),
    "quantize": (("--quantize", "int3"), "`quantize` is `int3`"),
    "activations": (("--activations", "low"), "`activations` is `low`"),
    "threads": (("--threads", "0"), "`threads` is 0"),
    "context": (("--max-context", "4"), "the context holds 4"),
    "trained context": (("--max-context", "4096"), "`max_context` is 4096"),
    "system with raw": (("--raw", "--system", "x"), "`--system` needs a chat template"),
    "no such file": (("--file", "nowhere.txt"), "cannot read `nowhere.txt`"),
}


def refused(result, fragment: str, code: int = 1) -> None:
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert fragment in result.stderr
    assert "Traceback" not in result.stderr
    if code == 1:
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1
        assert not result.stderr.endswith(".\n")


@pytest.mark.parametrize("name", MISTAKES)
def test_an_error_is_one_sentence_that_names_the_value(outrider, model, name: str) -> None:
    arguments, fragment = MISTAKES[name]
    refused(outrider("generate", "a prompt", "-m", model, "--json", *arguments), fragment)


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (("--nonsense",), "--nonsense"),
        (("--max-tokens", "many"), "'--max-tokens'"),
        (("--logprobs", "2"), "`--logprobs` needs `--json`"),
    ],
)
def test_an_invalid_command_line_exits_with_2(outrider, model, arguments, fragment: str) -> None:
    refused(outrider("generate", "a prompt", "-m", model, *arguments), fragment, code=2)


def test_a_missing_prompt_is_an_error(outrider, model) -> None:
    refused(outrider("generate", "-m", model), "pass a prompt", code=2)


@pytest.mark.parametrize("command", [("generate", "hello"), ("chat",), ("bench", "speed")])
def test_an_unknown_model_is_an_error(outrider, command) -> None:
    refused(outrider(*command, "-m", "no-such-model"), "no-such-model")


@pytest.mark.parametrize("name", ["quantize", "activations", "threads"])
def test_a_race_refuses_mistakes_before_it_installs_engines(outrider, model, name: str) -> None:
    arguments, fragment = MISTAKES[name]
    refused(outrider("bench", "peers", "a prompt", "-m", model, "--json", *arguments), fragment)


def test_cuda_without_a_gpu_is_an_error(outrider, model, monkeypatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", "12.8")
    asked = ("generate", "hello", "-m", model, "--max-tokens", 4, "--json")
    refused(outrider(*asked, "--backend", "cuda"), "torch sees no NVIDIA GPU (see `nvidia-smi`")
    refused(outrider(*asked, "--backend", "cuda"), "use `backend=cpu`")
    found = [outrider(*asked, *flags) for flags in ((), ("--backend", "auto"), ("--backend", "cpu"))]
    assert [one.exit_code for one in found] == [0, 0, 0]


def test_pulling_an_unknown_name_is_an_error(outrider) -> None:
    refused(outrider("pull", "gpt-9"), "gpt-9")


@pytest.mark.parametrize(
    ("line", "fragment"),
    [
        ('{"prompt": ', "line 2 starts like a JSON object but is not one"),
        ('{"prompt": "a", "prediction": "\\ud800"}', "line 2 has a `prediction` with a lone surrogate"),
        ('{"text": "hello"}', "line 2 needs either `prompt`"),
        ('{"prompt": 7}', "line 2 needs either `prompt`"),
        ('{"prompt": "a", "messages": []}', "line 2 needs either `prompt`"),
        ('{"messages": "hello"}', "line 2 needs either `prompt`"),
        ('{"prompt": "a", "prediction": 7}', "line 2 has a `prediction` that is not text"),
    ],
)
def test_a_malformed_line_is_named(outrider, model, tmp_path, line: str, fragment: str) -> None:
    file = tmp_path / "prompts"
    file.write_text(f"fine\n{line}\n")
    refused(outrider("generate", "-m", model, "--file", file), fragment)


def test_a_line_that_is_no_text_is_named(outrider, model, tmp_path) -> None:
    file = tmp_path / "prompts"
    file.write_bytes(b"fine\r\nfine\ngr\xfc\xdfe\n")
    refused(outrider("generate", "-m", model, "--file", file), f"cannot read `{file}`: line 3 is not UTF-8 text")


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "user"}],
        [{"content": "hi"}],
        ["hi"],
        [{"role": 3, "content": "hi"}],
        [{"role": "user", "content": 5}],
    ],
)
def test_malformed_messages_are_an_error(outrider, model, tmp_path, messages) -> None:
    file = tmp_path / "prompts"
    file.write_text(json.dumps({"messages": messages}))
    result = outrider("generate", "-m", model, "--file", file)
    refused(result, "message")


def test_messages_without_a_chat_template_are_an_error(outrider, model, plain_model, tmp_path) -> None:
    file = tmp_path / "prompts"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}))
    refused(outrider("generate", "-m", model, "--raw", "--file", file), "`messages` need the chat template")
    refused(outrider("generate", "-m", plain_model, "--file", file), "chat template")
    refused(outrider("chat", "-m", plain_model), "has no chat template")


def test_a_file_without_prompts_is_an_error(outrider, model, tmp_path) -> None:
    for content, fragment in ((b"\n \n", "contains no prompt"), (b"\xff\xfe\x00", "not UTF-8")):
        (tmp_path / "prompts").write_bytes(content)
        refused(outrider("generate", "-m", model, "--file", tmp_path / "prompts"), fragment)
    refused(outrider("generate", "-m", model, "--file", tmp_path), "cannot read")


def test_a_damaged_model_is_an_error(outrider, tmp_path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but no more")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("{")
    for name in ("broken.gguf", "folder"):
        refused(outrider("generate", "hello", "-m", tmp_path / name), name)


def test_batch_sizes_must_be_numbers(outrider, model) -> None:
    for given in ("a", "0", "1,,2", ""):
        refused(outrider("bench", "speed", "-m", model, "--batch", given), "`--batch` is")


def test_the_process_exits_with_code_1(model) -> None:
    """The same in a real process, without the test runner."""
    command = [sys.executable, "-m", "outrider", "generate", "hi", "-m", str(model), "--top-p", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: `top_p` is 2.0: it must lie in (0, 1]\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
@pytest.mark.parametrize("command", [("generate", "hi", "--max-tokens", "2"), ("show",)])
def test_output_that_the_disk_cannot_hold_is_one_sentence(model, command: tuple[str, ...]) -> None:
    given = ["-m", str(model)] if command[0] == "generate" else [str(model)]
    with Path("/dev/full").open("w") as full:
        line = [sys.executable, "-m", "outrider", *command, *given]
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "error: cannot write the output: No space left on device"
    assert "Traceback" not in done.stderr


def test_characters_that_the_output_cannot_encode_are_replaced(model) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}

    def printed(*command: str) -> str:
        line = [sys.executable, "-m", "outrider", *command, "-m", str(model), "--max-tokens", "2"]
        return subprocess.run(line, capture_output=True, check=True, env=environment).stdout.decode("ascii")

    assert "d?j?" in printed("demo", "d\u00e9j\u00e0 vu", "--rounds", "1")
    assert json.loads(printed("generate", "d\u00e9j\u00e0 vu", "--json"))["prompt"] == "d\u00e9j\u00e0 vu"


def test_interrupts_and_user_errors_print_no_traceback() -> None:
    for raised, code, printed in ((KeyboardInterrupt(), 130, ""), (UserError("no"), 1, "error: no\n")):
        app = typer.Typer(cls=CommandGroup)
        app.command("fail")(raiser(raised))
        app.command("other")(lambda: None)
        result = CliRunner().invoke(app, ["fail"])
        assert (result.exit_code, result.stderr) == (code, printed)


def raiser(raised: BaseException):
    def fail() -> None:
        raise raised

    return fail


def test_a_full_disk_is_reported_with_the_file_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(path: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")  # in mid-file the system names none

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UserError, match=r"cannot write `.*page.html`: no space left on device"):
        console.write(tmp_path / "page.html", "text", "written")
