"""Outputs of the engine as JSON, and speculation stats in words: used by `generate` and `chat`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..errors import UserError
from ..types import Completion, FinishReason, Output, SpecStats
from .prompts import Prompt

SHOWN_DEPTHS = 8  # acceptance rates that fit into one line


def output_json(prompt: Prompt, output: Output) -> dict[str, Any]:
    """Return the JSON object of one output: the first sample, and all samples of `--n` under `samples`."""
    question = {"messages": prompt.messages} if prompt.text is None else {"prompt": prompt.text}
    first = completion_json(output.completions[0])
    described = {"prompt": None, **question, **first, "stats": stats_json(output)}
    if len(output.completions) > 1:
        described["samples"] = [completion_json(completion) for completion in output.completions]
    return described


def completion_json(completion: Completion) -> dict[str, Any]:
    described: dict[str, Any] = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
    }
    if completion.finish_reason == FinishReason.ERROR:
        described["error"] = completion.stop_reason
    if completion.logprobs is not None:
        described["logprobs"] = [asdict(token) for token in completion.logprobs]
    return described


def stats_json(output: Output) -> dict[str, Any]:
    """Return the stats of a request."""
    stats = output.stats
    assert stats is not None, "a finished output carries its stats"
    spec_stats = stats.speculation
    return {
        "method": stats.method or "none",
        "steps": stats.steps,
        "drafted": spec_stats.drafted,
        "accepted": spec_stats.accepted,
        "tokens_per_step": round(spec_stats.tokens_per_step, 4),
        "mean_acceptance_length": round(spec_stats.mean_acceptance_length, 4),
        "acceptance_rates": [round(rate, 4) for rate in spec_stats.rates],
        "widths": {str(width): spec_stats.widths[width] for width in sorted(spec_stats.widths)},
        "drafters": {name: asdict(drafter) for name, drafter in spec_stats.drafters.items()},
        "suspended": spec_stats.suspended,
        "suspension": spec_stats.suspension.as_json() if spec_stats.suspension else None,
        "seconds": round(stats.seconds, 6),
        "tokens_per_second": round(stats.tokens_per_second, 3),
        "first_token_seconds": round(stats.first_token_seconds, 6),
        "cached_tokens": stats.cached_tokens,
        "preemptions": stats.preemptions,
    }


def check_errors(outputs: Sequence[Output]) -> None:
    """Raise if a completion ended with an error. Call it after all output was printed."""
    reasons = [one.stop_reason for output in outputs for one in output.completions if one.finish_reason == "error"]
    if reasons:
        raise UserError(f"{len(reasons)} of {len(outputs)} outputs failed: {reasons[0]}")


def speculation_summary(method: str, spec_stats: SpecStats) -> str:
    """Describe drafted and accepted tokens in one line, with the acceptance rates of the first depths."""
    if not spec_stats.drafted:
        return f"nothing drafted by {method}"
    rates = [f"{rate:.0%}" for rate in spec_stats.rates]
    more = " ..." if len(rates) > SHOWN_DEPTHS else ""
    drafters = [f"{name} {drafter.accepted} of {drafter.drafted}" for name, drafter in spec_stats.drafters.items()]
    by_drafter = f"; accepted by drafter: {', '.join(drafters)}" if drafters else ""
    return (
        f"{spec_stats.tokens_per_step:.1f} tokens per step with {method}: "
        f"drafted {spec_stats.drafted}, accepted {spec_stats.accepted}; "
        f"by depth {' '.join(rates[:SHOWN_DEPTHS])}{more}{by_drafter}"
    )


def suspension_note(spec_stats: SpecStats) -> str:
    """Say why there are no drafts in most steps, and how to force them; empty if there are, or if none was found."""
    if spec_stats.suspension is None or (spec_stats.drafted and 4 * spec_stats.suspended < 3 * spec_stats.steps):
        return ""
    steps = f"{spec_stats.suspended} of {spec_stats.steps} steps"
    return f"drafts suspended in {steps}: {spec_stats.suspension}; `--always-draft` forces them"
