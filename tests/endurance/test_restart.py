"""kill -9 in the middle of streams, of a training run, of a pull; then the same again: what was acknowledged is whole.

Files are there complete or not at all, a stream that was cut does not look finished, and whatever was cut goes on to
the same bits. With OUTRIDER_ENDURANCE=1 there are many more deaths.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from endurance import lives
from endurance.lives import ENDS, PARTS, TIMEOUT, Fate, life, news
from outrider import LLM, SamplingParams, UserError
from outrider.train.data.store import Store
from outrider.train.io import checkpoints
from outrider.train.io.disk import write_folder

LONG = os.environ.get("OUTRIDER_ENDURANCE") == "1"
PARAMS = SamplingParams(max_tokens=80, temperature=0.8, ignore_eos=True)
STEPS = 10
METHODS = ["medusa:heads=2", "draft_model:width=64,layers=1"]
HEAD = {"config.json", "model.safetensors", "card.json"}


# ---- a server ----


@dataclass
class Heard:
    """What a client has of its stream."""

    prompt: list[int]
    seed: int
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    reason: str | None = None
    done: bool = False

    def body(self, **changes: Any) -> dict[str, Any]:
        params = {name: getattr(PARAMS, name) for name in ("max_tokens", "temperature", "ignore_eos")}
        return {"prompt": self.prompt, "seed": self.seed, "return_token_ids": True, **params, **changes}

    def listen(self, url: str) -> None:
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=self.body(stream=True), timeout=TIMEOUT) as answer:
                for line in answer.iter_lines():
                    self.done |= line == "data: [DONE]"
                    if line.startswith("data: {"):
                        (choice,) = json.loads(line[6:])["choices"]
                        self.text += choice["text"]
                        self.tokens += choice.get("token_ids") or []
                        self.reason = choice["finish_reason"] or self.reason
        except httpx.TransportError:
            return


@contextmanager
def served(model: Path, port: int, most: float = math.inf) -> Iterator[Any]:
    with life(lives.serve, str(model), port, most) as (process, _):
        end = time.monotonic() + TIMEOUT
        while process.is_alive() and time.monotonic() < end:
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.02)
        yield process


def cut(model: Path, port: int, heard: list[Heard], enough: int) -> None:
    """Read all streams at once, and kill the server when `enough` tokens have arrived."""
    # Some tokens more than enough: the last ones of a text may wait for the rest of a character.
    with served(model, port, enough + 40) as process:
        address = f"http://127.0.0.1:{port}"
        threads = [threading.Thread(target=each.listen, args=(address,), daemon=True) for each in heard]
        for thread in threads:
            thread.start()
        end = time.monotonic() + TIMEOUT
        while sum(len(each.tokens) for each in heard) < enough:
            assert process.is_alive() and time.monotonic() < end
            time.sleep(0.001)
        process.kill()
        for thread in threads:
            thread.join(TIMEOUT)
            assert not thread.is_alive(), "a client waits for a dead server"


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        found: int = free.getsockname()[1]
    return found


@pytest.mark.timeout(1800)
def test_streams_of_a_killed_server_do_not_look_finished_and_go_on(tiny_folder: Callable[..., Path], port: int) -> None:
    model, dice, broken = tiny_folder(), random.Random(9), 0
    llm = LLM(str(model), backend="cpu")
    for number in range(20 if LONG else 1):
        heard = [Heard([dice.randrange(3, 101) for _ in range(9)], 10 * number + each) for each in range(8)]
        cut(model, port, heard, dice.randrange(1, 250))
        for each in heard:
            (output,) = llm.generate([each.prompt], replace(PARAMS, seed=each.seed))
            expected = output.completions[0]
            assert each.tokens == expected.token_ids[: len(each.tokens)] and expected.text.startswith(each.text)
            assert each.reason is None or (each.reason, each.text) == ("length", expected.text), "cut, yet finished"
            assert each.reason is not None or not each.done, "cut, yet done"
            broken += 0 < len(each.tokens) < PARAMS.max_tokens
    assert broken, "no stream was cut"
    with served(model, port), httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT) as client:
        for each in heard:
            answer = client.post("/v1/completions", json=each.body()).json()["choices"][0]["token_ids"]
            assert answer[: len(each.tokens)] == each.tokens and len(answer) == PARAMS.max_tokens
            if left := PARAMS.max_tokens - len(each.tokens):
                asked = each.body(prompt=each.prompt + each.tokens, max_tokens=left)
                more = client.post("/v1/completions", json=asked).json()["choices"][0]["token_ids"]
                assert each.tokens + more == answer, "what was heard cannot be gone on from"


# ---- a training run ----


@pytest.fixture(scope="module")
def job(tiny_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    prompts = tmp_path_factory.mktemp("killed") / "prompts.txt"
    prompts.write_text("".join(f"number {number}, please\n" for number in range(30)))
    flags = {"tokens": 600, "max_new": 24, "max_requests": 3, "rows": 2, "length": 80, "steps": STEPS, "backend": "cpu"}
    return {"model": str(tiny_folder()), "prompts": (prompts,), **flags}


def check_run(out: Path) -> None:
    """Whatever is there can be read; a head is there whole or not at all."""
    for name in ("settings.json", "card.json", "answers/header.json", "answers/card.json"):
        if (out / name).exists():
            json.loads((out / name).read_text())
    if (out / "state.pt").exists():
        assert checkpoints.load(out, torch.device("cpu"))["step"] > 0
    if (out / "answers" / "header.json").exists():
        store = Store(out / "answers")
        assert all(len(store.tokens(index)) for index in range(len(store)))
    for folder in out.glob("[!.]*/config.json"):
        assert {file.name for file in folder.parent.iterdir()} >= HEAD
        assert load_file(folder.parent / "model.safetensors") and json.loads((folder.parent / "card.json").read_text())


def lived(out: Path, job: dict[str, Any], fate: Fate) -> int | None:
    """How often a run changed the disk until it was finished; None: it died."""
    with life(lives.train, {**job, "out": out}, METHODS, fate) as (process, hears):
        messages = list(news(hears))
        process.join(TIMEOUT)
    check_run(out)
    assert messages or process.exitcode in ENDS, process.exitcode
    return messages[-1] if messages else None


def check_same(out: Path, whole: Path) -> None:
    found, expected = (
        {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}
        for folder in (out, whole)
    )
    assert found.keys() == expected.keys(), "something was left behind, or is missing"
    same = [name for name in expected if name.endswith((".safetensors", ".bin"))]
    assert len(same) >= 5 and [name for name in same if found[name] != expected[name]] == []
    steps = [json.loads(line)["step"] for line in found["log.jsonl"].splitlines() if b'"train"' in line]
    assert steps == list(range(1, STEPS + 1))


@pytest.mark.timeout(3600)
def test_a_killed_training_run_goes_on_to_the_same_bits(job: dict[str, Any], tmp_path: Path) -> None:
    dice, deaths, number = random.Random(4), 0, 0
    whole = tmp_path / "whole"
    changes = lived(whole, job, Fate())
    assert changes is not None and changes > 50
    while deaths < (150 if LONG else 3):
        out, number = tmp_path / f"killed-{number}", number + 1
        for _ in range(4):
            fate = Fate(dice.randrange(1, changes), torn=dice.random() < 0.5)
            if lived(out, job, fate) is not None:
                break
            deaths += 1
        assert lived(out, job, Fate()) is not None
        check_same(out, whole)


def test_an_export_takes_away_what_a_killed_one_left(tmp_path: Path) -> None:
    """Numbers of processes come again, most of all in containers: what carries ours is of one before us."""
    head, others = tmp_path / "head", tmp_path / f".head.{os.getppid()}.new"
    left = [tmp_path / f".head.{os.getpid()}.old", tmp_path / f".head.{2**22 + 1}.new"]
    for folder in (head, others, *left):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    write_folder(head, {"config.json": b"[]"})
    assert (head / "config.json").read_text() == "[]"
    assert sorted(tmp_path.iterdir()) == [others, head]


def test_what_a_killed_export_moved_aside_comes_back_if_the_next_one_fails(tmp_path: Path) -> None:
    aside = tmp_path / f".head.{2**22 + 1}.old"
    aside.mkdir()
    (aside / "config.json").write_text("{}")

    def full() -> Iterator[bytes]:
        raise OSError(28, "No space left on device")
        yield b""

    with pytest.raises(UserError, match="its old content is intact"):
        write_folder(tmp_path / "head", {"config.json": full()})
    assert [file.read_text() for file in tmp_path.glob("head/*")] == ["{}"]
    assert list(tmp_path.iterdir()) == [tmp_path / "head"]


# ---- a pull ----


def pulled(cache: Path, fate: Fate, after: float | None = None) -> int | None:
    """Return how often a pull changed the disk; None if it died, at a change or after `after` seconds."""
    with life(lives.pull, str(cache), fate) as (process, hears):
        words = news(hears)
        assert next(words) == "begun"
        if after is not None:
            time.sleep(after)
            process.kill()
        messages = list(words)
        process.join(TIMEOUT)
    check_pulled(cache / "models" / "tiny")
    assert messages or process.exitcode in ENDS, process.exitcode
    return messages[-1] if messages else None


def check_finished(cache: Path) -> None:
    assert pulled(cache, Fate()) is not None
    left = sorted(file.name for file in (cache / "models" / "tiny").iterdir())
    assert left == ["lock", "tiny.gguf", "tiny.gguf.stamp"]


@pytest.mark.timeout(1800)
def test_a_pull_killed_at_any_change_leaves_a_whole_file_or_none_and_goes_on(tmp_path: Path) -> None:
    changes = pulled(tmp_path / "whole", Fate())
    assert changes is not None and changes > 10
    for change in range(1, changes + 1):
        for torn in (False, True) if LONG else (change % 2 == 0,):
            cache = tmp_path / f"{change}-{torn}"
            pulled(cache, Fate(change, torn))
            check_finished(cache)


@pytest.mark.timeout(1800)
def test_a_pull_killed_at_any_time_leaves_a_whole_file_or_none_and_goes_on(tmp_path: Path) -> None:
    dice, died = random.Random(6), 0
    for number in range(60 if LONG else 3):
        for _ in range(4):
            died += pulled(tmp_path / str(number), Fate(), after=dice.random() * 0.12) is None
        check_finished(tmp_path / str(number))
    assert died


def check_pulled(folder: Path) -> None:
    file, stamp = folder / "tiny.gguf", folder / "tiny.gguf.stamp"
    if file.exists():
        assert hashlib.sha256(file.read_bytes()).digest() == hashlib.sha256(b"".join(PARTS)).digest()
    if stamp.exists():
        assert file.exists()
    for wheel in folder.glob("wheels/*.whl"):
        assert wheel.stat().st_size > len(PARTS[0])
