"""`outrider verify`: on this model and this machine, speculation changes nothing but the speed.

Two proofs. Texts: whoever drafts, alone or in a batch, at any temperature, the tokens are those of plain decoding. Law:
where drafts are verified by rejection, which keeps the distribution and not the text, short answers come as often as
the target's own log-probabilities say.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ..errors import UserError
from ..input_processor import Prompt
from ..llm import LLM
from ..speculation import available, drafts_from, find
from ..speculation.configure import parse, read
from ..types import SamplingParams, SpecStats
from ..weights import shipped
from . import distribution
from .distribution import FALSE_ALARM, POWER, Comparison
from .machine import machine_facts
from .method_spec import with_settings, without

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
class VerifyConfig:
    drafters: Sequence[str]  # as the user wrote them; `all`: every method that can run
    temperatures: Sequence[float] = (0.0, 0.8)
    max_tokens: int = 48
    samples: int = 2000
    seed: int = 0
    counts_only: bool = False  # texts that differ are told, and no failure: kernels that do not promise the same bits


def measure(
    open_model: Opener,
    ask: Callable[[LLM], Sequence[Prompt]],
    plan: VerifyConfig,
    model: str,
    note: Callable[[str], None],
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
        "machine": machine_facts(llm.engine.device),
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


def listen(llm: LLM, prompts: Sequence[Prompt], plan: VerifyConfig) -> Baseline:
    questions = [
        PromptCase(prompt, SamplingParams(max_tokens=plan.max_tokens, temperature=temperature, seed=plan.seed + n), n)
        for n, prompt in enumerate(prompts)
        for temperature in plan.temperatures
    ]
    coins = llm.tokenizer.encode(COINS)
    return Baseline(questions, alone(llm, questions)[0], coins, distribution.expected(llm, coins, DRAWN))


def check(open_model: Opener, drafter: str, plain: Baseline, plan: VerifyConfig) -> Iterator[dict[str, Any]]:
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


def finding(drafter: str, mode: str, llm: LLM, plain: Baseline, plan: VerifyConfig) -> dict[str, Any]:
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
        found["law"] = {
            **report(distribution.comparisons(drawn.counts, plain.probs)),
            "drafted": drawn.spec_stats.drafted,
        }
        idle = bool(method) and not drawn.spec_stats.drafted
        broken = broken or not found["law"]["holds"]
        spec_stats.add(drawn.spec_stats)
    found |= {
        "drafted": spec_stats.drafted,
        "accepted": spec_stats.accepted,
        "mean_acceptance_length": spec_stats.mean_length,
    }
    return {**found, "verdict": FAIL if broken else UNPROVEN if idle else PASS, "reason": why(found, idle)}


def with_prediction(question: PromptCase, method: str, plain: Baseline) -> PromptCase:
    """A method that drafts from what a request brings gets plain decoding's first answer to the same prompt."""
    if not method or drafts_from(method) != "prediction":
        return question
    first = next(n for n, one in enumerate(plain.questions) if one.number == question.number)
    return replace(question, params=replace(question.params, prediction=plain.answers[first][0]))


def alone(llm: LLM, questions: Sequence[PromptCase]) -> tuple[list[Generated], SpecStats]:
    """Each by itself."""
    spec_stats, answers = SpecStats(), []
    for question in questions:
        one, own = batched(llm, [question])
        answers += one
        spec_stats.add(own)
    return answers, spec_stats


def batched(llm: LLM, questions: Sequence[PromptCase]) -> tuple[list[Generated], SpecStats]:
    spec_stats, answers = SpecStats(), []
    for output in llm.generate([one.prompt for one in questions], [one.params for one in questions]):
        (told,) = output.completions
        answers.append((told.token_ids, told.text, told.finish_reason))
        if output.stats is not None:
            spec_stats.add(output.stats.speculation)
    return answers, spec_stats


