"""Measure the server under load: `overhead`, `load` and `start` each print a table; `load` also checks for faults.

    python tools/load_server.py overhead smollm2-135m --rounds 5 --tokens 128
    python tools/load_server.py load smollm2-135m --streams 200 --minutes 5
    python tools/load_server.py start smollm2-135m

The server runs in its own process, which can also run the engine without HTTP, so that both use the same weights
alternately. The client uses plain sockets, because the cost of a client library would be part of the measurement.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from load_report import StreamResult, report, say

SENTENCE = "the sea is wide and old ships cross it slowly while birds follow them over grey water toward the north"
WORDS = SENTENCE.split()


def prompt(number: int, words: int = 24) -> str:
    """Return a different text for each stream, so that no two share more than a few pages."""
    chosen = random.Random(number)
    return f"{number}. " + " ".join(chosen.choice(WORDS) for _ in range(words))


# ---- the client ----


async def ask(
    port: int, text: str, tokens: int, leave_after: int | None = None, result: StreamResult | None = None
) -> StreamResult:
    """Stream one completion, and disconnect after `leave_after` chunks. `result` is filled while it runs."""
    body = json.dumps(
        {
            "prompt": text,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    result = result or StreamResult()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError as error:
        result.problem = f"connect: {error}"
        return result
    try:
        writer.write(head.encode() + body)
        await listen(reader, result, leave_after)
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        result.problem = f"{type(error).__name__}: {error}"
    finally:
        writer.transport.abort()
    return result


async def listen(reader: asyncio.StreamReader, result: StreamResult, leave_after: int | None) -> None:
    headers = await reader.readuntil(b"\r\n\r\n")
    result.status = int(headers.split(b" ", 2)[1])
    tail = b""
    while data := await reader.read(2**16):
        if result.status == 200 and b"data: " in data:
            result.chunks.append(time.perf_counter())
        tail = (tail + data)[-4096:]
        if leave_after is not None and len(result.chunks) >= leave_after:
            return
    if result.status != 200:
        result.problem = tail.decode(errors="replace")[-300:]
    elif b"data: [DONE]" not in tail:
        result.problem = "the stream ended early: " + tail.decode(errors="replace")[-200:]
    else:
        result.finished = True
        _, _, usage = tail.rpartition(b'"completion_tokens":')
        result.tokens = int(usage.split(b",")[0].split(b"}")[0])


def get(port: int, path: str) -> dict[str, Any]:
    """Ask the server process for JSON."""
    with socket.create_connection(("127.0.0.1", port), timeout=600) as line:
        line.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: line.recv(2**16), b""))
    found: dict[str, Any] = json.loads(answer.partition(b"\r\n\r\n")[2])
    return found


# ---- the server, in a process of its own ----


def host(arguments: argparse.Namespace) -> int:
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    from outrider import AsyncLLM, SamplingParams
    from outrider.server.app import build_app, serve
    from outrider.server.app import listen as take_port
    from outrider.server.options import ServerOptions

    options = ServerOptions(port=0, log_requests=False, max_waiting=arguments.max_waiting)
    listener = take_port(options)
    names = ("max_requests", "max_step_tokens", "cache_tokens", "speculate")
    llm = AsyncLLM(arguments.model, **{name: getattr(arguments, name) for name in names})
    app = build_app(llm, options)

    async def alone(request: Request) -> Response:
        """Run the same requests on the engine without HTTP."""
        streams, tokens = int(request.query_params["streams"]), int(request.query_params["tokens"])
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)

        async def one(number: int) -> int:
            count = 0
            async for output in llm.generate(prompt(number), params):
                count = len(output.completions[0].token_ids)
            return count

        started = time.perf_counter()
        counts = await asyncio.gather(*(one(number) for number in range(streams)))
        return JSONResponse({"tokens": sum(counts), "seconds": time.perf_counter() - started})

    async def facts(request: Request) -> Response:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        load = llm.load
        return JSONResponse(
            {
                "pages": load.pages_used,
                "running": load.running,
                "waiting": load.waiting,
                "sequences": app.state.context.admission.active,
                "tasks": len(asyncio.all_tasks()),
                "parents": len(llm.engine.parents),
                "resident": resident,
                "cpu": time.thread_time(),  # of the event loop only: the engine's threads may spin
            }
        )

    app.router.routes += [Route("/load/alone", alone), Route("/load/facts", facts)]
    say(str(listener.getsockname()[1]))
    return serve(app, options, listener)


@contextmanager
def hosted(arguments: argparse.Namespace) -> Iterator[int]:
    command = [sys.executable, __file__, "host", arguments.model]
    for name in ("max_requests", "max_step_tokens", "cache_tokens", "max_waiting", "speculate"):
        command.append(f"--{name.replace('_', '-')}={getattr(arguments, name)}")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit("the server did not start")
        yield int(line)
    finally:
        process.terminate()
        code = process.wait(timeout=60)
        if code:
            say(f"the server exited with {code}")


# ---- what is measured ----


async def together(port: int, streams: int, tokens: int) -> tuple[int, float]:
    started = time.perf_counter()
    results = await asyncio.gather(*(ask(port, prompt(number), tokens) for number in range(streams)))
    seconds = time.perf_counter() - started
    bad = [result.problem for result in results if not result.finished]
    if bad:
        raise SystemExit(f"a stream failed: {bad[0]}")
    return sum(result.tokens for result in results), seconds


@dataclass
class Comparison:
    """Speeds of the engine alone and through HTTP, measured alternately on one server."""

    port: int
    streams: int
    tokens: int
    speeds: dict[str, list[float]] = field(default_factory=lambda: {"alone": [], "http": []})  # tokens/s
    work: dict[str, list[float]] = field(
        default_factory=lambda: {"alone": [], "http": []}
    )  # ms of the event loop per token

    def measure(self, kind: str) -> None:
        before = get(self.port, "/load/facts")["cpu"]
        if kind == "alone":
            found = get(self.port, f"/load/alone?streams={self.streams}&tokens={self.tokens}")
            count, seconds = found["tokens"], found["seconds"]
        else:
            count, seconds = asyncio.run(together(self.port, self.streams, self.tokens))
        self.speeds[kind].append(count / seconds)
        self.work[kind].append((get(self.port, "/load/facts")["cpu"] - before) * 1000 / count)

    def row(self) -> str:
        added = [alone / http - 1 for alone, http in zip(*self.speeds.values(), strict=True)]
        cells = [self.streams, *(f"{median(each):.1f}" for each in self.speeds.values()), f"{median(added):+.1%}"]
        cells += [f"{min(added):+.1%} {max(added):+.1%}", *(f"{median(each):.2f}" for each in self.work.values())]
        return f"| {' | '.join(str(cell) for cell in cells)} |"


def overhead(arguments: argparse.Namespace) -> int:
    """Compare the speed of the engine alone and through HTTP, by the ratio of each pair of measurements."""
    with hosted(arguments) as port:
        say("| streams | alone tok/s | HTTP tok/s | added | lowest, highest | loop ms/tok alone | with HTTP |")
        say("|---|---|---|---|---|---|---|")
        for streams in (1, 8):
            asyncio.run(together(port, streams, 16))  # warm
            comparison = Comparison(port, streams, arguments.tokens)
            for number in range(arguments.rounds):
                for kind in ("alone", "http")[:: 1 if number % 2 else -1]:
                    comparison.measure(kind)
            say(comparison.row())
    return 0


@dataclass
class Load:
    """Clients that send requests until the end, some of which disconnect early."""

    results: list[StreamResult] = field(default_factory=list)

    async def client(self, port: int, number: int, until: float, tokens: int, aborts: float) -> None:
        chosen = random.Random(number)
        count_sent = 0
        while time.perf_counter() < until:
            count_sent += 1
            leaves = chosen.random() < aborts
            text = prompt(1000 * number + count_sent, chosen.randint(4, 60))
            count = chosen.randint(max(tokens // 4, 1), tokens)
            # Some clients disconnect before the first chunk, some in the middle.
            result = StreamResult()
            self.results.append(result)
            await ask(port, text, count, chosen.randint(0, count // 2) if leaves else None, result)
            if result.status == 429:
                await asyncio.sleep(chosen.uniform(0.2, 2.0))


async def watch(port: int, seconds: float) -> list[dict[str, Any]]:
    samples = []
    for _ in range(8):
        await asyncio.sleep(seconds / 8)
        samples.append(await asyncio.to_thread(get, port, "/load/facts"))
    return samples


def load(arguments: argparse.Namespace) -> int:
    """Run many streams, some of which disconnect, and check that no resource of them is left afterwards."""
    seconds = arguments.minutes * 60
    with hosted(arguments) as port:
        asyncio.run(together(port, 1, 8))
        before = get(port, "/load/facts")
        clients_load = Load()

        async def run() -> list[dict[str, Any]]:
            until = time.perf_counter() + seconds
            clients = [
                asyncio.create_task(clients_load.client(port, number, until, arguments.tokens, arguments.aborts))
                for number in range(arguments.streams)
            ]
            samples = await watch(port, seconds)
            for client in clients:  # at the end all disconnect at once
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
            return samples

        samples = asyncio.run(run())
        deadline = time.monotonic() + 30
        while not is_over(after := get(port, "/load/facts")) and time.monotonic() < deadline:
            time.sleep(0.2)
    return report(clients_load.results, before, samples, after)


def is_over(facts: dict[str, Any]) -> bool:
    """Return whether the last abort is complete, which takes as long as the step that was running."""
    return not facts["sequences"] and not facts["parents"]


def start(arguments: argparse.Namespace) -> int:
    """Measure the time from the command line to the end of the first response."""
    say("| run | listening s | first answer s | CPU s |")
    say("|---|---|---|---|")
    for run in range(arguments.rounds):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        started = time.perf_counter()
        command = [sys.executable, "-m", "outrider", "serve", arguments.model, f"--port={port}"]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            result = StreamResult()
            listening = None
            while not result.finished and process.poll() is None:
                result = asyncio.run(ask(port, "The sea", 1))
                if result.status and listening is None:
                    listening = time.perf_counter() - started
                time.sleep(0.02)
            seconds = time.perf_counter() - started
            user, system = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
            spent = (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
            say(f"| {run + 1} | {listening:.2f} | {seconds:.2f} | {spent:.2f} |")
        finally:
            process.terminate()
            process.wait(timeout=60)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for command in (overhead, load, start, host):
        part = commands.add_parser(command.__name__, help=command.__doc__)
        part.set_defaults(run=command)
        part.add_argument("model")
        part.add_argument("--rounds", type=int, default=5)
        part.add_argument("--tokens", type=int, default=128)
        part.add_argument("--streams", type=int, default=200)
        part.add_argument("--minutes", type=float, default=5.0)
        part.add_argument("--aborts", type=float, default=0.3, help="fraction of the requests that disconnect early")
        part.add_argument("--max-requests", type=int, default=32)
        part.add_argument("--max-step-tokens", type=int, default=128)
        # A small cache, so that all of its pages are touched soon, and later growth of memory is a leak.
        part.add_argument("--cache-tokens", type=int, default=8192)
        part.add_argument("--max-waiting", type=int, default=256)
        part.add_argument("--speculate", default="none")
    arguments = parser.parse_args()
    code: int = arguments.run(arguments)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
