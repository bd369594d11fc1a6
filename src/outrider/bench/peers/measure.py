"""The rounds of `outrider bench peers`: every engine gets the same prompts, prompt by prompt in turn.

Decoding is timed as the difference between many tokens and one token after the same prompt, so that the prompt's own
cost, which is a figure of its own, is in none of them. Nobody keeps prompts or answers from one turn to the next.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ...errors import UserError
from ...weights import Checkpoint
from . import export, install
from .install import CannotInstallError
from .process import SERVE, Child, Completed, PeerFailedError
from .registry import OURS, Peer

QUICK = 30.0  # seconds: who starts faster than this starts again in each round
WARM_UP = 8  # tokens
TRIES = 3  # to time a text on a machine with other work


@dataclass
class PeerBenchmark:
    """`entrants`: whoever is still in it, we ourselves first. `skipped`: the others, and why."""

    plan: PeersConfig
    sets: Sets
    note: Note
    entrants: list[PeerRun] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def drop(self, name: str, error: Exception) -> None:
        """A peer that fails costs its own figures and nobody else's."""
        if name == OURS:
            raise UserError(f"Outrider's own process failed: {error}") from error
        self.note(f"without {name}: {error}")
        self.skipped[name] = str(error)
        for entrant in [one for one in self.entrants if one.peer.name == name]:
            self.entrants.remove(entrant)
            entrant.close()

    def everyone(self, run: Callable[[PeerRun], None], shift: int = 0) -> None:
        """`run` with each in turn. shift: who begins, since the first finds another machine than the last."""
        for entrant in rotated(self.entrants, shift):
            try:
                run(entrant)
            except FAILURES as error:
                self.drop(entrant.peer.name, error)

    def close(self) -> None:
        for entrant in self.entrants:
            entrant.close()


def rotated(entrants: Sequence[PeerRun], shift: int) -> list[PeerRun]:
    at = shift % max(len(entrants), 1)
    return [*entrants[at:], *entrants[:at]]


def run(
    peers: Iterable[Peer],
    model: str,
    checkpoint: Checkpoint,
    sets: Sets,
    plan: PeersConfig,
    note: Note,
    again: bool = False,
) -> PeerBenchmark:
    """All rounds; every process is gone at the end. again: environments are made anew."""
    race = PeerBenchmark(plan, sets, note)
    try:
        for peer in peers:
            try:
                race.entrants.append(enter(peer, model, checkpoint, plan, note, again))
            except FAILURES as error:
                race.drop(peer.name, error)
        race.everyone(lambda entrant: begin(race, entrant))
        for number in range(plan.rounds):
            note(f"round {number + 1} of {plan.rounds}")
            one_round(race, number)
        race.everyone(weigh)
    finally:
        race.close()
    return race


def begin(race: PeerBenchmark, entrant: PeerRun) -> None:
    """Both processes, warm, and how many tokens to draft."""
    race.note(f"starting {entrant.peer.name}")
    entrant.children["plain"] = entrant.start("plain", race.plan, race.sets)
    if entrant.peer.speculation:
        try:
            entrant.children["speculation"] = entrant.start("speculation", race.plan, race.sets)
        except PeerFailedError as error:
            if entrant.peer.name == OURS:
                raise
            entrant.no_speculation = str(error)
            race.note(f"{entrant.peer.name} without its speculation: {error}")
    entrant.turn("plain", [long_prompt(race.sets, race.plan.prompt_tokens, 0)], 1, None)
    for batch in race.plan.batches:
        first = {group.name: group for group in reversed(list(groups(race.sets, [batch])))}
        for way in entrant.ways(batch):
            if way == "speculation" and entrant.peer.widths:
                entrant.widths[batch] = fastest_width(entrant, list(first.values()), race.plan.tokens)
            else:
                entrant.turn(way, next(iter(first.values())).prompts, WARM_UP, None)


def fastest_width(entrant: PeerRun, trials: Sequence[PromptGroup], tokens: int) -> int:
    """Of the peer's own choice of widths, the best on the first prompts of each set."""
    if len(entrant.peer.widths) == 1:
        entrant.turn("speculation", trials[0].prompts, WARM_UP, entrant.peer.widths[0])
        return entrant.peer.widths[0]
    took = {
        width: sum(entrant.turn("speculation", trial.prompts, tokens, width).seconds for trial in trials)
        for width in entrant.peer.widths
    }
    return min(took, key=lambda width: took[width])


def one_round(race: PeerBenchmark, number: int) -> None:
    plan = race.plan
    for at, group in enumerate(groups(race.sets, plan.batches)):
        race.everyone(partial(decode, plan=plan, group=group, number=number), shift=number + at)
    text = long_prompt(race.sets, plan.prompt_tokens, number)
    race.everyone(lambda entrant: entrant.prompts.append(entrant.turn("plain", [text], 1, None).seconds), number)
    race.everyone(lambda entrant: start_again(race, entrant), number)


def decode(entrant: PeerRun, plan: PeersConfig, group: PromptGroup, number: int) -> None:
    """One group of prompts in the round `number`, by each of the entrant's ways."""
    for way in entrant.ways(group.batch):
        width = entrant.widths.get(group.batch) if way == "speculation" else None
        texts, seconds = after_first_token(entrant, way, group, plan.tokens, width)
        sheets = entrant.decodings.setdefault((way, group.batch, group.name), [])
        if len(sheets) == number:
            sheets.append(DecodeTime())
        sheets[number].tokens += (plan.tokens - 1) * group.batch
        sheets[number].seconds += seconds
        if way == "plain" and group.batch == min(plan.batches):
            entrant.texts |= {(group.name, at): text for at, text in zip(group.numbers, texts, strict=True)}


