"""Damaged folders of draft heads, in every layout: what does not work is refused in one sentence, and at once."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tiny
import tiny_blocks
import tiny_heads
import tiny_medusa
import tiny_modules
from outrider.errors import UserError
from outrider.models import read_config
from outrider.speculation.checkpoints import describe, open_head

LAYOUTS = [
    *[("eagle3", layout) for layout in tiny_heads.LAYOUTS],
    *[("peagle", layout) for layout in tiny_modules.PEAGLE],
    *[("mtp", layout) for layout in tiny_modules.MTP],
    *[("medusa", layout) for layout in tiny_medusa.LAYOUTS],
    *[("dflash", layout) for layout in tiny_blocks.DFLASH],
    *[("dspark", layout) for layout in tiny_blocks.DSPARK],
]
KEYS = ("quantization_config", "layer_types", "use_swa", "swa_window_size", "rope_scaling", "markov_rank")
ABSURD: tuple[Any, ...] = (None, -1, 0, 2.5, True, "x", [], {}, [1, "a"], {"a": 1}, 10**12, float("inf"))
BENDS: dict[str, Callable[[Tensor], Tensor]] = {
    "scalar": lambda tensor: tensor.flatten()[0],
    "empty": lambda tensor: tensor[:0],
    "flat": lambda tensor: tensor.flatten(),
    "deep": lambda tensor: tensor[None, None],
    "short": lambda tensor: tensor[:1],
    "whole numbers": lambda tensor: tensor.to(torch.int32),
    "nowhere": lambda tensor: tensor * 10**9,
}
TARGET = read_config(tiny.checkpoint("llama").config)


class Folder:
    """A head as it was written, to be damaged again and again."""

    def __init__(self, method: str, layout: str, path: Path) -> None:
        variant: dict[str, Any] = {"mtp": {}, "medusa": {"heads": 3}}.get(method, {"own_head": False})
        tiny_heads.make(method, path, layout=layout, **variant)
        self.path = path
        self.file = next(file for file in path.iterdir() if file.suffix in (".safetensors", ".bin", ".pt"))
        self.config: dict[str, Any] = json.loads((path / "config.json").read_text())
        pickled = self.file.suffix != ".safetensors"
        self.tensors: dict[str, Tensor] = torch.load(self.file) if pickled else load_file(self.file)

    def write_config(self, config: dict[str, Any]) -> None:
        (self.path / "config.json").write_text(json.dumps(config))

    def write_tensors(self, tensors: dict[str, Tensor]) -> None:
        found = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
        torch.save(found, self.file) if self.file.suffix != ".safetensors" else save_file(found, self.file)

    def refusal(self) -> str:
        """What is said of it; empty: it is a head."""
        try:
            describe(open_head(str(self.path)))
            open_head(str(self.path), TARGET)
        except UserError as error:
            assert "\n" not in str(error) and not str(error).endswith(".")
            return str(error)
        return ""


@pytest.fixture(params=LAYOUTS, ids="-".join)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    return Folder(*request.param, tmp_path)


def key_paths(config: dict[str, Any]) -> list[list[str]]:
    """Paths to every key, nested ones included."""
    nested = [[key, *path] for key, value in config.items() if isinstance(value, dict) for path in key_paths(value)]
    return [[key] for key in config] + nested


def test_absurd_configurations_never_crash(folder: Folder) -> None:
    source, refused = random.Random(1), 0
    for path in [*key_paths(folder.config), *([key] for key in KEYS)]:
        for absurd in source.sample(ABSURD, 3):
            changed = json.loads(json.dumps(folder.config)) | ({"use_swa": True} if source.random() < 0.5 else {})
            inner = changed
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = absurd
            folder.write_config(changed)
            refused += bool(folder.refusal())
    assert refused or "num_attention_heads" not in str(folder.config)  # to Medusa heads, no key matters much


def test_bent_tensors_never_crash(folder: Folder) -> None:
    source = random.Random(2)
    for bend, change in BENDS.items():
        for name in source.sample(sorted(folder.tensors), 3):
            folder.write_tensors(folder.tensors | {name: change(folder.tensors[name])})
            said = folder.refusal()
            if bend in ("scalar", "empty") and name != "t2d" and not name.startswith("verifier_"):
                assert "stores the tensor" in said and "with the shape" in said


def test_lost_and_misnumbered_tensors_never_crash(folder: Folder) -> None:
    for name in random.Random(3).sample(sorted(folder.tensors), 5):
        rest = {other: each for other, each in folder.tensors.items() if other != name}
        far = {name.replace("0", "1000000000000"): folder.tensors[name]}
        for tensors in (rest, rest | far, folder.tensors | far):
            folder.write_tensors(tensors)
            folder.refusal()


def test_any_damage_to_a_pickle_is_refused_or_read(tmp_path: Path) -> None:
    folder = Folder("medusa", "fasterdecoding", tmp_path)
    whole, source = folder.file.read_bytes(), random.Random(2)
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(3):
            damaged[source.randrange(1500)] = source.randrange(256)
        folder.file.write_bytes(bytes(damaged))
        refused += bool(folder.refusal())
    assert refused > 100


def test_a_medusa_head_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = Folder("medusa", "vllm", tmp_path)
    left = {name: tensor for name, tensor in folder.tensors.items() if not name.startswith("blocks.1.")}
    folder.write_tensors(left)
    assert "has 2 Medusa heads, and none of the number 1" in folder.refusal()
