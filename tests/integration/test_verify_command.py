"""`outrider verify` passes correct engines and fails broken ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from outrider import LLM
from outrider.diagnostics.verify import VerifyConfig, choose, measure
from outrider.kernels import SamplingMetadata, VerifyInputs, VerifyOutput
from outrider.speculation import available
from outrider.speculation.verifier import Verifier

SMALL = ("--backend", "cpu", "--max-tokens", 8, "--samples", 300, "--limit", 2)
Run = Callable[..., Any]


def checks(result: Any, code: int = 0) -> list[dict[str, Any]]:
    assert result.exit_code == code, result.stderr
    found = json.loads(result.stdout)
    assert found["passed"] == (code == 0)
    return found["checks"]


def test_a_correct_drafter_passes_every_verification_mode(outrider: Run, model: Path) -> None:
    itself = f"draft_model:model={model},width=2"
    plain, *found = checks(outrider("verify", "-m", model, "--speculate", itself, *SMALL, "--json"))
    assert plain["drafter"] == "none" and plain["verdict"] == "pass"
    assert plain["texts"]["compared"] == 2 * 2 * 2  # prompts, temperatures, alone and batched
    assert [one["verification"] for one in found] == ["exact", "rejection", "block"]
    for one in found:
        assert one["verdict"] == "pass" and one["drafter"] == itself
        assert one["texts"]["different"] == 0 and one["accepted"] > 0
    assert found[0]["distribution"] is None
    for one in (plain, *found[1:]):
        test = one["distribution"]
        assert one["law"] == test  # deprecated alias
        assert 0 < test["statistic"] < test["threshold"] and test["comparisons"] == 6
        assert 0.1 < test["detectable_total_variation"] < 0.5


def test_all_checks_every_method_that_can_run_and_lists_the_others(outrider: Run, model: Path) -> None:
    found = checks(outrider("verify", "-m", model, *SMALL, "--speculate", "all", "--temperature", 0, "--json"))
    ran = {one["drafter"]: one for one in found if one["verdict"] != "skipped"}
    skipped = {one["drafter"]: one["reason"] for one in found if one["verdict"] == "skipped"}
    assert set(ran) == {"none", "ngram", "suffix", "prediction"}
    assert set(ran) | set(skipped) == {"none", *available()}
    assert "--speculate eagle3:model=..." in skipped["eagle3"]
    assert ran["prediction"]["accepted"] > 0  # it was given plain decoding's answer


def test_quick_checks_every_method_once_and_each_other_mode_with_one_of_them(outrider: Run, model: Path) -> None:
    itself = f"draft_model:model={model},width=2"
    drafters = ("--speculate", "ngram", "--speculate", itself, "--speculate", "suffix")
    common = ("verify", "-m", model, *drafters, "--backend", "cpu", "--limit", 1, "--json")
    result = outrider(*common, "--quick", "--samples", 100)
    found = checks(result)
    assert [(one["drafter"], one["verification"]) for one in found] == [
        ("none", None),
        ("ngram", "exact"),
        ("ngram", "rejection"),
        ("suffix", "exact"),
        (itself, "exact"),
        (itself, "block"),
    ]
    report = json.loads(result.stdout)
    assert (report["prompts"], report["max_tokens"], report["samples"]) == (1, 16, 100)
    assert result.stderr.startswith(f"checking {model}: "), "a pipe is not silent while the model loads"


def test_progress_reaches_its_total_and_never_falls(plain: LLM) -> None:
    reported: list[tuple[int, int, str]] = []
    config = VerifyConfig(["ngram"], max_tokens=4, samples=100)
    source = plain.resolved.model
    measure(
        lambda drafter: LLM(source, speculate=drafter, backend="cpu"),
        lambda llm: [[5, 6, 7, 5, 6]],
        config,
        source,
        lambda line: None,
        lambda *moment: reported.append(moment),
    )
    done = [moment[0] for moment in reported]
    assert reported[0] == (0, 0, "plain decoding") and done == sorted(done)
    assert reported[-1][0] == reported[-1][1] == pytest.approx(reported[3][1])
    assert list(dict.fromkeys(label for _, _, label in reported)) == [
        "plain decoding",
        "ngram, exact",
        "ngram, rejection",
    ]


def test_heads_are_skipped_for_a_model_without_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    drafters, skipped = choose(["all", "mtp:model=there"], "random/tiny")
    assert drafters == ["ngram", "prediction", "suffix", "mtp:model=there"]
    assert "mtp" not in skipped and "eagle3" in skipped
    assert "mtp" in choose(["all"], "random/tiny")[1]


def test_the_default_output_is_a_table(outrider: Run, model: Path) -> None:
    result = outrider("verify", "-m", model, *SMALL, "--speculate", "ngram", "abcabcabc", "xyzxyz")
    assert result.exit_code == 0
    for text in ("plain", "ngram", "rejection", "pass", "once in 1,000,000", "All checks passed."):
        assert text in result.stdout


def accept_first(
    self: Verifier, logits: Tensor, sampling: SamplingMetadata, drafts: VerifyInputs, sampled: Tensor
) -> VerifyOutput:
    """Accept the first drafted token without looking at the target's logits."""
    output = HONEST(self, logits, sampling, drafts, sampled)
    tokens = output.tokens.clone()
    first = drafts.tokens[(drafts.starts[:-1] + 1).clamp(max=len(drafts.tokens) - 1)]
    drafted = drafts.starts.diff() > 1
    tokens[:, 0] = first.where(drafted & (first >= 0), tokens[:, 0])
    return replace(output, tokens=tokens)


