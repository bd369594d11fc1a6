"""A peer that takes part: its weights, its processes, and what was measured of it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ...weights import Checkpoint
from . import models, setup
from .child import SERVE, Child, Completed, PeerFailedError
from .roster import OURS, Peer
from .setup import CannotInstallError

Way = Literal["plain", "speculation"]
Sets = Mapping[str, Sequence[Sequence[int]]]  # prompts as token ids, by the name of their set
Note = Callable[[str], None]
FAILURES = (CannotInstallError, models.UnsuitableError, PeerFailedError)


@dataclass(frozen=True)
class Plan:
    rounds: int = 3
    tokens: int = 128  # that each prompt is continued with
    batches: tuple[int, ...] = (1, 8)
    prompt_tokens: int = 512
    threads: int = 1
    quantize: str | None = None  # our weights, if they are floats

    def context(self, sets: Sets) -> int:
        longest = max(len(prompt) for prompts in sets.values() for prompt in prompts)
        return max(longest, self.prompt_tokens) + self.tokens


@dataclass
class Decoding:
    """Of one set in one round: tokens after the first ones, and the seconds that they took."""

    tokens: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass
class Entrant:
    peer: Peer
    python: Path
    model: str  # as its worker opens it
    facts: dict[str, Any] = field(default_factory=dict)
    children: dict[Way, Child] = field(default_factory=dict)
    no_speculation: str | None = None  # why it has none here
    widths: dict[int, int] = field(default_factory=dict)  # batch: tokens that are drafted
    starts: list[float] = field(default_factory=list)  # seconds from the process's start to its first token
    decodings: dict[tuple[Way, int, str], list[Decoding]] = field(default_factory=dict)  # way, batch, set: by round
    prompts: list[float] = field(default_factory=list)  # seconds for the long prompt, by round
    texts: dict[tuple[str, int], list[int]] = field(default_factory=dict)  # set and number: what was said plainly
    memory: dict[Way, dict[str, int] | None] = field(default_factory=dict)

    def start(self, way: Way, plan: Plan, sets: Sets) -> Child:
        """A process with an open model, which has said its first token and is stopped."""
        command = [str(self.python), str(SERVE), str(self.peer.worker)]
        again = "-again" if way in self.children else ""  # the first one goes on writing
        log = setup.folder_of(self.peer) / f"{way}{again}.log"
        child = Child(command, surroundings(self.peer, plan.threads), log)
        try:
            own: dict[str, Any] = (
                {"method": self.peer.speculation, "quantize": plan.quantize} if self.peer.name == OURS else {}
            )
            self.facts = child.ask(
                "open",
                model=self.model,
                threads=plan.threads,
                context=plan.context(sets),
                batch=max(plan.batches),
                speculate=way == "speculation",
                **own,
            )["found"]
            prompt = next(iter(sets.values()))[0]
            width = self.peer.widths[0] if way == "speculation" and self.peer.widths else None
            child.complete([prompt[:8]], 1, width)
        except BaseException:
            child.close()
            raise
        self.starts += [child.age] if way == "plain" else []
        child.pause()
        return child

    def turn(self, way: Way, prompts: Sequence[Sequence[int]], tokens: int, width: int | None) -> Completed:
        """While it computes, nobody else does."""
        child = self.children[way]
        child.resume()
        try:
            return child.complete(prompts, tokens, width)
        finally:
            child.pause()

    def ways(self, batch: int) -> list[Way]:
        drafts = batch == 1 or self.peer.speculates_in_batches
        return [way for way in self.children if way == "plain" or drafts]

    def close(self) -> None:
        for child in self.children.values():
            child.close()


def enter(peer: Peer, given: str, checkpoint: Checkpoint, plan: Plan, note: Note, again: bool) -> Entrant:
    """Installed, and with weights that it can read. given: the model as the user named it."""
    if peer.weights == "gguf":
        models.gguf(checkpoint)  # refused before it is compiled
    python = setup.install(peer, note, again)
    if peer.weights == "given":
        return Entrant(peer, python, given)
    if peer.weights == "gguf":
        return Entrant(peer, python, str(models.gguf(checkpoint)))
    folder = models.folder(checkpoint, note)
    return Entrant(peer, python, str(export(peer, python, checkpoint, folder, plan, note) or folder))


def export(peer: Peer, python: Path, checkpoint: Checkpoint, folder: Path, plan: Plan, note: Note) -> Path | None:
    """What the peer makes of the folder, by its own tools; None where it reads the folder itself."""
    if peer.weights != "export":
        return None
    place = models.home(checkpoint) / peer.name
    if (place / models.DONE).is_file():
        return place
    note(f"{peer.name} converts the weights to {place}")
    models.begin(place)
    log = setup.folder_of(peer) / "export.log"
    child = Child([str(python), str(SERVE), str(peer.worker)], surroundings(peer, plan.threads), log)
    try:
        child.ask("prepare", model=str(folder), into=str(place))
    finally:
        child.close()
    models.finish(place)
    return place


def surroundings(peer: Peer, threads: int) -> dict[str, str]:
    """The environment variables of a process: the same number of threads for all; peers have no need of a network."""
    own = setup.outside() if peer.recipe else dict(os.environ)
    own |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    own["TOKENIZERS_PARALLELISM"] = "false"
    if peer.recipe:
        own |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        own["XDG_CACHE_HOME"] = str(setup.folder_of(peer) / "cache")  # what it compiles for itself
    return own


@dataclass(frozen=True)
class Group:
    """Prompts that are answered at once."""

    name: str  # of their set
    numbers: tuple[int, ...]  # within it
    prompts: tuple[Sequence[int], ...]

    @property
    def batch(self) -> int:
        return len(self.numbers)


def groups(sets: Sets, batches: Sequence[int]) -> Iterator[Group]:
    """All prompts of each set at each batch size; the last group is filled up with the first prompts again."""
    for name, prompts in sets.items():
        for size in batches:
            for begin in range(0, len(prompts), size):
                numbers = tuple(at % len(prompts) for at in range(begin, begin + size))
                yield Group(name, numbers, tuple(prompts[at] for at in numbers))


def long_prompt(sets: Sets, tokens: int, seed: int) -> list[int]:
    """The prompts in another order each time, one after the other, cut to length."""
    every = [prompt for prompts in sets.values() for prompt in prompts]
    random.Random(seed).shuffle(every)
    text = [token for prompt in every for token in prompt]
    return (text * -(-tokens // len(text)))[:tokens]
