"""Answers as JSON, and what speculation gave in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..errors import UserError
from ..types import Completion, Output, SpecStats
from .prompts import Prompt

DEPTHS = 8  # as many as one line has room for


def describe(prompt: Prompt, output: Output) -> dict[str, Any]:
    """The JSON object of one answer; further samples of `--n` follow under `samples`."""
    given = {"messages": prompt.messages} if prompt.text is None else {"prompt": prompt.text}
    first = completion(output.completions[0])
    described = {"prompt": None, **given, **first, "stats": stats(output)}
    if len(output.completions) > 1:
        described["samples"] = [completion(one) for one in output.completions]
    return described


def check_endings(outputs: Sequence[Output]) -> None:
    """Once all that there is was shown: an answer that broke is no answer, and its reader hears why."""
    causes = [one.stop_reason for output in outputs for one in output.completions if one.finish_reason == "error"]
    if causes:
        raise UserError(f"{len(causes)} of {len(outputs)} answers broke off: {causes[0]}")


def completion(one: Completion) -> dict[str, Any]:
    described: dict[str, Any] = {
        "text": one.text,
        "token_ids": list(one.token_ids),
        "finish_reason": one.finish_reason,
    }
    if one.logprobs is not None:
        described["logprobs"] = [asdict(token) for token in one.logprobs]
    return described


def stats(output: Output) -> dict[str, Any]:
    """What the request cost. The mean length counts the token that the target adds to each step."""
    spent = output.stats
    assert spent is not None, "a finished output carries its stats"
    spec_stats = spent.speculation
    return {
        "method": spent.method or "none",
        "steps": spent.steps,
        "drafted": spec_stats.drafted,
        "accepted": spec_stats.accepted,
        "mean_acceptance_length": round(spec_stats.mean_length, 4),
        "acceptance_rates": [round(rate, 4) for rate in spec_stats.rates],
        "widths": {str(width): spec_stats.widths[width] for width in sorted(spec_stats.widths)},
        "drafters": {name: asdict(credit) for name, credit in spec_stats.drafters.items()},
        "seconds": round(spent.seconds, 6),
        "tokens_per_second": round(spent.tokens_per_second, 3),
        "first_token_seconds": round(spent.first_token_seconds, 6),
        "cached_tokens": spent.cached_tokens,
        "preemptions": spent.preemptions,
    }


def gain(method: str, spec_stats: SpecStats) -> str:
    """What speculation gave, in words; the deepest drafts are left out."""
    if not spec_stats.drafted:
        return f"nothing drafted by {method}"
    rates = [f"{rate:.0%}" for rate in spec_stats.rates]
    more = " ..." if len(rates) > DEPTHS else ""
    whose = [f"{name} {credit.accepted} of {credit.drafted}" for name, credit in spec_stats.drafters.items()]
    return (
        f"{spec_stats.mean_length:.1f} tokens a step with {method}: "
        f"drafted {spec_stats.drafted}, kept {spec_stats.accepted}; "
        f"by depth {' '.join(rates[:DEPTHS])}{more}{'; kept of each: ' if whose else ''}{', '.join(whose)}"
    )
