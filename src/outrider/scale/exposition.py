"""The metrics of all replicas on one page, each sample with the name of its replica."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .bridge import Reply

SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (.+)")


def merge(replies: Sequence[Reply]) -> Reply:
    """One page of Prometheus' text format from several. A refusal stands for all: they share their keys."""
    refused = [reply for reply in replies if reply.status != 200]
    if refused:
        return refused[0]
    families: dict[str, tuple[list[str], list[str]]] = {}  # name -> comments, samples
    for reply in replies:
        family = ""
        for line in reply.body.decode().splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                family = line.split(" ", 3)[2]
                comments, _ = families.setdefault(family, ([], []))
                if line not in comments:
                    comments.append(line)
            elif found := SAMPLE.fullmatch(line):
                name, labels, value = found.groups()
                named = ",".join(part for part in (labels, f'replica="{reply.replica}"') if part)
                families.setdefault(family or name, ([], []))[1].append(f"{name}{{{named}}} {value}")
    lines = [line for comments, samples in families.values() for line in (*comments, *samples)]
    headers = [(name, value) for name, value in replies[0].headers if name.lower() != b"content-length"]
    return Reply("", 200, headers, "\n".join([*lines, ""]).encode())
