"""`outrider verify`: on this model and this machine, speculation changes nothing but the speed.

Two proofs. Texts: whoever drafts, alone or in a batch, at any temperature, the tokens are those of plain decoding. Law:
where drafts are verified by rejection, which keeps the distribution and not the text, short answers come as often as
the target's own log-probabilities say.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ..errors import UserError
from ..input_processor import Prompt
from ..llm import LLM
from ..speculation import available, drafts_from, find
from ..speculation.configure import parse, read
from ..types import SamplingParams, SpecStats
from ..weights import shipped
from . import law
from .chi_square import FALSE_ALARM, POWER
from .drafters import with_settings, without
from .findings import Plain, Question, Told, differences, line, report, why
from .machine import measured_on

Opener = Callable[[str], LLM]  # an engine with this drafter
PASS, FAIL, UNPROVEN, SKIPPED = "pass", "fail", "unproven", "skipped"

PROMPTS = (
    "Write the numbers from one to twenty as words, then write them once more.",
    "Repeat this line three times: the cat sat on the mat and the dog sat on the log.",
    "def area(width, height):\n    return width * height\n\nRename `width` to `breadth` and write the function again.",
    "Why is the sky blue? Explain it to a child.",
    'Fill in the fields for Ada, Ben and Eve: {"name": "", "age": 0, "town": ""}',
    "Translate into French: good morning, good evening, good night, goodbye.",
)
# What comes next is open, and yet it has come before: whoever looks drafts up finds some, and half of them are wrong.
COINS = "Coins: heads tails heads heads tails tails heads tails heads heads tails heads tails tails heads tails"
DRAWN = SamplingParams(temperature=1.0, top_k=4)


@dataclass(frozen=True)
class Plan:
    drafters: Sequence[str]  # as the user wrote them; `all`: every method that can run
    temperatures: Sequence[float] = (0.0, 0.8)
    max_tokens: int = 48
    samples: int = 2000
    seed: int = 0
    counts_only: bool = False  # texts that differ are told, and no failure: kernels that do not promise the same bits


def measure(
    open_model: Opener, ask: Callable[[LLM], Sequence[Prompt]], plan: Plan, model: str, note: Callable[[str], None]
) -> dict[str, Any]:
    """All findings of one run."""
    drafters, skipped = choose(plan.drafters, model)

    def opened(drafter: str) -> LLM:
        gc.collect()  # an engine holds on to memory that the next one measures as its room
        return open_model(drafter)

    llm = opened("none")
    plain = listen(llm, ask(llm), plan)
    facts = {
        "model": llm.resolved.model,
        "backend": llm.resolved.backend,
        "machine": measured_on(llm.engine.device),
        "prompts": len({question.number for question in plain.questions}),
        "temperatures": list(plan.temperatures),
        "max_tokens": plan.max_tokens,
        "seed": plan.seed,
        "samples": plan.samples,
        "false_alarm": FALSE_ALARM,
        "power": POWER,
    }
    found = [finding("none", "", llm, plain, plan)]
    del llm
    note(line(found[0]))
    for drafter in drafters:
        for one in check(opened, drafter, plain, plan):
            found.append(one)
            note(line(one))
    found += [{"drafter": name, "verdict": SKIPPED, "reason": reason} for name, reason in skipped.items()]
    return {**facts, "passed": all(one["verdict"] != FAIL for one in found), "checks": found}


def choose(asked: Sequence[str], model: str) -> tuple[list[str], dict[str, str]]:
    """The drafters to run, and of `all` those that cannot, with the reason."""
    named = list(dict.fromkeys(one for one in asked if one != "all"))
    for one in named:
        if not read(one)[0]:
            raise UserError("`--speculate` is `none`, which is always checked: name a method, or `all`")
        if parse(one).verification == "synthetic":
            raise UserError(f"`{one}` forces how much is kept, whatever the model says: leave out `verify=synthetic`")
    if "all" not in asked:
        return named, {}
    told = {read(one)[0] for one in named}
    free, skipped = [], {}
    for name in available():
        if name in told:
            continue
        reason = lacks(name, model)
        if reason:
            skipped[name] = reason
        else:
            free.append(name)
    return [*free, *named], skipped


def lacks(method: str, model: str) -> str:
    """Why a method cannot run for a model without being told more; empty: it can."""
    module = find(method)
    if all(field.name != "model" for field in fields(module.Options)) or shipped.find(model, method) is not None:
        return ""
    inside = getattr(module, "has_own", None)  # whether the model's own checkpoint holds what drafts
    with contextlib.suppress(UserError):  # a model without a checkpoint holds nothing
        if inside is not None and inside(model):
            return ""
    return f"none ships for `{model}`: pass `--speculate {method}:model=...`"


def listen(llm: LLM, prompts: Sequence[Prompt], plan: Plan) -> Plain:
    questions = [
        Question(prompt, SamplingParams(max_tokens=plan.max_tokens, temperature=temperature, seed=plan.seed + n), n)
        for n, prompt in enumerate(prompts)
        for temperature in plan.temperatures
    ]
    coins = llm.tokenizer.encode(COINS)
    return Plain(questions, alone(llm, questions)[0], coins, law.expected(llm, coins, DRAWN))


def check(open_model: Opener, drafter: str, plain: Plain, plan: Plan) -> Iterator[dict[str, Any]]:
    """By each verification that suits the drafter, unless it says by which; each in an engine of its own."""
    method, settings = read(drafter)
    mode = parse(drafter).verification
    llm = open_model(with_settings(drafter, adaptive="false") if mode == "exact" else drafter)
    needs = llm.engine.spec_manager.methods[method].needs
    yield finding(drafter, mode, llm, plain, plan)
    del llm
    if "verify" in settings:
        return
    for other in ("rejection", "block"):
        if other == "block" and (needs.trees or not needs.draws):
            continue
        drawn = {"draft": "probabilistic"} if needs.draws and "draft" not in settings else {}
        llm = open_model(with_settings(without(drafter, "adaptive"), verify=other, **drawn))
        yield finding(drafter, other, llm, plain, plan)
        del llm


def finding(drafter: str, mode: str, llm: LLM, plain: Plain, plan: Plan) -> dict[str, Any]:
    """What became of one engine's answers: their texts against plain decoding's, or against its own, and their law."""
    method = llm.engine.spec_manager.plan.method
    questions = [with_prediction(one, method, plain) for one in plain.questions]
    singly, spec_stats = alone(llm, questions)
    together, other = batched(llm, questions)
    spec_stats.add(other)
    if mode in ("", "exact"):
        against, expected, ways = "plain decoding", plain.answers, {"alone": singly, "batched": together}
    else:  # the text is the drafter's own, and only the law is the target's
        against, expected, ways = "the same alone", singly, {"batched": together}
    texts = {"against": against, **differences(questions, expected, ways, llm)}
    found: dict[str, Any] = {"drafter": drafter, "verification": mode or None, "texts": texts, "law": None}
    broken, idle = texts["different"] and not plan.counts_only, bool(method) and not spec_stats.drafted
    if mode != "exact":
        drawn = draw(llm, method, plain, plan)
        found["law"] = {**report(law.comparisons(drawn.counts, plain.law)), "drafted": drawn.spec_stats.drafted}
        idle = bool(method) and not drawn.spec_stats.drafted
        broken = broken or not found["law"]["holds"]
        spec_stats.add(drawn.spec_stats)
    found |= {
        "drafted": spec_stats.drafted,
        "accepted": spec_stats.accepted,
        "mean_acceptance_length": spec_stats.mean_length,
    }
    return {**found, "verdict": FAIL if broken else UNPROVEN if idle else PASS, "reason": why(found, idle)}


def with_prediction(question: Question, method: str, plain: Plain) -> Question:
    """A method that drafts from what a request brings gets plain decoding's first answer to the same prompt."""
    if not method or drafts_from(method) != "prediction":
        return question
    first = next(n for n, one in enumerate(plain.questions) if one.number == question.number)
    return replace(question, params=replace(question.params, prediction=plain.answers[first][0]))


def alone(llm: LLM, questions: Sequence[Question]) -> tuple[list[Told], SpecStats]:
    """Each by itself."""
    spec_stats, answers = SpecStats(), []
    for question in questions:
        one, own = batched(llm, [question])
        answers += one
        spec_stats.add(own)
    return answers, spec_stats


def batched(llm: LLM, questions: Sequence[Question]) -> tuple[list[Told], SpecStats]:
    spec_stats, answers = SpecStats(), []
    for output in llm.generate([one.prompt for one in questions], [one.params for one in questions]):
        (told,) = output.completions
        answers.append((told.token_ids, told.text, told.finish_reason))
        if output.stats is not None:
            spec_stats.add(output.stats.speculation)
    return answers, spec_stats


def draw(llm: LLM, method: str, plain: Plain, plan: Plan) -> law.Drawn:
    params = replace(DRAWN, seed=plan.seed)
    if method and drafts_from(method) == "prediction":
        likeliest = max(plain.law, key=lambda text: plain.law[text])
        params = replace(params, prediction=likeliest)
    return law.draw(llm, plain.coins, params, plan.samples)
