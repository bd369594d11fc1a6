"""Prometheus metrics: vLLM's names, which existing dashboards use, and `outrider_` names for what vLLM lacks.

Requests are counted on the event loop. The engine's counters are read at each scrape, without a lock.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from ..async_llm import AsyncLLM
from ..types import FinishReason, Output, SamplingParams, SpecStats, Stats
from .admission import Admission
from .logs import RequestRecord, current
from .tracing import FinishedRequest, Tracer

# Upper bounds of the buckets in seconds: those of vLLM, so that dashboards made for it work.
FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
PER_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
LABELS = ("model_name", "engine")  # of every sample, as in vLLM


class Histogram:
    """A histogram that is cheap enough to update for every token. Only one thread writes."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)  # the last bucket has no bound
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def read(self) -> tuple[list[tuple[str, float]], float]:
        """Return the cumulative count at each bound, and the sum, as Prometheus writes them."""
        cumulative: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            cumulative.append(("+Inf" if bound == float("inf") else str(bound), total))
        return cumulative, self._sum


class RequestMetrics:
    """Measures one engine request from its arrival to its end."""

    def __init__(
        self, metrics: Metrics, record: RequestRecord | None, prompt_tokens: int, params: SamplingParams | None
    ) -> None:
        self._metrics, self._record, self._prompt_tokens, self._params = metrics, record, prompt_tokens, params
        self._started = self._latest = time.perf_counter()
        self._first: float | None = None
        self._tokens = 0
        self._done = False

    def first_token(self) -> None:
        self._latest = time.perf_counter()
        if self._first is None:
            self._first = self._latest - self._started
            self._metrics.first_token.observe(self._first)

    def tokens(self, count: int) -> None:
        """Count tokens that arrived since the last call. The first ones do not count as inter-token latency."""
        if count <= 0:
            return
        if self._first is None:
            self.first_token()
        else:
            now = time.perf_counter()
            # Tokens that arrive together share the time since the last ones.
            self._metrics.between_tokens.observe((now - self._latest) / count, count)
            self._latest = now
        self._tokens += count
        self._metrics.generated += count

    def done(self, output: Output | None, reason: str | None = None) -> None:
        """End the request: with its last output, or with None if the client disconnected before."""
        if self._done:
            return
        self._done = True
        seconds = time.perf_counter() - self._started
        reasons = [completion.finish_reason for completion in output.completions] if output is not None else []
        reason = reason or next((known for known in reasons if known is not None), FinishReason.ABORT.value)
        self._metrics.count(output, reason, seconds)
        if self._record is not None:
            self._record.add_output(output, reason, self._prompt_tokens, self._tokens, self._first)
        if self._metrics.tracer is not None and reason in self._metrics.finished:
            self._metrics.tracer.record(
                FinishedRequest(
                    model=self._metrics.name,
                    request_id=self._record.request_id if self._record is not None else "",
                    headers=self._record.trace_headers if self._record is not None else {},
                    params=self._params,
                    stats=None if output is None else output.stats,
                    reason=reason,
                    prompt_tokens=self._prompt_tokens,
                    completion_tokens=self._tokens,
                    first_token_seconds=self._first,
                    seconds=seconds,
                )
            )


