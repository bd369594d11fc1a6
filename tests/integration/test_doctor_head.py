"""`outrider doctor --head`: what was understood of a folder, whether it fits a model, and how to use it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

import tiny_heads
from outrider.speculation.checkpoints import METHODS
from tiny_heads import Plan

RECORDED = Path(__file__).parents[1] / "vectors" / "heads"
# name of a recorded head -> words that its description has
DESCRIPTIONS = {
    "eagle3-3.1": {
        "method": "eagle3 (EAGLE-3)",
        "layout": "speculators",
        "reads": "4 states, 32 wide, entering layers 0, 4, 2, 3: stated by the checkpoint",
        "layers": "1, each with 2 heads of 16, 2 for keys, MLP 24 wide",
        "biases": "attention, its output, MLP",
        "flags": "fc, fc_norm, norm_before_residual, norm_last, norm_output",
        "can draft": "every token",
        "made to draft": "3 tokens at a time",
        "ignored": "nothing",
    },
    "eagle3-window": {
        "windows": "5",
        "head norms": "on queries and keys",
        "ignored": "t2d",
    },
    "peagle-norm": {
        "method": "peagle (P-EAGLE)",
        "mask": "93",
        "embedding": "its own, 96 tokens",
        "can draft": "56 tokens, ids 0 to 94",
    },
    "dflash-window": {
        "method": "dflash (DFlash)",
        "windows": "5, all",
        "causal": "yes, no",
        "embedding": "the target's",
    },
    "dspark-vanilla": {
        "block": "4",
        "markov": "vanilla",
        "markov rank": "8",
        "flags": "anchored, from_anchor, confidence, confidence_markov",
    },
}


def described(result) -> dict[str, dict[str, str]]:
    assert result.exit_code == 0, result.stderr
    (line,) = result.stdout.splitlines()
    return json.loads(line)


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_the_description_names_layout_and_fields(outrider, name: str) -> None:
    found = described(outrider("doctor", "--head", RECORDED / name, "--json"))
    for part, words in DESCRIPTIONS[name].items():
        assert found["head"][part].startswith(words), part
    assert found["model"] is None and "--model MODEL" in found["use"]
    assert ("markov" in found["head"]) == (name == "dspark-vanilla")


def test_every_recorded_head_is_described(outrider) -> None:
    for folder in RECORDED.iterdir():
        text = outrider("doctor", "--head", folder)
        assert text.exit_code == 0, text.stderr
        kind = json.loads((folder / "config.json").read_text())["speculators_model_type"]
        assert f"--speculate {kind}:model={folder}\n" in text.stdout


@pytest.mark.parametrize("method", METHODS)
def test_the_command_line_it_gives_works(outrider, model, tmp_path: Path, method: str) -> None:
    folder = tmp_path / "a head"
    assert tiny_heads.make(method, folder)["model"] == str(folder)
    found = described(outrider("doctor", "--head", folder, "-m", model, "--json"))
    assert found["model"] == str(model)
    assert found["head"]["method"] == f"{method} ({METHODS[method]})"
    last = method in ("eagle", "mtp", "medusa")
    assert ("the target's last state" if last else "entering layers") in found["head"]["reads"]
    _, *arguments = shlex.split(found["use"])
    answer = outrider(*arguments, "--max-tokens", 4, "--json")
    assert answer.exit_code == 0, answer.stderr
    if method == "eagle3":
        assert f"It drafts for {model}" in outrider("doctor", "--head", folder, "-m", model).stdout


def test_a_head_without_stated_aux_layers_is_refused(outrider, model, tmp_path: Path) -> None:
    """SafeAILab's folders leave them to the model, and this one has too few layers to choose among."""
    tiny_heads.write(Plan(), tmp_path, "safeailab")
    found = described(outrider("doctor", "--head", tmp_path, "--json"))
    assert "the checkpoint does not say" in found["head"]["reads"]
    refused(outrider("doctor", "--head", tmp_path, "-m", model), "too few for the default aux layers")


def test_fields_that_contradict_the_tensors_are_listed_as_ignored(outrider, tmp_path: Path) -> None:
    tiny_heads.write(Plan(), tmp_path, "angelslim")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"draft_vocab_size": 7, "num_hidden_layers": 9}))
    ignored = described(outrider("doctor", "--head", tmp_path, "--json"))["head"]["ignored"]
    for words in ("t2d", "`tie_word_embeddings`", "`draft_vocab_size` 7", "`num_hidden_layers` 9"):
        assert words in ignored


def refused(result, fragment: str, code: int = 1) -> None:
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert fragment in result.stderr and "Traceback" not in result.stderr


def test_heads_that_cannot_run_are_refused(outrider, model, tmp_path: Path) -> None:
    refused(outrider("doctor", "--head", tmp_path), "it has no `config.json`")
    refused(outrider("doctor", "--head", model), "is a model of its own, no draft head")
    refused(outrider("doctor", "--head", RECORDED / "eagle3-plain", "-m", model), "reads states of width 32")


def test_a_head_that_lacks_a_tensor_does_not_fit(outrider, model, tmp_path: Path) -> None:
    """Found by building it, not by its sizes alone."""
    from safetensors.torch import load_file, save_file

    tiny_heads.write(Plan(), tmp_path, "speculators")
    file = tmp_path / "model.safetensors"
    save_file({name: each for name, each in load_file(file).items() if "down_proj" not in name}, file)
    refused(outrider("doctor", "--head", tmp_path, "-m", model), "down_proj")
