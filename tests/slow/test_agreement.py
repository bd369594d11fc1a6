"""Real models choose the tokens that transformers chooses with the same dequantised weights.

`python tests/slow/test_agreement.py` prints the table that the documentation quotes.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from torch import Tensor

from outrider import kernels
from outrider.kernels.cpu import _native
from outrider.kernels.quantization import dequantize
from outrider.models import build
from outrider.tokenizer import Tokenizer
from outrider.weights import Checkpoint, open_checkpoint
from outrider.weights.checkpoint import Stored
from tiny import run

MODELS = ("smollm2-135m", "gemma3-270m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b")
EVAL = Path(os.environ.get("OUTRIDER_EVAL_DATA") or Path(__file__).parents[3] / "shared" / "data" / "eval")
CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "gemma3_text": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
}
FILES = ("gsm8k", "humaneval", "mt_bench", "spec_bench_long")
PER_FILE = 5
HALVES = {"f16": torch.float16, "bf16": torch.bfloat16}
RECODED = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", *HALVES)
TOKENS = 400
PAGE = 16


@dataclass
class Agreement:
    """How near one kernel level comes to transformers, over all positions of all prompts."""

    model: str
    level: str
    formats: str
    prompts: int = 0
    positions: int = 0
    same: int = 0
    divergence: float = 0.0

    def add(self, logits: Tensor, wanted: Tensor) -> None:
        self.prompts += 1
        for ours, theirs in zip(logits.split(64), wanted.split(64), strict=True):  # [64, V]
            self.positions += ours.shape[0]
            self.same += int((ours.argmax(1) == theirs.argmax(1)).sum())
            expected = theirs.log_softmax(1)
            self.divergence += float((expected.exp() * (expected - ours.log_softmax(1))).sum())

    @property
    def top1(self) -> float:
        return self.same / self.positions

    @property
    def kl(self) -> float:
        return self.divergence / self.positions

    def __str__(self) -> str:
        return (
            f"{self.model:<18} {self.level:<9} {self.prompts:>3} prompts {self.positions:>6} positions  "
            f"top-1 {self.top1:8.3%}  mean KL {self.kl:.2e}  ({self.formats})"
        )


def prompts(count: int) -> Iterator[str]:
    """The first `count` of each file."""
    for name in FILES:
        with (EVAL / f"{name}.jsonl").open(encoding="utf-8") as lines:
            for _, line in zip(range(count), lines, strict=False):
                yield json.loads(line)["prompt"]


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    if tokenizer.chat_template is None:
        return tokenizer.encode(text)[:TOKENS]
    templated = tokenizer.apply_chat([{"role": "user", "content": text}])
    return tokenizer.encode(templated, add_special=False)[:TOKENS]


def transformers_model(checkpoint: Checkpoint) -> Any:
    """The same numbers in transformers, fp32."""
    model_type = checkpoint.config["model_type"]
    settings = {key: value for key, value in checkpoint.config.items() if key != "model_type"}
    make_config, make_model = CLASSES[model_type]
    config = make_config(**settings)
    state = {}
    for name in checkpoint.names():
        values = dequantize(checkpoint.weight(name))
        # Gemma's norms are 1 + w in transformers, and plain in GGUF files.
        offset = model_type == "gemma3_text" and not checkpoint.norms_are_offset and name.endswith("norm.weight")
        state[name] = values - 1 if offset else values
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    with torch.device("meta"):
        model = make_model(config)
    model.to_empty(device="cpu")
    model.init_weights()  # buffers that no checkpoint holds: rotary frequencies, the embedding scale
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not missing
    assert not unexpected
    return model.eval()


def formats(checkpoint: Checkpoint) -> str:
    counts = Counter(checkpoint.weight(name).kind for name in checkpoint.names() if "norm" not in name)
    return ", ".join(f"{count} x {kind}" for kind, count in counts.most_common())


def recoded(checkpoint: Checkpoint, kind: str) -> Checkpoint:
    """The same model with every matrix in one format."""

    def convert(stored: Stored) -> Stored:
        if len(stored.shape) == 1:
            return stored
        values = dequantize(stored.load())
        if kind in HALVES:
            return Stored(kind, stored.shape, values.to(HALVES[kind]))
        blocks = gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType[kind.upper()])
        return Stored(kind, stored.shape, torch.from_numpy(blocks))

    return replace(checkpoint, tensors={name: convert(stored) for name, stored in checkpoint.tensors.items()})


@functools.cache
def measure(name: str, kind: str | None = None) -> list[Agreement]:
    """One line per level: all prompts on the best, one prompt of each file on the others."""
    checkpoint = open_checkpoint(name)
    if kind is None:
        return compare(name, checkpoint, PER_FILE, _native.available_levels())
    return compare(name, recoded(checkpoint, kind), 1, _native.available_levels()[-1:])


@torch.no_grad()
def compare(name: str, checkpoint: Checkpoint, per_file: int, levels: list[str]) -> list[Agreement]:
    tokenizer = Tokenizer.open(checkpoint.tokenizer_source)
    model = build(checkpoint, kernels.load("cpu"), max_context=TOKENS)
    wanted = transformers_model(checkpoint)
    found = [Agreement(name, level, formats(checkpoint)) for level in levels]
    for index, text in enumerate(prompts(per_file)):
        tokens = encode(tokenizer, text)
        expected = wanted(torch.tensor([tokens]), use_cache=False).logits[0]  # [T, V]
        for agreement in found:  # the best level last, so that it is in force in the end
            if agreement.level == levels[-1] or index % per_file == 0:
                _native.choose_level(agreement.level)
                logits, _ = run(model, tokens, TOKENS, page_size=PAGE, dtype="float16")
                agreement.add(logits, expected)
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", MODELS)
def test_top_1_agrees_with_transformers(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = measure(name)
    with capsys.disabled():
        sys.stdout.write("\n" + "\n".join(map(str, found)) + "\n")
    assert found[-1].prompts == PER_FILE * len(FILES)
    for agreement in found:
        assert agreement.top1 >= 0.99, str(agreement)
        assert 0 <= agreement.kl < 0.01, str(agreement)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", RECODED)
def test_each_format_stays_near(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One prompt of each file: too few to bound the share of equal tokens, enough for the divergence."""
    (found,) = measure(MODELS[0], kind)
    with capsys.disabled():
        sys.stdout.write(f"\n{found}\n")
    assert 0 <= found.kl < 1e-3, str(found)


def main() -> None:
    for name in sys.argv[1:] or MODELS:
        sys.stdout.write("\n".join(map(str, measure(name))) + "\n")
    for kind in () if sys.argv[1:] else RECODED:
        sys.stdout.write("\n".join(map(str, measure(MODELS[0], kind))) + "\n")


if __name__ == "__main__":
    main()
