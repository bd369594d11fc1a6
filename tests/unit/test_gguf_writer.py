"""GGUF files that we write are those that others read, and that we read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf as gguf_package
import numpy as np
import pytest
import torch

import tiny
from outrider.errors import UserError
from outrider.kernels import Weight
from outrider.kernels.cpu import quantize_weight
from outrider.kernels.quantization import dequantize
from outrider.weights import gguf_writer, open_checkpoint
from outrider.weights.gguf_header import read_header
from outrider.weights.gguf_writer import describe, encode, rename

METADATA: dict[str, Any] = {
    "text": "grüße",
    "empty": "",
    "yes": True,
    "whole": 7,
    "negative": -7,
    "large": 1 << 40,
    "small": -(1 << 40),
    "real": 0.5,
    "texts": ["", "a", "猫"],
    "reals": [1.0, -0.25],
    "flags": [True, False],
    "numbers": [1, -1, 1 << 30],
    "long numbers": [1 << 40],
    "nothing": [],
}


def floats(*shape: int, seed: int = 0) -> Weight:
    return Weight("f32", shape, torch.randn(*shape, generator=torch.Generator().manual_seed(seed)))


TENSORS = {
    "odd": floats(5),
    "matrix": floats(3, 7, seed=1),
    "halves": Weight("bf16", (2, 3), floats(2, 3, seed=2).data.to(torch.bfloat16)),
    "blocks": quantize_weight(floats(4, 64, seed=3), "int8"),
}


def test_what_is_written_is_read_back() -> None:
    written = b"".join(encode(METADATA, TENSORS))
    header = read_header(Path("x"), written)
    assert header.metadata == METADATA
    assert {type(header.metadata[key]) for key in ("whole", "large", "real", "yes")} == {int, float, bool}
    for info in header.tensors:
        weight = TENSORS[info.name]
        assert (info.kind, info.shape) == (weight.kind, weight.shape)
        assert written[info.offset : info.offset + info.size] == gguf_writer.raw(weight.data)
        assert info.offset % 32 == 0


def test_others_read_the_same(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    # The other reader has no place for lists without a member.
    metadata = {key: value for key, value in METADATA.items() if key != "nothing"}
    path.write_bytes(b"".join(encode(metadata | {"general.architecture": "llama"}, TENSORS)))
    reader = gguf_package.GGUFReader(path)
    assert reader.fields["text"].contents() == "grüße"
    assert reader.fields["texts"].contents() == ["", "a", "猫"]
    kinds = gguf_package.GGUFValueType
    expected = {
        "yes": [kinds.BOOL],
        "whole": [kinds.UINT32],
        "negative": [kinds.INT32],
        "large": [kinds.UINT64],
        "small": [kinds.INT64],
        "real": [kinds.FLOAT32],
        "reals": [kinds.ARRAY, kinds.FLOAT32],
        "numbers": [kinds.ARRAY, kinds.INT32],
        "long numbers": [kinds.ARRAY, kinds.INT64],
        "texts": [kinds.ARRAY, kinds.STRING],
    }
    assert {key: reader.fields[key].types for key in expected} == expected
    assert all(reader.fields[key].contents() == METADATA[key] for key in expected)
    for tensor in reader.tensors:
        wanted = dequantize(TENSORS[tensor.name]).numpy()
        found = gguf_package.quants.dequantize(tensor.data, tensor.tensor_type).reshape(wanted.shape)
        assert np.array_equal(found, wanted)


@pytest.mark.parametrize("bad", [{"k": [1, "a"]}, {"k": None}, {"k": 1 << 70}, {"k": {"a": 1}}])
def test_what_no_metadata_can_hold(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="GGUF metadata cannot hold"):
        list(encode(bad, {}))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "linear-rope", "llama-bias"])
def test_a_model_is_the_same_through_gguf(name: str, tmp_path: Path) -> None:
    before = open_checkpoint(str(tiny.folder(name)))
    config = before.config | ({"sliding_window": None} if name == "qwen2" else {})
    weights = {each: before.weight(each) for each in before.names()}
    path = tmp_path / "m.gguf"
    path.write_bytes(b"".join(encode(describe(config, "tiny", "f32"), rename(config, weights))))
    after = open_checkpoint(str(path))
    assert sorted(after.names()) == sorted(before.names())
    for each in before.names():
        assert torch.equal(after.weight(each).data, weights[each].data), each
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    keys += ("max_position_embeddings", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "vocab_size")
    assert {key: after.config[key] for key in keys} == {key: config[key] for key in keys}
    assert after.config["model_type"] == config["model_type"]
    if name == "linear-rope":
        assert after.config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def test_rows_are_in_the_order_of_others() -> None:
    """As llama.cpp's converter orders them: pairs of a head side by side."""
    rows = torch.arange(16)[:, None].float()
    found = gguf_writer.interleave(Weight("f32", (16, 1), rows), 2).data.flatten().tolist()
    assert found == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]


@pytest.mark.parametrize("name", ["gemma3", "mistral", "smollm3"])
def test_tensors_without_a_gguf_name_are_refused(name: str) -> None:
    config = open_checkpoint(str(tiny.folder(name))).config
    with pytest.raises(UserError, match="cannot be written as GGUF: give the target as a folder instead"):
        describe(config, "tiny", "f32")
