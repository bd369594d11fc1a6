"""Sound checkpoints of every format and layout, tiny, for the fuzzer to damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tiny
import tiny_blocks
import tiny_heads
import tiny_medusa
import tiny_modules
from outrider.kernels import Weight
from outrider.kernels.cpu import quantize_weight
from outrider.weights import gguf_writer, open_checkpoint

LAYOUTS = [
    ("eagle", "safeailab"),
    *[("eagle3", layout) for layout in tiny_heads.LAYOUTS],
    *[("peagle", layout) for layout in tiny_modules.PEAGLE],
    *[("mtp", layout) for layout in tiny_modules.MTP],
    *[("medusa", layout) for layout in tiny_medusa.LAYOUTS],
    *[("dflash", layout) for layout in tiny_blocks.DFLASH],
    *[("dspark", layout) for layout in tiny_blocks.DSPARK],
]
MODELS = ("llama", "llama3-rope", "qwen2", "qwen3", "gemma3", "smollm3-window")
WORDS = tiny.SPECIAL + tiny.CHARACTERS
CONTROL, NORMAL = 3, 1


def vocabulary(tokenizer: str) -> dict[str, Any]:
    """The tokenizer of the tiny models as GGUF has it."""
    found: dict[str, Any] = {
        "model": tokenizer,
        "tokens": [word.replace(" ", "\u0120" if tokenizer == "gpt2" else "\u2581") for word in WORDS],
        "token_type": [CONTROL] * len(tiny.SPECIAL) + [NORMAL] * len(tiny.CHARACTERS),
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if tokenizer == "gpt2":
        found |= {"pre": "smollm", "merges": ["a b"]}
        found["tokens"][-1] = "ab"
    else:
        found |= {"scores": [-float(at) for at in range(len(WORDS))]}
    return {f"tokenizer.ggml.{key}": each for key, each in found.items()} | {
        "tokenizer.chat_template": "{{ messages }}"
    }


def write_gguf(name: str, tokenizer: str, quantized: bool, path: Path) -> None:
    checkpoint = open_checkpoint(tiny.folder(name))
    tensors: dict[str, Weight] = {}
    for each in checkpoint.names():
        weight = checkpoint.weight(each)
        tensors[each] = quantize_weight(weight, "int8") if quantized and len(weight.shape) == 2 else weight
    metadata = gguf_writer.describe(checkpoint.config, name, "q8_0" if quantized else "f32") | vocabulary(tokenizer)
    path.write_bytes(b"".join(gguf_writer.encode(metadata, gguf_writer.rename(checkpoint.config, tensors))))


def write_head(method: str, layout: str, folder: Path) -> dict[str, str]:
    """Write a head with random weights: its drafts do not matter here."""
    if method in ("eagle", "eagle3"):
        return tiny_heads.write(tiny_heads.Plan(method=method), folder, layout)
    if method == "peagle":
        return tiny_modules.peagle(tiny_heads.Plan(layers=2), folder, layout)
    if method in ("dflash", "dspark"):
        return tiny_blocks.write(tiny_blocks.Plan(method=method), folder, layout)
    return tiny_heads.make(method, folder, layout=layout)


def write_samples(folder: Path) -> Path:
    """All of them below `folder`; the list that the fuzzer reads."""
    samples: list[dict[str, Any]] = []
    for name, tokenizer, quantized in (
        ("llama", "gpt2", False),
        ("llama", "llama", True),
        ("qwen3", "gpt2", False),
    ):
        path = folder / f"{name}-{tokenizer}.gguf"
        write_gguf(name, tokenizer, quantized, path)
        samples.append({"kind": "gguf", "path": str(path)})
    for name in MODELS:
        samples.append({"kind": "safetensors", "path": str(tiny.copy(name, folder / name))})
    shards = tiny.copy("llama", folder / "shards")
    (shards / "model.safetensors").unlink()
    for file in tiny.folder("llama", "100KB").iterdir():
        (shards / file.name).write_bytes(file.read_bytes())
    samples.append({"kind": "safetensors", "path": str(shards)})
    for method, layout in LAYOUTS:
        head_folder = folder / f"{method}-{layout}"
        options = {**write_head(method, layout, head_folder)}
        options.pop("model")
        sample = {"kind": "head", "path": str(head_folder), "method": method, "options": options}
        samples.append(sample | {"target": str(folder / "llama")})
    draft = tiny.copy("llama", folder / "draft")
    sample = {"kind": "head", "path": str(draft), "method": "draft_model", "options": {}}
    samples.append(sample | {"target": str(folder / "llama")})
    listed = folder / "samples.json"
    listed.write_text(json.dumps(samples))
    return listed
