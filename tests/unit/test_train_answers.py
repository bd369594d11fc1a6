"""Answers of the target: independent of batches, without duplicates, split by prompt, and none lost."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import shutil
import stat
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import tiny
from outrider import LLM, SamplingParams
from outrider.errors import UserError
from outrider.input_processor import mix
from outrider.train.data import answers
from outrider.train.data.answers import (
    SELF_WRITTEN,
    AnswerPlan,
    AnswerTask,
    answer_tasks,
    default_modes,
    write_answers,
)
from outrider.train.data.store import Store

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role[0] }}:{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>a:{% endif %}"
)
PROMPTS = [f"prompt number {number}" for number in range(12)]
PLAN = AnswerPlan(tokens=300, max_new=12, held_out=0.25, longest=96)
OWN = replace(PLAN, self_prompted=0.6, max_new=44)
SHARD_BYTES = 1_500


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a chat template, whose texts end sooner than random ones would."""
    made = tiny.copy("llama", tmp_path_factory.mktemp("chatty"))
    tensors = load_file(made / "model.safetensors")
    tensors["lm_head.weight"][2] *= 2
    save_file(tensors, made / "model.safetensors", {"format": "pt"})
    (made / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": TEMPLATE}))
    return made


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), backend="cpu", max_requests=4, cache_tokens=4096)


@pytest.fixture
def write(llm: LLM, tmp_path: Path) -> Callable[..., Store]:
    numbers = itertools.count()

    def run(prompts: list[str] = PROMPTS, plan: AnswerPlan = PLAN, own: LLM = llm, to: Path | None = None) -> Store:
        with Store(to or tmp_path / f"store-{next(numbers)}", SHARD_BYTES) as store:
            write_answers(own, prompts, plan, store)
        return Store(store.folder)

    return run


def contents(store: Store) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(store.folder.iterdir())}


def rows(store: Store) -> list[tuple[int, int, list[int], list[int]]]:
    """Of each document its number, that of its prompt, the tokens of its prompt and those of its answer."""
    listed = store.documents()
    texts = [store.tokens(index).tolist() for index in range(len(store))]
    cuts = zip(texts, listed.prompt_lengths.tolist(), strict=True)
    parts = [(text[:cut], text[cut:]) for text, cut in cuts]
    return [(*each, *part) for *each, part in zip(listed.numbers.tolist(), listed.prompts.tolist(), parts, strict=True)]


def answer(llm: LLM, prompt: list[int], **params: Any) -> list[int]:
    return llm.generate([prompt], SamplingParams(**params))[0].completions[0].token_ids


def asked(llm: LLM, text: str) -> list[int]:
    return llm.chat_prompt([{"role": "user", "content": text}])


def test_documents_equal_engine_outputs(llm: LLM, write: Callable[..., Store]) -> None:
    store = write()
    assert PLAN.tokens <= store.answered < PLAN.tokens + PLAN.max_new
    wanted = list(itertools.islice(answer_tasks(PLAN, len(PROMPTS)), 100))
    assert len({each.temperature for each in wanted}) == 3
    for number, prompt, tokens, written in rows(store):
        task = wanted[number]
        assert task.prompt == prompt and tokens == asked(llm, PROMPTS[prompt])
        sampling = {"temperature": task.temperature, "top_p": task.top_p, "seed": task.seed}
        assert written == answer(llm, tokens, max_tokens=PLAN.max_new, **sampling)
    temperatures = [wanted[number].temperature for number, *_ in rows(store)]
    assert store.documents().temperatures.tolist() == pytest.approx(temperatures)


def test_the_end_token_belongs_to_the_answer(write: Callable[..., Store]) -> None:
    found = [written for *_, written in rows(write(plan=replace(PLAN, max_new=44, tokens=1500)))]
    ended = [2 in written for written in found]
    assert any(ended) and not all(ended)
    assert all(written.index(2) == len(written) - 1 if 2 in written else len(written) == 44 for written in found)


def test_batch_size_does_not_change_answers(folder: Path, write: Callable[..., Store]) -> None:
    one, many = (LLM(str(folder), backend="cpu", max_requests=count, cache_tokens=4096) for count in (1, 9))
    assert contents(write(plan=OWN, own=one)) == contents(write(plan=OWN, own=many))


def test_the_seed_changes_the_answers(write: Callable[..., Store]) -> None:
    assert contents(write()) != contents(write(plan=replace(PLAN, seed=1)))


class StopError(BaseException):
    pass


