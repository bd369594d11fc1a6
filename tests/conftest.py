"""Fixtures that several rooms share."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

import tiny
from outrider import LLM

SPECIAL = ["<pad>", "<s>", "</s>"]
CHARACTERS = [chr(code) for code in range(32, 127)] + ["é", "ü", "猫"]  # one token each: 101 with the special ones


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A tiny random model in a folder as users have them, with a tokenizer of single characters."""

    def make(name: str = "llama") -> Path:
        folder = tmp_path_factory.getbasetemp() / f"whole-{name}"
        if not folder.exists():
            shutil.copytree(tiny.folder(name), folder)
            tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(SPECIAL + CHARACTERS)}, []))
            tokenizer.decoder = decoders.Fuse()
            tokenizer.add_special_tokens(SPECIAL)
            tokenizer.save(str(folder / "tokenizer.json"))
        return folder

    return make


@pytest.fixture(scope="module", params=["cpu", "reference"])
def tiny_llm(request: pytest.FixtureRequest, tiny_folder: Callable[..., Path]) -> Callable[..., LLM]:
    """Make an LLM over a tiny model, on each backend in turn."""

    def make(name: str = "llama", **options: object) -> LLM:
        return LLM(str(tiny_folder(name)), backend=request.param, **options)

    return make
