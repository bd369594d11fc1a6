from dataclasses import replace
from pathlib import Path
import pytest
import tiny_heads
from laws.test_speculation import BASE, PROMPT, told, with_options
SAMPLED = replace(BASE, temperature=0.8, logprobs=4)

@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3"])
def test_x(tiny_llm, tmp_path, method):
    options = tiny_heads.make(method, tmp_path)
    expected = [told(tiny_llm().generate(PROMPT, p)[0]) for p in (BASE, SAMPLED)]
    for draft in ("greedy", "probabilistic"):
      for adaptive in ("no", "yes"):
        lens = []
        for shape in ({"width": 4}, {"width": 4, "branches": 1}, {"width": 12, "branches": 3}, {"width": 15, "branches": 2, "levels": 4}):
            llm = tiny_llm(speculate=with_options(method, adaptive=adaptive, draft=draft, **shape, **options))
            outputs = llm.generate([PROMPT, PROMPT], [BASE, SAMPLED])
            assert [told(o) for o in outputs] == expected
            lens.append([round(o.stats.speculation.mean_length, 2) for o in outputs])
        print(method, draft, adaptive, lens)
