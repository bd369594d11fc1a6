"""`outrider verify`: check on this model and this machine that speculation changes nothing but the speed.

Two checks. Texts: with every method, alone and in a batch, at every temperature, the tokens equal plain decoding's.
Distribution: verification by rejection keeps the distribution instead of the text, so sampled short answers are
compared with the probabilities that the target itself gives them.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..catalog import shipped
from ..errors import UserError
from ..input_processor import Prompt
from ..llm import LLM
from ..speculation import available, drafts_from, find
from ..speculation.config import parse, read, with_settings, without_setting
from ..speculation.registry import has_model
from ..types import Progress, SamplingParams, SpecStats, unwatched
from . import distribution
from .distribution import FALSE_ALARM, POWER, Comparison
from .machine import machine_facts

Opener = Callable[[str], LLM]  # method specification -> engine
Generated = tuple[list[int], str, str | None]  # token ids, text, finish reason
PASS, FAIL, UNPROVEN, SKIPPED = "pass", "fail", "unproven", "skipped"

PROMPTS = (
    "Write the numbers from one to twenty as words, then write them once more.",
    "Repeat this line three times: the cat sat on the mat and the dog sat on the log.",
    "def area(width, height):\n    return width * height\n\nRename `width` to `breadth` and write the function again.",
    "Why is the sky blue? Explain it to a child.",
    'Fill in the fields for Ada, Ben and Eve: {"name": "", "age": 0, "town": ""}',
    "Translate into French: good morning, good evening, good night, goodbye.",
)
# The next token is uncertain, yet both tokens have occurred: lookup methods always draft, and about half is rejected.
COINS = "Coins: heads tails heads heads tails tails heads tails heads heads tails heads tails tails heads tails"
SAMPLED = SamplingParams(temperature=1.0, top_k=4, seed=0)
# Work by which the remaining time is estimated, in answers of 48 tokens that are generated alone. Measured on two cores
# of a Neoverse-N1 with a model of 135 M parameters.
LOADING, PER_BATCHED, PER_SAMPLE = 4.0, 0.5, 0.015


@dataclass(frozen=True)
class VerifyConfig:
    drafters: Sequence[str]  # method specifications; `all`: every method that can run
    temperatures: Sequence[float] = (0.0, 0.8)
    max_tokens: int = 48
    samples: int = 2000
    seed: int = 0
    counts_only: bool = False  # count texts that differ without failing: for kernels that are not batch-invariant
    quick: bool = False  # check each mode but exact match with only one method


class Work:
    """The work of all checks, done and to be done; reports it with the check that runs."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.label = progress, ""
        self.done = self.total = 0.0

    def begin(self, label: str) -> None:
        self.label = label
        self.advance(0.0)

    def advance(self, amount: float) -> None:
        self.done += amount
        self.progress(round(100 * self.done), round(100 * max(self.total, self.done)), self.label)


@dataclass(frozen=True)
class PromptCase:
    prompt: Prompt
    params: SamplingParams
    number: int  # index of the prompt


@dataclass(frozen=True)
class Baseline:
    """The output of plain decoding, which every method is compared with."""

    cases: list[PromptCase]
    answers: list[Generated]  # generated one by one
    coins: list[int]  # token ids of the prompt for the distribution test
    probs: dict[distribution.Text, float]  # probability of every short answer to it


