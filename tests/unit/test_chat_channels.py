"""`chat` of the Python interface with a model that answers in channels (gpt-oss)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import tiny
from outrider import LLM, AsyncLLM, Output, SamplingParams

CHAIN = (
    "<|channel|>",
    "analysis",
    "<|message|>",
    "Hm.",
    "<|end|>",
    "Here.",
    "<|return|>",
)  # the answer, token by token
RAW = "".join(CHAIN)
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{# <|channel|>analysis<|message|> #}"
QUESTION = [{"role": "user", "content": "go"}]


def write(folder: Path) -> Path:
    """Write a model whose next token depends on the last one alone: it answers `go` with CHAIN."""
    tiny.copy("llama", folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": CHAIN[-1], "chat_template": TEMPLATE}))
    words = json.loads((folder / "tokenizer.json").read_text().replace("</s>", CHAIN[-1]))
    ids: dict[str, int] = words["model"]["vocab"]
    for text, digit in zip(CHAIN[:-1], "012345", strict=True):  # whose ids they take over
        ids[text] = ids.pop(digit)
        entry = {**words["added_tokens"][0], "id": ids[text], "content": text, "special": text.startswith("<")}
        words["added_tokens"].append(entry)
    (folder / "tokenizer.json").write_text(json.dumps(words))
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name].zero_()  # the layers add nothing to the embedding
    tensors["model.norm.weight"].fill_(1)
    tensors["lm_head.weight"].zero_()
    for last, following in zip(("o", *CHAIN), CHAIN, strict=False):
        tensors["lm_head.weight"][ids[following]] = tensors["model.embed_tokens.weight"][ids[last]]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(write(tmp_path_factory.mktemp("channels") / "model"), backend="cpu", max_context=64) as made:
        yield made


def parts(output: Output) -> list[tuple[str, str]]:
    return [(one.reasoning, one.text) for one in output.completions]


def params(**options: object) -> SamplingParams:
    return SamplingParams(temperature=0, **options)  # type: ignore[arg-type]


def test_reasoning_stands_beside_the_text(llm: LLM) -> None:
    output = llm.chat(QUESTION, params())
    assert parts(output) == [("Hm.", "Here.")] and output.completions[0].finish_reason == "stop"
    assert llm.tokenizer.decode(output.completions[0].token_ids).endswith("Here."), "the tokens are all there"


def test_each_answer_of_several_is_split(llm: LLM) -> None:
    cut = params(max_tokens=4, n=2)
    both = llm.chat([QUESTION, QUESTION], [cut, params()])
    assert [parts(output) for output in both] == [[("Hm.", "")] * 2, [("Hm.", "Here.")]]


def test_channels_stay_if_special_tokens_are_kept(llm: LLM) -> None:
    assert parts(llm.chat(QUESTION, params(skip_special_tokens=False))) == [("", RAW)]


def test_prompts_without_the_template_are_not_split(llm: LLM) -> None:
    (output,) = llm.generate(["go"], params())
    assert parts(output) == [("", "analysisHm.Here.")]


def test_a_stream_is_split(llm: LLM) -> None:
    async def answer() -> list[Output]:
        async with AsyncLLM(llm) as served:
            return [output async for output in served.chat(QUESTION, params())]

    outputs = [parts(output)[0] for output in asyncio.run(answer())]
    assert outputs[-1] == ("Hm.", "Here.") and outputs == sorted(outputs)
