"""The Ray Serve application with real replicas on this machine. `make test-scale` installs Ray and runs it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
import yaml

import tiny

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).resolve().parents[2]
HEADER = "x-outrider-replica"
START = "Once upon a time, in a house by the sea, "  # several blocks long
LONG = 12_000  # tokens: some ten seconds of the tiny model, unless somebody ends it
BOTH = {
    "min_replicas": 2,
    "max_replicas": 2,
    "imbalance": 4,
    "health_period_seconds": 0.5,
    "health_timeout_seconds": 5,
}
SMALL = {
    "min_replicas": 1,
    "max_replicas": 2,
    "target_ongoing_requests": 1,
    "upscale_seconds": 1,
    "max_ongoing_requests": 2,
    "max_queued_requests": 2,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a long context."""
    folder = tmp_path_factory.mktemp("scale") / "model"
    tiny.copy("llama", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 16_384}))
    return folder


@pytest.fixture(scope="module")
def site(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Deploy the example's config file with a tiny model, and a second, smaller application."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = yaml.safe_load((ROOT / "examples" / "serve.yaml").read_text())
    config["http_options"].update(host="127.0.0.1", port=port)
    (large,) = config["applications"]
    common = {"model": str(model), "names": "tiny", "block": 16, "cache_tokens": 60_000, "cpus": 1, "drain_seconds": 60}
    small = {**large, "name": "small", "route_prefix": "/small", "args": {**common, **SMALL}}
    large["args"] = {**common, **BOTH}
    config["applications"].append(small)
    file = tmp_path_factory.mktemp("scale") / "serve.yaml"
    file.write_text(yaml.safe_dump(config))

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Only counted, not measured: the tests care for behaviour, and the replicas are tiny.
    context = ray.init(num_cpus=6, object_store_memory=100 * 2**20, include_dashboard=False, log_to_driver=False)
    environment = {**os.environ, "RAY_ADDRESS": context.address_info["gcs_address"]}
    command = [str(Path(sys.executable).with_name("serve")), "run", str(file)]
    runner = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        until(lambda: len(replicas(address)) == 2 and len(replicas(f"{address}/small")) == 1, "up", seconds=240)
        yield address
    finally:
        runner.send_signal(signal.SIGINT)
        runner.wait(120)
        ray.shutdown()


def until(condition: Callable[[], Any], description: str, seconds: float = 60) -> float:
    """Wait for a condition; return the seconds that it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, f"not {description} after {seconds} seconds"
        time.sleep(0.1)
    return time.monotonic() - start


def samples(address: str, name: str) -> dict[str, float]:
    """Return one metric by replica."""
    try:
        page = httpx.get(f"{address}/metrics", timeout=10).raise_for_status().text
    except httpx.HTTPError:
        return {}
    lines = [line for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    return {line.split('replica="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


def replicas(address: str) -> set[str]:
    return set(samples(address, "vllm:num_requests_running"))


def ask(address: str, prompt: str, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, **fields}
    return httpx.post(f"{address}/v1/completions", json=body, timeout=120)


class Stream:
    """A long response that is read in the background."""

    def __init__(self, address: str, prompt: str, tokens: int = LONG) -> None:
        self.events: list[str] = []
        self.replica = ""
        self.status = 0
        self.body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        self.thread = threading.Thread(target=self._read, args=(f"{address}/v1/completions",))
        self.leave = threading.Event()
        self.thread.start()

    def _read(self, address: str) -> None:
        with httpx.stream("POST", address, json=self.body, timeout=120) as response:
            self.replica, self.status = response.headers.get(HEADER, ""), response.status_code
            for line in response.iter_lines():
                if line.startswith("data: "):
                    self.events.append(line.removeprefix("data: "))
                if self.leave.is_set():
                    return

    def begun(self) -> bool:
        return len(self.events) > 2 or not self.thread.is_alive()

    def end(self) -> list[str]:
        self.thread.join(120)
        assert not self.thread.is_alive()
        return self.events


def two_streams(address: str) -> tuple[Stream, Stream]:
    """Start a stream on each replica; the second goes to the less loaded one."""
    first = Stream(address, "first")
    until(first.begun, "begun")
    second = Stream(address, "second")
    until(second.begun, "begun")
    assert {first.replica, second.replica} == replicas(address)
    return first, second


def actor(application: str, replica: str) -> Any:
    name = f"SERVE_REPLICA::{application}#Replica#{replica}"
    return ray.get_actor(name, namespace="serve")


def kill(application: str, replica: str) -> None:
    process = ray.get(actor(application, replica).__ray_call__.remote(lambda _: os.getpid()))
    os.kill(process, signal.SIGKILL)


def test_different_prompts_are_spread_over_replicas(site: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda number: ask(site, f"{number} is a number", max_tokens=64), range(40)))
    assert {answer.status_code for answer in answers} == {200}
    shares = Counter(answer.headers[HEADER] for answer in answers)
    print("40 prompts that differ, 8 at a time:", dict(shares))  # noqa: T201
    assert len(shares) == 2 and min(shares.values()) >= 10


def test_prompts_with_a_common_prefix_go_to_one_replica(site: str) -> None:
    before = samples(site, "vllm:prefix_cache_hits_total")
    homes = {}
    for letter in "ABCDEF":
        prompts = [f"{letter}. {START}{number} {'x' * number}" for number in range(6)]
        homes[letter] = [ask(site, prompt).headers[HEADER] for prompt in prompts]
    after = samples(site, "vllm:prefix_cache_hits_total")
    hits = {name: after[name] - before[name] for name in after}
    print("6 families of 6 prompts:", {name: Counter(home) for name, home in homes.items()}, "tokens hit:", hits)  # noqa: T201
    assert all(len(set(home)) == 1 for home in homes.values())
    # All but the first prompt of each letter find its prefix in the cache, except the last, partial page.
    assert sum(hits.values()) >= 6 * 5 * 32


def test_a_busy_prefix_holder_is_not_preferred(site: str) -> None:
    home = ask(site, START).headers[HEADER]
    batch_size = [Stream(site, f"{START}and {number}") for number in range(5)]
    until(lambda: all(stream.begun() for stream in batch_size), "begun")
    late = ask(site, f"{START}at last")
    for stream in batch_size:
        stream.leave.set()
    for stream in batch_size:
        stream.end()
    assert {stream.replica for stream in batch_size} == {home}
    assert late.headers[HEADER] != home


def test_a_disconnected_client_frees_its_request(site: str) -> None:
    stream = Stream(site, "leaving early")
    until(stream.begun, "begun")
    stream.leave.set()
    took = until(lambda: sum(samples(site, "vllm:num_requests_running").values()) == 0, "free", seconds=5)
    assert len(stream.end()) < LONG / 4
    print(f"a client hung up: its place is free after {took:.2f} s")  # noqa: T201


def test_a_replica_killed_during_a_stream_is_replaced(site: str) -> None:
    lost, kept = two_streams(site)
    before = replicas(site)
    kill("outrider", lost.replica)
    *_, last = lost.end()
    assert json.loads(last)["error"]["code"] == "replica_lost"
    assert kept.thread.is_alive()
    answers = [ask(site, f"{number} while one is missing") for number in range(6)]
    assert {(answer.status_code, answer.headers[HEADER]) for answer in answers} == {(200, kept.replica)}
    took = until(lambda: len(replicas(site)) == 2, "replaced", seconds=240)
    assert replicas(site) - before and lost.replica not in replicas(site)
    events = kept.end()
    assert events[-1] == "[DONE]" and json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
    print(f"killed in mid-stream after {len(lost.events) - 1} events: replaced after {took:.1f} s, the other went on")  # noqa: T201


def test_a_request_whose_replica_was_killed_before_its_response_is_not_sent_to_another(site: str) -> None:
    assert httpx.post(f"{site}/pause", timeout=30).status_code == 200
    waiting = Stream(site, "who will answer?", tokens=8)
    until(lambda: sum(samples(site, "vllm:num_requests_waiting").values()) == 1, "waiting")
    (holder,) = [name for name, count in samples(site, "vllm:num_requests_waiting").items() if count]
    kill("outrider", holder)
    until(lambda: holder not in replicas(site), "gone")
    assert httpx.post(f"{site}/resume", timeout=30).status_code == 200
    assert waiting.end() == [] and waiting.status == 500
    until(lambda: len(replicas(site)) == 2, "replaced", seconds=240)


def break_engine(application: str, replica: str) -> None:
    """Make the next step of the replica's engine end its thread."""

    def at_the_replica(_: object) -> None:  # inside, so that it travels whole: a replica has no tests to import
        def fall(*_: object, **__: object) -> None:
            raise SystemExit("broken by a test")

        (thread,) = [thread for thread in threading.enumerate() if thread.name == "outrider-engine"]
        thread._target.__self__.engine.step = fall  # type: ignore[attr-defined]

    ray.get(actor(application, replica).__ray_call__.remote(at_the_replica))


def test_a_replica_whose_engine_dies_is_replaced(site: str) -> None:
    sick, *_ = sorted(replicas(site))
    break_engine("outrider", sick)
    statuses: Counter[int] = Counter()

    def gone() -> bool:
        statuses.update(ask(site, f"{sum(statuses.values())} or so").status_code for _ in range(4))
        return sick not in replicas(site)

    until(gone, "replaced", seconds=240)
    until(lambda: len(replicas(site)) == 2, "two again", seconds=240)
    print("an engine died: statuses until its replica was gone:", dict(statuses))  # noqa: T201
    # Only those in the step that broke hear of it.
    assert statuses[200] > 4 and statuses.total() - statuses[200] <= 1
    assert httpx.get(f"{site}/health").status_code == 200


def test_overload_gets_429_and_adds_a_replica(site: str) -> None:
    small = f"{site}/small"
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda number: ask(small, f"{number}", max_tokens=2000, ignore_eos=True), range(12)))
    statuses = Counter(answer.status_code for answer in answers)
    assert statuses[200] >= 3 and statuses[429] >= 1 and statuses.total() == statuses[200] + statuses[429]
    for answer in answers:
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) >= 1 and answer.json()["error"]["code"] == "queue_full"
    batch_size = [Stream(small, f"{number}") for number in range(3)]
    until(lambda: sum(stream.begun() for stream in batch_size) >= 2, "begun")
    assert httpx.get(f"{small}/health", timeout=30).status_code == 200, "full is not ill"
    took = until(lambda: len(replicas(small)) == 2, "scaled up", seconds=240)
    for stream in batch_size:
        stream.leave.set()
        stream.end()
    print(f"12 clients: {dict(statuses)}; under load a second replica after {took:.1f} s")  # noqa: T201


def test_a_deleted_application_finishes_its_requests(site: str) -> None:
    stream = Stream(f"{site}/small", "last words", tokens=4000)
    until(stream.begun, "begun")
    from ray import serve  # warns of others' old habits: not while tests are collected

    serve.delete("small")
    events = stream.end()
    assert events[-1] == "[DONE]" and json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
