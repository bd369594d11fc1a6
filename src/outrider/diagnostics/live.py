"""Read the metrics of a running server again and again, and derive rates and mean latencies from them."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from ..errors import UserError

READ_TIMEOUT = 5.0  # seconds for one answer
WINDOW = 10.0  # seconds over which rates and means are taken
HISTORY = 60  # rates that are kept for the chart
MAX_BYTES = 8 * 2**20  # of one answer

Samples = Mapping[str, Mapping[tuple[tuple[str, str], ...], float]]  # name -> labels -> value


class UnreachableError(Exception):
    """The server did not answer; the message is the reason."""


@dataclass(frozen=True)
class Reading:
    """The metrics and the health of a server at one moment."""

    seconds: float  # `monotonic`
    samples: Samples
    health: str  # "ok", or the reason why the server is not well

    def total(self, name: str) -> float:
        """Return the sum of a metric over its labels; 0 if the server does not export it."""
        return sum(self.samples.get(name, {}).values())

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Return the values of a metric by one of its labels."""
        return {dict(labels).get(label, ""): value for labels, value in self.samples.get(name, {}).items()}

    def label(self, name: str, label: str) -> str:
        """Return a label of a metric's first sample; empty if there is none."""
        return next(iter(self.by_label(name, label)), "")


class Server:
    """A running server, read over HTTP."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = normalize(url)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def read(self) -> Reading:
        """Read the metrics and the health. Raise UnreachableError if there is no server, UserError if it refuses."""
        from prometheus_client.parser import text_string_to_metric_families

        status, body = self._get("/metrics")
        if status == 401:
            raise UserError(f"`{self.url}` requires an API key: pass `--api-key`, or set `OUTRIDER_KEY`")
        samples: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        try:
            for metric in text_string_to_metric_families(body if status == 200 else ""):
                for sample in metric.samples:
                    samples.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
        except ValueError:
            samples.clear()
        if "vllm:num_requests_running" not in samples:
            raise UserError(f"`{self.url}/metrics` (status {status}) is not that of `outrider serve`: check the URL")
        return Reading(time.monotonic(), samples, self._health())

    def _health(self) -> str:
        status, body = self._get("/health")
        if status == 200:
            return "ok"
        try:
            return str(json.loads(body)["reason"])
        except (ValueError, KeyError, TypeError):
            return f"/health has status {status}"

    def _get(self, path: str) -> tuple[int, str]:
        try:
            with urlopen(Request(self.url + path, headers=self._headers), timeout=READ_TIMEOUT) as answer:
                return answer.status, answer.read(MAX_BYTES).decode(errors="replace")
        except HTTPError as error:
            with error:
                return error.code, error.read(MAX_BYTES).decode(errors="replace")
        except (URLError, HTTPException, OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise UnreachableError(str(getattr(reason, "strerror", None) or reason or type(error).__name__)) from None


def normalize(url: str) -> str:
    """Return the address of a server: with a scheme, without a path."""
    full = url if "://" in url else f"http://{url}"
    if not full.startswith(("http://", "https://")):
        raise UserError(f"`{url}` is not the address of a server: expected one such as `http://localhost:8000`")
    return full.rstrip("/").removesuffix("/v1")


@dataclass
class History:
    """The latest readings of a server, and the speed at each of them."""

    readings: deque[Reading] = field(default_factory=deque)
    speeds: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))  # generated tokens/s

    def add(self, reading: Reading) -> None:
        """Add a reading. If counters fell, the server was restarted, and earlier readings are dropped."""
        tokens = "vllm:generation_tokens_total"
        if self.readings and reading.total(tokens) < self.readings[-1].total(tokens):
            self.readings.clear()
        if self.readings:
            last = self.readings[-1]
            self.speeds.append((reading.total(tokens) - last.total(tokens)) / (reading.seconds - last.seconds))
        self.readings.append(reading)
        while len(self.readings) > 2 and reading.seconds - self.readings[0].seconds > WINDOW:
            self.readings.popleft()

    @property
    def last(self) -> Reading:
        return self.readings[-1]

    def growth(self, name: str) -> float:
        """Return the growth of a counter within the window."""
        return self.last.total(name) - self.readings[0].total(name)

    def rate(self, name: str) -> float:
        """Return the growth of a counter per second; 0 after the first reading."""
        seconds = self.last.seconds - self.readings[0].seconds
        return self.growth(name) / seconds if seconds > 0 else 0.0

    def mean(self, name: str) -> float | None:
        """Return the mean of a histogram within the window or, if nothing was counted there, since the start."""
        return self.ratio(f"{name}_sum", f"{name}_count")

    def ratio(self, part: str, whole: str) -> float | None:
        """Return the ratio of two counters within the window, else since the start; None if nothing was counted."""
        if self.growth(whole) > 0:
            return self.growth(part) / self.growth(whole)
        total = self.last.total(whole)
        return self.last.total(part) / total if total > 0 else None


def summarize(history: History, server: Server) -> dict[str, Any]:
    """Return the figures of one frame, as they are printed and as `--json` writes them."""
    last = history.last
    pages = float(last.label("vllm:cache_config_info", "num_gpu_blocks") or 0)
    used = last.total("vllm:kv_cache_usage_perc")
    per_step = history.ratio("vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_drafts_total")
    return {
        "url": server.url,
        "model": last.label("vllm:num_requests_running", "model_name"),
        "health": last.health,
        "paused": bool(last.total("outrider_engine_paused")),
        "draining": bool(last.total("outrider_draining")),
        "running": int(last.total("vllm:num_requests_running")),
        "waiting": int(last.total("vllm:num_requests_waiting")),
        "finished": {
            reason: int(count)
            for reason, count in last.by_label("vllm:request_success_total", "finished_reason").items()
        },
        "refused": int(last.total("outrider_requests_refused_total")),
        "preempted": int(last.total("vllm:num_preemptions_total")),
        "generated_tokens_per_second": history.rate("vllm:generation_tokens_total"),
        "prompt_tokens_per_second": history.rate("vllm:prompt_tokens_total"),
        "generated_tokens": int(last.total("vllm:generation_tokens_total")),
        "prompt_tokens": int(last.total("vllm:prompt_tokens_total")),
        "page_size": int(last.label("vllm:cache_config_info", "block_size") or 0),
        "pages": int(pages),
        "pages_used": round(used * pages),
        "prefix_cache_hit_rate": history.ratio("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
        "methods": list(last.by_label("outrider_acceptance_length", "method")),
        "acceptance_rate": history.ratio(
            "vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_draft_tokens_total"
        ),
        "mean_acceptance_length": None if per_step is None else 1 + per_step,
        "drafted_tokens": int(last.total("vllm:spec_decode_num_draft_tokens_total")),
        "accepted_tokens": int(last.total("vllm:spec_decode_num_accepted_tokens_total")),
        "first_token_seconds": history.mean("vllm:time_to_first_token_seconds"),
        "per_token_seconds": history.mean("vllm:inter_token_latency_seconds"),
        "queue_seconds": history.mean("vllm:request_queue_time_seconds"),
        "end_to_end_seconds": history.mean("vllm:e2e_request_latency_seconds"),
    }