def draw(llm: LLM, method: str, plain: Baseline, plan: VerifyConfig) -> distribution.SampledAnswers:
    params = replace(DRAWN, seed=plan.seed)
    if method and drafts_from(method) == "prediction":
        likeliest = max(plain.probs, key=lambda text: plain.probs[text])
        params = replace(params, prediction=likeliest)
    return distribution.draw(llm, plain.coins, params, plan.samples)


@dataclass(frozen=True)
class PromptCase:
    prompt: Prompt
    params: SamplingParams
    number: int  # of the prompt


Generated = tuple[list[int], str, str | None]  # tokens, text, why it ended


@dataclass(frozen=True)
class Baseline:
    """What plain decoding says: the measure of all that follows."""

    questions: list[PromptCase]
    answers: list[Generated]  # one by one
    coins: list[int]
    probs: dict[distribution.Text, float]


def differences(
    questions: Sequence[PromptCase], expected: Sequence[Generated], ways: Mapping[str, Sequence[Generated]], llm: LLM
) -> dict[str, Any]:
    """How many answers, by the way that they were asked for, are not the expected ones, and where the first departs."""
    found: dict[str, Any] = {"compared": 0, "different": 0, "first": None}
    for way, answers in ways.items():
        for question, meant, told in zip(questions, expected, answers, strict=True):
            found["compared"] += 1
            if told == meant:
                continue
            found["different"] += 1
            found["first"] = found["first"] or {
                "prompt": question.number + 1,
                "temperature": question.params.temperature,
                "way": way,
                **departure(meant, told, llm),
            }
    return found


def departure(expected: Generated, told: Generated, llm: LLM) -> dict[str, Any]:
    pairs = zip(expected[0], told[0], strict=False)
    at = next((n for n, (one, other) in enumerate(pairs) if one != other), min(len(expected[0]), len(told[0])))
    said = [llm.tokenizer.decode(each[0][at : at + 1]) if at < len(each[0]) else None for each in (expected, told)]
    return {"token": at + 1, "expected": said[0], "found": said[1], "finish_reason": told[2]}


def report(compared: dict[tuple[int, ...], Comparison]) -> dict[str, Any]:
    """The comparison that came closest to its threshold, or passed it furthest; what all of them would have caught."""
    places, worst = max(compared.items(), key=lambda item: item[1].excess)
    whole = max(compared.values(), key=lambda one: one.detectable)
    impossible = worst.statistic == math.inf
    return {
        "holds": worst.holds,
        "statistic": None if impossible else worst.statistic,
        "threshold": worst.threshold,
        "freedom": worst.freedom,
        "positions": [place + 1 for place in places],
        "impossible_answers": impossible,
        "comparisons": len(compared),
        "detectable_total_variation": whole.detectable,
    }


def why(found: dict[str, Any], idle: bool) -> str:
    """What is wrong, in words; empty: nothing."""
    texts, law_found = found["texts"], found["law"]
    reasons = []
    if texts["different"]:
        first = texts["first"]
        said = {key: "the end" if first[key] is None else repr(first[key]) for key in ("expected", "found")}
        reasons.append(
            f"{texts['different']} of {texts['compared']} texts differ from {texts['against']}: "
            f"prompt {first['prompt']} at temperature {first['temperature']:g}, {first['way']}, "
            f"has {said['found']} for {said['expected']} as token {first['token']}"
        )
    if law_found is not None and law_found["impossible_answers"]:
        reasons.append("answers came that the model never gives")
    elif law_found is not None and not law_found["holds"]:
        reasons.append(
            f"the law is broken: chi-square {law_found['statistic']:.0f} where {law_found['threshold']:.0f} is passed "
            f"once in {1 / FALSE_ALARM:,.0f} runs"
        )
    if idle:
        reasons.append("nothing was drafted, so nothing is proven: give prompts that it has guesses for")
    return "; ".join(reasons)


def line(found: dict[str, Any]) -> str:
    """A finding in one line, as it comes."""
    who = " ".join(filter(None, (found["drafter"], found["verification"])))
    return f"{who}: {found['verdict']}{', ' if found['reason'] else ''}{found['reason']}"
