"""The Python interface: what it takes, what it refuses by name, and what users of vLLM expect of it."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

from outrider import LLM, AsyncLLM, SamplingParams, StructuredOutput, UserError
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
    assert "expected one of activations, backend" in refusal(lambda: make_config("x", {"colour": "red"}))


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