class Metrics:
    """All counters of the server, and the Prometheus registry that renders them."""

    def __init__(
        self,
        llm: AsyncLLM,
        name: str | None = None,
        admission: Admission | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.llm, self.admission, self.tracer = llm, admission, tracer
        self.name = name or llm.llm.resolved.model
        self._own = [self.name, "0"]  # values of LABELS; a server has one engine
        self.prompted = self.generated = self.preemptions = 0
        self.finished: Counter[str] = Counter({reason.value: 0 for reason in FinishReason})
        self.first_token = Histogram(FIRST_TOKEN)
        self.between_tokens = Histogram(PER_TOKEN)
        self.per_token = Histogram(PER_TOKEN)
        self.end_to_end, self.queued = Histogram(REQUEST), Histogram(REQUEST)
        self.prefill, self.decode, self.inference = Histogram(REQUEST), Histogram(REQUEST), Histogram(REQUEST)
        self._highest: dict[str, int] = {}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def request(self, prompt_tokens: int, params: SamplingParams | None = None) -> RequestMetrics:
        """Start to measure a request that has just arrived."""
        return RequestMetrics(self, current.get(), prompt_tokens, params)

    def close(self) -> None:
        """Export the spans that wait."""
        if self.tracer is not None:
            self.tracer.close()

    def count(self, output: Output | None, reason: str, seconds: float) -> None:
        if reason not in self.finished:  # refused by the engine before it ran
            if self.admission is not None:
                self.admission.refused[reason] += 1
            return
        self.finished[reason] += 1
        self.end_to_end.observe(seconds)
        if output is not None:
            self.prompted += len(output.prompt_token_ids)
            if output.stats is not None:
                self._count_times(output.stats)

    def _count_times(self, stats: Stats) -> None:
        """Count the engine's times of a finished request. One that ended before its first token has no decode time."""
        self.preemptions += stats.preemptions
        self.queued.observe(stats.queue_seconds)
        self.inference.observe(stats.seconds - stats.queue_seconds)
        self.prefill.observe(stats.prefill_seconds)
        if stats.steps:
            self.decode.observe(stats.decode_seconds)
        if stats.time_per_output_token:
            self.per_token.observe(stats.time_per_output_token)

    def render(self) -> tuple[bytes, str]:
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics; the Prometheus client calls this at every scrape."""
        yield from self._queue()
        yield from self._requests()
        yield from self._speculation()
        yield from self._engine()

    def _queue(self) -> Iterable[Metric]:
        load, plan = self.llm.load, self.llm.llm.resolved
        cache = self.llm.engine.scheduler.cache
        yield self._gauge("vllm:num_requests_running", "Requests that the engine is running", load.running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait in the engine's queue", load.waiting)
        used = load.pages_used / load.pages
        yield self._gauge("vllm:kv_cache_usage_perc", "Fraction of the KV cache pages in use, 1 means full", used)
        facts = {
            "block_size": plan.page_size,
            "num_gpu_blocks": plan.pages,
            "cache_dtype": plan.kv_dtype,
            "enable_prefix_caching": plan.prefix_cache,
        }
        help_ = "Configuration of the KV cache, in the labels; the value is always 1"
        yield self._gauge("vllm:cache_config_info", help_, 1, {name: str(value) for name, value in facts.items()})
        queries, hits = self._rising("queries", cache.lookups), self._rising("hits", cache.hits)
        yield self._counter("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache", queries)
        yield self._counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache", hits)

    def _requests(self) -> Iterable[Metric]:
        yield self._counter("vllm:prompt_tokens", "Prompt tokens of finished requests", self.prompted)
        yield self._counter("vllm:generation_tokens", "Tokens generated", self.generated)
        yield self._counter(
            "vllm:num_preemptions", "Times that a request was preempted and lost its KV pages", self.preemptions
        )
        yield self._by_label("vllm:request_success", "Finished requests", "finished_reason", self.finished)
        times = {
            "vllm:time_to_first_token_seconds": ("From a request's arrival to its first token", self.first_token),
            "vllm:inter_token_latency_seconds": ("From one token to the next", self.between_tokens),
            "vllm:request_time_per_output_token_seconds": (
                "Mean time per token after the first, by request",
                self.per_token,
            ),
            "vllm:e2e_request_latency_seconds": ("From a request's arrival to its end", self.end_to_end),
            "vllm:request_queue_time_seconds": (
                "From a request's arrival in the engine to its first step",
                self.queued,
            ),
            "vllm:request_prefill_time_seconds": ("From a request's first step to its first token", self.prefill),
            "vllm:request_decode_time_seconds": ("From a request's first token to its last", self.decode),
            "vllm:request_inference_time_seconds": ("From a request's first step to its last token", self.inference),
        }
        for name, (text, histogram) in times.items():
            metric = HistogramMetricFamily(name, text, labels=LABELS)
            metric.add_metric(self._own, *histogram.read())
            yield metric
        if self.admission is not None:
            refused = self.admission.refused.copy()
            yield self._by_label("outrider_requests_refused", "Requests rejected before they ran", "reason", refused)
            yield self._gauge(
                "outrider_draining", "1 while the server drains before it shuts down", int(self.admission.draining)
            )

    def _speculation(self) -> Iterable[Metric]:
        method_stats = self._stats_by_method()
        total = SpecStats.total(method_stats.values())
        drafts = self._rising("drafts", total.num_drafts)
        drafted, accepted = self._rising("drafted", total.drafted), self._rising("accepted", total.accepted)
        yield self._counter("vllm:spec_decode_num_drafts", "Drafts that were verified", drafts)
        yield self._counter("vllm:spec_decode_num_draft_tokens", "Drafted tokens", drafted)
        yield self._counter("vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens", accepted)
        accepted_per_depth = {
            str(depth): self._rising(f"depth {depth}", count) for depth, count in enumerate(total.accepted_per_depth)
        }
        help_ = "Accepted draft tokens by their position in the draft"
        yield self._by_label("vllm:spec_decode_num_accepted_tokens_per_pos", help_, "position", accepted_per_depth)
        yield self._by_method(
            "outrider_acceptance_length",
            "Mean tokens per step that verified a draft, including the target's own token",
            {method: spec_stats.mean_acceptance_length for method, spec_stats in method_stats.items()},
        )
        yield self._by_method(
            "outrider_tokens_per_step",
            "Mean tokens per step, of all steps",
            {method: spec_stats.tokens_per_step for method, spec_stats in method_stats.items()},
        )
        yield from self._suspensions(method_stats)
        yield from self._adapters()
        nonfinite = {
            method: self._rising(f"nonfinite {method}", spec_stats.nonfinite)
            for method, spec_stats in method_stats.items()
        }
        help_ = "Draft tokens ignored because their distribution was not finite"
        yield self._by_label("outrider_nonfinite_draft_tokens", help_, "method", nonfinite)
        widths = {str(width): self._rising(f"width {width}", total.widths[width]) for width in sorted(total.widths)}
        yield self._by_label("outrider_draft_width_steps", "Steps by the number of drafted tokens", "width", widths)

    def _suspensions(self, method_stats: Mapping[str, SpecStats]) -> Iterable[Metric]:
        """Yield why drafts did not pay the last time, by method: they pay if the tokens exceed the cost."""
        steps = {method: spec_stats.suspended for method, spec_stats in method_stats.items()}
        help_ = "Steps without a draft because it was not expected to pay"
        rising = {method: self._rising(f"suspended {method}", count) for method, count in steps.items()}
        yield self._by_label("outrider_suspended_steps", help_, "method", rising)
        reasons = {name: stats.suspension for name, stats in method_stats.items() if stats.suspension is not None}
        figures = {
            "cost": "Cost of a step with a draft, of one without, when drafts were last suspended",
            "tokens": "Tokens that it was expected to yield, of those without a draft",
            "acceptance_rate": "Acceptance rate that was expected of its first draft token",
        }
        for figure, text in figures.items():
            values = {method: getattr(reason, figure) for method, reason in reasons.items()}
            yield self._by_method(f"outrider_suspension_{figure}", text, values)

    def _adapters(self) -> Iterable[Metric]:
        """Yield the acceptance of finished requests by adapter: a head may fit one adapter, and not another."""
        stats = {
            (adapter, method): snapshot(one)
            for adapter, by_method in dict(self.llm.engine.spec_manager.adapter_stats).items()
            for method, one in dict(by_method).items()
        }
        labels = [*LABELS, "adapter", "method"]
        drafted = CounterMetricFamily("outrider_adapter_draft_tokens", "Drafted tokens, by adapter", labels=labels)
        accepted = CounterMetricFamily(
            "outrider_adapter_accepted_tokens", "Accepted draft tokens, by adapter", labels=labels
        )
        length = GaugeMetricFamily(
            "outrider_adapter_acceptance_length",
            "Mean tokens per step that verified a draft, including the target's own token, by adapter",
            labels=labels,
        )
        for key, one in stats.items():
            drafted.add_metric([*self._own, *key], one.drafted)
            accepted.add_metric([*self._own, *key], one.accepted)
            length.add_metric([*self._own, *key], one.mean_acceptance_length)
        yield from (drafted, accepted, length)

    def _stats_by_method(self) -> dict[str, SpecStats]:
        """Return the stats by method, of the finished requests and then of the running ones.

        In this order a request that finishes in between is missing in one scrape, but never counted twice.
        """
        engine = self.llm.engine
        stats = {method: snapshot(spec_stats) for method, spec_stats in dict(engine.spec_manager.method_stats).items()}
        for parent in list(engine.parents.values()):
            for request in (detokenizer.request for detokenizer in parent.detokenizers):
                if request.method and request.finish_reason is None:
                    stats.setdefault(request.method, SpecStats()).add(snapshot(request.spec_stats))
        return stats

    def _engine(self) -> Iterable[Metric]:
        engine = self.llm.engine
        yield self._counter("outrider_steps", "Forward passes of the target model", engine.times.steps)
        yield self._counter("outrider_step_seconds", "Seconds spent in engine steps", engine.times.seconds)
        help_ = "Seconds of these in which the device ran several decode steps without the host"
        yield self._counter("outrider_device_rounds_seconds", help_, engine.runner.multi_step.busy)
        late = engine.late_work.read()
        help_ = "CUDA graphs captured in the path of requests"
        yield self._counter("outrider_late_captures", help_, late.captures)
        help_ = "Kernels compiled in the path of requests, or loaded from Triton's cache"
        yield self._counter("outrider_late_compilations", help_, late.compilations)
        help_ = "Runs of work that the warm-up captured, but not in their shape"
        yield self._counter("outrider_late_eager_runs", help_, late.eager_runs)
        evictions = engine.scheduler.cache.evictions
        yield self._counter("outrider_prefix_cache_evictions", "Prefix cache pages evicted for new tokens", evictions)
        yield self._gauge("outrider_engine_alive", "0 when the engine's thread has died", int(self.llm.alive))
        yield self._gauge("outrider_engine_paused", "1 while the engine is paused", int(self.llm.paused))

    def _rising(self, name: str, value: int) -> int:
        """Return the highest value seen: a counter may be read too low within a step, but must never fall."""
        self._highest[name] = max(value, self._highest.get(name, 0))
        return self._highest[name]

    def _gauge(self, name: str, help_: str, value: float, labels: Mapping[str, str] | None = None) -> Metric:
        more = labels or {}
        metric = GaugeMetricFamily(name, help_, labels=[*LABELS, *more])
        metric.add_metric([*self._own, *more.values()], value)
        return metric

    def _by_method(self, name: str, help_: str, values: Mapping[str, float]) -> Metric:
        metric = GaugeMetricFamily(name, help_, labels=[*LABELS, "method"])
        for method, value in values.items():
            metric.add_metric([*self._own, method], value)
        return metric

    def _counter(self, name: str, help_: str, value: float) -> Metric:
        metric = CounterMetricFamily(name, help_, labels=LABELS)
        metric.add_metric(self._own, value)
        return metric

    def _by_label(self, name: str, help_: str, label: str, values: Mapping[str, Any]) -> Metric:
        metric = CounterMetricFamily(name, help_, labels=[*LABELS, label])
        for key, value in values.items():
            metric.add_metric([*self._own, key], value)
        return metric


def snapshot(spec_stats: SpecStats) -> SpecStats:
    """Copy the stats, which the engine's thread may change meanwhile; each container is copied atomically."""
    return SpecStats(
        spec_stats.steps,
        spec_stats.drafted,
        spec_stats.accepted,
        spec_stats.drafted_per_depth.copy(),
        spec_stats.accepted_per_depth.copy(),
        spec_stats.widths.copy(),
        suspended=spec_stats.suspended,
        suspension=spec_stats.suspension,
        nonfinite=spec_stats.nonfinite,
    )
