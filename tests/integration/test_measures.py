"""`outrider doctor`, `outrider bench speed`, `rows` and `speculation`: figures that make sense."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from outrider import LLM, SamplingParams
from outrider.bench import speculation
from outrider.bench.charts import counted
from outrider.bench.speed import WIDTHS, spread
from outrider.cli.bench import doubling, show_speculation
from outrider.diagnostics.machine import HostBandwidthMeter
from outrider.kernels import cpu


def read(result):
    assert result.exit_code == 0, result.stderr
    (line,) = result.stdout.splitlines()
    return json.loads(line)


def test_doctor_reports_versions_machine_and_findings(outrider) -> None:
    found = read(outrider("doctor", "--json"))
    assert found["versions"]["torch"] and found["versions"]["python"].startswith("3.")
    machine = found["machine"]
    assert machine["level"] in machine["available_levels"]
    assert machine["threads"] >= 1 and machine["cores"] >= 1
    assert machine["memory_bytes"] > 2**28
    assert 0.1 < machine["bandwidth_gb_per_second"] < 5000
    assert found["models"] == []
    assert any("outrider pull smollm2-135m" in finding for finding in found["findings"])
    text = outrider("doctor")
    assert text.exit_code == 0
    for word in ("Versions", "torch", "memory bandwidth", machine["level"]):
        assert word in text.stdout


def test_bench_speed_prints_every_figure(outrider, model) -> None:
    small = ("-m", model, "--rounds", 1, "--tokens", 4, "--batch", "1,2", "--prompt-tokens", 16)
    found = read(outrider("bench", "speed", *small, "--json"))
    assert [one["batch"] for one in found["decode"]] == [1, 2]
    assert tuple(one["tokens"] for one in found["step"]) == WIDTHS
    assert found["step"][0]["relative_to_one"] == 1
    named = (
        "bandwidth_gb_per_second",
        "fraction_of_bandwidth",
        "host_milliseconds_per_step",
        "host_share",
        "prefill_tokens_per_second",
    )
    spreads = [found[name] for name in named] + [one["step_milliseconds"] for one in found["decode"]]
    for figure in spreads:
        assert 0 < figure["low"] <= figure["median"] <= figure["high"] < math.inf
    one = found["decode"][0]
    ideal = found["weight_bytes_per_step"] / (found["bandwidth_gb_per_second"]["median"] * 1e9)
    # In a single round the medians are the samples, so the definition holds to the digit.
    step = one["step_milliseconds"]["median"] / 1e3
    assert found["fraction_of_bandwidth"]["median"] == pytest.approx(ideal / step, rel=1e-6)
    assert found["load_to_first_token_seconds"] > found["load_seconds"] > 0
    text = outrider("bench", "speed", *small)
    assert "step with 16 tokens" in text.stdout and "decode, batch 2" in text.stdout


def test_bench_rows_splits_every_step_into_its_parts(outrider, model) -> None:
    small = ("bench", "rows", "-m", model, "--rounds", 2, "--rows", "4,2", "--threads", "1,2", "--context", 16)
    before = cpu.facts()["threads"]
    found = read(outrider(*small, "--json"))
    cpu.set_threads(before)
    assert [(one["threads"], one["rows"]) for one in found["steps"]] == [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4)]
    for one in found["steps"]:
        layers, head, host = (one[f"{part}_milliseconds"] for part in ("layers", "head", "host"))
        assert layers > 0 and head > 0
        assert host == pytest.approx(max(one["milliseconds"]["median"] - layers - head, 0))
        assert (one["rows"] == 1) == (one["relative_to_one"] == 1) == (one["further_row"] is None)
    text = outrider(*small)
    cpu.set_threads(before)
    assert text.exit_code == 0 and "x one row  further row" in text.stdout


@pytest.mark.parametrize("threads", ["1", "1,2"])
def test_the_chart_of_rows_has_a_line_for_each_thread_count(outrider, model, tmp_path, threads: str) -> None:
    before, file = cpu.facts()["threads"], tmp_path / "rows.svg"
    asked = ("bench", "rows", "-m", model, "--rounds", 1, "--rows", "1,4", "--context", 8, "--plot", file)
    found = read(outrider(*asked, "--threads", threads, "--json"))
    cpu.set_threads(before)
    hints = [one.text for one in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}title")]
    for one in found["steps"]:
        label = f"{counted(one['threads'], 'thread')}, {counted(one['rows'], 'row')}"
        assert f"{label}: {one['relative_to_one']:.2f}" in hints
    assert len(hints) == (2 if threads == "1" else 8)
    assert "svg" in outrider(*asked[:-1], tmp_path / "rows.png").stderr


def test_the_default_thread_counts_double_up_to_all_cores() -> None:
    assert [doubling(most) for most in (1, 2, 6, 16)] == [(1,), (1, 2), (1, 2, 4, 6), (1, 2, 4, 8, 16)]


def test_without_a_batch_of_one_its_figures_are_absent(outrider, model) -> None:
    small = ("-m", model, "--rounds", 1, "--tokens", 3, "--batch", "2", "--prompt-tokens", 8)
    found = read(outrider("bench", "speed", *small, "--json"))
    assert found["fraction_of_bandwidth"] is None
    assert "not measured" in outrider("bench", "speed", *small).stdout


def test_bench_speculation_prints_every_figure(outrider, model, capsys) -> None:
    small = ("one two one two one", "-m", model, "--rounds", 1, "--max-tokens", 6, "--raw", "--speculate", "ngram")
    found = read(outrider("bench", "speculation", *small, "--json"))
    assert found["method"] == "ngram" and found["different_texts"] == 0 and found["prompts"] == 1
    assert found["machine"]["accelerator"] is None
    assert f"with ngram on {found['machine']['processor']}" in outrider("bench", "speculation", *small).stdout
    show_speculation({**found, "machine": {**found["machine"], "accelerator": "a card"}})
    assert "with ngram on a card; 1 prompt," in capsys.readouterr().out, "it is not the processor that was measured"


def test_bench_speculation_in_batches(outrider, model) -> None:
    prompts = [f"{word} two {word} two" for word in ("one", "six", "ten")]
    small = (*prompts, "-m", model, "--rounds", 2, "--max-tokens", 6, "--raw", "--speculate", "ngram", "--batch", 2)
    found = read(outrider("bench", "speculation", *small, "--json"))
    assert (found["batch"], found["prompts"], found["different_texts"]) == (2, 3, 0)
    for times in found["request_milliseconds"].values():
        assert all(value > 0 for value in times.values())
        assert times["first_token"] >= times["prefill"]
        assert times["per_output_token"] == pytest.approx(times["decode"] / 5, rel=0.3)  # of other requests' medians
    text = outrider("bench", "speculation", *small).stdout
    assert "3 prompts in batches of 2," in text and "per output token" in text


def test_bench_speculation_times_prompts_without_the_prefix_cache(model) -> None:
    """Else the prompts of the second of two runs would cost nothing."""
    llm = LLM(str(model), speculate="ngram")
    timer = speculation.ModelTimer(llm.engine.model)
    prompt = list(range(5, 69))
    result = speculation.one_round(llm, timer, [[prompt]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert [stats.cached_tokens for stats in result.plain.requests + result.drafted.requests] == [0, 0]


@pytest.mark.parametrize(("median", "sentence"), [(1.42, "1.42 times as fast"), (0.97, "did not pay here: 0.97 of")])
def test_a_loss_is_called_a_loss(outrider, model, capsys, median: float, sentence: str) -> None:
    asked = ("ab ab", "-m", model, "--rounds", 1, "--max-tokens", 4, "--raw", "--speculate", "ngram", "--json")
    found = read(outrider("bench", "speculation", *asked))
    show_speculation({**found, "speedup": {"median": median, "low": 0.9, "high": 1.5}})
    assert sentence in capsys.readouterr().out


def test_spread_is_median_lowest_and_highest() -> None:
    assert spread([3, 1, 2], scale=10) == {"median": 20, "low": 10, "high": 30}
    assert spread([]) is None


def test_bandwidth_is_that_of_the_best_pass() -> None:
    found = HostBandwidthMeter(2**20).read(passes=4)
    assert len(found.passes) == 4
    assert found.bytes_per_second == max(found.passes) > 0


def test_help_is_quick_because_torch_stays_out() -> None:
    code = "import sys, outrider.cli as cli\ntry:\n cli.main()\nfinally:\n assert 'torch' not in sys.modules"
    for arguments in (["--help"], ["generate", "--help"], ["--version"]):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