def measure(
    open_model: Opener,
    ask: Callable[[LLM], Sequence[Prompt]],
    config: VerifyConfig,
    model: str,
    note: Callable[[str], None],
    progress: Progress = unwatched,
) -> dict[str, Any]:
    """Run every check; `note` receives one line for each result, `progress` the share of the work that is done."""
    drafters, skipped = choose(config.drafters, model)
    if config.quick:  # the first method takes the tests of the distribution: lookups are the fastest, draft models last
        drafters.sort(key=lambda drafter: (has_model(read(drafter)[0]), read(drafter)[0] == "draft_model"))
    work = Work(progress)
    work.begin("plain decoding")

    def opened(drafter: str) -> LLM:
        gc.collect()  # free the last engine before the next one measures the free memory
        return open_model(drafter)

    llm = opened("none")
    prompts = ask(llm)
    cases, modes = len(prompts) * len(config.temperatures), expected_modes(drafters, config)
    checks, sampled = 1 + len(modes), 1 + sum(mode != "exact" for mode in modes)
    work.total = checks * (LOADING + cases * (1 + PER_BATCHED)) + cases + sampled * config.samples * PER_SAMPLE
    work.advance(LOADING)
    baseline = run_baseline(llm, prompts, config, work)
    facts = {
        "model": llm.resolved.model,
        "backend": llm.resolved.backend,
        "machine": machine_facts(llm.engine.device),
        "prompts": len({case.number for case in baseline.cases}),
        "temperatures": list(config.temperatures),
        "max_tokens": config.max_tokens,
        "seed": config.seed,
        "samples": config.samples,
        "false_alarm": FALSE_ALARM,
        "power": POWER,
    }
    results = [check_engine("none", "", llm, baseline, config, work)]
    del llm
    note(summary(results[0]))
    for drafter in drafters:
        checked = {result["verification"] for result in results} if config.quick else set()
        for result in check_drafter(opened, drafter, baseline, config, checked, work):
            results.append(result)
            note(summary(result))
    results += [{"drafter": name, "verdict": SKIPPED, "reason": reason} for name, reason in skipped.items()]
    return {**facts, "passed": all(result["verdict"] != FAIL for result in results), "checks": results}


def choose(requested: Sequence[str], model: str) -> tuple[list[str], dict[str, str]]:
    """Return the specifications to check and, for `all`, the methods that cannot run with the reason."""
    named = list(dict.fromkeys(drafter for drafter in requested if drafter != "all"))
    for drafter in named:
        if not read(drafter)[0]:
            raise UserError("`--speculate` is `none`, which is always checked: name a method, or `all`")
        if parse(drafter).verification == "synthetic":
            raise UserError(
                f"`{drafter}` forces the acceptance rate and changes the text: leave out `verify=synthetic`"
            )
    if "all" not in requested:
        return named, {}
    configured = {read(drafter)[0] for drafter in named}
    runnable, skipped = [], {}
    for name in available():
        if name in configured:
            continue
        reason = missing_head(name, model)
        if reason:
            skipped[name] = reason
        else:
            runnable.append(name)
    return [*runnable, *named], skipped


def missing_head(method: str, model: str) -> str:
    """Return why a method cannot run for a model without further settings; empty if it can."""
    module = find(method)
    if not has_model(method) or shipped.find(model, method) is not None:
        return ""
    has_own = getattr(module, "has_own", None)  # whether the target's own checkpoint contains a head
    with contextlib.suppress(UserError):  # raised for a model without a checkpoint, which contains no head
        if has_own is not None and has_own(model):
            return ""
    return f"none ships for `{model}`: pass `--speculate {method}:model=...`"


def expected_modes(drafters: Sequence[str], config: VerifyConfig) -> list[str]:
    """Return the verification modes of all checks of methods, as far as the names of the methods tell."""
    modes: list[str] = []
    for drafter in drafters:
        method, settings = read(drafter)
        if "verify" in settings:
            modes.append(parse(drafter).verification)
            continue
        has_block = has_model(method) and "branches" not in settings
        modes += ["exact", *sampled_modes(has_block, modes if config.quick else ())]
    return modes


def sampled_modes(has_block: bool, checked: Collection[str]) -> list[str]:
    """Return the modes in which the distribution is tested, without those that were checked."""
    modes = ["rejection", "block"] if has_block else ["rejection"]
    return [mode for mode in modes if mode not in checked]


def run_baseline(llm: LLM, prompts: Sequence[Prompt], config: VerifyConfig, work: Work) -> Baseline:
    cases = [
        PromptCase(
            prompt, SamplingParams(max_tokens=config.max_tokens, temperature=temperature, seed=config.seed + n), n
        )
        for n, prompt in enumerate(prompts)
        for temperature in config.temperatures
    ]
    coins = llm.tokenizer.encode(COINS)
    return Baseline(cases, generate_alone(llm, cases, work)[0], coins, distribution.expected(llm, coins, SAMPLED))


