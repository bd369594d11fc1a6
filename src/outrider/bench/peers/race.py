"""The rounds of `outrider bench peers`: every engine gets the same prompts, prompt by prompt in turn.

Decoding is timed as the difference between many tokens and one token after the same prompt, so that the prompt's own
cost, which is a figure of its own, is in none of them. Nobody keeps prompts or answers from one turn to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from ...errors import UserError
from ...weights import Checkpoint
from .child import PeerFailedError
from .entrants import FAILURES, Decoding, Entrant, Group, Note, Plan, Sets, Way, enter, groups, long_prompt
from .roster import OURS, Peer

QUICK = 30.0  # seconds: who starts faster than this starts again in each round
WARM_UP = 8  # tokens
TRIES = 3  # to time a text on a machine with other work


@dataclass
class Race:
    """`entrants`: whoever is still in it, we ourselves first. `skipped`: the others, and why."""

    plan: Plan
    sets: Sets
    note: Note
    entrants: list[Entrant] = field(default_factory=list)
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

    def everyone(self, run: Callable[[Entrant], None], shift: int = 0) -> None:
        """`run` with each in turn. shift: who begins, since the first finds another machine than the last."""
        for entrant in rotated(self.entrants, shift):
            try:
                run(entrant)
            except FAILURES as error:
                self.drop(entrant.peer.name, error)

    def close(self) -> None:
        for entrant in self.entrants:
            entrant.close()


def rotated(entrants: Sequence[Entrant], shift: int) -> list[Entrant]:
    at = shift % max(len(entrants), 1)
    return [*entrants[at:], *entrants[:at]]


def run(
    peers: Iterable[Peer],
    model: str,
    checkpoint: Checkpoint,
    sets: Sets,
    plan: Plan,
    note: Note,
    again: bool = False,
) -> Race:
    """All rounds; every process is gone at the end. again: environments are made anew."""
    race = Race(plan, sets, note)
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


def begin(race: Race, entrant: Entrant) -> None:
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


def fastest_width(entrant: Entrant, trials: Sequence[Group], tokens: int) -> int:
    """Of the peer's own choice of widths, the best on the first prompts of each set."""
    if len(entrant.peer.widths) == 1:
        entrant.turn("speculation", trials[0].prompts, WARM_UP, entrant.peer.widths[0])
        return entrant.peer.widths[0]
    took = {
        width: sum(entrant.turn("speculation", trial.prompts, tokens, width).seconds for trial in trials)
        for width in entrant.peer.widths
    }
    return min(took, key=lambda width: took[width])


def one_round(race: Race, number: int) -> None:
    plan = race.plan
    for at, group in enumerate(groups(race.sets, plan.batches)):
        race.everyone(partial(decode, plan=plan, group=group, number=number), shift=number + at)
    text = long_prompt(race.sets, plan.prompt_tokens, number)
    race.everyone(lambda entrant: entrant.prompts.append(entrant.turn("plain", [text], 1, None).seconds), number)
    race.everyone(lambda entrant: start_again(race, entrant), number)


def decode(entrant: Entrant, plan: Plan, group: Group, number: int) -> None:
    """One group of prompts in the round `number`, by each of the entrant's ways."""
    for way in entrant.ways(group.batch):
        width = entrant.widths.get(group.batch) if way == "speculation" else None
        texts, seconds = after_first_token(entrant, way, group, plan.tokens, width)
        sheets = entrant.decodings.setdefault((way, group.batch, group.name), [])
        if len(sheets) == number:
            sheets.append(Decoding())
        sheets[number].tokens += (plan.tokens - 1) * group.batch
        sheets[number].seconds += seconds
        if way == "plain" and group.batch == min(plan.batches):
            entrant.texts |= {(group.name, at): text for at, text in zip(group.numbers, texts, strict=True)}


def after_first_token(
    entrant: Entrant, way: Way, group: Group, tokens: int, width: int | None
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


def start_again(race: Race, entrant: Entrant) -> None:
    if entrant.starts[-1] < QUICK:
        entrant.start("plain", race.plan, race.sets).close()


def weigh(entrant: Entrant) -> None:
    entrant.memory = {way: child.memory() for way, child in entrant.children.items()}
