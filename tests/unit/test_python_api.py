"""The Python interface: what it takes, what it refuses by name, and what users of vLLM expect of it."""

from __future__ import annotations

import asyncio
import inspect
import json
import pickle
import shutil
import weakref
from collections.abc import AsyncIterator, Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

from outrider import LLM, AsyncLLM, Output, SamplingParams, StructuredOutput, UserError
from outrider.async_llm import EngineStoppedError
from outrider.config import OPTION_ALIASES, EngineConfig, EngineOptions, check, make_config
from refusals import refusal

DOCS = Path(__file__).parents[2] / "docs"

# ---- options of the engine ----


def test_keywords_are_typed_so_that_editors_and_mypy_know_them() -> None:
    hints, known = get_type_hints(EngineOptions), get_type_hints(EngineConfig)
    known.pop("model")
    known |= {other: known[name] for other, name in OPTION_ALIASES.items()}
    assert hints == known
    for kind in (LLM, AsyncLLM):
        assert inspect.signature(kind).parameters["options"].annotation == "Unpack[EngineOptions]"


def test_unknown_keywords_are_refused_with_the_nearest_name() -> None:
    assert refusal(lambda: LLM("x", speculat="ngram")) == "no option called `speculat`: did you mean `speculate`?"  # type: ignore[call-arg]
    assert "expected one of activations, always_draft, backend" in refusal(lambda: make_config("x", {"zzz": "red"}))


def test_vllms_names_of_options() -> None:
    names = {"max_model_len": 64, "max_num_seqs": 3, "max_num_batched_tokens": 32}
    config = make_config("x", names)
    assert (config.max_context, config.max_requests, config.max_step_tokens) == (64, 3, 32)
    for both in ({"max_model_len": 64, "max_context": 64}, {"max_context": 64, "max_model_len": 64}):
        assert "`max_model_len` is another name of `max_context`" in refusal(lambda both=both: make_config("x", both))


@pytest.mark.parametrize("field", fields(EngineConfig), ids=lambda field: field.name)
def test_options_of_another_type_are_refused_by_name(field: Any) -> None:
    with pytest.raises(UserError, match=rf"`{field.name}` is <obj.*>: expected "):
        check(make_config("x", {field.name: object()}) if field.name != "model" else EngineConfig(model=object()))  # type: ignore[arg-type]


def test_a_model_may_be_a_path(tiny_folder, tmp_path) -> None:
    assert LLM(tiny_folder(), backend="cpu", cache_tokens=64).resolved.max_context == 64
    assert f"no model at `{Path.cwd() / 'org/name'}`" in refusal(lambda: LLM(Path("org/name")))


# ---- sampling parameters ----

WRONG = [object(), "hot", 0.5, True, [0.5], {"a": "b"}, b"x"]
RIGHT: dict[str, tuple[Any, ...]] = {  # of WRONG, the values that a field takes
    "str": ("hot",),
    "float": (0.5,),
    "bool": (True,),
    "Mapping[int, float]": (),
}


@pytest.mark.parametrize("field", fields(SamplingParams), ids=lambda field: field.name)
def test_parameters_of_another_type_are_refused_by_name(field: Any) -> None:
    taken = [value for kind in field.type.split(" | ") for value in RIGHT.get(kind, ())]
    for value in WRONG:
        if not any(value is each for each in taken):
            with pytest.raises(UserError, match=f"`{field.name}` is "):
                SamplingParams(**{field.name: value})


def test_vllms_none_leaves_a_list_at_its_default() -> None:
    names = ("stop", "stop_token_ids", "bad_words", "banned_token_ids", "logit_bias", "allowed_token_ids", "prediction")
    params = SamplingParams(**dict.fromkeys(names))  # type: ignore[arg-type]
    assert params == SamplingParams() and pickle.loads(pickle.dumps(params)) == params


def test_numbers_of_numpy_are_numbers(tiny_llm) -> None:
    ids = np.array([5, 6])
    params = SamplingParams(temperature=np.float32(0.5), max_tokens=np.int64(3), stop_token_ids=ids, seed=np.int64(4))
    plain = SamplingParams(temperature=0.5, max_tokens=3, stop_token_ids=[5, 6], seed=4)
    llm = tiny_llm()
    found, expected = (llm.generate([[5, 6]], each)[0].completions[0] for each in (params, plain))
    assert found.token_ids == expected.token_ids


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams)])
def test_every_parameter_is_documented(name: str) -> None:
    assert f"        {name}: " in (SamplingParams.__doc__ or "")
    assert f"`{name}`" in (DOCS / "guide.md").read_text().partition("## Sampling parameters")[2]