def after_first_token(
    entrant: PeerRun, way: Way, group: PromptGroup, tokens: int, width: int | None
) -> tuple[list[list[int]], float]:
    """The texts, and the seconds of all their tokens but the first, whose time is taken before and after."""
    for _ in range(TRIES):
        before = entrant.turn(way, group.prompts, 1, width)
        long = entrant.turn(way, group.prompts, tokens, width)
        after = entrant.turn(way, group.prompts, 1, width)
        seconds = long.seconds - min(before.seconds, after.seconds)
        if seconds > 0:
            return long.tokens, seconds
    raise PeerFailedError(f"one token took longer than {tokens}, {TRIES} times: let the machine rest, or ask for more")


def start_again(race: PeerBenchmark, entrant: PeerRun) -> None:
    if entrant.starts[-1] < QUICK:
        entrant.start("plain", race.plan, race.sets).close()


def weigh(entrant: PeerRun) -> None:
    entrant.memory = {way: child.memory() for way, child in entrant.children.items()}


Way = Literal["plain", "speculation"]
Sets = Mapping[str, Sequence[Sequence[int]]]  # prompts as token ids, by the name of their set
Note = Callable[[str], None]
FAILURES = (CannotInstallError, export.UnsuitableError, PeerFailedError)


@dataclass(frozen=True)
class PeersConfig:
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
class DecodeTime:
    """Of one set in one round: tokens after the first ones, and the seconds that they took."""

    tokens: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass
class PeerRun:
    peer: Peer
    python: Path
    model: str  # as its worker opens it
    facts: dict[str, Any] = field(default_factory=dict)
    children: dict[Way, Child] = field(default_factory=dict)
    no_speculation: str | None = None  # why it has none here
    widths: dict[int, int] = field(default_factory=dict)  # batch: tokens that are drafted
    starts: list[float] = field(default_factory=list)  # seconds from the process's start to its first token
    decodings: dict[tuple[Way, int, str], list[DecodeTime]] = field(default_factory=dict)  # way, batch, set: by round
    prompts: list[float] = field(default_factory=list)  # seconds for the long prompt, by round
    texts: dict[tuple[str, int], list[int]] = field(default_factory=dict)  # set and number: what was said plainly
    memory: dict[Way, dict[str, int] | None] = field(default_factory=dict)

    def start(self, way: Way, plan: PeersConfig, sets: Sets) -> Child:
        """A process with an open model, which has said its first token and is stopped."""
        command = [str(self.python), str(SERVE), str(self.peer.worker)]
        again = "-again" if way in self.children else ""  # the first one goes on writing
        log = install.folder_of(self.peer) / f"{way}{again}.log"
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


def enter(peer: Peer, given: str, checkpoint: Checkpoint, plan: PeersConfig, note: Note, again: bool) -> PeerRun:
    """Installed, and with weights that it can read. given: the model as the user named it."""
    if peer.weights == "gguf":
        export.gguf(checkpoint)  # refused before it is compiled
    python = install.install(peer, note, again)
    if peer.weights == "given":
        return PeerRun(peer, python, given)
    if peer.weights == "gguf":
        return PeerRun(peer, python, str(export.gguf(checkpoint)))
    folder = export.folder(checkpoint, note)
    return PeerRun(peer, python, str(convert_weights(peer, python, checkpoint, folder, plan, note) or folder))


def convert_weights(
    peer: Peer, python: Path, checkpoint: Checkpoint, folder: Path, plan: PeersConfig, note: Note
) -> Path | None:
    """What the peer makes of the folder, by its own tools; None where it reads the folder itself."""
    if peer.weights != "export":
        return None
    place = export.home(checkpoint) / peer.name
    if (place / export.DONE).is_file():
        return place
    note(f"{peer.name} converts the weights to {place}")
    export.begin(place)
    log = install.folder_of(peer) / "export.log"
    child = Child([str(python), str(SERVE), str(peer.worker)], surroundings(peer, plan.threads), log)
    try:
        child.ask("prepare", model=str(folder), into=str(place))
    finally:
        child.close()
    export.finish(place)
    return place


def surroundings(peer: Peer, threads: int) -> dict[str, str]:
    """The environment variables of a process: the same number of threads for all; peers have no need of a network."""
    own = install.outside() if peer.recipe else dict(os.environ)
    own |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    own["TOKENIZERS_PARALLELISM"] = "false"
    if peer.recipe:
        own |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        own["XDG_CACHE_HOME"] = str(install.folder_of(peer) / "cache")  # what it compiles for itself
    return own


@dataclass(frozen=True)
class PromptGroup:
    """Prompts that are answered at once."""

    name: str  # of their set
    numbers: tuple[int, ...]  # within it
    prompts: tuple[Sequence[int], ...]

    @property
    def batch(self) -> int:
        return len(self.numbers)


def groups(sets: Sets, batches: Sequence[int]) -> Iterator[PromptGroup]:
    """All prompts of each set at each batch size; the last group is filled up with the first prompts again."""
    for name, prompts in sets.items():
        for size in batches:
            for begin in range(0, len(prompts), size):
                numbers = tuple(at % len(prompts) for at in range(begin, begin + size))
                yield PromptGroup(name, numbers, tuple(prompts[at] for at in numbers))


def long_prompt(sets: Sets, tokens: int, seed: int) -> list[int]:
    """The prompts in another order each time, one after the other, cut to length."""
    every = [prompt for prompts in sets.values() for prompt in prompts]
    random.Random(seed).shuffle(every)
    text = [token for prompt in every for token in prompt]
    return (text * -(-tokens // len(text)))[:tokens]
