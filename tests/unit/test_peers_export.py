"""The weights as peers read them: the same numbers, in files that others open."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

import tiny
import tiny_gguf
from outrider.bench.peers import export
from outrider.errors import UserError
from outrider.kernels.cpu import quantize_weight
from outrider.weights import gguf_writer, open_checkpoint
from outrider.weights.random import byte_tokens


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def gguf(folder: Path, **more: object) -> Path:
    """A tiny Llama with quantised matrices, and words of its own."""
    source = open_checkpoint(str(tiny.folder("llama")))
    weights = {name: source.weight(name) for name in source.names()}
    weights |= {name: quantize_weight(one, "int8") for name, one in weights.items() if len(one.shape) > 1}
    words = {key: value for key, value in byte_tokens("", tiny.VOCABULARY).items() if key != "path"}
    words |= {"tokenizer.ggml.eos_token_id": 2, "tokenizer.chat_template": "{{ messages[0].content }}"}
    described = gguf_writer.describe(source.config, "tiny", "q8_0") | words | more
    path = folder / "tiny.gguf"
    path.write_bytes(b"".join(gguf_writer.encode(described, gguf_writer.rename(source.config, weights))))
    return path


def test_a_file_becomes_a_folder_that_transformers_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "SHARD", 40_000)
    checkpoint = export.checked(str(gguf(tmp_path)))
    messages: list[str] = []
    folder = export.folder(checkpoint, messages.append)
    assert len(list(folder.glob("*.safetensors"))) > 1 and len(messages) == 1
    opened = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert opened.dtype == torch.float32
    for name, parameter in opened.named_parameters():
        assert torch.equal(parameter, export.dequantize(checkpoint.weight(name))), name
    words = transformers.AutoTokenizer.from_pretrained(folder)
    assert words.chat_template == "{{ messages[0].content }}"
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == [2]
    assert export.folder(checkpoint, messages.append) == folder and len(messages) == 1  # once


@torch.no_grad()
def test_transformers_rotates_as_a_file_of_llama_3_says(tmp_path: Path) -> None:
    file = tiny_gguf.write("llama3-rope", tmp_path / "m.gguf")
    folder = export.folder(export.checked(str(file)), lambda _: None)
    opened = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.tensor([tiny.prompt(100)])
    found, wanted = (model(tokens).logits for model in (opened, tiny.original("llama3-rope")))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


def test_an_incomplete_folder_is_written_again(tmp_path: Path) -> None:
    checkpoint = export.checked(str(gguf(tmp_path)))
    folder = export.folder(checkpoint, lambda _: None)
    (folder / export.DONE).unlink()
    (folder / "rest").write_text("")
    assert export.folder(checkpoint, lambda _: None) == folder
    assert not (folder / "rest").exists() and (folder / export.DONE).is_file()


def test_another_file_of_the_same_name_has_a_folder_of_its_own(tmp_path: Path) -> None:
    first = export.home(export.checked(str(gguf(tmp_path))))
    (tmp_path / "other").mkdir()
    assert export.home(export.checked(str(gguf(tmp_path / "other")))) != first


def test_norms_of_gemma_are_stored_less_one(tmp_path: Path) -> None:
    """GGUF holds them whole: what is read back must be the same number."""
    folder = tmp_path / "out"
    folder.mkdir()
    gemma = open_checkpoint(str(tiny.folder("gemma3")))
    assert gemma.norms_are_offset
    whole = export.Checkpoint(Path("x.gguf"), gemma.config, gemma.tensors, byte_tokens("", tiny.VOCABULARY))
    export.write(whole, folder)
    found = open_checkpoint(str(folder))
    for name in gemma.names():
        before, after = (export.dequantize(one.weight(name)) for one in (whole, found))
        assert torch.allclose(after + (1 if name.endswith("norm.weight") else 0), before, atol=1e-6), name


def test_unsupported_checkpoints_are_refused_with_a_reason(tmp_path: Path) -> None:
    folder = export.checked(str(tiny.folder("llama")))
    assert export.folder(folder, print) == folder.path
    with pytest.raises(export.UnsuitableError, match=r"it reads GGUF files, and `.*` is a folder"):
        export.gguf(folder)
    path = gguf(tmp_path)
    assert export.gguf(export.checked(str(path))) == path
    with pytest.raises(UserError, match="`random/tiny` is a shape with random weights"):
        export.checked("random/tiny")


def test_an_unwritable_cache_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="cannot write `"):
        export.folder(export.checked(str(gguf(tmp_path))), lambda _: None)
