"""The Grafana dashboard in examples/grafana asks only for metrics and labels that the server exports."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from outrider.server.app import build_app
from outrider.server.options import ServerOptions

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "grafana"
METRIC = re.compile(r"\b(?:vllm:|outrider_)\w+")
ENGINE = {"speculate": "ngram:width=3,adaptive=no"}
PROMETHEUS = {"instance"}  # labels that Prometheus adds
ASK: dict[str, Any] = {"prompt": [5, 6, 7] * 4, "max_tokens": 30, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    return json.loads((FOLDER / "outrider.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def labels(llm) -> dict[str, set[str]]:
    """Labels of each sample that a server exports after a request and a refusal."""
    client = TestClient(build_app(llm, ServerOptions(names=("tiny",), max_body_bytes=1000)))
    client.post("/v1/completions", json=ASK)
    client.post("/v1/completions", content=b" " * 1001)
    found: dict[str, set[str]] = defaultdict(set)
    for metric in text_string_to_metric_families(client.get("/metrics").text):
        for sample in metric.samples:
            found[sample.name] |= set(sample.labels)
    return found


def expressions(dashboard: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each query with its legend."""
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"], target["legendFormat"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["definition"], ""


def test_every_metric_exists(dashboard, labels) -> None:
    for expression, _ in expressions(dashboard):
        names = METRIC.findall(expression)
        assert names, expression
        assert not set(names) - set(labels), expression


def test_every_label_exists(dashboard, labels) -> None:
    for expression, legend in expressions(dashboard):
        filters = {name for body in re.findall(r"\{([^}]*)\}", expression) for name in re.findall(r"(\w+)=~?", body)}
        groups = {name.strip() for body in re.findall(r"by \(([^)]*)\)", expression) for name in body.split(",")}
        groups |= set(re.findall(r"\{\{(\w+)\}\}", legend))
        first, *others = METRIC.findall(expression)  # the first is grouped, others may divide it
        assert filters | groups <= labels[first] | PROMETHEUS, expression
        assert all(filters <= labels[name] | PROMETHEUS for name in others), expression


def test_panels_do_not_overlap_and_have_ids_of_their_own(dashboard) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        area = panel["gridPos"]
        cells = {
            (x, y) for x in range(area["x"], area["x"] + area["w"]) for y in range(area["y"], area["y"] + area["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)


def test_prometheus_reads_the_default_port() -> None:
    (job,) = yaml.safe_load((FOLDER / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"localhost:{ServerOptions.port}"]}]