HONEST = Verifier.verify


def test_a_verifier_that_accepts_every_draft_fails(outrider: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Verifier, "verify", accept_first)
    arguments = ("verify", "-m", model, *SMALL, "--speculate", "ngram", "abcabcabcabc", "xyzxyzxyz")
    found = checks(outrider(*arguments, "--json"), code=1)
    verdicts = {(one["drafter"], one["verification"]): one for one in found}
    assert verdicts["none", None]["verdict"] == "pass"
    exact = verdicts["ngram", "exact"]
    assert exact["verdict"] == "fail" and exact["texts"]["different"] > 0
    first = exact["texts"]["first"]
    assert first["way"] == "alone" and first["token"] >= 2 and first["expected"] != first["found"]
    exact_only = (*arguments[:3], *SMALL, "--speculate", "ngram:verify=exact", "abcabcabcabc")
    result = outrider(*exact_only)
    assert result.exit_code == 1
    assert (
        "FAILED: ngram:verify=exact verified by exact" in result.stderr
        and "texts differ from plain decoding" in result.stderr
    )
    assert "CHECKS FAILED" in result.stdout
    forgiven = checks(outrider(*exact_only, "--fast", "--json"))
    assert forgiven[1]["texts"]["different"] > 0  # counted without failing


@pytest.mark.parametrize("verify", ["rejection", "block"])
def test_a_drafter_that_misreports_its_probabilities_fails(outrider: Run, model: Path, verify: str) -> None:
    settings = "draft=probabilistic,width=1"
    liar, honest = (f"{name}:model={model},verify={verify},{settings}" for name in ("integration.liar", "draft_model"))
    _, one, other = checks(
        outrider("verify", "-m", model, *SMALL, "--speculate", liar, "--speculate", honest, "--json"), code=1
    )
    assert one["verdict"] == "fail" and one["distribution"]["statistic"] > one["distribution"]["threshold"]
    assert one["texts"]["different"] == 0 and "the distribution is wrong" in one["reason"]
    assert other["verdict"] == "pass" and other["verification"] == verify


def test_a_run_without_drafts_is_unproven(outrider: Run, model: Path) -> None:
    found = checks(
        outrider(
            "verify", "-m", model, *SMALL, "--speculate", "ngram:longest=9,shortest=9,verify=exact", "ab", "--json"
        )
    )
    assert found[1]["verdict"] == "unproven" and "nothing was drafted" in found[1]["reason"]


@pytest.mark.parametrize(
    ("speculate", "message"),
    [
        ("ngram:verify=synthetic,length=2", "leave out `verify=synthetic`"),
        ("none", "which is always checked"),
        ("ngrams", "no method called `ngrams`"),
    ],
)
def test_specifications_that_cannot_be_verified_are_refused(
    outrider: Run, model: Path, speculate: str, message: str
) -> None:
    result = outrider("verify", "-m", model, *SMALL, "--speculate", speculate)
    assert result.exit_code == 1 and message in result.stderr
