"""The rounds of `outrider bench peers`: every engine gets the same prompts, one group of prompts after the other.

Decoding is timed as the difference between many tokens and one token after the same prompt, which leaves out prefill;
prefill is a figure of its own. No engine keeps prompts or answers between requests.
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
from ...weights.random import is_random
from . import environment, export
from .environment import CannotInstallError, Child, Completed, PeerFailedError
from .registry import OURS, Peer

QUICK = 30.0  # seconds: a peer that starts faster is started again in each round
WARM_UP = 8  # tokens generated before the first round
TRIES = 3  # attempts to time a text on a machine with other load


Way = Literal["plain", "speculation"]
Sets = Mapping[str, Sequence[Sequence[int]]]  # prompts as token ids, by the name of their set
Note = Callable[[str], None]
FAILURES = (CannotInstallError, export.UnsuitableError, PeerFailedError)


@dataclass(frozen=True)
class PeersConfig:
    rounds: int = 3
    tokens: int = 128  # to generate after each prompt
    batches: tuple[int, ...] = (1, 8)
    prompt_tokens: int = 512
    threads: int = 1
    quantize: str | None = None  # format for our weights if they are floats; on a GPU, fp8 for vLLM's, too
    activations: str = "auto"  # ours, beside quantized weights
    backend: str = "cpu"  # or "cuda"
    drafts: Mapping[str, Any] | None = None  # on a GPU: the same drafting for vLLM, as its `speculative_config`

    def context(self, sets: Sets) -> int:
        longest = max(len(prompt) for prompts in sets.values() for prompt in prompts)
        return max(longest, self.prompt_tokens) + self.tokens


@dataclass
class DecodeTime:
    """Tokens after the first of each text, and their seconds, of one set in one round."""

    tokens: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass
class PeerRun:
    """An installed peer with its processes and measurements."""

    peer: Peer
    python: Path
    model: str  # name or path for its worker
    given: str = ""  # the model as the user named it
    facts: dict[str, Any] = field(default_factory=dict)
    children: dict[Way, Child] = field(default_factory=dict)
    no_speculation: str | None = None  # why speculation failed to start
    widths: dict[int, int] = field(default_factory=dict)  # batch size -> number of draft tokens
    starts: list[float] = field(default_factory=list)  # seconds from process start to the first token
    decodings: dict[tuple[Way, int, str], list[DecodeTime]] = field(
        default_factory=dict
    )  # (mode, batch, set) -> one for each round
    prompts: list[float] = field(default_factory=list)  # seconds of prefill of the long prompt, by round
    texts: dict[tuple[str, int], list[int]] = field(default_factory=dict)  # (set, index) -> text of plain decoding
    memory: dict[Way, dict[str, int] | None] = field(default_factory=dict)

    def start(self, way: Way, config: PeersConfig, sets: Sets) -> Child:
        """Start a process, load the model, generate one token, and pause it."""
        command = [str(self.python), str(self.peer.worker), self.peer.name]
        again = "-again" if way in self.children else ""  # the first process still writes its log
        log = environment.folder_of(self.peer) / f"{way}{again}.log"
        child = Child(command, process_environment(self.peer, config.threads), log)
        try:
            self.facts = child.ask(
                "open",
                model=self.model,
                threads=config.threads,
                context=config.context(sets),
                batch=max(config.batches),
                speculate=way == "speculation",
                **self.options(config),
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

    def options(self, config: PeersConfig) -> dict[str, Any]:
        """Return what the worker of this engine takes beside the common fields."""
        on_gpu = {} if config.backend == "cpu" else {"backend": config.backend}
        if self.peer.name == OURS:
            precision = {"quantize": config.quantize, "activations": config.activations}
            return {"method": self.peer.speculation, **precision, **on_gpu}
        quantization = config.quantize if config.quantize == "fp8" else None
        return on_gpu and {
            **on_gpu,
            "drafts": config.drafts,
            "random": is_random(self.given),
            "quantization": quantization,
        }

    def complete(self, way: Way, prompts: Sequence[Sequence[int]], tokens: int, width: int | None) -> Completed:
        """Resume the process for one request; all others are paused."""
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


def enter(peer: Peer, given: str, checkpoint: Checkpoint, config: PeersConfig, note: Note, again: bool) -> PeerRun:
    """Install a peer and provide its weights. given: the model as the user named it."""
    if peer.weights == "gguf":
        export.gguf(checkpoint)  # refuse a folder before compiling the peer
    python = environment.install(peer, note, again)
    if peer.weights == "given":
        return PeerRun(peer, python, given, given)
    if peer.weights == "gguf":
        return PeerRun(peer, python, str(export.gguf(checkpoint)), given)
    folder = export.folder(checkpoint, note)
    return PeerRun(peer, python, str(convert_weights(peer, python, checkpoint, folder, config, note) or folder), given)


def convert_weights(
    peer: Peer, python: Path, checkpoint: Checkpoint, folder: Path, config: PeersConfig, note: Note
) -> Path | None:
    """Convert the folder with the peer's own tools; None if it reads the folder itself."""
    if peer.weights != "export":
        return None
    converted = export.home(checkpoint) / peer.name
    if (converted / export.DONE).is_file():
        return converted
    note(f"{peer.name} converts the weights to {converted}")
    export.begin(converted)
    log = environment.folder_of(peer) / "export.log"
    child = Child([str(python), str(peer.worker), peer.name], process_environment(peer, config.threads), log)
    try:
        child.ask("prepare", model=str(folder), into=str(converted))
    finally:
        child.close()
    export.finish(converted)
    return converted


