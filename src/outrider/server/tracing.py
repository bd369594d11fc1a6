"""OpenTelemetry traces: one span per engine request, with the names that vLLM gives to spans and attributes.

Needs the extra `otel`. Spans hold times and counts, never texts. They are exported by a thread of the SDK, in batches.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..errors import UserError
from ..types import FinishReason, SamplingParams, Stats

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

HEADERS = ("traceparent", "tracestate")  # W3C trace context: the span of the client becomes the parent
PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
PROTOCOLS = ("grpc", "http/protobuf")  # the first is the default, as in vLLM
NANOSECONDS = 10**9


@dataclass(frozen=True)
class FinishedRequest:
    """Facts about one engine request that has ended."""

    model: str
    request_id: str
    headers: Mapping[str, str]  # those in HEADERS that the client sent
    params: SamplingParams | None
    stats: Stats | None  # None if the client disconnected before the end
    reason: str
    prompt_tokens: int
    completion_tokens: int
    first_token_seconds: float | None  # None: it ended before its first token
    seconds: float  # from the arrival to the end

    def attributes(self) -> dict[str, Any]:
        """Return the attributes of the span; values that are not known are left out."""
        params, stats = self.params, self.stats
        found: dict[str, Any] = {
            "gen_ai.response.model": self.model,
            "gen_ai.request.id": self.request_id,
            "gen_ai.response.finish_reasons": [self.reason],
            "gen_ai.usage.prompt_tokens": self.prompt_tokens,
            "gen_ai.usage.completion_tokens": self.completion_tokens,
            "gen_ai.latency.time_to_first_token": self.first_token_seconds,
            "gen_ai.latency.e2e": self.seconds,
        }
        if params is not None:
            found |= {
                "gen_ai.request.temperature": params.temperature,
                "gen_ai.request.top_p": params.top_p,
                "gen_ai.request.max_tokens": params.max_tokens,
                "gen_ai.request.n": params.n,
                "gen_ai.usage.num_sequences": params.n,
            }
        if stats is not None:
            found |= {
                "gen_ai.latency.time_in_queue": stats.queue_seconds,
                "gen_ai.latency.time_in_model_prefill": stats.prefill_seconds,
                "gen_ai.latency.time_in_model_decode": stats.decode_seconds,
                "gen_ai.latency.time_in_model_inference": stats.seconds - stats.queue_seconds,
                "outrider.cached_tokens": stats.cached_tokens,
                "outrider.preemptions": stats.preemptions,
                **speculation_attributes(stats),
            }
        return {name: value for name, value in found.items() if value is not None}


def speculation_attributes(stats: Stats) -> dict[str, Any]:
    """Return the speculation stats; empty for plain decoding."""
    if not stats.method:
        return {}
    spec_stats = stats.speculation
    return {
        "outrider.speculation.method": stats.method,
        "outrider.speculation.steps": spec_stats.steps,
        "outrider.speculation.draft_tokens": spec_stats.drafted,
        "outrider.speculation.accepted_tokens": spec_stats.accepted,
        "outrider.speculation.tokens_per_step": spec_stats.tokens_per_step,
    }


class Tracer:
    """Writes the spans of finished requests to an exporter."""

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # The detector reads OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES, which replace our name.
        resource = Resource.create({"service.name": "outrider"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("outrider", __version__)
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def open(cls, endpoint: str) -> Tracer:
        """Return a tracer that exports to a collector."""
        protocol = os.environ.get(PROTOCOL_VARIABLE, PROTOCOLS[0])
        if protocol not in PROTOCOLS:
            raise UserError(f"`{PROTOCOL_VARIABLE}` is `{protocol}`: expected {' or '.join(PROTOCOLS)}")
        check_installed()
        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

            return cls(GrpcExporter(endpoint=endpoint))
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return cls(HttpExporter(endpoint=endpoint))

    def record(self, request: FinishedRequest) -> None:
        """Write the span of a request that has just ended."""
        from opentelemetry.trace import SpanKind, StatusCode

        end = time.time_ns()
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(request.headers),
            kind=SpanKind.SERVER,
            attributes=request.attributes(),
            start_time=end - int(request.seconds * NANOSECONDS),
        )
        if request.reason == FinishReason.ERROR:
            span.set_status(StatusCode.ERROR)
        span.end(end)

    def close(self) -> None:
        """Export the spans that wait, and stop."""
        self._provider.shutdown()


def check_installed() -> None:
    """Raise UserError if the packages of the extra are missing."""
    try:
        import opentelemetry.exporter.otlp.proto.grpc.trace_exporter
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"`otlp_traces_endpoint` needs OpenTelemetry, and `{error.name}` is not installed: "
            "run `pip install 'outrider[otel]'`"
        ) from None
