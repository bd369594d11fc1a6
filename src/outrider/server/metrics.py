"""What Prometheus reads: vLLM's names, which the tools of the field know, and ours for what they lack.

Requests are counted on the event loop; what the engine knows is read when somebody asks, without a lock.
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
from ..types import FinishReason, Output, SpecStats
from .admission import Guard
from .logs import Entry, current

# Upper bounds in seconds: vLLM's, so that dashboards made for it fit.
FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
PER_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
END_TO_END = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)  # the last: beyond all bounds
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def read(self) -> tuple[list[tuple[str, float]], float]:
        """As Prometheus writes it: how many lie at or below each bound, and the sum of all."""
        below: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            below.append(("+Inf" if bound == float("inf") else str(bound), total))
        return below, self._sum


class RequestMetrics:
    """One request from its arrival to its end."""

    def __init__(self, metrics: Metrics, entry: Entry | None) -> None:
        self._metrics, self._entry = metrics, entry
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
        """So many tokens have come since the last time. The first ones are not part of the gaps."""
        if count <= 0:
            return
        if self._first is None:
            self.first_token()
        else:
            now = time.perf_counter()
            # Tokens that come together share the time that they took.
            self._metrics.between_tokens.observe((now - self._latest) / count, count)
            self._latest = now
        self._tokens += count
        self._metrics.generated += count

    def done(self, output: Output | None, reason: str | None = None) -> None:
        """The end: with the last output, or with None where the client was gone before it came."""
        if self._done:
            return
        self._done = True
        seconds = time.perf_counter() - self._started
        reasons = [each.finish_reason for each in output.completions] if output is not None else []
        reason = reason or next((each for each in reasons if each is not None), FinishReason.ABORT.value)
        self._metrics.count(output, reason, seconds)
        if self._entry is not None:
            self._entry.answered(output, reason, self._tokens, self._first)


class Metrics:
    """All that is counted, and the registry that spells it."""

    def __init__(self, llm: AsyncLLM, name: str | None = None, guard: Guard | None = None) -> None:
        self.llm, self.guard = llm, guard
        self.name = name or llm.llm.resolved.model
        self.prompted = self.generated = self.preemptions = 0
        self.finished: Counter[str] = Counter({reason.value: 0 for reason in FinishReason})
        self.first_token = Histogram(FIRST_TOKEN)
        self.between_tokens = Histogram(PER_TOKEN)
        self.end_to_end = Histogram(END_TO_END)
        self._highest: dict[str, int] = {}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def request(self) -> RequestMetrics:
        """Call it when the request arrives."""
        return RequestMetrics(self, current.get())

    def count(self, output: Output | None, reason: str, seconds: float) -> None:
        if reason not in self.finished:  # the engine refused it: it was never a request
            if self.guard is not None:
                self.guard.refused[reason] += 1
            return
        self.finished[reason] += 1
        self.end_to_end.observe(seconds)
        if output is not None:
            self.prompted += len(output.prompt_token_ids)
            self.preemptions += output.stats.preemptions if output.stats is not None else 0

    def render(self) -> tuple[bytes, str]:
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def collect(self) -> Iterable[Metric]:
        """Prometheus' client calls it for every reading."""
        yield from self._queue()
        yield from self._requests()
        yield from self._speculation()
        yield from self._engine()

    def _queue(self) -> Iterable[Metric]:
        load, plan = self.llm.load, self.llm.llm.resolved
        cache = self.llm.engine.scheduler.cache
        yield self._gauge("vllm:num_requests_running", "Requests in the engine's steps", load.running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait for a place in them", load.waiting)
        used = load.pages_used / load.pages
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the key/value pages in use, 1 is all", used)
        facts = {
            "block_size": plan.page_size,
            "num_gpu_blocks": plan.pages,
            "cache_dtype": plan.kv_dtype,
            "enable_prefix_caching": plan.prefix_cache,
        }
        help_ = "How the key/value cache is cut; the value is always 1"
        yield self._gauge("vllm:cache_config_info", help_, 1, {name: str(value) for name, value in facts.items()})
        queries, hits = self._rising("queries", cache.lookups), self._rising("hits", cache.hits)
        yield self._counter("vllm:prefix_cache_queries", "Tokens looked for in the prefix cache", queries)
        yield self._counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache", hits)

    def _requests(self) -> Iterable[Metric]:
        yield self._counter("vllm:prompt_tokens", "Tokens of the prompts that were answered", self.prompted)
        yield self._counter("vllm:generation_tokens", "Tokens generated", self.generated)
        yield self._counter("vllm:num_preemptions", "Times that a request gave up its pages", self.preemptions)
        yield self._by_label("vllm:request_success", "Requests that ended", "finished_reason", self.finished)
        times = {
            "vllm:time_to_first_token_seconds": ("From a request's arrival to its first token", self.first_token),
            "vllm:inter_token_latency_seconds": ("From one token to the next", self.between_tokens),
            "vllm:e2e_request_latency_seconds": ("From a request's arrival to its end", self.end_to_end),
        }
        for name, (text, histogram) in times.items():
            family = HistogramMetricFamily(name, text, labels=["model_name"])
            family.add_metric([self.name], *histogram.read())
            yield family
        if self.guard is not None:
            refused = self.guard.refused.copy()
            yield self._by_label("outrider_requests_refused", "Requests turned away at the door", "reason", refused)
            yield self._gauge("outrider_draining", "1 while the server shuts down", int(self.guard.draining))

    def _speculation(self) -> Iterable[Metric]:
        method_stats = self._tallies()
        total = SpecStats()
        for spec_stats in method_stats.values():
            total.add(spec_stats)
        drafts = self._rising("drafts", total.steps - total.widths.get(0, 0))
        drafted, accepted = self._rising("drafted", total.drafted), self._rising("accepted", total.accepted)
        yield self._counter("vllm:spec_decode_num_drafts", "Drafts that were verified", drafts)
        yield self._counter("vllm:spec_decode_num_draft_tokens", "Tokens that were drafted", drafted)
        yield self._counter("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were kept", accepted)
        name, help_ = "vllm:spec_decode_num_accepted_tokens_per_pos", "Drafted tokens kept, by their place in the draft"
        places = {
            str(place): self._rising(f"kept {place}", kept) for place, kept in enumerate(total.accepted_per_depth)
        }
        yield self._by_label(name, help_, "position", places)
        help_ = "Tokens a step, the target's own included"
        family = GaugeMetricFamily("outrider_acceptance_length", help_, labels=["model_name", "method"])
        for method, spec_stats in method_stats.items():
            family.add_metric([self.name, method], spec_stats.mean_length)
        yield family
        widths = {str(width): self._rising(f"width {width}", total.widths[width]) for width in sorted(total.widths)}
        yield self._by_label("outrider_draft_width_steps", "Steps by the number of tokens drafted", "width", widths)

    def _tallies(self) -> dict[str, SpecStats]:
        """By method: of the requests that have ended, and then of those that run.

        In this order a request that ends meanwhile is missing for once, but none is counted twice.
        """
        engine = self.llm.engine
        found = {method: snapshot(spec_stats) for method, spec_stats in dict(engine.spec_manager.method_stats).items()}
        for family in list(engine.parents.values()):
            for request in (transcript.request for transcript in family.transcripts):
                if request.method and request.finish_reason is None:
                    found.setdefault(request.method, SpecStats()).add(snapshot(request.spec_stats))
        return found

    def _engine(self) -> Iterable[Metric]:
        engine = self.llm.engine
        yield self._counter("outrider_steps", "Passes of the target", engine.times.steps)
        yield self._counter("outrider_step_seconds", "Seconds spent in steps", engine.times.seconds)
        help_ = (
            "Seconds of them in which the device ran rounds by itself; the rest is the host's, where there are rounds"
        )
        yield self._counter("outrider_device_rounds_seconds", help_, engine.runner.multi_step.busy)
        evictions = engine.scheduler.cache.evictions
        yield self._counter("outrider_prefix_cache_evictions", "Shared pages taken for something new", evictions)
        yield self._gauge("outrider_engine_alive", "0 when the engine's thread is gone", int(self.llm.alive))
        yield self._gauge("outrider_engine_paused", "1 while the engine is paused", int(self.llm.paused))

    def _rising(self, name: str, value: int) -> int:
        """A count that may be lower for a moment, within a step of the engine: readers must never see it fall."""
        self._highest[name] = max(value, self._highest.get(name, 0))
        return self._highest[name]

    def _gauge(self, name: str, help_: str, value: float, labels: Mapping[str, str] | None = None) -> Metric:
        more = labels or {}
        family = GaugeMetricFamily(name, help_, labels=["model_name", *more])
        family.add_metric([self.name, *more.values()], value)
        return family

    def _counter(self, name: str, help_: str, value: float) -> Metric:
        family = CounterMetricFamily(name, help_, labels=["model_name"])
        family.add_metric([self.name], value)
        return family

    def _by_label(self, name: str, help_: str, label: str, values: Mapping[str, Any]) -> Metric:
        family = CounterMetricFamily(name, help_, labels=["model_name", label])
        for key, value in values.items():
            family.add_metric([self.name, key], value)
        return family


def snapshot(spec_stats: SpecStats) -> SpecStats:
    """A copy that the engine's thread does not change under the reader; each container is copied in one go."""
    return SpecStats(
        spec_stats.steps,
        spec_stats.drafted,
        spec_stats.accepted,
        spec_stats.drafted_per_depth.copy(),
        spec_stats.accepted_per_depth.copy(),
        spec_stats.widths.copy(),
    )
