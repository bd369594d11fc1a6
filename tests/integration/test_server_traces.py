"""OpenTelemetry: a collector gets one span per request, with vLLM's attributes and the client's trace as parent."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from starlette.testclient import TestClient

from outrider import SamplingParams, UserError
from outrider.server import tracing
from outrider.server.api.generation import generate
from outrider.server.api.translate import EngineInput
from outrider.server.app import build_app
from outrider.server.options import ServerOptions

ENGINE = {"speculate": "ngram:width=3,adaptive=no"}
ASK: dict[str, Any] = {"prompt": [5, 6, 7] * 4, "max_tokens": 30, "temperature": 0, "ignore_eos": True}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(TraceServiceServicer):
    """Receives spans over gRPC or HTTP."""

    def __init__(self) -> None:
        self.received: list[ExportTraceServiceRequest] = []

    def Export(self, request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:  # noqa: N802
        self.received.append(request)
        return ExportTraceServiceResponse()

    @property
    def spans(self) -> list[Any]:
        return [
            span
            for request in self.received
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    @property
    def service(self) -> str:
        attributes = self.received[0].resource_spans[0].resource.attributes
        return next(each.value.string_value for each in attributes if each.key == "service.name")


@pytest.fixture(params=["grpc", "http/protobuf"])
def collector(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Collector, str]]:
    """A collector and its URL."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", request.param)
    collector = Collector()
    if request.param == "grpc":
        server = grpc.server(ThreadPoolExecutor(1))
        add_TraceServiceServicer_to_server(collector, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield collector, f"http://127.0.0.1:{port}"
        server.stop(None).wait()
        return

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.Export(ExportTraceServiceRequest.FromString(body), None)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield collector, f"http://127.0.0.1:{http.server_port}/v1/traces"
        http.shutdown()


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


def test_a_request_gives_a_span_with_vllms_attributes(llm, collector) -> None:
    received, url = collector
    app = build_app(llm, ServerOptions(names=("tiny",), otlp_traces_endpoint=url))
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}
    answer = TestClient(app).post("/v1/completions", json={**ASK, "n": 2, "top_p": 0.9}, headers=headers).json()
    app.state.context.metrics.close()
    (span,) = received.spans
    assert (span.name, span.kind, received.service) == ("llm_request", span.SPAN_KIND_SERVER, "outrider")
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    found = attributes(span)
    assert {name: found[name] for name in found if ".request." in name} == {
        "gen_ai.request.id": "mine",
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.max_tokens": 30,
        "gen_ai.request.n": 2,
    }
    assert found["gen_ai.response.model"] == "tiny" and found["gen_ai.usage.num_sequences"] == 2
    assert found["gen_ai.usage.prompt_tokens"] == 12 and found["gen_ai.usage.completion_tokens"] == 60
    assert [each.string_value for each in found["gen_ai.response.finish_reasons"].values] == ["length"]
    latency = {name.removeprefix("gen_ai.latency."): found[name] for name in found if "latency" in name}
    assert 0 < latency["time_in_queue"] < latency["time_to_first_token"] < latency["e2e"]
    assert latency["time_in_model_inference"] == pytest.approx(
        latency["time_in_model_prefill"] + latency["time_in_model_decode"]
    )
    assert (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 == pytest.approx(latency["e2e"], abs=1e-6)
    counted = answer["metrics"]["speculative_decoding"]
    assert found["outrider.speculation.method"] == "ngram"
    assert found["outrider.speculation.draft_tokens"] == counted["num_draft_tokens"] > 0
    assert found["outrider.speculation.accepted_tokens"] == counted["num_accepted_draft_tokens"] > 0


@pytest.fixture
def spans() -> Iterator[tuple[tracing.Tracer, Any]]:
    """A tracer and the exporter that keeps its spans in memory."""
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    tracer = tracing.Tracer(exporter)
    yield tracer, exporter
    tracer.close()


def test_spans_of_prompts_and_of_plain_decoding(llm, spans) -> None:
    """Each prompt of a request has a span, in a trace of its own without a parent; refused ones have none."""
    tracer, exporter = spans
    app = build_app(llm, ServerOptions(names=("tiny",)))
    app.state.context.metrics.tracer = tracer
    client = TestClient(app)
    body = {**ASK, "prompt": [[5, 6, 7], [8, 9]], "speculate": False, "max_tokens": 3}
    assert client.post("/v1/completions", json=body).status_code == 200
    assert client.post("/v1/completions", json={**ASK, "prompt": [10**6]}).status_code == 400
    tracer.close()
    found = exporter.get_finished_spans()
    assert sorted(span.attributes["gen_ai.usage.prompt_tokens"] for span in found) == [2, 3]
    assert all(span.parent is None for span in found)
    assert not [name for span in found for name in span.attributes if "speculation" in name]


def test_the_span_of_a_client_that_left_says_abort(llm, spans) -> None:
    tracer, exporter = spans
    app = build_app(llm, ServerOptions(names=("tiny",)))
    app.state.context.metrics.tracer = tracer

    async def leave() -> None:
        stream = generate(app.state.context, EngineInput([5, 6, 7], SamplingParams(max_tokens=99, ignore_eos=True)))
        await anext(stream)
        await stream.aclose()

    asyncio.run(leave())
    tracer.close()
    (span,) = exporter.get_finished_spans()
    assert span.attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert "gen_ai.latency.time_in_queue" not in span.attributes


def test_wrong_settings_are_refused(monkeypatch) -> None:
    with pytest.raises(UserError, match="`otlp_traces_endpoint` is `localhost:4317`: expected a URL"):
        ServerOptions(otlp_traces_endpoint="localhost:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")
    with pytest.raises(UserError, match=r"`OTEL_EXPORTER_OTLP_TRACES_PROTOCOL` is `http/json`: expected grpc or"):
        tracing.Tracer.open("http://localhost:4318")


def test_without_the_extra_the_option_is_refused_before_the_model_is_loaded(outrider, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    done = outrider("serve", "./no-such-model", "--otlp-traces-endpoint", "http://localhost:4317")
    assert done.exit_code == 1
    assert "needs OpenTelemetry" in done.stderr and "pip install 'outrider[otel]'" in done.stderr
