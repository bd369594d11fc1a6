"""Report words that docs/glossary.md retires: in identifiers and file names, and in prose if they have no other sense.

`python tools/check_vocabulary.py [PATH ...]` prints each use as `path:line: word` with the word to use instead, and the
number of uses by folder. A line that keeps a deprecated public name says so in a comment: `deprecated alias`. Plurals
are found by their singular. Exits with code 1 if there are more uses than `--limit`.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

FOLDERS = ("src", "tests", "tools", "docs", "examples", "csrc", "README.md", "CONTRIBUTING.md", "Makefile")
PYTHON, CPP, PROSE = {".py", ".pyi"}, {".cpp", ".h"}, {".md", ".yaml", ""}
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
    "tap": "aux layer",
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
    "room": "num_draft_tokens, capacity, buffer",
    "odds": "acceptance rate",
    "luck": "acceptance rate",
    "chance": "acceptance rate, probability",
    "regret": "hysteresis",
    "offer": "width search",
    "trial": "exploration",
    "turn": "context, rotation",
    "turned": "rotated",
    "flight": "multi-step run",
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
    "pace": "tokens per second",
    "sight": "attention range",
    "walk": "traversal",
    "resting": "suspended",
    "missed": "catch-up",
    "credit": "drafter stats",
    "follows": "has_kv",
    "arrivals": "split-k counters",
    "border": "threshold",
    "habit": "DeviceDefaults",
    "settled": "next tokens",
    "follower": "grammar matcher",
}
# Files in which a retired word is quoted or has its ordinary sense: path prefix -> words.
ALLOWED: dict[str, frozenset[str]] = {
    "tools/check_vocabulary.py": frozenset((*RETIRED, *IDENTIFIERS, *PHRASES)),
    "docs/glossary.md": frozenset((*RETIRED, *IDENTIFIERS, *PHRASES)),
    "src/outrider/server/app.py": frozenset(("family",)),  # of a socket
    "src/outrider/server/metrics.py": frozenset(("family",)),  # prometheus_client
    "src/outrider/diagnostics/live.py": frozenset(("families",)),  # prometheus_client
    "tests/integration/test_dashboard.py": frozenset(("families",)),  # prometheus_client
    "tests/integration/test_server_metrics.py": frozenset(("families",)),  # prometheus_client
    "src/outrider/scale/deployment.py": frozenset(("pending",)),  # Ray Serve
    "csrc/": frozenset(("guard", "pending")),  # std::lock_guard, nb::call_guard; parts of a job that still run
    "tests/integration/test_playground_layout_browser.py": frozenset(("tap",)),  # of a finger
}
WORD = re.compile(r"[A-Za-z][A-Za-z_]*")
PARTS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
# Comments and string literals of C++; the rest of a line is code.
CPP_PROSE = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
Use = tuple[int, str, str]  # line, word, what to say instead


def instead_of(word: str, *tables: Mapping[str, str]) -> str | None:
    """Return what to say instead of a word or of its singular; None if it is not retired."""
    for table in tables:
        instead = table.get(word) or table.get(word.removesuffix("s"))
        if instead is not None:
            return instead
    return None


def identifier_uses(identifier: str, line: int) -> Iterator[Use]:
    """Find the parts of an identifier, split at underscores and capitals, that are retired."""
    for part in PARTS.findall(identifier):
        instead = instead_of(part.lower(), RETIRED, IDENTIFIERS)
        if instead is not None:
            yield line, part.lower(), instead


def prose_uses(text: str, line: int) -> Iterator[Use]:
    """Find the words and phrases that are retired in prose."""
    for number, content in enumerate(text.lower().splitlines(), line):
        for word in WORD.findall(content):
            for part in word.split("_"):
                instead = instead_of(part, RETIRED)
                if instead is not None:
                    yield number, part, instead
        for phrase, instead in PHRASES.items():
            if re.search(rf"\b{phrase}\b", content):
                yield number, phrase, instead


def python_uses(text: str) -> Iterator[Use]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            yield from identifier_uses(token.string, token.start[0])
        elif token.type in (tokenize.COMMENT, tokenize.STRING):
            yield from prose_uses(token.string, token.start[0])


def cpp_uses(text: str) -> Iterator[Use]:
    for match in CPP_PROSE.finditer(text):
        yield from prose_uses(match[0], text.count("\n", 0, match.start()) + 1)
    code = CPP_PROSE.sub(lambda match: "\n" * match[0].count("\n"), text)
    for number, content in enumerate(code.splitlines(), 1):
        for word in WORD.findall(content):
            yield from identifier_uses(word, number)


def uses(path: Path) -> Iterator[Use]:
    """Find all uses in a file, its name included, except lines that keep a deprecated alias."""
    yield from identifier_uses(path.stem, 1)
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    reader = python_uses if path.suffix in PYTHON else cpp_uses if path.suffix in CPP else None
    for line, word, instead in prose_uses(text, 1) if reader is None else reader(text):
        if ALIAS not in lines[line - 1]:
            yield line, word, instead


def files(name: str) -> list[Path]:
    root = Path(name)
    found = sorted(root.rglob("*")) if root.is_dir() else [root]
    return [path for path in found if path.is_file() and path.suffix in PYTHON | CPP | PROSE]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=list(FOLDERS))
    parser.add_argument("--count", action="store_true", help="print the number of uses by word instead of each use")
    parser.add_argument("--limit", type=int, default=0, help="number of uses that is no failure")
    chosen = parser.parse_args(arguments)
    words: Counter[str] = Counter()
    folders: Counter[str] = Counter()
    for name in chosen.paths:
        for path in files(name):
            allowed = {word for prefix, listed in ALLOWED.items() if str(path).startswith(prefix) for word in listed}
            for line, word, instead in uses(path):
                if word in allowed or word.removesuffix("s") in allowed:
                    continue
                words[word] += 1
                folders[
                    "/".join(path.parts[:3] if path.parts[0] == "src" else path.parts[:2][: len(path.parts) - 1])
                ] += 1
                if not chosen.count:
                    sys.stdout.write(f"{path}:{line}: `{word}` is retired: say {instead}\n")
    for title, counts in (("word", words), ("folder", folders)) if chosen.count else (("folder", folders),):
        for name, count in counts.most_common():
            sys.stdout.write(f"{count:5d} {title} {name}\n")
    sys.stdout.write(f"{words.total()} uses of retired words\n")
    return 1 if words.total() > chosen.limit else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
