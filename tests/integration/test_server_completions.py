"""`POST /v1/completions`: prompts, parameters, response fields; and the endpoints that do not generate."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

from outrider import LLM, SamplingParams
from outrider.server.app import build_app
from outrider.server.options import ServerOptions
from waiting import wait_until

PROMPT = "once upon a time, "
ENDLESS = {"temperature": 0, "ignore_eos": True, "max_tokens": 12}
ENGINE = {"max_requests": 8, "speculate": "ngram:adaptive=no"}


@pytest.fixture(scope="module")
def client(llm) -> TestClient:
    return TestClient(build_app(llm, ServerOptions(names=("tiny", "small"))))


@pytest.fixture(scope="module")
def ask(client) -> Any:
    def post(prompt: Any = PROMPT, **fields: Any) -> dict[str, Any]:
        response = client.post("/v1/completions", json={"prompt": prompt, **ENDLESS, **fields})
        assert response.status_code == 200, response.text
        return response.json()

    return post


def engine_text(plain: LLM, prompt: Any = PROMPT, **fields: Any) -> str:
    return plain.generate([prompt], SamplingParams(**{**ENDLESS, **fields}))[0].completions[0].text


def test_a_completion_response_has_openais_fields(ask, llm, plain) -> None:
    answer = ask(speculate=False)
    assert set(answer) == {"id", "object", "created", "model", "choices", "usage"}
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
    [choice] = answer["choices"]
    assert choice == {
        "index": 0,
        "text": engine_text(plain),
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    assert len(choice["text"]) > 0
    usage = answer["usage"]
    prompt = len(llm.llm.tokenizer.encode(PROMPT))
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (prompt, 12, prompt + 12)


def test_cached_tokens_are_counted_in_the_usage(ask, llm) -> None:
    prompt = [5 + index % 7 for index in range(40)]
    first, second = ask(prompt), ask(prompt)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
    assert first["choices"] == second["choices"]


@pytest.mark.parametrize("several", [["the cat", "a dog, "], [[5, 6, 7], [8, 9]]], ids=["texts", "tokens"])
def test_several_prompts_return_several_choices(ask, several) -> None:
    answer = ask(several, n=2, temperature=1, seed=3)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    alone = [ask(prompt, n=2, temperature=1, seed=3) for prompt in several]
    assert [choice["text"] for choice in answer["choices"]] == [c["text"] for one in alone for c in one["choices"]]
    assert len({choice["text"] for choice in answer["choices"]}) == 4
    for part in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer["usage"][part] == sum(one["usage"][part] for one in alone)


def test_a_prompt_as_tokens_equals_the_same_prompt_as_text(ask, llm) -> None:
    assert ask(llm.llm.tokenizer.encode(PROMPT))["choices"] == ask(PROMPT)["choices"]


# What each parameter does is tested in its own room; here, that it arrives there.
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0, "seed": 7},
        {"temperature": 1.0, "seed": 7, "top_p": 0.5},
        {"temperature": 1.0, "seed": 7, "top_k": 3},
        {"temperature": 1.0, "seed": 7, "min_p": 0.2},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"repetition_penalty": 5.0},
        {"allowed_token_ids": [40, 41]},
        {"max_tokens": 3},
        {"min_tokens": 5, "ignore_eos": False},
    ],
    ids=lambda fields: list(fields)[-1],
)
def test_sampling_parameters_reach_the_engine(ask, plain, fields) -> None:
    text = ask(**fields)["choices"][0]["text"]
    assert text == engine_text(plain, **fields)
    if "min_tokens" not in fields:
        assert text != engine_text(plain)


def test_logit_bias_accepts_token_ids_as_strings(ask) -> None:
    assert ask(logit_bias={"40": 100})["choices"][0]["text"] == ask(allowed_token_ids=[40])["choices"][0]["text"]


def test_bad_words_are_not_generated(ask) -> None:
    said = ask()["choices"][0]["text"]
    assert said[0] not in ask(bad_words=[said[0]])["choices"][0]["text"]
    assert ask(bad_words=["\0"])["choices"][0]["text"] == said  # no token says it


def test_stop_strings_and_stop_tokens_end_the_text(ask, llm) -> None:
    whole = ask(max_tokens=24)["choices"][0]["text"]
    word = whole[4:6]
    at = whole.index(word)
    [choice] = ask(max_tokens=24, stop=word)["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (whole[:at], "stop", word)
    [choice] = ask(max_tokens=24, stop=[word], include_stop_str_in_output=True)["choices"]
    assert choice["text"] == whole[: at + 2]
    token = llm.llm.tokenizer.encode(whole[4], add_special=False)[0]
    [choice] = ask(max_tokens=24, stop_token_ids=[token])["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", token)


def test_logprobs_list_the_top_tokens_and_the_sampled_one(ask) -> None:
    found = ask(logprobs=2, temperature=1, seed=5)["choices"][0]
    logprobs = found["logprobs"]
    assert {len(part) for part in logprobs.values()} == {12}
    assert "".join(logprobs["tokens"]) == found["text"]
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[token] == logprob <= 0
        assert 2 <= len(top) <= 3
    assert [found["text"][at] for at in logprobs["text_offset"]] == logprobs["tokens"]


@pytest.mark.parametrize("count", [0, 1])
def test_echo_returns_the_logprobs_of_the_prompt(ask, plain, count) -> None:
    """As lm-eval needs: the prompt's tokens, each with its logprob, the first without one."""
    prompt = [5, 6, 7, 8]
    found = ask(prompt, echo=True, logprobs=1, max_tokens=count)
    [choice] = found["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith(plain.tokenizer.decode(prompt))
    assert found["usage"]["completion_tokens"] == count
    assert choice["finish_reason"] == "length"
    assert {len(part) for part in logprobs.values()} == {len(prompt) + count}
    assert [choice["text"][at] for at in logprobs["text_offset"]] == logprobs["tokens"]
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    [output] = plain.generate([prompt], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1))
    body = [entry.logprob for entry in output.prompt_logprobs[1:]]
    assert logprobs["token_logprobs"][1 : len(prompt)] == body
    assert all(max(top.values()) >= own for top, own in zip(logprobs["top_logprobs"][1:], body, strict=False))


