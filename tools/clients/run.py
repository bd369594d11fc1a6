"""Run third-party clients against `outrider serve`; each prints its checks.

    python tools/clients/run.py                          all of them
    python tools/clients/run.py llm langchain            some
    python tools/clients/run.py schemathesis --cases 10000

Each client has its own virtual environment, made on first use; that of outrider is not changed.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import with_aiperf
import with_langchain
import with_llm
import with_lm_eval
import with_schemathesis
from stage import ClientError, Environment, Record, serving

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(description="Run third-party clients against the server.")
    parser.add_argument("clients", nargs="*", help=f"some of {', '.join(CLIENTS)}; none: all")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "clients", help="environments and records")
    parser.add_argument("--cases", type=int, default=1000, help="number of schemathesis cases")
    parser.add_argument("--requests", type=int, default=24, help="number of requests of the load test")
    asked = parser.parse_args()
    unknown = sorted(set(asked.clients) - set(CLIENTS))
    if unknown:
        parser.error(f"no client called `{unknown[0]}`: expected some of {', '.join(CLIENTS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # no server may outlive its clients
    return 0 if all([run(name, asked) for name in asked.clients or CLIENTS]) else 1


def run(name: str, asked: argparse.Namespace) -> bool:
    """Run one client, and write its record to a file."""
    record, began = Record(name), time.monotonic()
    scratch = asked.folder / "scratch" / name
    scratch.mkdir(parents=True, exist_ok=True)
    try:
        CLIENTS[name](asked, scratch, record)
    except ClientError as error:
        record.note("the client was content", False, error)
    report = f"{record.table()}\n    {time.monotonic() - began:.0f} s with {asked.model}\n"
    (asked.folder / f"{name}.txt").write_text(report)
    sys.stdout.write(f"{report}\n")
    sys.stdout.flush()
    return record.passed


def environment(asked: argparse.Namespace, name: str, packages: tuple[str, ...]) -> Environment:
    found = Environment(asked.folder / name)
    found.install(*packages)
    return found


def llm(asked: argparse.Namespace, scratch: Path, record: Record) -> None:
    own = environment(asked, "chat", with_llm.PACKAGES)
    with serving(asked.model, scratch, ("--speculate", "suffix")) as server:
        with_llm.run(server, own, scratch, record)


def langchain(asked: argparse.Namespace, scratch: Path, record: Record) -> None:
    own = environment(asked, "chat", with_langchain.PACKAGES)
    with serving(asked.model, scratch, ("--speculate", "suffix")) as server:
        with_langchain.run(server, own, scratch, record)


def lm_eval(asked: argparse.Namespace, scratch: Path, record: Record) -> None:
    own = environment(asked, "scores", with_lm_eval.PACKAGES)
    with (
        serving(asked.model, scratch, ("--speculate", "none")) as plain,
        serving(asked.model, scratch, ("--speculate", "suffix:adaptive=no")) as drafted,
    ):
        with_lm_eval.run({"none": plain, "suffix": drafted}, own, scratch, record)


def aiperf(asked: argparse.Namespace, scratch: Path, record: Record) -> None:
    own = environment(asked, "load", with_aiperf.PACKAGES)
    with serving(asked.model, scratch, ("--speculate", "suffix:adaptive=no")) as server:
        with_aiperf.run(server, own, scratch, record, asked.requests)


def schemathesis(asked: argparse.Namespace, scratch: Path, record: Record) -> None:
    own = environment(asked, "fuzz", with_schemathesis.PACKAGES)
    with serving(asked.model, scratch, ("--speculate", "suffix", *with_schemathesis.FLAGS)) as server:
        with_schemathesis.run(server, own, scratch, record, asked.cases)


CLIENTS: dict[str, Callable[[argparse.Namespace, Path, Record], None]] = {
    "llm": llm,
    "langchain": langchain,
    "lm-eval": lm_eval,
    "aiperf": aiperf,
    "schemathesis": schemathesis,
}

if __name__ == "__main__":
    raise SystemExit(main())
