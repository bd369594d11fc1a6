"""Structured output: every answer has its shape, and speculation changes no token of it. No tolerance anywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace

import pytest

import tiny_heads
from laws import oracle
from laws.mix import BASE, PROMPT, plain, visible, with_options
from outrider import LLM, SamplingParams, StructuredOutput, UserError
from outrider.structured_output.matcher import GrammarMatcher

SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "s": {"type": "string", "maxLength": 4},
        "l": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["n", "s", "l"],
    "additionalProperties": False,
}
EXPRESSION = r"[a-f]{2,5}-[0-9]{3}( ok)?"
CHOICES = ["yes", "yesterday", "no, never", "猫"]
FREE = replace(BASE, max_tokens=110, ignore_eos=False, logit_bias={3: -5.0})  # few blanks: answers are short
START = PROMPT[:18]


def is_record(text: str) -> bool:
    """The schema, checked by hand."""
    found = json.loads(text)
    number, string, entries = found["n"], found["s"], found["l"]
    assert set(found) == {"n", "s", "l"} and type(number) is int and 0 <= number <= 99
    assert len(string) <= 4 and len(entries) <= 2 and set(entries) <= {"a", "b"}
    return True


def asks(kind: str, value: str, **changes: object) -> SamplingParams:
    return replace(FREE, structured=StructuredOutput(kind, value), **changes)  # type: ignore[arg-type]


MIX: dict[str, SamplingParams] = {
    "json": asks("json", json.dumps(SCHEMA)),
    "warm json": asks("json", json.dumps(SCHEMA), temperature=0.9, logprobs=3),
    "two": asks("json", json.dumps(SCHEMA), temperature=0.9, n=2),
    "regex": asks("regex", EXPRESSION),
    "warm regex": asks("regex", EXPRESSION, temperature=0.9, repetition_penalty=1.3, top_p=0.9),
    "choice": asks("choice", json.dumps(CHOICES)),
    "warm choice": asks("choice", json.dumps(CHOICES), temperature=0.9, logprobs=100),
    "grammar": asks("grammar", 'start: item ("," item)*\nitem: /[xyz]{1,3}/', temperature=0.9, min_tokens=12),
    "free": replace(BASE, temperature=0.8, logprobs=2),
    "free, greedy": replace(BASE, presence_penalty=0.4),
}
HAS_SHAPE: dict[str, Callable[[str], object]] = {
    "json": is_record,
    "warm json": is_record,
    "two": is_record,
    "regex": re.compile(EXPRESSION).fullmatch,
    "warm regex": re.compile(EXPRESSION).fullmatch,
    "choice": CHOICES.__contains__,
    "warm choice": CHOICES.__contains__,
    "grammar": re.compile(r"[xyz]{1,3}(,[xyz]{1,3})*").fullmatch,
}
METHODS = {
    "ngram": "ngram:adaptive=no",
    "chain": "eagle3:adaptive=no,width=5",
    "tree": "eagle3:adaptive=no,width=12,branches=3,max_depth=4",
    "drawn chain": "draft_model:adaptive=no,width=4,draft=probabilistic",
    "drawn tree": "eagle3:adaptive=no,width=12,branches=3,max_depth=4,draft=probabilistic",
    "together": "suffix+ngram:adaptive=no",
    "adaptive": "suffix",
}


@pytest.fixture(scope="module")
def expected(tiny_llm) -> dict[str, object]:
    """What plain decoding says; every answer has its shape, or no room for it."""
    outputs = tiny_llm().generate([START] * len(MIX), [plain(params) for params in MIX.values()])
    for name, output in zip(MIX, outputs, strict=True):
        for one in output.completions if name in HAS_SHAPE else ():
            assert one.finish_reason == "stop" and HAS_SHAPE[name](one.text), (name, one)
    return dict(zip(MIX, map(visible, outputs), strict=True))


def check(llm: LLM, expected: dict[str, object], drafts: bool = True) -> None:
    """drafts: some draft must be made. With adaptive width, whether one pays depends on measured times."""
    outputs = llm.generate([START] * len(MIX), list(MIX.values()))
    for name, output in zip(MIX, outputs, strict=True):
        assert visible(output) == expected[name], name
    llm.engine.scheduler.check()
    assert not drafts or any(output.stats.speculation.drafted for output in outputs if output.stats)


def engine(tiny_llm, tmp_path, method: str, **options: object) -> LLM:
    name, _, own = method.partition(":")
    if name in ("eagle3", "draft_model"):
        own = ",".join([own, *(f"{key}={value}" for key, value in tiny_heads.make(name, tmp_path).items())])
    return tiny_llm(speculate=f"{name}:{own}" if own else name, **options)


@pytest.mark.parametrize("method", METHODS)
def test_speculation_changes_nothing(tiny_llm, tmp_path, expected, method: str) -> None:
    llm = engine(tiny_llm, tmp_path, METHODS[method])
    for _ in range(2):  # then out of the prefix cache
        check(llm, expected, drafts=method != "adaptive")


RUN_METHODS = {
    "none": "none",
    "ngram": METHODS["ngram"],
    "suffix": "suffix:adaptive=no",
    "chain": METHODS["chain"],
    "drawn chain": METHODS["drawn chain"],
    "rejection": "draft_model:adaptive=no,width=3,draft=probabilistic,verify=rejection",
}


def runs_of(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[set[bool]]:
    """Return a list that notes for each multi-step run whether its rows have a grammar."""
    runs: list[set[bool]] = []
    runner = llm.engine.runner.multi_step
    launch = runner._launch

    def watch(buffers, *rest):  # type: ignore[no-untyped-def]
        runs.append({request.grammar is not None for request in buffers.requests})
        return launch(buffers, *rest)

    monkeypatch.setattr(runner, "_launch", watch)
    return runs


@pytest.mark.parametrize("method", RUN_METHODS)
def test_multi_step_runs_change_nothing(tiny_llm, tmp_path, monkeypatch, method: str) -> None:
    """The host fills the masks of a step while the target runs it."""
    stepwise, llm = (engine(tiny_llm, tmp_path, RUN_METHODS[method], decode_steps=steps) for steps in (1, 5))
    runs = runs_of(llm, monkeypatch)
    bare = replace(BASE, ignore_eos=False, structured=MIX["json"].structured)  # no processors
    mix = {**MIX, "bare": bare, "reported": replace(bare, logprobs=4)}
    for names in (list(mix), ["bare"], ["reported"], ["regex", "free"], ["warm choice", "two", "free, greedy"]):
        params = [mix[name] for name in names]
        expected, outputs = (one.generate([START] * len(params), params) for one in (stepwise, llm))
        for name, meant, output in zip(names, expected, outputs, strict=True):
            assert visible(output) == visible(meant), name
    assert {True} in runs and {True, False} in runs
    llm.engine.scheduler.check()


@pytest.mark.parametrize("model", ["", "qwen3-next"])
@pytest.mark.parametrize("method", ["none", "ngram"])
def test_a_grammar_that_fails_within_a_run_ends_its_request_alone(
    tiny_llm, tmp_path, monkeypatch, method: str, model: str
) -> None:
    """The others run again from the tokens before the run, which their grammars and recurrent layers have left."""
    given = [model] if model else []
    names = ["json", "warm json", "regex", "free"]
    expected = tiny_llm(*given).generate([START] * len(names), [plain(MIX[name]) for name in names])
    llm = tiny_llm(*given, speculate=RUN_METHODS[method], decode_steps=6)
    runs, masks = runs_of(llm, monkeypatch), GrammarMatcher.masks

    def fail(self, output, *rest):  # type: ignore[no-untyped-def]
        if len(output) >= 5 and self is failing:
            raise ValueError("the backend failed")
        return masks(self, output, *rest)

    monkeypatch.setattr(GrammarMatcher, "masks", fail)
    for name in names:
        llm.engine.add(START, MIX[name], name)
    failing = llm.engine.parents["warm json"].requests[0].grammar
    ended = {}
    while not llm.engine.is_idle:
        ended.update({output.request_id: output for output in llm.engine.step() if output.finished})
    for name, output in zip(names, expected, strict=True):
        if name == "warm json":
            assert ended[name].completions[0].finish_reason == "error"
        else:
            assert visible(ended[name]) == visible(output), name
            assert ended[name].stats.preemptions == (1 if model else 0), "it failed in one run and in no other"
    assert {True, False} in runs
    llm.engine.scheduler.check()


SHAPES = {
    "all right": {"wrong": 1000, "width": 6},
    "half right": {"wrong": 2, "width": 3},
    "always wrong": {"wrong": 1, "width": 5},
    "tree": {"wrong": 1000, "width": 15, "branches": 3},
    "tree, partly wrong": {"wrong": 4, "width": 8, "branches": 2},
}


@pytest.mark.parametrize(
    ("name", "shape"),
    [(name, shape) for name in ("warm json", "grammar") for shape in SHAPES]
    + [("json", "tree"), ("warm choice", "tree")],
)
def test_chains_and_trees_at_any_acceptance(tiny_llm, expected, name: str, shape: str) -> None:
    (answer,), _ = expected[name]
    oracle.TEXTS[tuple(START)] = answer[0]
    llm = tiny_llm(speculate=with_options("laws.oracle", adaptive="false", **SHAPES[shape]), max_step_tokens=64)
    output = llm.generate(START, MIX[name])[0]
    assert visible(output) == expected[name]
    spec_stats = output.stats.speculation
    if shape == "all right":  # nor was anything cut off that the grammar allows; the end itself counts as the target's
        assert spec_stats.drafted - spec_stats.accepted <= 1
        assert len(answer[0]) < 3 or spec_stats.accepted > 0
    if shape == "always wrong":
        assert spec_stats.accepted == 0
    for step, partial in enumerate(llm.stream(START, MIX[name])):
        if step in (0, 2):
            llm.engine.clear_cache()
        output = partial
    assert visible(output) == expected[name]


@pytest.mark.parametrize("verify", ["rejection", "block"])
def test_other_verifications_keep_the_shape(tiny_llm, tmp_path, verify: str) -> None:
    own = ",".join(f"{key}={value}" for key, value in tiny_heads.make("eagle3", tmp_path).items())
    llm = tiny_llm(speculate=f"eagle3:adaptive=no,width=4,draft=probabilistic,verify={verify},{own}")
    for name, has_shape in HAS_SHAPE.items():
        outputs = llm.generate([START] * 4, [replace(MIX[name], seed=seed) for seed in range(4)])
        assert all(has_shape(one.text) for output in outputs for one in output.completions), name


def test_plain_rows_beside_shaped_ones_keep_their_bits(tiny_llm) -> None:
    free = [replace(BASE, temperature=0.8, logprobs=5), replace(BASE, logprobs=5)]
    llm = tiny_llm()
    alone = [visible(output) for output in llm.generate([PROMPT] * 2, free)]
    mixed = llm.generate([PROMPT] * 4, [free[0], MIX["json"], MIX["warm regex"], free[1]])
    assert [visible(mixed[0]), visible(mixed[3])] == alone


def test_log_probabilities_are_the_models_own(tiny_llm) -> None:
    llm = tiny_llm()
    free = llm.generate(PROMPT, replace(BASE, max_tokens=1, logprobs=5))[0].completions[0]
    shaped = llm.generate(PROMPT, replace(MIX["choice"], logprobs=5))[0].completions[0]
    assert shaped.logprobs[0].top == free.logprobs[0].top and shaped.logprobs[0].rank > 1


def test_a_cut_answer_begins_as_the_whole_one(tiny_llm) -> None:
    llm = tiny_llm()
    whole = llm.generate(PROMPT, MIX["json"])[0].completions[0]
    cut = llm.generate(PROMPT, replace(MIX["json"], max_tokens=5))[0].completions[0]
    assert cut.finish_reason == "length" and cut.token_ids == whole.token_ids[:5]
    stopped = llm.generate(PROMPT, replace(MIX["json"], stop=":"))[0].completions[0]
    assert stopped.stop_reason == ":" and whole.text.startswith(stopped.text)


@pytest.mark.parametrize("decode_steps", [1, 4])
def test_a_finished_shape_ends_before_min_tokens(tiny_llm, decode_steps: int) -> None:
    for speculate in ("none", "ngram:adaptive=no"):
        params, llm = replace(MIX["choice"], min_tokens=50), tiny_llm(speculate=speculate, decode_steps=decode_steps)
        output = llm.generate(PROMPT, params)[0].completions[0]
        assert output.finish_reason == "stop" and output.text in CHOICES


@pytest.mark.parametrize("decode_steps", [1, 4])
@pytest.mark.parametrize("speculate", ["none", "ngram:adaptive=no", "laws.oracle:adaptive=no"])
def test_bans_that_leave_nothing_end_in_an_error(tiny_llm, speculate: str, decode_steps: int) -> None:
    """After `y` the grammar wants `e`, which is banned: the request ends alone, and says why."""
    llm = tiny_llm(speculate=speculate, decode_steps=decode_steps)
    start, banned = (3 + ord(letter) - 32 for letter in "ye")
    oracle.TEXTS[tuple(PROMPT)] = [start, banned, 5, 5]
    params = asks("choice", '["yes"]', banned_token_ids=[banned])
    only = asks("choice", '["yes"]', allowed_token_ids=[start])
    outputs = llm.generate([PROMPT] * 3, [params, only, replace(BASE, speculate=decode_steps == 1 and "ngram")])
    for output in outputs[:2]:
        assert output.completions[0].finish_reason == "error" and output.completions[0].text == "y"
        assert "no token is left" in str(output.completions[0].stop_reason)
    assert outputs[2].completions[0].finish_reason == "length"


@pytest.mark.parametrize("decode_steps", [1, 4])
def test_a_word_that_a_draft_would_complete_is_banned(tiny_llm, decode_steps: int) -> None:
    """The prompt makes `yes` the draft after `a`. After `y` the grammar wants `e`, which completes a banned word."""
    llm = tiny_llm(speculate="ngram:adaptive=no", decode_steps=decode_steps)
    prompt = [3 + ord(letter) - 32 for letter in "kayes.kayes."]
    params = asks("choice", '["kayes"]', bad_words=("ye",))
    (output,) = llm.generate([prompt], params)
    assert output.completions[0].finish_reason == "error" and output.completions[0].text == "kay"
    assert output.completions[0].token_ids == [*prompt[:3], 2]  # the end of an incomplete text
    assert output.stats.speculation.drafted > 0


def test_a_shape_that_the_vocabulary_cannot_spell_ends_in_an_error(tiny_llm) -> None:
    output = tiny_llm().generate(PROMPT, asks("choice", json.dumps(["a☃"])))[0].completions[0]
    assert output.finish_reason == "error" and output.text == "a"


def test_a_bad_shape_is_refused_before_anything_runs(tiny_llm) -> None:
    llm = tiny_llm()
    with pytest.raises(UserError, match=r"JSON schema that cannot be used \(Unimplemented keys"):
        llm.generate(PROMPT, asks("json", '{"not": {}}'))
    assert llm.engine.is_idle and not llm.engine.parents
