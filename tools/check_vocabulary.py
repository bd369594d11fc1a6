"""Reject the words that docs/glossary.md retires: in identifiers, and in prose where they have no ordinary meaning.

`python tools/check_vocabulary.py [PATH ...]` prints each use as `path:line: word`, with the word to use instead.
A line that keeps a deprecated public name says so in a comment: `deprecated alias`.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("src", "tests", "tools", "docs", "examples", "csrc", "README.md", "CONTRIBUTING.md")
SUFFIXES = {".py", ".pyi", ".md", ".cpp", ".h"}
ALIAS = "deprecated alias"

# Retired in identifiers and in prose: word -> what to say instead.
RETIRED = {
    "guess": "draft",
    "guesses": "drafts",
    "guessed": "drafted",
    "likeliest": "argmax, top-k, most probable",
    "crowd": "batch size",
    "purse": "exploration budget",
    "cabin": "DecodeState",
    "seats": "DecodeState",
    "grove": "tree builder",
    "roster": "registry",
    "unattended": "multi-step",
    "attended": "with the host",
    "absences": "suspended requests",
    "deserted": "dropped",
    "survivals": "acceptance rates",
    "rehearse": "warm up, profile",
    "rehearsal": "warm-up, profile run",
    "exert": "profile run",
    "intake": "input processor",
    "transcript": "detokenizer",
    "tally": "speculation stats",
    "tallies": "speculation stats",
    "taps": "aux layers",
    "tapped": "aux hidden states",
    "flown": "run",
    "whoever": "name the subject",
    "nobody": "name the subject",
}
PHRASES = {
    "of late": "recently",
    "in vain": "wasted",
    "so many": "the count",
    "thrown away": "rejected",
    "came to nothing": "rejected",
    "lets go": "drops",
    "close up": "compact",
}
# Retired in identifiers alone: in prose these are ordinary words.
IDENTIFIERS = {
    "place": "position, index, depth or device",
    "places": "positions, indices, slots",
    "room": "num_draft_tokens, capacity, buffer",
    "rooms": "num_draft_tokens, capacities, buffers",
    "odds": "acceptance rate",
    "luck": "acceptance rate",
    "chance": "acceptance rate, probability",
    "chances": "acceptance rates, probabilities",
    "regret": "hysteresis",
    "offer": "width search",
    "trial": "exploration",
    "turn": "context, rotation",
    "turns": "contexts",
    "turned": "rotated",
    "flight": "multi-step run",
    "flights": "multi-step runs",
    "fly": "run",
    "landed": "finished",
    "seat": "admission slot",
    "sheet": "chain builder",
    "slate": "chain builder",
    "drawer": "draft sampler",
    "student": "draft head",
    "lesson": "target outputs",
    "aims": "targets",
    "told": "name what is known",
    "telling": "reporting",
    "subject": "target model",
    "inherit": "init_from",
    "interchange": "vllm_export",
    "guard": "admission",
    "patience": "receive timeout, backoff",
    "family": "parent request",
    "families": "parent requests",
    "pending": "sampling metadata",
    "edits": "logits processors",
    "knot": "latency model point",
    "knots": "latency model points",
    "pace": "tokens per second",
    "sight": "attention range",
    "walk": "traversal",
    "resting": "suspended",
    "missed": "catch-up",
    "credit": "drafter stats",
    "follows": "has_kv",
    "arrivals": "split-k counters",
    "border": "threshold",
}
# Places where a retired word is somebody else's, or has its ordinary sense: path prefix -> words.
ALLOWED: dict[str, frozenset[str]] = {
    "tools/check_vocabulary.py": frozenset((*RETIRED, *IDENTIFIERS, *PHRASES)),
    "docs/glossary.md": frozenset((*RETIRED, *IDENTIFIERS, *PHRASES)),
    "src/outrider/server/lifetime.py": frozenset(("family",)),  # of a socket
    "src/outrider/server/metrics.py": frozenset(("family",)),  # prometheus_client
    "tests/integration/test_server_metrics.py": frozenset(("families",)),  # prometheus_client
    "src/outrider/scale/deployment.py": frozenset(("pending",)),  # Ray Serve
}
WORD = re.compile(r"[A-Za-z][A-Za-z_]*")
PARTS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
Use = tuple[int, str, str]  # line, word, what to say instead


def words_of(identifier: str) -> list[str]:
    """Split an identifier at underscores and capitals, in lower case."""
    return [part.lower() for part in PARTS.findall(identifier)]


def prose_uses(text: str, line: int) -> Iterator[Use]:
    """Find the words and phrases that are retired in prose."""
    lowered = text.lower()
    for number, content in enumerate(lowered.splitlines(), line):
        for word in WORD.findall(content):
            for part in word.split("_"):
                if part in RETIRED:
                    yield number, part, RETIRED[part]
        for phrase, instead in PHRASES.items():
            if re.search(rf"\b{phrase}\b", content):
                yield number, phrase, instead


def python_uses(text: str) -> Iterator[Use]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            for word in words_of(token.string):
                instead = RETIRED.get(word) or IDENTIFIERS.get(word)
                if instead is not None:
                    yield token.start[0], word, instead
        elif token.type in (tokenize.COMMENT, tokenize.STRING):
            yield from prose_uses(token.string, token.start[0])


def uses(path: Path) -> Iterator[Use]:
    text = path.read_text(encoding="utf-8")
    found = python_uses(text) if path.suffix in (".py", ".pyi") else prose_uses(text, 1)
    lines = text.splitlines()
    for line, word, instead in found:
        if ALIAS not in lines[line - 1]:
            yield line, word, instead


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", default=list(FOLDERS))
    parser.add_argument("--count", action="store_true", help="print the number of uses by word alone")
    asked = parser.parse_args(arguments)
    counts: dict[str, int] = {}
    for name in asked.paths:
        root = Path(name)
        for path in sorted(root.rglob("*")) if root.is_dir() else [root]:
            if path.suffix not in SUFFIXES:
                continue
            allowed = {word for prefix, words in ALLOWED.items() if str(path).startswith(prefix) for word in words}
            for line, word, instead in uses(path):
                if word not in allowed:
                    counts[word] = counts.get(word, 0) + 1
                    if not asked.count:
                        sys.stdout.write(f"{path}:{line}: `{word}` is retired: say {instead}\n")
    if asked.count:
        for word, count in sorted(counts.items(), key=lambda item: -item[1]):
            sys.stdout.write(f"{count:5d} {word}\n")
    sys.stdout.write(f"{sum(counts.values())} uses of retired words\n")
    return 1 if counts else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
