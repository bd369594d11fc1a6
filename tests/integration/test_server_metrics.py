"""Prometheus metrics: vLLM's names, and values that agree with the responses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from outrider import SamplingParams
from outrider.server.admission import Admission
from outrider.server.api.generation import generate
from outrider.server.api.translate import EngineInput
from outrider.server.app import build_app
from outrider.server.metrics import Histogram, Metrics
from outrider.server.options import ServerOptions
from waiting import counted_steps, wait_until

ASK: dict[str, Any] = {"prompt": [5, 6, 7] * 4, "max_tokens": 30, "temperature": 0, "ignore_eos": True}
VLLM = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:cache_config_info": "gauge",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:num_preemptions": "counter",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_inference_time_seconds": "histogram",
    "vllm:spec_decode_num_drafts": "counter",
    "vllm:spec_decode_num_draft_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "counter",
}
OWN = ("model_name", "engine")  # labels of every sample
ENGINE = {"speculate": "ngram:width=3,adaptive=no"}  # a fixed width, so that every step drafts


@pytest.fixture
def client(llm) -> TestClient:
    return TestClient(build_app(llm, ServerOptions(names=("tiny", "other"))))


def read(client: TestClient) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    answer = client.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain; version=")
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for metric in text_string_to_metric_families(answer.text):
        for sample in metric.samples:
            labels = tuple(sorted((name, value) for name, value in sample.labels.items() if name not in OWN))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def one(found: dict[str, Any], name: str, **labels: str) -> float:
    return found[name][tuple(sorted(labels.items()))]


def test_vllms_metrics_exist_before_the_first_request(client) -> None:
    kinds = {each.name: each.type for each in text_string_to_metric_families(client.get("/metrics").text)}
    assert {name: kinds.get(name) for name in VLLM} == VLLM
    assert all(name.startswith(("vllm:", "outrider_")) for name in kinds)


def test_every_sample_has_the_model_name_and_the_engine(client) -> None:
    metrics_read = list(text_string_to_metric_families(client.get("/metrics").text))
    assert {sample.labels["model_name"] for metric in metrics_read for sample in metric.samples} == {"tiny"}
    assert {sample.labels["engine"] for metric in metrics_read for sample in metric.samples} == {"0"}


def test_cache_config_info_has_vllms_labels(client, llm) -> None:
    (labels,) = read(client)["vllm:cache_config_info"]
    facts = dict(labels)
    assert facts["block_size"] == str(llm.llm.resolved.page_size) and facts["num_gpu_blocks"] == str(
        llm.llm.resolved.pages
    )


@pytest.mark.parametrize("stream", [False, True])
def test_counters_agree_with_the_responses(client, stream: bool) -> None:
    before = read(client)
    extra = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answers = [client.post("/v1/completions", json={**ASK, "n": count, **extra}) for count in (1, 2)]
    assert all(answer.status_code == 200 for answer in answers)
    after = read(client)

    def grown(name: str, **labels: str) -> float:
        return one(after, name, **labels) - one(before, name, **labels)

    assert grown("vllm:prompt_tokens_total") == 24
    assert grown("vllm:generation_tokens_total") == 90
    assert grown("vllm:request_success_total", finished_reason="length") == 2
    assert grown("vllm:time_to_first_token_seconds_count") == 2
    assert grown("vllm:e2e_request_latency_seconds_count") == 2
    assert 0 < grown("vllm:inter_token_latency_seconds_count") < 90
    assert grown("vllm:e2e_request_latency_seconds_sum") >= grown("vllm:inter_token_latency_seconds_sum") > 0
    assert grown("vllm:prefix_cache_queries_total") >= 2 * 11


def test_the_times_of_requests_add_up(client) -> None:
    before = read(client)
    for count in (1, 2):
        client.post("/v1/completions", json={**ASK, "n": count})
    client.post("/v1/completions", json={**ASK, "max_tokens": 1})
    after = read(client)

    def grown(part: str, kind: str = "sum") -> float:
        name = f"vllm:{part}_seconds_{kind}"
        return one(after, name) - one(before, name)

    parts = ("request_queue_time", "request_prefill_time", "request_decode_time", "request_inference_time")
    assert [grown(part, "count") for part in parts] == [3, 3, 3, 3]
    assert all(grown(part) > 0 for part in parts)
    queued, prefill, decode, inference = map(grown, parts)
    assert inference == pytest.approx(prefill + decode)
    assert queued + inference <= grown("e2e_request_latency")
    # The request of one token has no token after its first. 29 tokens follow the first of each sample.
    assert grown("request_time_per_output_token", "count") == 2
    assert grown("request_time_per_output_token") == pytest.approx(decode / 29, rel=0.05)


def test_speculation_counters_agree_with_the_engine(client, llm) -> None:
    client.post("/v1/completions", json=ASK)
    llm.llm.method_stats["ngram"].nonfinite = 7
    found, spec_stats = read(client), llm.llm.method_stats["ngram"]
    drafts = one(found, "vllm:spec_decode_num_drafts_total")
    assert drafts == spec_stats.steps - spec_stats.widths.get(0, 0) > 0
    assert one(found, "vllm:spec_decode_num_draft_tokens_total") == spec_stats.drafted > 0
    accepted = one(found, "vllm:spec_decode_num_accepted_tokens_total")
    by_depth = found["vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    assert accepted == spec_stats.accepted == sum(by_depth.values()) > 0
    assert [dict(labels)["position"] for labels in by_depth] == ["0", "1", "2"]
    assert one(found, "outrider_acceptance_length", method="ngram") == pytest.approx(1 + spec_stats.accepted / drafts)
    tokens_per_step = 1 + spec_stats.accepted / spec_stats.steps
    assert one(found, "outrider_tokens_per_step", method="ngram") == pytest.approx(tokens_per_step)
    assert one(found, "outrider_suspended_steps_total", method="ngram") == spec_stats.suspended
    assert one(found, "outrider_nonfinite_draft_tokens_total", method="ngram") == 7
    assert sum(found["outrider_draft_width_steps_total"].values()) == spec_stats.steps
    assert one(found, "outrider_steps_total") > 0


def test_counters_rise_while_a_request_runs(llm) -> None:
    """Counters of tokens and of speculation rise during a request, never fall, and end at the engine's counts."""
    app = build_app(llm, ServerOptions(names=("tiny",)))
    context = app.state.context
    names = {
        "drafts": "vllm:spec_decode_num_drafts_total",
        "drafted": "vllm:spec_decode_num_draft_tokens_total",
        "accepted": "vllm:spec_decode_num_accepted_tokens_total",
        "first": 'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="tiny",position="0"}',
        "tokens": "vllm:generation_tokens_total",
    }

    def figures() -> dict[str, float]:
        lines = context.metrics.render()[0].decode().splitlines()
        found = {name: [line for line in lines if line.startswith(body)] for name, body in names.items()}
        return {name: float(body[0].split()[-1]) if body else 0.0 for name, body in found.items()}

    async def during() -> list[dict[str, float]]:
        params = SamplingParams(max_tokens=90, temperature=0, ignore_eos=True, n=2)
        found = []
        async for _ in generate(context, EngineInput([5, 6, 7] * 4, params)):
            found.append(figures())
            permits.release()
        return found

    with counted_steps(llm, 1) as permits:
        seen = asyncio.run(during())
    middle = seen[len(seen) // 2]
    for name in names:
        values = [each[name] for each in seen]
        assert values == sorted(values), name
        assert values[0] < middle[name] < values[-1], name
    wait_until(lambda: llm.engine.is_idle)
    spec_stats, final = llm.llm.method_stats["ngram"], figures()
    assert (final["drafted"], final["accepted"], final["first"]) == (
        spec_stats.drafted,
        spec_stats.accepted,
        spec_stats.accepted_per_depth[0],
    )


def test_gauges_show_the_current_load(llm) -> None:
    metrics = Metrics(llm, "tiny")

    async def during() -> list[dict[str, float]]:
        found = []
        params = SamplingParams(max_tokens=40, ignore_eos=True, n=6)  # and three run at once
        async for _ in llm.generate([5, 6, 7], params):
            metrics_read = text_string_to_metric_families(metrics.render()[0].decode())
            found.append({sample.name: sample.value for metric in metrics_read for sample in metric.samples})
            permits.release()
        return found

    with counted_steps(llm, 1) as permits:
        found = asyncio.run(during())
    assert max(each["vllm:num_requests_running"] for each in found) == 3
    assert max(each["vllm:num_requests_waiting"] for each in found) >= 2
    assert 0 < max(each["vllm:kv_cache_usage_perc"] for each in found) <= 1
    (rest,) = metrics.render()[0].decode().split("vllm:kv_cache_usage_perc{")[1:]
    assert rest.split("\n")[0].endswith(" 0.0")


def test_rejected_requests_are_counted_by_reason(llm) -> None:
    client = TestClient(build_app(llm, ServerOptions(api_keys=("key",), max_body_bytes=100)))
    client.post("/v1/completions", json=ASK)
    client.headers["Authorization"] = "Bearer key"
    client.post("/v1/completions", content=b" " * 101)
    assert client.post("/v1/completions", json={"prompt": [10**6]}).status_code == 400
    found = read(client)
    assert one(found, "outrider_requests_refused_total", reason="key") == 1
    assert one(found, "outrider_requests_refused_total", reason="body") == 1
    assert sum(found["vllm:request_success_total"].values()) == 0


def test_two_servers_in_a_process_count_separately(llm) -> None:
    first, second = Metrics(llm), Metrics(llm)
    request = first.request(3)
    request.tokens(3)
    request.done(None)
    request.done(None)
    assert first.finished["abort"] == 1
    assert first.generated == 3 and second.generated == 0 and sum(second.finished.values()) == 0


def test_a_counter_never_falls(llm) -> None:
    metrics, cache = Metrics(llm), llm.engine.scheduler.cache
    known = cache.lookups
    try:
        cache.lookups = known + 500
        high = metrics.render()[0]
        cache.lookups = known
        assert (
            metrics.render()[0].split(b"prefix_cache_queries_total")[-1].split(b"\n")[0]
            == (high.split(b"prefix_cache_queries_total")[-1].split(b"\n")[0])
        )
    finally:
        cache.lookups = known


def test_tokens_that_arrive_together_share_their_latency(llm, monkeypatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("outrider.server.metrics.time.perf_counter", lambda: clock[0])
    metrics = Metrics(llm, admission=Admission(ServerOptions(), llm))
    request = metrics.request(3)
    for seconds, count in ((0.5, 2), (0.3, 3), (0.02, 1)):
        clock[0] += seconds
        request.tokens(count)
    buckets, total = metrics.between_tokens.read()
    assert total == pytest.approx(0.32) and buckets[-1] == ("+Inf", 4)
    assert dict(buckets)["0.15"] == 4 and dict(buckets)["0.075"] == 1
    buckets, total = metrics.first_token.read()
    assert total == 0.5 and buckets[-1] == ("+Inf", 1)


def test_a_histogram_counts_a_bound_in_the_lower_bucket() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 3.0):
        histogram.observe(value)
    assert histogram.read() == ([("1.0", 2), ("2.0", 3), ("+Inf", 4)], 6.0)
