"""A long prompt is read in chunks between which other streams go on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_runner import make

import tiny
from outrider import LLM, Output, SamplingParams
from outrider.prompt_chunks import FIRST_TOKENS, LEAST_TOKENS, STEP_SECONDS, PromptChunks
from outrider.request import Row, Step

PARAMS = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)


def step_of(*sizes: int, decode_steps: int = 1) -> Step:
    return Step([Row(make("a", [1]), 0, [1] * size, sample=True) for size in sizes], decode_steps)


def test_the_limit_is_that_of_the_measured_speed() -> None:
    chunks = PromptChunks(512)
    assert chunks.limit(0) == FIRST_TOKENS
    chunks.observe(step_of(100, 1), 0.202)  # 2 ms per token
    assert chunks.limit(5) == int(STEP_SECONDS / 0.002) - 5
    chunks.observe(step_of(1, 1), 5.0)  # few tokens, and runs without the host, say nothing about prompts
    chunks.observe(step_of(100, decode_steps=8), 5.0)
    assert chunks.limit(0) == int(STEP_SECONDS / 0.002)
    chunks.observe(step_of(32), 3.2)
    assert chunks.limit(9) == LEAST_TOKENS
    chunks.observe(step_of(512), 0.001)
    assert chunks.limit(9) == 512
    assert PromptChunks(16).limit(0) == 16


@pytest.mark.parametrize("seconds", [1e-6, 1.0], ids=["fast", "slow"])
def test_a_stream_gets_a_token_for_every_chunk_of_a_long_prompt(tmp_path: Path, seconds: float) -> None:
    config = tiny.copy("llama", tmp_path) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 2048}))
    llm = LLM(str(tmp_path), backend="cpu", max_step_tokens=64, cache_tokens=2048)
    engine, prompt = llm.engine, [3 + at % 90 for at in range(900)]
    alone = llm.generate([prompt], SamplingParams(max_tokens=3, temperature=0))[0].completions[0].token_ids
    engine.clear_cache()
    engine.prompt_chunks.observe = lambda *_: None  # type: ignore[method-assign]
    engine.prompt_chunks.seconds_per_token = seconds
    stream = engine.add([5, 6, 7], PARAMS)
    engine.step()
    long = engine.add(prompt, SamplingParams(max_tokens=3, temperature=0))
    counts: list[int] = []
    outputs: dict[str, Output] = {}
    while long not in outputs:  # a step returns an output of each request that got a token
        outputs = {output.request_id: output for output in engine.step()}
        counts.append(len(outputs[stream].completions[0].token_ids))
    assert counts == list(range(counts[0], counts[0] + len(counts)))  # one more in every step
    chunk = LEAST_TOKENS if seconds == 1.0 else 63
    assert len(counts) == -(-len(prompt) // chunk)
    while not outputs[long].finished:
        outputs = {output.request_id: output for output in engine.step()}
    assert outputs[long].completions[0].token_ids == alone
