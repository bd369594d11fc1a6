"""`outrider train`: every method on a tiny model, what is written, what is refused, and a run that is cut."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

from outrider import LLM, SamplingParams
from outrider.cli import app
from outrider.cli.train import Screen
from outrider.models import read_config
from outrider.train.data import answers as answering
from outrider.train.data.store import Store
from outrider.train.io import checkpoints
from outrider.train.methods import TRAINABLE
from outrider.train.progress import HeadMetrics, ProgressEvent, TextProgress
from outrider.weights import open_checkpoint

METHODS = (
    "eagle3:draft_vocabulary=60,length=2",
    "eagle:length=2",
    "peagle:draft_vocabulary=60,length=2,layers=1",
    "dflash:block=3,layers=1",
    "dspark:block=3,layers=1,markov_rank=8",
    "medusa:heads=3",
    "mtp:length=2",
    "draft_model:width=64,layers=1",
)
SPECULATORS = {"eagle3", "eagle", "peagle", "dflash", "dspark", "medusa", "mtp"}
FLAGS = ("--tokens", 500, "--max-new", 24, "--rows", 2, "--length", 80, "--steps", 5, "--backend", "cpu")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("train") / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"number {number}, please"}) + "\n" for number in range(30)))
    return file


def type_in(*arguments: object) -> Any:
    result = CliRunner().invoke(app, ["train", *(str(argument) for argument in arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(scope="module")
def trained(model: Path, prompts: Path) -> Path:
    out = prompts.parent / "whole"
    result = type_in(*METHODS, "-m", model, "--prompts", prompts, "--out", out, *FLAGS)
    assert result.exit_code == 0, result.stderr
    assert f"`{out}` holds {', '.join(TRAINABLE)} after 5 steps\n" == result.stdout
    assert "step 3 of 5" not in result.stdout  # progress goes to stderr
    return out


@pytest.fixture(scope="module")
def plain(model: Path) -> list[str]:
    return texts(LLM(str(model), backend="cpu"))


def texts(llm: LLM) -> list[str]:
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    return [output.completions[0].text for output in llm.generate(["number 3", "a letter, please"], params)]


def test_every_method_can_be_trained() -> None:
    assert [method.partition(":")[0] for method in METHODS] == list(TRAINABLE)


@pytest.mark.parametrize("method", TRAINABLE)
def test_trained_heads_draft_without_changing_the_text(
    trained: Path, model: Path, plain: list[str], method: str
) -> None:
    llm = LLM(str(model), backend="cpu", speculate=f"{method}:model={trained / method},adaptive=no")
    assert texts(llm) == plain
    assert llm.method_stats[method].drafted > 0


@pytest.mark.parametrize("method", TRAINABLE)
def test_the_card_records_the_run(trained: Path, prompts: Path, model: Path, method: str) -> None:
    folders = [trained / method] + [trained / f"{method}-speculators"] * (method in SPECULATORS)
    for folder in folders:
        text = (folder / "card.json").read_text()
        assert str(prompts.parent) not in text and str(model.parent) not in text
        card = json.loads(text)
        assert card["head"]["method"] == method and card["head"]["parameters"] > 100
        assert (card["steps"], card["seed"], card["target"]["model"]) == (5, 0, model.name)
        assert card["target"]["bytes"] == (model / "model.safetensors").stat().st_size
        assert [one["file"] for one in card["data"]["prompts"]] == [prompts.name]
        assert card["data"]["answered"] >= 500 and card["tokens_seen"] > 0
        assert [point["step"] for point in card["head"]["losses"]] == [3, 5]
        assert all(point["loss"] > 0 for point in card["head"]["losses"])
        assert len(card["trained_beside"]) == len(METHODS) - 1
    assert not (trained / "draft_model-speculators").exists()


def test_a_resumed_run_ends_with_the_same_bits(trained: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = trained.parent / "cut"
    command = (*METHODS, "-m", model, "--answers", trained, "--out", out, *FLAGS)
    with monkeypatch.context() as patch:
        patch.setattr(TextProgress, "event", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        stopped = type_in(*command)
    assert stopped.exit_code == 130 and stopped.stdout == ""
    assert "stopped after step 3; it is saved, and the same command continues from there\n" in stopped.stderr
    assert not (out / "eagle3").exists()
    gone_on = type_in(*command)
    assert gone_on.exit_code == 0 and "from step 3 on" in gone_on.stderr
    for method in TRAINABLE:
        name = f"{method}/model.safetensors"
        assert (out / name).read_bytes() == (trained / name).read_bytes(), method
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 5]


def test_a_finished_run_can_be_prolonged(trained: Path, model: Path) -> None:
    out = trained.parent / "finished"
    command = ("medusa", "-m", model, "--answers", trained / "answers", "--out", out, *FLAGS[4:8])
    assert type_in(*command, "--steps", 2).exit_code == 0
    before = (out / "medusa" / "model.safetensors").read_bytes()
    again = type_in(*command, "--steps", 2)
    assert again.exit_code == 0 and again.stdout.startswith(f"`{out}` is finished: pass more `--steps`")
    more = type_in(*command, "--steps", 4, "--json")
    printed = [json.loads(line) for line in more.stdout.splitlines()]
    assert printed[-1]["finished"] and printed[-1]["card"]["steps"] == 4 == printed[-2]["step"]
    assert printed[-2]["figures"]["medusa"]["loss"] > 0
    assert (out / "medusa" / "model.safetensors").read_bytes() != before
    other = type_in(*command, "--steps", 4, "--seed", 1)
    refused(other, "holds a run with other settings (`seed` was `0` and is `1`)")
    refused(type_in("mtp", *command[1:]), "`methods.medusa` is missing; `methods.mtp` is new")


def test_a_full_disk_stops_nothing_and_loses_nothing(
    trained: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = trained.parent / "full"
    command = ("medusa", "-m", model, "--answers", trained, "--out", out, *FLAGS[4:8], "--steps", 4)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "save", full)
        patch.setattr(TextProgress, "event", lambda *_: os.kill(os.getpid(), signal.SIGINT))
        refused(
            type_in(*command),
            f"cannot save step 3 in `{out}` (No space left on device): no state was saved before; make room and run",
            lines=4,
        )
    assert type_in(*command).exit_code == 0


def test_answers_only_generates_answers_and_stops(model: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = prompts.parent / "answers-alone"
    command = ("--answers-only", "-m", model, "--prompts", prompts, "--out", out, *FLAGS[:8])
    with monkeypatch.context() as patch:
        patch.setattr(TextProgress, "answers", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        stopped = type_in(*command)
    assert stopped.exit_code == 130 and "its answers are kept" in stopped.stderr
    found = type_in(*command)
    assert found.exit_code == 0 and found.stdout.endswith(f"tokens are in `{out / 'answers'}`\n")
    assert {file.name for file in out.iterdir()} == {"answers"}
    monkeypatch.setattr("outrider.train.data.answers.LLM", None)  # nothing is generated again
    assert type_in(*command).stdout == found.stdout


def refused(result: Any, fragment: str, lines: int = 1) -> None:
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert fragment in result.stderr.splitlines()[-1]
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert result.stderr.count("\n") == lines
    assert not result.stderr.endswith(".\n")


MISTAKES: dict[str, tuple[tuple[object, ...], str]] = {
    "method": (("eagle4",), "the method `eagle4` cannot be trained (did you mean `eagle`?)"),
    "option": (("eagle3:lenght=3",), "`eagle3` has no training option `lenght` (did you mean `length`?)"),
    "value": (("eagle3:length=long",), "`length` is `long`: expected a whole number"),
    "range": (("eagle3:length=0",), "`length` is 0"),
    "nothing set": (("eagle3:length",), "`length` of `eagle3` sets nothing"),
    "twice": (("eagle3:length=2,length=3",), "`length` is given twice for `eagle3`"),
    "the same name": (("mtp", "mtp:length=2"), "two heads have the name `mtp`"),
    "a name that is a path": (("mtp:name=../mtp",), "`name` is `../mtp`"),
    "no method": ((), "no method is named"),
    "rate": (("mtp", "--learning-rate", 0), "`learning_rate` is 0.0"),
    "greedy": (("mtp", "--greedy", 1.5), "`greedy` is 1.5: it must be between 0 and 1"),
    "begin": (("mtp", "--init-from", "nowhere"), "`nowhere` does not exist"),
    "steps": (("mtp", "--steps", 0), "`steps` is 0"),
    "seconds": (("mtp", "--seconds", -1), "`seconds` is -1.0"),
    "backend": (("mtp", "--backend", "abacus"), "`backend` is `abacus`"),
    "prompts": (("mtp", "--prompts", "nowhere.jsonl"), "cannot read `nowhere.jsonl`"),
    "answers": (("mtp", "--answers", "nowhere"), "`nowhere` holds no answers"),
    "model": (("mtp", "-m", "no-such-model"), "no-such-model"),
    "both": (("mtp", "--answers", "a", "--answers-only"), "pass one of them"),
    "answers and prompts": (("mtp", "--answers", "a", "--prompts", "p.txt"), "for which no `prompts` are read"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_invalid_commands_are_refused(
    outrider: Callable[..., Any], model: Path, prompts: Path, tmp_path: Path, name: str
) -> None:
    given, fragment = MISTAKES[name]
    asked = () if "--answers" in given else ("--prompts", prompts)
    common = ("-m", model, *asked, "--out", tmp_path / "out", *FLAGS)
    refused(outrider("train", *common, *given), fragment)
    assert not (tmp_path / "out" / "answers").exists()


def test_missing_prompts_broken_prompts_and_unusable_folders_are_refused(model: Path, tmp_path: Path) -> None:
    refused(type_in("mtp", "-m", model, "--out", tmp_path / "out"), "there are no prompts: pass files")
    (tmp_path / "file").write_text("")
    refused(
        type_in("mtp", "-m", model, "--prompts", "x", "--out", tmp_path / "file"), f"write to `{tmp_path / 'file'}`"
    )
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a"}\n{"prompt"\n')
    broken = ("mtp", "-m", model, "--prompts", tmp_path / "broken.jsonl", "--out", tmp_path / "out")
    refused(type_in(*broken), "line 2 is not JSON")


def test_a_terminal_shows_the_newest_metrics() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with Screen(console) as screen:
        screen.stage("train eagle3")
        screen.answers(3, 40, 100)
        for kind, loss in (("train", 3.0), ("train", 2.5), ("held out", 2.75)):
            figures = HeadMetrics(loss, (0.5, 0.25), (0.4, 0.3), 1.625, 1.0, 0)
            screen.event(ProgressEvent(kind, 7, 20, 1.0, 900, 1234.0, {"eagle3": 1e-3}, {"eagle3": figures}))
        screen.note("a remark")
    shown = console.file.getvalue()
    for words in ("step 7 of 20", "50% 25%", "1.62", "held out", "2.750", "1234", "1.0e-03", "note: a remark"):
        assert words in shown


def test_answers_of_another_model_are_refused(trained: Path, tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    result = type_in("mtp", "-m", tiny_folder("qwen3"), "--answers", trained, "--out", tmp_path)
    refused(result, "pass the model that wrote them")


def test_init_from_another_run(trained: Path, model: Path, tmp_path: Path) -> None:
    state, begun = trained / "state.pt", ("-m", model, "--answers", trained, *FLAGS, "--begin", trained / "state.pt")
    slow = ("eagle3:draft_vocabulary=60,length=2,learning_rate=1e-12", "medusa:heads=3,name=fresh")
    result = type_in(*slow, *begun, "--out", tmp_path / "on")
    assert result.exit_code == 0 and "`fresh` is not in" in result.stderr
    device = torch.device("cpu")
    before, after = checkpoints.read(state, device, ""), checkpoints.read(tmp_path / "on" / "state.pt", device, "")
    assert after["step"] == 5
    for name, value in before["students"]["eagle3"].items():
        assert torch.allclose(after["students"]["eagle3"][name].float(), value.float(), atol=1e-6), name
    for given, said in {
        ("eagle3:draft_vocabulary=60,length=2,mlp_width=48",): "pass the options of that head",
        ("medusa:heads=3,name=fresh",): "holds none of fresh",
        ("medusa:heads=3", "--begin", tmp_path / "nothing.pt"): "does not exist",
        ("medusa:heads=3", "--begin", "shipped"): "`shipped` holds none of medusa",
    }.items():
        refused = type_in(*begun, *given, "--out", tmp_path / said)
        assert refused.exit_code == 1 and said in refused.stderr, refused.stderr


def test_init_from_an_exported_folder(trained: Path, model: Path, tmp_path: Path) -> None:
    """Whose steps are too small to be seen: what was read is what is written again."""
    again = ("-m", model, "--answers", trained, *FLAGS, "--learning-rate", 1e-12, "--init-from", trained)
    assert type_in(*METHODS, *again, "--out", tmp_path).exit_code == 0
    assert json.loads((tmp_path / "card.json").read_text())["began_with"] == trained.name
    for method in TRAINABLE:
        before, after = (load_file(folder / method / "model.safetensors") for folder in (trained, tmp_path))
        assert before.keys() == after.keys()
        for name, value in before.items():
            bits = value.dtype in (torch.uint8, torch.int64)  # blocks
            assert torch.equal(after[name], value) if bits else torch.allclose(after[name], value, rtol=0.01), name


def test_greedy_sets_the_fraction_of_greedy_answers_and_the_cache_fits_them(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = []

    def opened(*given: Any, **named: Any) -> LLM:
        llm = LLM(*given, **named)
        plans.append(llm.resolved)
        return llm

    monkeypatch.setattr(answering, "LLM", opened)
    command = ("--answers-only", "-m", model, "--prompts", prompts, *FLAGS[:8], "--max-requests", 3)
    assert type_in(*command, "--greedy", 0.9, "--out", tmp_path / "nearly").exit_code == 0
    assert (plans[0].max_context, plans[0].pages * plans[0].page_size) == (80, 240)
    asked = json.loads((tmp_path / "nearly" / "answers" / "card.json").read_text())["asked"]["plan"]
    assert [round(share, 6) for _, _, share in asked["temperatures"]] == [0.9, 0.06, 0.04]
    assert type_in(*command, "--greedy", 1, "--out", tmp_path / "all").exit_code == 0
    kept = Store(tmp_path / "all" / "answers").documents()
    assert set(kept.temperatures.tolist()) == {0.0}


def test_a_document_may_be_longer_than_the_model_was_trained_for(model: Path) -> None:
    assert answering.context_of(str(model), 70) == 80  # whole pages
    trained = read_config(open_checkpoint(str(model)).config).context
    assert answering.context_of(str(model), trained + 100) == trained


def test_matrices_have_the_requested_storage_format(trained: Path, model: Path, tmp_path: Path) -> None:
    asked = ("eagle3:draft_vocabulary=60,length=2", "-m", model, "--answers", trained, *FLAGS)
    assert type_in(*asked, "--storage", "q5_1", "--out", tmp_path / "five").exit_code == 0
    kinds = {name.rpartition(".")[2] for name in load_file(tmp_path / "five" / "eagle3" / "model.safetensors")}
    assert "q5_1" in kinds and "q8_0" not in kinds
    assert json.loads((tmp_path / "five" / "eagle3" / "card.json").read_text())["flags"]["storage"] == "q5_1"
    refused(type_in(*asked, "--storage", "q3_k", "--out", tmp_path / "three"), "`storage` is `q3_k`")