def check_drafter(
    open_model: Opener, drafter: str, baseline: Baseline, config: VerifyConfig, checked: Collection[str], work: Work
) -> Iterator[dict[str, Any]]:
    """Check a method with each verification mode that suits it, or the one it names; one engine for each mode.

    checked: modes other than exact match that are left out.
    """
    method, settings = read(drafter)
    mode = parse(drafter).verification
    work.begin(f"{drafter}, {mode}")
    llm = open_model(with_settings(drafter, adaptive="false") if mode == "exact" else drafter)
    needs = llm.engine.spec_manager.methods[method].needs
    work.advance(LOADING)
    yield check_engine(drafter, mode, llm, baseline, config, work)
    del llm
    if "verify" in settings:
        return
    for other in sampled_modes(needs.has_probs and not needs.trees, checked):
        work.begin(f"{drafter}, {other}")
        sampled = {"draft": "probabilistic"} if needs.has_probs and "draft" not in settings else {}
        llm = open_model(with_settings(without_setting(drafter, "adaptive"), verify=other, **sampled))
        work.advance(LOADING)
        yield check_engine(drafter, other, llm, baseline, config, work)
        del llm


def check_engine(
    drafter: str, mode: str, llm: LLM, baseline: Baseline, config: VerifyConfig, work: Work
) -> dict[str, Any]:
    """Compare the texts of one engine and, unless `mode` is exact match, the distribution of its answers."""
    method = llm.engine.spec_manager.plan.method
    cases = [with_prediction(case, method, baseline) for case in baseline.cases]
    alone, spec_stats = generate_alone(llm, cases, work)
    batched, batched_stats = generate_batch(llm, cases)
    work.advance(PER_BATCHED * len(cases))
    spec_stats.add(batched_stats)
    if mode in ("", "exact"):
        against, expected, runs = "plain decoding", baseline.answers, {"alone": alone, "batched": batched}
    else:  # the text may differ from plain decoding, but not between a request alone and in a batch
        against, expected, runs = "the same alone", alone, {"batched": batched}
    texts = {"against": against, **compare_texts(cases, expected, runs, llm)}
    result: dict[str, Any] = {"drafter": drafter, "verification": mode or None, "texts": texts, "distribution": None}
    failed, idle = texts["different"] and not config.counts_only, bool(method) and not spec_stats.drafted
    if mode != "exact":
        sampled = sample_answers(llm, method, baseline, config)
        work.advance(PER_SAMPLE * config.samples)
        result["distribution"] = {
            **worst_comparison(distribution.comparisons(sampled.counts, baseline.probs)),
            "drafted": sampled.spec_stats.drafted,
        }
        idle = bool(method) and not sampled.spec_stats.drafted
        failed = failed or not result["distribution"]["holds"]
        spec_stats.add(sampled.spec_stats)
    result |= {
        "law": result["distribution"],  # deprecated alias of `distribution`
        "drafted": spec_stats.drafted,
        "accepted": spec_stats.accepted,
        "tokens_per_step": spec_stats.tokens_per_step,
        "mean_acceptance_length": spec_stats.mean_acceptance_length,
    }
    return {**result, "verdict": FAIL if failed else UNPROVEN if idle else PASS, "reason": explain(result, idle)}


def with_prediction(case: PromptCase, method: str, baseline: Baseline) -> PromptCase:
    """Give a method that drafts from a predicted output plain decoding's first answer to the same prompt."""
    if not method or drafts_from(method) != "prediction":
        return case
    first = next(n for n, other in enumerate(baseline.cases) if other.number == case.number)
    return replace(case, params=replace(case.params, prediction=baseline.answers[first][0]))


def generate_alone(llm: LLM, cases: Sequence[PromptCase], work: Work) -> tuple[list[Generated], SpecStats]:
    """Generate the answers one request at a time."""
    spec_stats, answers = SpecStats(), []
    for case in cases:
        answer, answer_stats = generate_batch(llm, [case])
        answers += answer
        spec_stats.add(answer_stats)
        work.advance(1.0)
    return answers, spec_stats