def test_prompt_logprobs_have_vllms_format(ask) -> None:
    [choice] = ask([5, 6, 7], prompt_logprobs=2)["choices"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None and len(rest) == 2
    assert set(rest[0]["6"]) == {"logprob", "rank", "decoded_token"}
    assert {entry["rank"] for entry in rest[0].values()} >= {1, 2}


def test_speculation_metrics_are_returned_and_the_text_is_unchanged(ask) -> None:
    plain, drafted = ask(max_tokens=40, speculate=False), ask(max_tokens=40, speculate="ngram")
    assert plain["choices"] == drafted["choices"]
    assert "metrics" not in plain
    body = drafted["metrics"]["speculative_decoding"]
    histogram = body["acceptance_histogram"]
    assert len(histogram) == body["num_spec_tokens"] + 1
    assert sum(histogram) == body["num_spec_steps"] > 0
    assert sum(kept * steps for kept, steps in enumerate(histogram)) == body["num_accepted_draft_tokens"]
    assert body["mean_acceptance_length"] == 1 + body["num_accepted_draft_tokens"] / body["num_spec_steps"]
    assert body["draft_acceptance_rate"] == body["num_accepted_draft_tokens"] / body["num_draft_tokens"]
    assert body["tokens_per_step"] == 1 + body["num_accepted_draft_tokens"] / (40 - body["num_accepted_draft_tokens"])
    assert body["num_suspended_steps"] >= 0 and (body["suspension"] is None) == (body["num_suspended_steps"] == 0)


def test_speculate_width_and_num_speculative_tokens_mean_the_same(ask) -> None:
    for name in ("speculate_width", "num_speculative_tokens"):
        body = ask(max_tokens=40, speculate="ngram", **{name: 1})["metrics"]["speculative_decoding"]
        assert body["num_spec_tokens"] == 1
        assert "metrics" not in ask(max_tokens=40, speculate="ngram", **{name: 0})


def test_a_request_may_ask_for_drafts_that_do_not_pay(ask, llm, monkeypatch) -> None:
    spec_manager = llm.engine.spec_manager
    monkeypatch.setattr(spec_manager, "plan", replace(spec_manager.plan, adaptive=True))
    seconds = lambda self, batch_size, drafted: [1.0 + 9.0 * count for count in range(drafted + 1)]  # noqa: E731
    monkeypatch.setattr("outrider.speculation.adaptive.latency_model.LatencyModel.table", seconds)
    usual, forced = (ask(max_tokens=40, speculate="ngram", always_draft=always) for always in (False, True))
    assert usual["choices"] == forced["choices"]
    suspended, drafted = (body["metrics"]["speculative_decoding"] for body in (usual, forced))
    assert suspended["num_suspended_steps"] > 0 and suspended["suspension"]["cost"] > suspended["suspension"]["tokens"]
    assert suspended["suspension"]["reason"].startswith("a step with ")
    assert drafted["num_suspended_steps"] == 0 and drafted["num_draft_tokens"] > suspended["num_draft_tokens"]


def test_prediction_tokens_are_counted_in_the_usage(ask) -> None:
    said = ask(max_tokens=30)["choices"][0]["text"]
    answer = ask(max_tokens=30, prediction={"type": "content", "content": [{"type": "text", "text": said}]})
    assert answer["choices"][0]["text"] == said
    details = answer["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 15
    wrong = ask(max_tokens=30, prediction={"type": "content", "content": "~" * 30})
    assert wrong["choices"][0]["text"] == said
    details = wrong["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] < details["rejected_prediction_tokens"]


def test_a_trace_contains_every_step(ask) -> None:
    [choice] = ask(max_tokens=40, speculate="ngram", trace=True, return_token_ids=True)["choices"]
    steps = choice["speculation"]["steps"]
    assert [token for step in steps for token in step["tokens"]] == choice["token_ids"]
    assert "".join(text for step in steps for text in step["text"]) == choice["text"]
    kept = [step for step in steps if step["accepted"]]
    assert kept and all(step["tokens"][: step["accepted"]] == step["drafted"][: step["accepted"]] for step in kept)
    assert all(len(step["drafted"]) == len(step["drafted_text"]) for step in steps)
    times = [step["seconds"] for step in steps]
    assert times[0] == 0 and times == sorted(times) and 0 < times[-1] < 60


def test_a_trace_names_the_origins_of_combined_drafts(ask) -> None:
    [choice] = ask(max_tokens=40, speculate="suffix+ngram", trace=True)["choices"]
    drafts = [step for step in choice["speculation"]["steps"] if step["drafted"]]
    assert drafts and all(len(step["origins"]) == len(step["drafted"]) for step in drafts)
    assert {mask for step in drafts for mask in step["origins"]} <= {1, 2, 3}
    [choice] = ask(max_tokens=40, speculate="ngram", trace=True)["choices"]
    assert all("origins" not in step for step in choice["speculation"]["steps"])


def test_max_tokens_of_a_completion_defaults_to_16(client) -> None:
    answer = client.post("/v1/completions", json={"prompt": "a", "ignore_eos": True}).json()
    assert answer["usage"]["completion_tokens"] == 16


def test_models_tokenize_and_version_respond(client, llm) -> None:
    listed = client.get("/v1/models").json()
    assert [model["id"] for model in listed["data"]] == ["tiny", "small"]
    assert client.get("/v1/models/small").json() == listed["data"][1]
    assert listed["data"][0]["max_model_len"] == llm.llm.resolved.max_context
    assert client.get("/v1/models/large").status_code == 404
    tokens = client.post("/tokenize", json={"prompt": "cats", "return_token_strs": True}).json()
    assert tokens["tokens"] == llm.llm.tokenizer.encode("cats")
    assert tokens["count"] == len(tokens["tokens"])
    assert tokens["token_strs"][-4:] == list("cats")
    text = client.post("/detokenize", json={"tokens": tokens["tokens"][-4:]}).json()
    assert text == {"prompt": "cats"}
    spoken = client.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()
    assert spoken["tokens"] == llm.llm.chat_prompt([{"role": "user", "content": "hi"}])
    assert set(client.get("/version").json()) == {"version"}
    assert client.get("/health").status_code == 200


def test_pause_stops_the_engine_and_resume_continues(client, llm) -> None:
    assert client.post("/pause").json() == {"paused": True}
    assert llm.paused
    assert client.post("/resume").json() == {"paused": False}
    assert not llm.paused


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/pause?clear_cache=true"])
def test_a_cleared_cache_supplies_no_prefix(client, llm, path: str) -> None:
    ask = {"model": "tiny", "prompt": [7] * 64, "max_tokens": 1}

    def cached() -> int:
        usage = client.post("/v1/completions", json=ask).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    cached()
    assert cached() > 0
    assert client.post(path).status_code == 200
    client.post("/resume")
    assert cached() == 0


def test_requests_survive_a_cleared_cache(client, llm) -> None:
    """A running request is preempted, recomputes its prefix, and gives the same text."""
    ask = {"model": "tiny", "prompt": [9] * 40, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    plain = client.post("/v1/completions", json=ask).json()["choices"][0]["text"]
    with ThreadPoolExecutor(1) as pool:
        client.post("/pause")
        answer = pool.submit(lambda: client.post("/v1/completions", json=ask).json())
        wait_until(lambda: not llm.engine.is_idle)
        assert client.post("/reset_prefix_cache").json() == {"reset": True}
        client.post("/resume")
        client.post("/reset_prefix_cache")
        assert answer.result()["choices"][0]["text"] == plain


def test_pause_keeps_the_cache_unless_asked_and_refuses_other_values(client, llm) -> None:
    ask = {"model": "tiny", "prompt": [8] * 64, "max_tokens": 1}
    client.post("/v1/completions", json=ask)
    for path in ("/pause", "/pause?clear_cache=0"):
        assert client.post(path).status_code == 200
        client.post("/resume")
    refused = client.post("/pause?clear_cache=perhaps")
    assert refused.status_code == 400 and not llm.paused
    assert refused.json()["error"]["message"] == "`clear_cache` is `perhaps`: expected true or false"
    details = client.post("/v1/completions", json=ask).json()["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] > 0