@pytest.mark.parametrize("name", [name for name in get_type_hints(EngineOptions)])
def test_every_option_is_documented(name: str) -> None:
    assert f"`{name}`" in (DOCS / "reference/python.md").read_text()


def test_a_schema_may_be_a_mapping_and_choices_a_list() -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}}
    made = StructuredOutput("json", schema)
    assert made == StructuredOutput("json", made.text) and made.text.startswith('{"type": "object"')
    assert hash(made) == hash(StructuredOutput("json", schema))
    assert StructuredOutput("choice", ["yes", "no"]) == StructuredOutput("choice", '["yes", "no"]')
    assert "expected a JSON schema" in refusal(lambda: StructuredOutput("json", 5))  # type: ignore[arg-type]
    assert "expected a list of texts" in refusal(lambda: StructuredOutput("choice", {"a": 1}))
    assert "expected a text" in refusal(lambda: StructuredOutput("regex", {}))
    assert "cannot be written as JSON" in refusal(lambda: StructuredOutput("json", {"a": set()}))


# ---- prompts ----

PARAMS = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
TEXT = "hello"


TEMPLATE = "{% for message in messages %}{{ message.role }} {{ message.content }}|{% endfor %}"


@pytest.fixture(scope="module")
def llm(tiny_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """With a chat template, and a context of 64 tokens."""
    folder = tmp_path_factory.mktemp("api") / "model"
    shutil.copytree(tiny_folder(), folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": TEMPLATE}))
    return LLM(folder, backend="cpu", max_model_len=64)


def tokens_of(outputs: list[Output]) -> list[list[int]]:
    return [output.completions[0].token_ids for output in outputs]


def test_vllms_prompt_mappings(llm) -> None:
    ids = llm.tokenizer.encode(TEXT)
    plain = llm.generate(TEXT, PARAMS)
    forms = [{"prompt": TEXT}, {"prompt_token_ids": ids}, {"prompt_token_ids": tuple(ids), "prompt": TEXT}, TEXT, ids]
    assert tokens_of(llm.generate(forms, PARAMS)) == tokens_of(plain) * len(forms)
    assert [output.prompt for output in llm.generate(forms, PARAMS)] == [TEXT, None, TEXT, TEXT, None]
    assert tokens_of(llm.generate(forms[0], PARAMS)) == tokens_of(plain)
    assert list(llm.stream(forms[0], PARAMS))[-1].completions == plain[0].completions
    assert tokens_of(llm.generate((each for each in forms), PARAMS)) == tokens_of(plain) * len(forms)
    assert tokens_of(llm.generate(np.array(ids), PARAMS)) == tokens_of(plain)
    assert tokens_of(llm.generate([list(np.array(ids))], PARAMS)) == tokens_of(plain)


REFUSED_PROMPTS: list[tuple[Any, str]] = [
    (None, "`prompts` is None: expected a text, "),
    (5, "`prompts` is 5: expected a text, "),
    (b"hello", "`prompts` is b'hello': expected a text, "),
    ({"a"}, "`prompts` is {'a'}: expected a text, "),
    (["a", None], "`prompts[1]` is None: expected a text, "),
    (["a", 5], "`prompts[1]` is 5: expected a text, "),
    ([[5, "a"]], "`prompts[0][1]` is 'a': expected a token id"),
    ([[5, True]], "`prompts[0][1]` is True: expected a token id"),
    ([5, 1.5], "`prompts[0]` is 5: expected a text, "),
    ({"prompt": 5}, "`prompts['prompt']` is 5: expected a text"),
    ([{"prompt_token_ids": "abc"}], "`prompts[0]['prompt_token_ids']` is 'abc': expected a list of token ids"),
    ([{"prompt_token_ids": [1, None]}], "`prompts[0]['prompt_token_ids'][1]` is None: expected a token id"),
    ({}, "`prompts` is {}: expected a text, "),
    ({"prompt": "a", "cache_salt": "b"}, "`prompts` has the key 'cache_salt': expected `prompt` or"),
    ([{"role": "user", "content": "a"}], "`prompts[0]` is a message: pass messages to `chat`"),
]


@pytest.mark.parametrize(("prompts", "message"), REFUSED_PROMPTS, ids=[message for _, message in REFUSED_PROMPTS])
def test_prompts_of_another_type_are_refused_by_name(llm, prompts: Any, message: str) -> None:
    said = refusal(lambda: llm.generate(prompts, PARAMS))
    assert said.startswith(message)
    if not isinstance(prompts, list):
        assert refusal(lambda: list(llm.stream(prompts, PARAMS))).startswith("`prompt")
    assert llm.engine.is_idle


def test_sampling_params_is_another_name_of_params(llm) -> None:
    expected = tokens_of(llm.generate([[5, 6]], PARAMS))
    assert tokens_of(llm.generate([[5, 6]], sampling_params=PARAMS)) == expected
    assert tokens_of(llm.generate([[5, 6]], sampling_params=[PARAMS])) == expected
    assert tokens_of([list(llm.stream([5, 6], sampling_params=PARAMS))[-1]]) == expected
    assert "pass only one" in refusal(lambda: llm.generate([[5, 6]], PARAMS, sampling_params=PARAMS))
    for wrong in ({"temperature": 0}, "hot", 0.5, [PARAMS, None]):
        prompts = [[5, 6]] * (2 if isinstance(wrong, list) else 1)
        assert "expected SamplingParams" in refusal(lambda p=prompts, w=wrong: llm.generate(p, w))
    assert "one for each" in refusal(lambda: llm.generate([[5, 6]], [PARAMS, PARAMS]))


def test_outputs_is_another_name_of_completions(llm) -> None:
    (output,) = llm.generate([[5, 6]], PARAMS)
    assert output.outputs is output.completions


def test_prompt_logprobs_begin_with_none_as_in_vllm(llm) -> None:
    prompts = [[5, 6, 7], [5]]
    outputs = llm.generate(prompts, replace(PARAMS, prompt_logprobs=1))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(prompt)
        first, *rest = output.prompt_logprobs
        assert first is None and [entry.token for entry in rest if entry is not None] == prompt[1:]
    for partial in llm.stream(prompts[0], replace(PARAMS, prompt_logprobs=1)):
        assert partial.prompt_logprobs is not None and partial.prompt_logprobs[0] is None


# ---- conversations ----


def test_chat_takes_one_conversation_or_several(llm) -> None:
    talks = [[{"role": "user", "content": text}] for text in ("hi", "ho")]
    alone = [llm.chat(talk, PARAMS) for talk in talks]
    assert all(isinstance(output, Output) for output in alone)
    assert tokens_of(llm.chat(talks, PARAMS)) == tokens_of(alone)
    assert tokens_of(llm.chat(tuple(talks), sampling_params=[PARAMS, PARAMS])) == tokens_of(alone)
    assert tokens_of([llm.chat(talks[0], sampling_params=PARAMS)]) == tokens_of(alone[:1])


REFUSED_TALKS: list[tuple[Any, str]] = [
    (None, "`messages` is None: expected a list of messages"),
    ("hi", "`messages` is 'hi': expected a list of messages"),
    ({"role": "user", "content": "hi"}, "`messages` is {"),
    ([[{"role": "user", "content": "hi"}], "ho"], "`messages[1]` is 'ho': expected a list of messages"),
    ([[{"role": "user", "content": "hi"}], [{"content": "ho"}]], "`messages[1]`"),
]


@pytest.mark.parametrize(("messages", "message"), REFUSED_TALKS, ids=[message for _, message in REFUSED_TALKS])
def test_conversations_of_another_type_are_refused_by_name(llm, messages: Any, message: str) -> None:
    assert message in refusal(lambda: llm.chat(messages, PARAMS))


# ---- prompts that cannot be served ----

LONG = [5] * 200


@pytest.mark.parametrize("bad", [LONG, [], [10**6], {"prompt_token_ids": LONG}, "x" * 200])
def test_a_prompt_that_cannot_be_served_is_named(llm, bad: Any) -> None:
    said = refusal(lambda: llm.generate([[5, 6], bad, [7]], PARAMS))
    assert said.startswith("`prompts[1]` ") and "`keep_going=True` answers the others" in said
    assert llm.engine.is_idle
    said = refusal(lambda: llm.generate([bad], PARAMS))
    assert said.startswith("the prompt ") and "keep_going" not in said


@pytest.mark.parametrize("bad", [LONG, [], "x" * 200])
def test_keep_going_answers_the_other_prompts(llm, bad: Any) -> None:
    shown: list[Output] = []
    params = replace(PARAMS, n=2)
    outputs = llm.generate([[5, 6], bad, [7]], params, shown.append, keep_going=True)
    expected = llm.generate([[5, 6], [7]], params)
    assert [output.completions for output in (outputs[0], outputs[2])] == [output.completions for output in expected]
    refused = outputs[1]
    assert refused.finished and refused.stats is not None and refused in shown
    assert [one.index for one in refused.completions] == [0, 1]
    for one in refused.completions:
        assert (one.text, one.token_ids, one.finish_reason) == ("", [], "error")
        assert str(one.stop_reason).startswith("`prompts[1]` ")
    assert len({output.request_id for output in outputs}) == 3
    (alone,) = llm.generate([bad], params, keep_going=True)
    assert [one.finish_reason for one in alone.completions] == ["error", "error"]
    assert str(alone.completions[0].stop_reason).startswith("the prompt ")


def test_keep_going_does_not_hide_wrong_parameters(llm) -> None:
    with pytest.raises(UserError, match="`stop_token_ids` holds token"):
        llm.generate([[5], [6]], [PARAMS, replace(PARAMS, stop_token_ids=[10**6])], keep_going=True)
    with pytest.raises(UserError, match=r"`prompts\[1\]` is None"):
        llm.generate([[5], None], PARAMS, keep_going=True)


def test_conversations_that_cannot_be_served(llm) -> None:
    talks = [[{"role": "user", "content": text}] for text in ("hi", "x" * 200)]
    assert refusal(lambda: llm.chat(talks, PARAMS)).startswith("`messages[1]` has ")
    first, second = llm.chat(talks, PARAMS, keep_going=True)
    assert first.completions[0].finish_reason == "length" and second.completions[0].finish_reason == "error"


# ---- the end ----


def test_a_closed_llm_frees_its_memory_and_says_so(tiny_llm) -> None:
    with tiny_llm() as llm:
        assert llm.generate([[5, 6]], PARAMS)[0].finished
        engine = weakref.ref(llm.engine)
    assert engine() is None
    llm.close()
    for call in (
        lambda: llm.generate([[5, 6]], PARAMS),
        lambda: next(llm.stream([5, 6], PARAMS)),
        lambda: AsyncLLM(llm),
    ):
        with pytest.raises(EngineStoppedError, match="the engine is closed: start a new one"):
            call()


def test_closing_an_llm_ends_what_runs(tiny_llm) -> None:
    llm = tiny_llm()
    stream = llm.stream([5, 6], replace(PARAMS, max_tokens=200))
    next(stream)
    shared = AsyncLLM(llm)

    async def ask() -> None:
        async for _ in shared.generate([7, 8], replace(PARAMS, max_tokens=200)):
            await asyncio.to_thread(llm.close)

    with pytest.raises(EngineStoppedError, match="closed"):
        asyncio.run(ask())
    with pytest.raises(EngineStoppedError, match="closed"):
        list(stream)
    shared.close()


def test_async_with(tiny_llm) -> None:
    llm = tiny_llm()

    async def ask() -> list[int]:
        async with AsyncLLM(llm) as served:
            async for output in served.generate({"prompt_token_ids": [5, 6]}, sampling_params=PARAMS):
                last = output
        assert not served.alive
        return last.outputs[0].token_ids

    assert asyncio.run(ask()) == tokens_of(llm.generate([[5, 6]], PARAMS))[0]


def test_async_llm_refuses_by_name(llm) -> None:
    async def first(iterator: AsyncIterator[Output]) -> Output:
        return await anext(iterator)

    async def ask(prompt: Any, *arguments: Any) -> Output:
        async with AsyncLLM(llm) as served:
            return await first(served.generate(prompt, *arguments))

    for wrong in (None, 5, ["a", "b"], {"role": "user"}):
        assert refusal(lambda wrong=wrong: asyncio.run(ask(wrong, PARAMS))).startswith("`prompt")
    assert "expected SamplingParams" in refusal(lambda: asyncio.run(ask([5], {"temperature": 0})))