def generate_batch(llm: LLM, cases: Sequence[PromptCase]) -> tuple[list[Generated], SpecStats]:
    spec_stats, answers = SpecStats(), []
    for output in llm.generate([case.prompt for case in cases], [case.params for case in cases]):
        (completion,) = output.completions
        answers.append((completion.token_ids, completion.text, completion.finish_reason))
        if output.stats is not None:
            spec_stats.add(output.stats.speculation)
    return answers, spec_stats


def sample_answers(llm: LLM, method: str, baseline: Baseline, config: VerifyConfig) -> distribution.SampledAnswers:
    params = replace(SAMPLED, seed=config.seed)
    if method and drafts_from(method) == "prediction":
        params = replace(params, prediction=max(baseline.probs, key=lambda text: baseline.probs[text]))
    return distribution.draw(llm, baseline.coins, params, config.samples)


def compare_texts(
    cases: Sequence[PromptCase], expected: Sequence[Generated], runs: Mapping[str, Sequence[Generated]], llm: LLM
) -> dict[str, Any]:
    """Count the answers of each run that are not the expected ones, and describe the first difference."""
    result: dict[str, Any] = {"compared": 0, "different": 0, "first": None}
    for run, answers in runs.items():
        for case, wanted, answer in zip(cases, expected, answers, strict=True):
            result["compared"] += 1
            if answer == wanted:
                continue
            result["different"] += 1
            result["first"] = result["first"] or {
                "prompt": case.number + 1,
                "temperature": case.params.temperature,
                "way": run,
                **first_difference(wanted, answer, llm),
            }
    return result


def first_difference(expected: Generated, answer: Generated, llm: LLM) -> dict[str, Any]:
    pairs = zip(expected[0], answer[0], strict=False)
    index = next((n for n, (one, other) in enumerate(pairs) if one != other), min(len(expected[0]), len(answer[0])))
    texts = [
        llm.tokenizer.decode(generated[0][index : index + 1]) if index < len(generated[0]) else None
        for generated in (expected, answer)
    ]
    return {"token": index + 1, "expected": texts[0], "found": texts[1], "finish_reason": answer[2]}


def worst_comparison(compared: dict[tuple[int, ...], Comparison]) -> dict[str, Any]:
    """Report the comparison with the largest excess, and the bias that all comparisons would detect."""
    positions, worst = max(compared.items(), key=lambda item: item[1].excess)
    weakest = max(compared.values(), key=lambda comparison: comparison.detectable)
    impossible = worst.statistic == math.inf
    return {
        "holds": worst.holds,
        "statistic": None if impossible else worst.statistic,
        "threshold": worst.threshold,
        "freedom": worst.freedom,
        "positions": [index + 1 for index in positions],
        "impossible_answers": impossible,
        "comparisons": len(compared),
        "detectable_total_variation": weakest.detectable,
    }


def explain(result: dict[str, Any], idle: bool) -> str:
    """Return the reasons why a result is not a pass; empty if it is."""
    texts, test = result["texts"], result["distribution"]
    reasons = []
    if texts["different"]:
        first = texts["first"]
        shown = {key: "the end" if first[key] is None else repr(first[key]) for key in ("expected", "found")}
        reasons.append(
            f"{texts['different']} of {texts['compared']} texts differ from {texts['against']}: "
            f"prompt {first['prompt']} at temperature {first['temperature']:g}, {first['way']}, "
            f"has {shown['found']} for {shown['expected']} as token {first['token']}"
        )
    if test is not None and test["impossible_answers"]:
        reasons.append("answers of probability 0 were sampled")
    elif test is not None and not test["holds"]:
        reasons.append(
            f"the distribution is wrong: chi-square is {test['statistic']:.0f}, and a correct engine exceeds "
            f"{test['threshold']:.0f} once in {1 / FALSE_ALARM:,.0f} runs"
        )
    if idle:
        reasons.append("nothing was drafted, so nothing is proven: pass prompts for which the method drafts")
    return "; ".join(reasons)


def summary(result: dict[str, Any]) -> str:
    """Return one line for a result."""
    name = " ".join(filter(None, (result["drafter"], result["verification"])))
    return f"{name}: {result['verdict']}{', ' if result['reason'] else ''}{result['reason']}"
