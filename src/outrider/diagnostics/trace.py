"""`outrider trace`: one answer step by step: drafted and accepted tokens, why each step ended, and the times.

A step is a forward pass of the target. Its times: `draft`, making the draft that it verifies, at the end of the step
before; `verify`, the forward pass and verification; `host`, the rest of the engine's step.
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
from ..tokenizer import TokenTexts, spelled
from ..types import Completion, DecodeStep, Draft, FinishReason, Output, SamplingParams
from .machine import machine_facts

WARM_UP = "one two three one two three one two"  # repeats itself, so that lookup methods draft
SPACES = re.compile(" +")


class Ending(StrEnum):
    """Why a step produced no more tokens."""

    REJECTED = "rejected"  # the target chose another token than the drafted one
    DRAFT = "end of draft"  # a whole branch was accepted, and the target added a token
    NOTHING = "no draft"
    TEXT = "end of text"
    BUDGET = "budget"  # `max_tokens`, or the context length


@dataclass(frozen=True)
class DraftNode:
    """A drafted token."""

    token: int
    text: str  # the characters that it completes; its bytes, as `<0xF0>`, if it completes none
    parent: int  # index of the parent token; -1: the last token of the text
    depth: int
    kept: bool
    drafters: list[str] = field(default_factory=list)  # of combined drafters, those that proposed it


@dataclass(frozen=True)
class AnswerStep:
    number: int
    nodes: list[DraftNode]
    tokens: list[int]  # added to the text
    texts: list[str]  # text of each token, as in DraftNode
    shown: list[str]  # the same as streamed: a character that spans tokens appears with its last token
    kept: int  # number of `tokens` that were drafted
    ending: Ending
    draft: float  # seconds
    verify: float
    host: float

    @property
    def seconds(self) -> float:
        return self.draft + self.verify + self.host

    @property
    def branches(self) -> bool:
        return any(node.parent != index - 1 for index, node in enumerate(self.nodes))

    @property
    def own(self) -> str:
        """Classify the tokens after the accepted ones: corrected, bonus or plain."""
        if not self.nodes:
            return "plain"
        return "corrected" if self.rejected else "bonus"

    @property
    def rejected(self) -> list[DraftNode]:
        """Return the drafted tokens at the position where the target chose another token."""
        last = ([index for index, node in enumerate(self.nodes) if node.kept] or [-1])[-1]
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
    first_step_seconds: float  # until the first token: prefill
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
        """Return the steps after prefill."""
        return self.steps[1:]

    @property
    def tokens_per_second(self) -> float:
        seconds = sum(step.seconds for step in self.later)
        return sum(len(step.tokens) for step in self.later) / seconds if seconds else 0.0

    def rates(self) -> list[tuple[int, int]]:
        """Count for each depth the steps that drafted a token there, and those that accepted it."""
        counts: list[tuple[int, int]] = []
        for step in self.steps:
            for depth in range(1 + max((node.depth for node in step.nodes), default=-1)):
                counts += [(0, 0)] * (depth + 1 - len(counts))
                counts[depth] = (counts[depth][0] + 1, counts[depth][1] + (depth < step.kept))
        return counts

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "tokens_per_second": self.tokens_per_second}


def record(llm: LLM, prompt: Prompt, asked: str, params: SamplingParams) -> AnswerTrace:
    """Answer one prompt and record every step; the engine must run with one decode step per call.

    asked: the prompt as the user wrote it, for display.
    """
    llm.generate(WARM_UP, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    engine = llm.engine
    name = engine.add(prompt, params)
    times: list[tuple[float, float, float]] = []  # draft, verify, host of each step that produced tokens
    drafting = first = 0.0
    outputs: list[Output] = []
    while name in engine.parents:
        before = engine.times.seconds
        outputs = engine.step()
        seconds, spent = engine.times.seconds - before, engine.runner.spent
        if not times:  # chunked prefill takes several steps
            first += seconds
        if outputs:
            times.append((drafting, spent.target, seconds - spent.target - spent.draft))
            drafting = spent.draft
    (output,) = outputs
    assert output.stats is not None, "a finished output carries its stats"
    (completion,) = output.completions
    if completion.finish_reason == FinishReason.ERROR:
        raise UserError(f"the request failed: {completion.stop_reason}")
    return AnswerTrace(
        model=llm.resolved.model,
        method=output.stats.method or "none",
        backend=llm.resolved.backend,
        machine=machine_facts(engine.device),
        prompt=asked,
        prompt_tokens=len(output.prompt_token_ids),
        temperature=params.temperature,
        text=completion.text,
        finish_reason=str(completion.finish_reason),
        first_step_seconds=first,
        steps=read_steps(llm, completion, times, output.stats.method.split("+")),
    )


def read_steps(
    llm: LLM, completion: Completion, times: list[tuple[float, float, float]], drafters: list[str]
) -> list[AnswerStep]:
    texts, stream, steps = TokenTexts(llm.tokenizer), llm.tokenizer.stream(), completion.steps or []
    traced: list[AnswerStep] = []
    before: list[int] = []
    for number, (one, (draft, verify, host)) in enumerate(zip(steps, times, strict=True), 1):
        path = one.draft.path(one.tokens) if one.draft is not None else []
        traced.append(
            AnswerStep(
                number=number,
                nodes=nodes(texts, one.draft, before, path, drafters) if one.draft is not None else [],
                tokens=list(one.tokens),
                texts=labels(texts, one.tokens, texts.of(one.tokens, before)),
                shown=[stream.push(token) for token in one.tokens],
                kept=len(path),
                ending=ending(one, path, completion.finish_reason if number == len(steps) else None),
                draft=draft,
                verify=verify,
                host=host,
            )
        )
        before += one.tokens
    if traced:  # the text of an incomplete last character
        traced[-1].shown[-1] += stream.flush()
    return traced


def labels(texts: TokenTexts, tokens: list[int], complete: list[str]) -> list[str]:
    """Return the text of each token for display: the characters that it completes, else its bytes."""
    return [spelled(text, texts.spelling(token)) for token, text in zip(tokens, complete, strict=True)]


def nodes(texts: TokenTexts, draft: Draft, before: list[int], path: list[int], drafters: list[str]) -> list[DraftNode]:
    depths, parents, origins = draft.depths(), draft.parent_indices(), draft.origins
    shown = labels(texts, draft.tokens, texts.of_draft(draft, before))
    return [
        DraftNode(
            token=token,
            text=shown[index],
            parent=parents[index],
            depth=depths[index],
            kept=index in path,
            drafters=[]
            if origins is None
            else [name for bit, name in enumerate(drafters) if origins[index] >> bit & 1],
        )
        for index, token in enumerate(draft.tokens)
    ]


def ending(step: DecodeStep, path: list[int], finished: str | None) -> Ending:
    if finished is not None:
        return Ending.BUDGET if finished == FinishReason.LENGTH else Ending.TEXT
    if step.draft is None:
        return Ending.NOTHING
    last = path[-1] if path else -1
    return Ending.REJECTED if last in step.draft.parent_indices() else Ending.DRAFT


def sentence(step: AnswerStep) -> str:
    """Return a sentence that says why the step ended."""
    own = f"“{visible(step.texts[-1])}”"
    match step.ending:
        case Ending.REJECTED:
            rejected = " or ".join(f"“{visible(node.text)}”" for node in step.rejected[:3])
            more = ", among others," if len(step.rejected) > 3 else ""
            return f"The model chose {own} where {rejected}{more} was drafted."
        case Ending.DRAFT:
            return f"The whole branch was accepted; {own} is the model's own token."
        case Ending.NOTHING:
            return "Nothing was drafted: a plain decoding step."
        case Ending.TEXT:
            return "The text ends here."
        case Ending.BUDGET:
            return "The limit of `max_tokens` or of the context was reached."


def visible(text: str) -> str:
    """Return the text of a token with white space made visible."""
    shown = SPACES.sub(lambda run: "·" * len(run[0]) if len(run[0]) < 4 else f"␣{len(run[0])}", text)
    return shown.replace("\n", "↵").replace("\t", "⇥").replace("\r", "␍") or "∅"


def columns(text: str) -> int:
    """Count the columns that a text takes in a fixed-width font."""
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def rows(step: AnswerStep) -> list[int]:
    """Assign a line to each drafted token: one for each leaf; the accepted branch, else the first, takes line 0."""
    children: dict[int, list[int]] = {}
    for index, node in enumerate(step.nodes):
        children.setdefault(node.parent, []).append(index)
    lines, used = [0] * len(step.nodes), 0
    stack = [(-1, 0, True)]  # index of a token, line of its parent, whether it continues that line
    while stack:
        index, line, same = stack.pop()
        if not same:
            used += 1
            line = used
        if index >= 0:
            lines[index] = line
        siblings = sorted(children.get(index, []), key=lambda child: not step.nodes[child].kept)
        stack += [(child, line, not number) for number, child in reversed(list(enumerate(siblings)))]
    return lines