@pytest.mark.parametrize("plan", [PLAN, replace(OWN, tokens=700)], ids=["given", "own"])
def test_a_stopped_run_resumes(llm: LLM, write: Callable[..., Store], tmp_path: Path, plan: AnswerPlan) -> None:
    whole = write(plan=plan)
    counts: list[int] = []
    for _ in range(3):

        def stop(documents: int, *_: int, before: int = counts[-1] if counts else 0) -> None:
            if documents > before + 2:
                raise StopError

        with Store(tmp_path / "stopped", SHARD_BYTES) as store, pytest.raises(StopError):
            write_answers(llm, PROMPTS, plan, store, stop)
        assert llm.engine.is_idle and not llm.engine.parents
        counts.append(len(Store(tmp_path / "stopped")))
    assert counts == sorted(set(counts)) and 0 < counts[-1] < len(whole)
    assert contents(write(plan=plan, to=tmp_path / "stopped")) == contents(whole)


def test_a_killed_run_resumes(llm: LLM) -> None:
    with tempfile.TemporaryDirectory() as name, Store(Path(name) / "whole", SHARD_BYTES) as whole:
        write_answers(llm, PROMPTS, PLAN, whole)
        last = max(path.stem[-5:] for path in whole.folder.glob("tokens-*"))
        assert last != "00000"

        @settings(max_examples=15)
        @given(tokens=st.integers(0, SHARD_BYTES), index=st.integers(0, 400))
        def cut_anywhere(tokens: int, index: int) -> None:
            with tempfile.TemporaryDirectory() as killed:
                for path in whole.folder.iterdir():
                    size = {f"tokens-{last}": tokens, f"index-{last}": index}.get(path.stem)
                    (Path(killed) / path.name).write_bytes(path.read_bytes()[:size])
                with Store(killed, SHARD_BYTES) as store:
                    write_answers(llm, PROMPTS, PLAN, store)
                assert contents(store) == contents(whole)

        cut_anywhere()


def test_existing_answers_are_not_written_again(llm: LLM, write: Callable[..., Store], monkeypatch) -> None:
    store = write()
    before, real = contents(store), llm.engine.add
    wanted = list(itertools.islice(answer_tasks(PLAN, len(PROMPTS)), 100))
    there = {wanted[number].seed for number, *_ in rows(store)}

    def add(prompt: Any, params: SamplingParams) -> str:
        assert params.seed not in there
        return real(prompt, params)

    monkeypatch.setattr(llm.engine, "add", add)
    assert contents(write(to=store.folder)) == before
    assert len(write(plan=replace(PLAN, tokens=400), to=store.folder)) > len(there)


def test_a_run_can_be_extended_with_more_tokens(write: Callable[..., Store]) -> None:
    at_once = write(plan=replace(PLAN, tokens=450))
    first = write()
    assert contents(write(plan=replace(PLAN, tokens=450), to=first.folder)) == contents(at_once)


@pytest.mark.parametrize("change", [{"seed": 1}, {"max_new": 13}, {"held_out": 0.5}, {"longest": 90}])
def test_another_plan_is_refused(write: Callable[..., Store], change: dict[str, Any]) -> None:
    store = write()
    with pytest.raises(UserError, match=f"was started with `{next(iter(change))}`"):
        write(plan=replace(PLAN, **change), to=store.folder)
    with pytest.raises(UserError, match="was started with `prompts`"):
        write(PROMPTS[:-1], to=store.folder)