def process_environment(peer: Peer, threads: int) -> dict[str, str]:
    """Return the environment variables of a process: the same number of threads for all, and no network access."""
    variables = environment.outside() if peer.recipe else dict(os.environ)
    variables |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    variables["TOKENIZERS_PARALLELISM"] = "false"
    if peer.recipe or peer.module:
        variables |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        variables["XDG_CACHE_HOME"] = str(environment.folder_of(peer) / "cache")  # for its own compiled files
    return variables


@dataclass(frozen=True)
class PromptGroup:
    """Prompts that are answered in one batch."""

    name: str  # of their set
    numbers: tuple[int, ...]  # indices within the set
    prompts: tuple[Sequence[int], ...]

    @property
    def batch(self) -> int:
        return len(self.numbers)


def groups(sets: Sets, batches: Sequence[int]) -> Iterator[PromptGroup]:
    """Yield all prompts of each set at each batch size; the last group is filled with the first prompts."""
    for name, prompts in sets.items():
        for size in batches:
            for begin in range(0, len(prompts), size):
                numbers = tuple(index % len(prompts) for index in range(begin, begin + size))
                yield PromptGroup(name, numbers, tuple(prompts[index] for index in numbers))


def long_prompt(sets: Sets, tokens: int, seed: int) -> list[int]:
    """Concatenate the prompts in an order that depends on `seed`, cut to `tokens`."""
    every = [prompt for prompts in sets.values() for prompt in prompts]
    random.Random(seed).shuffle(every)
    text = [token for prompt in every for token in prompt]
    return (text * -(-tokens // len(text)))[:tokens]


@dataclass
class PeerBenchmark:
    """entrants: the peers that still run, our own engine first. skipped: the others with the reason."""

    config: PeersConfig
    sets: Sets
    note: Note
    entrants: list[PeerRun] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def drop(self, name: str, error: Exception) -> None:
        """Leave out a peer that failed; the others continue."""
        if name == OURS:
            raise UserError(f"Outrider's own process failed: {error}") from error
        self.note(f"without {name}: {error}")
        self.skipped[name] = str(error)
        for entrant in [entrant for entrant in self.entrants if entrant.peer.name == name]:
            self.entrants.remove(entrant)
            entrant.close()

    def everyone(self, run: Callable[[PeerRun], None], shift: int = 0) -> None:
        """Call `run` with each peer. shift: index of the first one, since the order affects the times."""
        for entrant in rotated(self.entrants, shift):
            try:
                run(entrant)
            except FAILURES as error:
                self.drop(entrant.peer.name, error)

    def close(self) -> None:
        for entrant in self.entrants:
            entrant.close()


def rotated(entrants: Sequence[PeerRun], shift: int) -> list[PeerRun]:
    first = shift % max(len(entrants), 1)
    return [*entrants[first:], *entrants[:first]]


def run(
    peers: Iterable[Peer],
    model: str,
    checkpoint: Checkpoint,
    sets: Sets,
    config: PeersConfig,
    note: Note,
    again: bool = False,
) -> PeerBenchmark:
    """Run all rounds and end all processes. again: reinstall the peers."""
    race = PeerBenchmark(config, sets, note)
    try:
        for peer in peers:
            try:
                race.entrants.append(enter(peer, model, checkpoint, config, note, again))
            except FAILURES as error:
                race.drop(peer.name, error)
        race.everyone(lambda entrant: begin(race, entrant))
        for number in range(config.rounds):
            note(f"round {number + 1} of {config.rounds}")
            one_round(race, number)
        if config.backend == "cpu":  # a GPU's memory is what its engine was allowed to take
            race.everyone(measure_memory)
    finally:
        race.close()
    return race


def begin(race: PeerBenchmark, entrant: PeerRun) -> None:
    """Start and warm up both processes of a peer, and choose its number of draft tokens."""
    race.note(f"starting {entrant.peer.name}")
    entrant.children["plain"] = entrant.start("plain", race.config, race.sets)
    if entrant.peer.speculation:
        try:
            entrant.children["speculation"] = entrant.start("speculation", race.config, race.sets)
        except PeerFailedError as error:
            if entrant.peer.name == OURS:
                raise
            entrant.no_speculation = str(error)
            race.note(f"{entrant.peer.name} without its speculation: {error}")
    entrant.complete("plain", [long_prompt(race.sets, race.config.prompt_tokens, 0)], 1, None)
    for batch in race.config.batches:
        first = {group.name: group for group in reversed(list(groups(race.sets, [batch])))}
        for way in entrant.ways(batch):
            if way == "speculation" and entrant.peer.widths:
                entrant.widths[batch] = fastest_width(entrant, list(first.values()), race.config.tokens)
            else:
                entrant.complete(way, next(iter(first.values())).prompts, WARM_UP, None)


def fastest_width(entrant: PeerRun, samples: Sequence[PromptGroup], tokens: int) -> int:
    """Return the fastest of the peer's widths on the first prompts of each set."""
    if len(entrant.peer.widths) == 1:
        entrant.complete("speculation", samples[0].prompts, WARM_UP, entrant.peer.widths[0])
        return entrant.peer.widths[0]
    seconds = {
        width: sum(entrant.complete("speculation", sample.prompts, tokens, width).seconds for sample in samples)
        for width in entrant.peer.widths
    }
    return min(seconds, key=lambda width: seconds[width])


def one_round(race: PeerBenchmark, number: int) -> None:
    config = race.config
    for index, group in enumerate(groups(race.sets, config.batches)):
        race.everyone(partial(decode, config=config, group=group, number=number), shift=number + index)
    text = long_prompt(race.sets, config.prompt_tokens, number)
    race.everyone(lambda entrant: entrant.prompts.append(entrant.complete("plain", [text], 1, None).seconds), number)
    race.everyone(lambda entrant: start_again(race, entrant), number)


def decode(entrant: PeerRun, config: PeersConfig, group: PromptGroup, number: int) -> None:
    """Time one group of prompts in round `number`, in each mode of the peer."""
    for way in entrant.ways(group.batch):
        width = entrant.widths.get(group.batch) if way == "speculation" else None
        texts, seconds = after_first_token(entrant, way, group, config.tokens, width)
        times = entrant.decodings.setdefault((way, group.batch, group.name), [])
        if len(times) == number:
            times.append(DecodeTime())
        times[number].tokens += (config.tokens - 1) * group.batch
        times[number].seconds += seconds
        if way == "plain" and group.batch == min(config.batches):
            entrant.texts |= {(group.name, index): text for index, text in zip(group.numbers, texts, strict=True)}


def after_first_token(
    entrant: PeerRun, way: Way, group: PromptGroup, tokens: int, width: int | None
) -> tuple[list[list[int]], float]:
    """Return the texts and the seconds after their first token, which is timed alone before and after."""
    for _ in range(TRIES):
        before = entrant.complete(way, group.prompts, 1, width)
        long = entrant.complete(way, group.prompts, tokens, width)
        after = entrant.complete(way, group.prompts, 1, width)
        seconds = long.seconds - min(before.seconds, after.seconds)
        if seconds > 0:
            return long.tokens, seconds
    raise PeerFailedError(
        f"one token took longer than {tokens} tokens in {TRIES} attempts: use an idle machine or more tokens"
    )


def start_again(race: PeerBenchmark, entrant: PeerRun) -> None:
    """Time another start of a peer that starts quickly. A GPU has no memory for one more process."""
    if race.config.backend == "cpu" and entrant.starts[-1] < QUICK:
        entrant.start("plain", race.config, race.sets).close()


def measure_memory(entrant: PeerRun) -> None:
    entrant.memory = {way: child.memory() for way, child in entrant.children.items()}
