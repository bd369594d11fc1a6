"""On a real model and real prompts, speculation changes no token: greedy and warm, alone and in batches."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from outrider import LLM, Output, SamplingParams

MODEL = "smollm2-135m"
EVAL = Path(os.environ.get("OUTRIDER_EVAL_DATA") or Path(__file__).parents[3] / "shared" / "data" / "eval")
FILES = ("gsm8k", "humaneval", "mt_bench", "spec_bench_long")
PER_FILE = 10
PARAMS = SamplingParams(max_tokens=64, seed=5)
DRAFTERS = {
    "ngram": "ngram:width=6,adaptive=false",
    "suffix": "suffix:width=8,adaptive=false",
    "itself": f"draft_model:model={MODEL},width=3,adaptive=false",
    "another vocabulary": "draft_model:model=gemma3-270m,vocabulary=strings,width=3,adaptive=false",
}


def prompts() -> list[str]:
    found = []
    for name in FILES:
        lines = (EVAL / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        found += [json.loads(line)["prompt"] for line in lines[:PER_FILE]]
    return found


def answers(llm: LLM, temperature: float) -> list[Output]:
    asked = [llm.chat_prompt([{"role": "user", "content": text}])[:600] for text in prompts()]
    return llm.generate(asked, replace(PARAMS, temperature=temperature))


def texts(outputs: list[Output]) -> list[list[int]]:
    return [output.completions[0].token_ids for output in outputs]


@pytest.fixture(scope="module", params=[0.0, 0.8])
def plain(request: pytest.FixtureRequest) -> tuple[float, list[list[int]]]:
    return request.param, texts(answers(LLM(MODEL), request.param))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_forty_prompts_keep_their_texts(plain: tuple[float, list[list[int]]], drafter: str) -> None:
    temperature, expected = plain
    outputs = answers(LLM(MODEL, speculate=DRAFTERS[drafter]), temperature)
    assert len(outputs) == 40 and texts(outputs) == expected
    accepted = sum(output.stats.speculation.accepted for output in outputs if output.stats)
    assert accepted > 40


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_model_drafting_for_itself_is_always_right() -> None:
    llm = LLM(MODEL, speculate=f"draft_model:model={MODEL},width=4,adaptive=false,draft=probabilistic")
    params = replace(PARAMS, temperature=0.8, top_p=0.9, ignore_eos=True)
    stats = llm.generate(llm.chat_prompt([{"role": "user", "content": "Tell me about rivers."}]), params)[0].stats
    assert stats is not None
    assert stats.speculation.accepted == stats.speculation.drafted > 40