def test_a_full_disk_keeps_flushed_answers(llm: LLM, write: Callable[..., Store], tmp_path: Path, monkeypatch) -> None:
    whole = write()
    real, left = os.write, [700]

    def stingy(handle: int, content: memoryview) -> int:
        if stat.S_ISREG(os.fstat(handle).st_mode):  # other threads write to pipes
            left[0] -= len(content)
            if left[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(handle, content)

    monkeypatch.setattr(answers, "FLUSH_SECONDS", 0.0)
    monkeypatch.setattr(os, "write", stingy)
    with pytest.raises(UserError, match=r"no space left on device; \d+ answers are kept"):
        write(to=tmp_path / "full")
    assert llm.engine.is_idle and not llm.engine.parents
    assert 0 < len(Store(tmp_path / "full")) < len(whole)
    left[0] = 10**9
    assert contents(write(to=tmp_path / "full")) == contents(whole)


def test_equal_answers_are_kept_once(write: Callable[..., Store], caplog: pytest.LogCaptureFixture) -> None:
    """So cold that every sample of a prompt is the greedy one: the run ends though it has not what was asked for."""
    cold = replace(PLAN, temperatures=((0.0, 1.0, 0.5), (1e-4, 1.0, 0.5)), tokens=1000)
    begun = write(plan=replace(cold, tokens=50))
    with caplog.at_level(logging.WARNING):
        found = rows(write(plan=cold, to=begun.folder))
    assert len(found) == len(PROMPTS) == len({prompt for _, prompt, *_ in found})
    assert "not 1000: no new answers come" in caplog.text


def test_greedy_alone_ends_with_one_answer_each(write: Callable[..., Store]) -> None:
    assert len(write(plan=replace(PLAN, temperatures=((0.0, 1.0, 1.0),), tokens=1000))) == len(PROMPTS)


def test_all_answers_of_a_prompt_are_on_one_side(write: Callable[..., Store]) -> None:
    store = write(plan=replace(PLAN, tokens=600))
    sides = defaultdict(set)
    for (_, prompt, *_), held_out in zip(rows(store), store.documents().held_out.tolist(), strict=True):
        sides[prompt].add(held_out)
    assert len(store) > 2 * len(PROMPTS)
    assert sorted(map(len, sides.values())) == [1] * len(PROMPTS)
    assert {True, False} == set().union(*sides.values())


def test_the_split_depends_on_share_and_seed(write: Callable[..., Store]) -> None:
    prompts = [f"question {number}" for number in range(200)]
    greedy = AnswerPlan(tokens=200, max_new=1, temperatures=((0.0, 1.0, 1.0),), held_out=0.3, longest=96)
    first, second = (write(prompts, replace(greedy, seed=seed)) for seed in (0, 1))
    sides = [dict(zip(s.documents().prompts, s.documents().held_out, strict=True)) for s in (first, second)]
    assert 40 < sum(sides[0].values()) < 80
    assert sides[0] != sides[1]


def test_tasks_follow_the_plan() -> None:
    plan = AnswerPlan(tokens=1, self_prompted=0.25)
    found = list(itertools.islice(answer_tasks(plan, 2000), 8000))
    assert [each.number for each in found] == list(range(8000))
    given_ones = [each for each in found if each.prompt != SELF_WRITTEN]
    assert 0.23 < 1 - len(given_ones) / 8000 < 0.27
    first = given_ones[:2000]
    assert sorted(each.prompt for each in first) == list(range(2000)) != [each.prompt for each in first]
    shares = Counter(each.temperature for each in first)
    assert [round(shares[each] / 2000, 1) for each in (0.0, 0.7, 1.0)] == [0.5, 0.3, 0.2]
    assert {each.top_p for each in first if each.temperature == 0.7} == {0.95}
    assert max(Counter(each.prompt for each in given_ones if each.temperature == 0).values()) == 1
    assert len({each.seed for each in found}) == 8000
    assert list(itertools.islice(answer_tasks(replace(plan, tokens=9), 2000), 8000)) == found


def test_sampled_modes_keep_their_proportion() -> None:
    assert default_modes(0.5) == AnswerPlan(tokens=1).temperatures
    for greedy in (0.0, 0.2, 1.0):
        shares = [share for _, _, share in default_modes(greedy)]
        assert shares == pytest.approx([greedy, 0.6 * (1 - greedy), 0.4 * (1 - greedy)])
    found = list(answer_tasks(AnswerPlan(tokens=1, temperatures=default_modes(1.0)), 50))
    assert len(found) == 50 and {each.temperature for each in found} == {0.0}


def own_texts(llm: LLM, store: Store) -> dict[int, str]:
    """By the numbers of their documents, the prompts that the target wrote."""
    before, after = "<s>u:", "</s><s>a:"
    texts = {n: llm.tokenizer.decode(p, skip_special=False) for n, which, p, _ in rows(store) if which == SELF_WRITTEN}
    assert all(text.startswith(before) and text.endswith(after) for text in texts.values())
    return {number: text.removeprefix(before).removesuffix(after) for number, text in texts.items()}


def test_the_target_prompts_itself(llm: LLM, write: Callable[..., Store]) -> None:
    plan = replace(OWN, tokens=800)
    store = write(plan=plan)
    texts, wanted = own_texts(llm, store), list(itertools.islice(answer_tasks(plan, len(PROMPTS)), 200))
    assert 3 < len(texts) == len(set(texts.values())) < len(store)
    for number, prompt, tokens, written in rows(store):
        if prompt != SELF_WRITTEN:
            continue
        task = wanted[number]
        opening = llm.tokenizer.encode("<s>u:", add_special=False)
        own = answer(llm, opening, temperature=1.0, top_p=0.95, seed=mix(task.seed, 0), max_tokens=44)
        assert own[-1] == 2 and llm.tokenizer.decode(own).strip() == texts[number]
        sampling = {"temperature": task.temperature, "top_p": task.top_p, "seed": task.seed}
        assert written == answer(llm, tokens, max_tokens=plan.max_new, **sampling)


def test_the_target_needs_no_prompts(llm: LLM, write: Callable[..., Store]) -> None:
    store = write([], OWN)
    assert len(own_texts(llm, store)) == len(store) > 0


def test_a_self_written_prompt_that_was_given_is_left_out(llm: LLM, write: Callable[..., Store]) -> None:
    texts = own_texts(llm, write(plan=OWN))
    number, text = next(iter(texts.items()))
    others = own_texts(llm, write([*PROMPTS, f" {text}"], OWN))
    assert number not in others and text not in others.values()
    assert set(others) & set(texts)


def test_equal_self_written_prompts_are_answered_once(
    llm: LLM, write: Callable[..., Store], tmp_path: Path, monkeypatch
) -> None:
    number = min(own_texts(llm, write(plan=OWN)))  # one that it answered
    seed = next(itertools.islice(answer_tasks(OWN, len(PROMPTS)), number, None)).seed

    def same_seed(*given: Any) -> Iterator[AnswerTask]:
        """Yield the tasks such that the target always writes the same prompt."""
        tasks = answer_tasks(*given)
        return (replace(task, seed=seed) if task.prompt == SELF_WRITTEN else task for task in tasks)

    monkeypatch.setattr(answers, "answer_tasks", same_seed)
    first = write(plan=replace(OWN, tokens=500))
    more = write(plan=replace(OWN, tokens=700), to=Path(shutil.copytree(first.folder, tmp_path / "more")))
    assert len(more) > len(first)
    assert len(own_texts(llm, first)) == len(own_texts(llm, more)) == 1


@pytest.mark.parametrize("template", [None, "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"])
def test_a_model_without_a_suitable_chat_template_cannot_prompt_itself(
    write: Callable[..., Store], tmp_path: Path, template: str | None
) -> None:
    model = tiny.copy("llama", tmp_path / "model")
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": template}))
    llm = LLM(str(model), backend="cpu", cache_tokens=2048, max_requests=4)
    with pytest.raises(UserError, match="pass `--self-prompts 0`"):
        write(plan=OWN, own=llm)
    prompts = [prompt for _, _, prompt, _ in rows(write(own=llm))]
    if template is None:
        assert all(llm.tokenizer.decode(prompt) in PROMPTS for prompt in prompts)


def test_long_prompts_are_left_out(llm: LLM, write: Callable[..., Store]) -> None:
    overhead = len(asked(llm, ""))
    fitting, long = "x" * (48 - overhead), "y" * (49 - overhead)
    found = rows(write([long, fitting], replace(PLAN, tokens=60, max_new=60)))
    assert {prompt for _, prompt, *_ in found} == {1}
    assert max(len(tokens) + len(written) for _, _, tokens, written in found) <= 96
    with pytest.raises(UserError, match="none of 1 prompts was answered, those of more than 48 tokens"):
        write([long])


def test_a_request_that_fails_is_left_out(llm: LLM, write: Callable[..., Store], monkeypatch) -> None:
    bad, real = asked(llm, PROMPTS[3]), llm.engine.runner.step

    def step(given: Any) -> Any:
        if any(row.request.prompt == bad and len(row.request.output) > 3 for row in given.rows):
            raise RuntimeError("no")
        return real(given)

    monkeypatch.setattr(llm.engine.runner, "step", step)
    assert {prompt for _, prompt, *_ in rows(write())} == set(range(len(PROMPTS))) - {3}


def test_answers_are_not_detokenized(llm: LLM, write: Callable[..., Store], monkeypatch) -> None:
    monkeypatch.setattr(llm.tokenizer, "decode", lambda *_: pytest.fail("decoded"))
    assert len(write())


def test_progress_is_reported(llm: LLM, tmp_path: Path) -> None:
    heard: list[tuple[int, int, int]] = []
    with Store(tmp_path) as store:
        write_answers(llm, PROMPTS, PLAN, store, lambda *progress: heard.append(progress))
        assert heard == sorted(heard) and heard[-1] == (len(store), store.answered, PLAN.tokens)


WRONG = [{"tokens": 0}, {"held_out": 1.5}, {"self_prompted": -0.1}, {"temperatures": ()}, {"seed": -1}]


@pytest.mark.parametrize("change", WRONG, ids=lambda change: next(iter(change)))
def test_invalid_plans_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"`{next(iter(change))}`"):
        replace(PLAN, **change)
