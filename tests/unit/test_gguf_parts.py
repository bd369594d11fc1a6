"""GGUF models in several files: any part, or the folder, opens the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_writer import Tensor, gguf
from test_gguf import VOCABULARY, WIDTH, floats, metadata

from outrider.errors import UserError
from outrider.weights import open_checkpoint


def split(number: int, count: int, tensors: int) -> dict[str, Any]:
    return {"split.no": number, "split.count": count, "split.tensors.count": tensors}


def write_parts(folder: Path, *later: list[Tensor], changes: dict[int, dict[str, Any]] | None = None) -> list[Path]:
    """Write a model as llama-gguf-split does: the metadata are in the first part."""
    parts = [[floats("token_embd.weight", VOCABULARY, WIDTH)], *later]
    paths = [folder / f"m-{number:05d}-of-{len(parts):05d}.gguf" for number in range(1, len(parts) + 1)]
    for number, (path, tensors) in enumerate(zip(paths, parts, strict=True)):
        fields = split(number, len(parts), sum(map(len, parts))) | (changes or {}).get(number, {})
        path.write_bytes(gguf((metadata() if number == 0 else {}) | fields, tensors))
    return paths


def test_any_part_or_the_folder_opens_the_whole_model(tmp_path: Path) -> None:
    norm, down = floats("output_norm.weight", WIDTH), floats("blk.0.ffn_down.weight", WIDTH, 96)
    paths = write_parts(tmp_path, [norm], [down])
    for source in (*paths, tmp_path):
        checkpoint = open_checkpoint(str(source))
        assert checkpoint.path == paths[0]
        assert checkpoint.config["hidden_size"] == WIDTH
        assert checkpoint.names() == [
            "model.embed_tokens.weight",
            "model.norm.weight",
            "model.layers.0.mlp.down_proj.weight",
        ]
        expected = torch.frombuffer(bytearray(down.data), dtype=torch.float32).view(WIDTH, 96)
        assert torch.equal(checkpoint.weight("model.layers.0.mlp.down_proj.weight").data, expected)
        assert len(checkpoint.mappings) == 3
        checkpoint.release()


def test_a_folder_with_one_gguf_file_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf(metadata(), [floats("token_embd.weight", VOCABULARY, WIDTH)]))
    (tmp_path / "mmproj-m.gguf").write_bytes(b"for images")
    (tmp_path / "mtp-m.gguf").write_bytes(b"a module for drafts")
    assert open_checkpoint(tmp_path).path == tmp_path / "m.gguf"
    (tmp_path / "n.gguf").write_bytes(b"another")
    with pytest.raises(UserError, match=r"has no `config.json`: pass the file `.*m\.gguf`"):
        open_checkpoint(tmp_path)


def test_parts_that_are_not_those_of_one_model_are_refused(tmp_path: Path) -> None:
    def refused(problem: str, path: Path) -> None:
        with pytest.raises(UserError, match=problem):
            open_checkpoint(str(path))

    norm = floats("output_norm.weight", WIDTH)
    first, second = write_parts(tmp_path, [norm])
    second.rename(tmp_path / "elsewhere.gguf")
    refused(r"one of 2 parts, but `m-00002-of-00002.gguf` is missing: fetch it too", first)
    refused(r"elsewhere.gguf` is one of 2 parts, but its name does not end in", tmp_path / "elsewhere.gguf")
    write_parts(tmp_path, [norm], changes={1: {"split.no": 0}})
    refused(r"m-00002-of-00002.gguf` is not part 2 of 2", first)
    write_parts(tmp_path, [norm], changes={1: {"split.count": 3}})
    refused(r"m-00002-of-00002.gguf` is not part 2 of 2", first)
    write_parts(tmp_path, [floats("token_embd.weight", VOCABULARY, WIDTH)])
    refused(r"has the tensor `token_embd.weight`, as another part has", second)
