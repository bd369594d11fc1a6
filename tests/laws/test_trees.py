"""The first law over the trees that methods grow, and over drafters that fill one tree together. No tolerance."""

from __future__ import annotations

import pytest

import tiny_heads
from laws.mix import FINDING, MIX, PROMPT, check, interrupted, visible, with_options
from outrider import UserError
from outrider.speculation import TreeOptions, available, find

GROWING = [name for name in available() if issubclass(find(name).Options, TreeOptions)]
SHAPES = {"broad": (15, 4, 2), "deep": (15, 2, 7), "small": (3, 3, 1)}  # tokens, branches, levels
NAMES = ("greedy", "warm", "truncated", "penalties", "stops", "two")


@pytest.fixture(scope="module")
def expected(tiny_llm) -> dict[str, object]:
    outputs = tiny_llm().generate([PROMPT] * len(NAMES), [MIX[name] for name in NAMES])
    return dict(zip(NAMES, map(visible, outputs), strict=True))


@pytest.fixture(scope="module", params=GROWING)
def grower(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    return request.param, tiny_heads.make(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.pairwise
@pytest.mark.parametrize(
    ("shape", "draft", "names"),
    [
        ("broad", "probabilistic", NAMES),
        ("deep", "greedy", NAMES),
        ("deep", "probabilistic", ("greedy", "truncated")),
        ("small", "greedy", NAMES),
    ],
    ids=["broad-probabilistic", "deep-greedy", "deep-probabilistic", "small-greedy"],
)
def test_trees_keep_the_text(tiny_llm, grower, expected, shape: str, draft: str, names: tuple[str, ...]) -> None:
    method, options = grower
    width, branches, levels = SHAPES[shape]
    tree = {"width": width, "branches": branches, "max_depth": levels, "draft": draft, "adaptive": "no"}
    if draft == "probabilistic" and method in FINDING:
        with pytest.raises(UserError, match="copies its drafts"):
            tiny_llm(speculate=with_options(method, **options, **tree))
        return
    outputs = check(tiny_llm(speculate=with_options(method, **options, **tree)), expected, names)
    spec_stats = outputs[0].stats.speculation
    assert spec_stats.drafted > 0 and len(spec_stats.drafted_per_depth) <= levels
    if method not in FINDING:  # these branch only where a text did
        assert max(spec_stats.widths) > len(spec_stats.drafted_per_depth)  # more tokens than levels: it did branch


def test_grown_trees_in_chunks_with_few_pages_and_interrupted(tiny_llm, grower, expected) -> None:
    method, options = grower
    speculate = with_options(method, **options, width=9, branches=3, max_depth=3, adaptive="no")
    check(tiny_llm(speculate=speculate, max_step_tokens=7), expected, NAMES)
    check(tiny_llm(speculate=speculate, cache_tokens=16 * 9), expected, NAMES)
    assert visible(interrupted(tiny_llm(speculate=speculate), MIX["warm"], {2, 3, 6})) == expected["warm"]


def test_a_tree_of_one_branch_is_the_chain(tiny_llm, grower) -> None:
    method, options = grower
    chain = tiny_llm(speculate=with_options(method, **options, width=4, adaptive="no"))
    tree = tiny_llm(speculate=with_options(method, **options, width=4, branches=1, max_depth=4, adaptive="no"))
    one, other = (llm.generate(PROMPT, MIX["warm"])[0].stats.speculation for llm in (chain, tree))
    assert one == other and one.drafted > 0


@pytest.mark.parametrize("method", ["suffix+ngram", "ngram+eagle3", "suffix+draft_model+eagle3", "prediction+suffix"])
def test_drafters_that_work_together_keep_the_text(tiny_llm, tmp_path, expected, method: str) -> None:
    made = {name: tiny_heads.make(name, tmp_path / name) for name in method.split("+")}
    options = {f"{name}.{key}": value for name, own in made.items() for key, value in own.items()}
    if "eagle3" in method:
        options |= {"eagle3.width": 9, "eagle3.branches": 3}
    llm = tiny_llm(speculate=with_options(method, **options, adaptive="no"))
    outputs = check(llm, expected, NAMES)
    assert any(output.stats.speculation.drafted for output in outputs)
    check(llm, expected, NAMES)
    check(tiny_llm(speculate=with_options(method, **options), max_step_tokens=7), expected, NAMES)
    assert visible(interrupted(llm, MIX["warm"], {2, 3, 6})) == expected["warm"]


@pytest.mark.parametrize("method", [name for name in available() if name not in GROWING])
def test_a_tree_is_refused_by_methods_that_draft_chains(tiny_llm, tmp_path, method: str) -> None:
    with pytest.raises(UserError, match=f"`{method}` drafts chains, no trees"):
        tiny_llm(speculate=with_options(method, **tiny_heads.make(method, tmp_path), branches=2))


def test_a_block_of_tokens_is_a_chain(tiny_llm, tmp_path) -> None:
    options = tiny_heads.make("eagle3", tmp_path)
    with pytest.raises(UserError, match="`verify=block` verifies only chains"):
        tiny_llm(speculate=with_options("eagle3", **options, width=6, branches=2, verify="block"))
