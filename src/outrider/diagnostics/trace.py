"""`outrider trace`: one answer, step by step: what was drafted, what of it stayed, why it ended there, and the times.

A step is a pass of the target. Its times: `draft`, making the guess that it verifies, at the end of the step before;
`verify`, the pass and the choice of what stays; `host`, all else of the engine's step.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from ..errors import UserError
from ..input_processor import Prompt
from ..llm import LLM
from ..types import Completion, DecodeStep, Draft, FinishReason, Output, SamplingParams
from .machine import machine_facts

WARM_UP = "one two three one two three one two"  # repeats itself, so that lookup methods draft
SPACES = re.compile(" +")


class Ending(StrEnum):
    """Why a step gave no more tokens."""

    REJECTED = "rejected"  # the target says something else than was drafted
    DRAFT = "end of draft"  # all of a branch was kept, and the target added a token
    NOTHING = "no draft"
    TEXT = "end of text"
    BUDGET = "budget"  # of tokens, or of the context


@dataclass(frozen=True)
class DraftNode:
    """A drafted token."""

    token: int
    text: str
    parent: int  # -1: it follows the text
    depth: int
    kept: bool
    drafters: list[str] = field(default_factory=list)  # of several, whose it is


@dataclass(frozen=True)
class AnswerStep:
    number: int
    nodes: list[DraftNode]
    tokens: list[int]  # that the text went on with
    texts: list[str]  # of these
    shown: list[str]  # the same as they stand in the answer: half a character shows with its other half
    kept: int  # how many of them were drafted
    ending: Ending
    draft: float  # seconds
    verify: float
    host: float

    @property
    def seconds(self) -> float:
        return self.draft + self.verify + self.host

    @property
    def branches(self) -> bool:
        return any(node.parent != place - 1 for place, node in enumerate(self.nodes))

    @property
    def own(self) -> str:
        """What the tokens after the kept ones are: corrected, bonus or plain."""
        if not self.nodes:
            return "plain"
        return "corrected" if self.refused else "bonus"

    @property
    def refused(self) -> list[DraftNode]:
        """What was drafted for the place at which the target said something else."""
        last = ([place for place, node in enumerate(self.nodes) if node.kept] or [-1])[-1]
        return [node for node in self.nodes if node.parent == last]


@dataclass(frozen=True)
class AnswerTrace:
    model: str
    method: str
    backend: str
    machine: dict[str, Any]
    prompt: str
    prompt_tokens: int
    temperature: float
    text: str
    finish_reason: str
    first_step_seconds: float  # until the first token: the prompt's pass
    steps: list[AnswerStep]

    @property
    def tokens(self) -> int:
        return sum(len(step.tokens) for step in self.steps)

    @property
    def drafted(self) -> int:
        return sum(len(step.nodes) for step in self.steps)

    @property
    def kept(self) -> int:
        return sum(step.kept for step in self.steps)

    @property
    def later(self) -> list[AnswerStep]:
        """The steps after that of the prompt, which takes a time of its own."""
        return self.steps[1:]

    @property
    def tokens_per_second(self) -> float:
        seconds = sum(step.seconds for step in self.later)
        return sum(len(step.tokens) for step in self.later) / seconds if seconds else 0.0

    def rates(self) -> list[tuple[int, int]]:
        """By depth: the steps that drafted so deep, and those that kept it."""
        found: list[tuple[int, int]] = []
        for step in self.steps:
            for depth in range(1 + max((node.depth for node in step.nodes), default=-1)):
                found += [(0, 0)] * (depth + 1 - len(found))
                found[depth] = (found[depth][0] + 1, found[depth][1] + (depth < step.kept))
        return found

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "tokens_per_second": self.tokens_per_second}


def record(llm: LLM, prompt: Prompt, asked: str, params: SamplingParams) -> AnswerTrace:
    """Answer one prompt. asked: as the user wrote it. The engine must not run several steps in one."""
    llm.generate(WARM_UP, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    engine = llm.engine
    name = engine.add(prompt, params)
    times: list[tuple[float, float, float]] = []  # of each step that gave tokens: draft, verify, host
    drafting = first = 0.0
    outputs: list[Output] = []
    while name in engine.parents:
        before = engine.times.seconds
        outputs = engine.step()
        seconds, spent = engine.times.seconds - before, engine.runner.spent
        if not times:  # a long prompt takes several steps
            first += seconds
        if outputs:
            times.append((drafting, spent.target, seconds - spent.target - spent.draft))
            drafting = spent.draft
    (output,) = outputs
    assert output.stats is not None, "a finished output carries its stats"
    (told,) = output.completions
    if told.finish_reason == FinishReason.ERROR:
        raise UserError(f"the request failed: {told.stop_reason}")
    return AnswerTrace(
        model=llm.resolved.model,
        method=output.stats.method or "none",
        backend=llm.resolved.backend,
        machine=machine_facts(engine.device),
        prompt=asked,
        prompt_tokens=len(output.prompt_token_ids),
        temperature=params.temperature,
        text=told.text,
        finish_reason=str(told.finish_reason),
        first_step_seconds=first,
        steps=read_steps(llm, told, times, output.stats.method.split("+")),
    )


def read_steps(
    llm: LLM, told: Completion, times: list[tuple[float, float, float]], drafters: list[str]
) -> list[AnswerStep]:
    stream, steps = llm.tokenizer.stream(), told.steps or []
    found = []
    for number, (one, (draft, verify, host)) in enumerate(zip(steps, times, strict=True), 1):
        path = one.draft.path(one.tokens) if one.draft is not None else []
        found.append(
            AnswerStep(
                number=number,
                nodes=nodes(llm, one.draft, path, drafters) if one.draft is not None else [],
                tokens=list(one.tokens),
                texts=[llm.tokenizer.token_text(token) for token in one.tokens],
                shown=[stream.push(token) for token in one.tokens],
                kept=len(path),
                ending=ending(one, path, told.finish_reason if number == len(steps) else None),
                draft=draft,
                verify=verify,
                host=host,
            )
        )
    return found


def nodes(llm: LLM, draft: Draft, path: list[int], drafters: list[str]) -> list[DraftNode]:
    depths, before, origins = draft.depths(), draft.before(), draft.origins
    return [
        DraftNode(
            token=token,
            text=llm.tokenizer.token_text(token),
            parent=before[place],
            depth=depths[place],
            kept=place in path,
            drafters=[]
            if origins is None
            else [name for bit, name in enumerate(drafters) if origins[place] >> bit & 1],
        )
        for place, token in enumerate(draft.tokens)
    ]


def ending(step: DecodeStep, path: list[int], finished: str | None) -> Ending:
    if finished is not None:
        return Ending.BUDGET if finished == FinishReason.LENGTH else Ending.TEXT
    if step.draft is None:
        return Ending.NOTHING
    last = path[-1] if path else -1
    return Ending.REJECTED if last in step.draft.before() else Ending.DRAFT


def sentence(step: AnswerStep) -> str:
    """Why the step ended, in words."""
    own = f"“{visible(step.texts[-1])}”"
    match step.ending:
        case Ending.REJECTED:
            refused = " or ".join(f"“{visible(node.text)}”" for node in step.refused[:3])
            more = ", among others," if len(step.refused) > 3 else ""
            return f"The model says {own} where {refused}{more} was drafted."
        case Ending.DRAFT:
            return f"All that was drafted on this way was kept; {own} is the model's own."
        case Ending.NOTHING:
            return "Nothing was drafted: the model chose by itself."
        case Ending.TEXT:
            return "The text ends here."
        case Ending.BUDGET:
            return "The tokens that were asked for end here."


def visible(text: str) -> str:
    """A token as it can be seen: it may be nothing but space."""
    shown = SPACES.sub(lambda run: "·" * len(run[0]) if len(run[0]) < 4 else f"␣{len(run[0])}", text)
    return shown.replace("\n", "↵").replace("\t", "⇥").replace("\r", "␍") or "∅"


def columns(text: str) -> int:
    """Cells of a fixed-width font."""
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def rows(step: AnswerStep) -> list[int]:
    """The line of each drafted token: one for each leaf; the way that was kept, else the first, stays on the first."""
    children: dict[int, list[int]] = {}
    for place, node in enumerate(step.nodes):
        children.setdefault(node.parent, []).append(place)
    found, used = [0] * len(step.nodes), 0
    waiting = [(-1, 0, True)]  # a token, its line, and whether that is its parent's
    while waiting:
        place, row, same = waiting.pop()
        if not same:
            used += 1
            row = used
        if place >= 0:
            found[place] = row
        family = sorted(children.get(place, []), key=lambda child: not step.nodes[child].kept)
        waiting += [(child, row, not number) for number, child in reversed(list(enumerate(family)))]
    return found
