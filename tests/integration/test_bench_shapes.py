"""`outrider bench speed` with a drafter, with a peer and on random shapes; `bench kernels` on a device."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tiny_heads
from outrider import LLM, SamplingParams
from outrider.bench import transformers_baseline
from outrider.bench.kernels import Recorder
from outrider.bench.speed import SpeedConfig, beyond_weights, decode, weight_bytes
from outrider.device import HOST
from outrider.diagnostics.machine import COPIES, DeviceBandwidthMeter, HostBandwidthMeter, bandwidth_meter
from outrider.errors import UserError
from outrider.kernels import cpu, reference
from outrider.kernels.cases import difference, layers, logits

SMALL = ("--rounds", 1, "--tokens", 12, "--batch", "1,2", "--prompt-tokens", 8, "--backend", "cpu")
DRAFTER = "eagle3:model=random/eagle3-tiny,width=4,verify=synthetic,length=3.0"


class Elsewhere:
    """A device that claims not to be the host and counts synchronizations."""

    def __init__(self, kind: str = "meta", free: int = 0) -> None:
        self.torch_device, self.free, self.waits = torch.device(kind), free, 0

    def fence(self) -> Elsewhere:
        return self

    def wait(self) -> None:
        self.waits += 1

    def free_bytes(self) -> int:
        return self.free


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("random/tiny", backend="cpu", cache_tokens=1024)


def test_speculation_and_a_peer_are_measured_in_the_same_rounds(outrider) -> None:
    chosen = ("-m", "random/tiny", *SMALL, "--speculate", DRAFTER, "--peer", "transformers")
    result = outrider("bench", "speed", *chosen, "--json")
    assert result.exit_code == 0, result.stderr
    assert "warming up transformers" in result.stderr
    found = json.loads(result.stdout)
    assert [one["batch"] for one in found["speculation"]] == [1, 2]
    for one, plain in zip(found["speculation"], found["decode"], strict=True):
        assert one["method"] == "eagle3"
        # In a single round the medians are the samples, so the definition holds to the digit.
        ratio = one["tokens_per_second"]["median"] / plain["tokens_per_second"]["median"]
        assert one["speedup"]["median"] == pytest.approx(ratio)
        assert 2 <= one["mean_acceptance_length"] <= 3
        assert max(one["widths"]) == "4"
    peer = found["peer"]
    assert not peer["compiled"]
    ours = found["decode"][0]["tokens_per_second"]["median"]
    assert peer["speedup"]["median"] == pytest.approx(ours / peer["tokens_per_second"]["median"])
    text = outrider("bench", "speed", *chosen).stdout
    assert "eagle3 against plain decoding, batch 2" in text
    assert "Outrider against it, batch 1" in text


def test_without_speculation_and_peer_their_figures_are_absent(outrider) -> None:
    found = json.loads(outrider("bench", "speed", "-m", "random/tiny", *SMALL, "--json").stdout)
    assert found["speculation"] == []
    assert found["peer"] is None
    assert found["memory_beyond_weights_and_cache_bytes"] is None  # not measured on the host


@pytest.mark.parametrize("name", transformers_baseline.PEERS)
def test_a_peer_generates_the_same_text(llm: LLM, name: str) -> None:
    """Weights and rope tables are the same, so greedy texts agree."""
    prompt = [9, 8, 7, 6, 5, 4, 3, 40, 50, 60]
    (ours,) = llm.generate([prompt], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    peer = transformers_baseline.find(name)(llm, 32)
    for _ in range(2):  # the second time its cache is a used one
        assert peer.text(prompt, 8) == ours.completions[0].token_ids  # type: ignore[attr-defined]
    assert peer.seconds_per_token(prompt, 4) > 0


def test_an_unknown_peer_is_refused(outrider) -> None:
    result = outrider("bench", "speed", "-m", "random/tiny", *SMALL, "--peer", "vllm")
    assert result.exit_code == 1
    assert result.stderr == "error: no peer called `vllm`: expected one of transformers, transformers-loop\n"


def test_without_transformers_a_peer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match="needs transformers, which is not installed: run `pip install"):
        transformers_baseline.find("transformers")


def test_the_cache_holds_the_largest_batch_twice() -> None:
    assert SpeedConfig(1, 100, (1, 8), 50).cache_tokens >= 2 * 8 * 150


@pytest.mark.parametrize("rounds", [1, 4])
def test_tokens_are_counted_rather_than_steps(rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine tokens, one of them from the prompt's own step: eight are timed, in however many steps they come."""
    llm = LLM("random/tiny", backend="cpu", cache_tokens=1024, decode_steps=rounds)
    clock = iter((0.0, 10.0))
    monkeypatch.setattr("outrider.bench.speed.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    steps = llm.engine.step
    taken: list[int] = []
    monkeypatch.setattr(llm.engine, "step", lambda quiet=False: taken.append(1) or steps(quiet))
    found = decode(llm, 2, SpeedConfig(1, 9, (2,), 4), random.Random(0))
    assert found.seconds == pytest.approx(10 / 8)
    assert len(taken) == 1 + 8 // rounds
    assert llm.engine.is_idle


def test_a_batch_whose_first_request_ends_too_early_is_refused() -> None:
    llm = LLM("random/tiny", backend="cpu", cache_tokens=1024, max_step_tokens=8)
    with pytest.raises(UserError, match="`tokens` is 2: the first of 4 requests ended before all had read"):
        decode(llm, 4, SpeedConfig(1, 2, (4,), 32), random.Random(0))
    assert llm.engine.is_idle


def test_a_copy_counts_what_is_read_and_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr("outrider.diagnostics.machine.time.perf_counter", lambda: next(clock))
    copier = DeviceBandwidthMeter(Elsewhere("cpu"), 1000)  # type: ignore[arg-type]
    found = copier.read(passes=3)  # each takes a second by this clock
    assert found.passes == (2.0 * COPIES * 1000,) * 3
    assert torch.equal(copier.target, copier.source)


def test_a_copy_is_timed_until_the_device_has_finished() -> None:
    device = Elsewhere()
    DeviceBandwidthMeter(device, 16).read(passes=2)  # type: ignore[arg-type]
    assert device.waits == 4
    assert isinstance(bandwidth_meter(HOST, 16), HostBandwidthMeter)
    assert isinstance(bandwidth_meter(Elsewhere(), 16), DeviceBandwidthMeter)  # type: ignore[arg-type]


def test_memory_beyond_weights_and_cache_leaves_out_both(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = 4 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128) + 2 * 64 * 512  # matrices, all of them
    assert weight_bytes(llm) == 2 * parameters
    # Tokens, layers, keys and values, heads, floats, bytes.
    assert llm.resolved.cache_bytes == 1024 * 4 * 2 * 2 * 16 * 2
    monkeypatch.setattr(llm.engine, "device", Elsewhere(free=10**9))
    before = 10**9 + weight_bytes(llm) + llm.resolved.cache_bytes + 777
    assert beyond_weights(llm, before) == 777


@pytest.mark.parametrize("method", ["dflash", "draft_model", "eagle3", "medusa"])  # one of each drafter class
def test_the_weights_of_every_drafter_count_as_weights(
    tiny_folder: Callable[..., Path], tmp_path: Path, method: str
) -> None:
    options = ",".join(f"{key}={value}" for key, value in tiny_heads.make(method, tmp_path).items())
    plain, alone, combined = (
        weight_bytes(LLM(str(tiny_folder()), backend="cpu", cache_tokens=256, speculate=speculate))
        for speculate in ("none", f"{method}:{options}", f"suffix+{method}:{options}")
    )
    assert alone > plain and combined == alone


def test_captured_operations_can_be_replayed() -> None:
    """A case gives the same results directly, through a recorder and by replay."""
    for case in (layers.linear("q8_0", 3, 64, 256), layers.mlp("f32", "silu"), logits.top_logprobs("plain", 5)):
        recorder = Recorder(cpu, torch.device("cpu"))
        run = case.build(recorder, 1)
        expected = case.build(reference, 1)(None)
        recorder.forget()
        for result, meant in zip(run(None), expected, strict=True):
            assert difference(result, meant) <= case.at(cpu.facts()["level"])
        (again,) = recorder.replay()
        parts = [again] if isinstance(again, torch.Tensor) else list(vars(again).values()) if again else []
        if case.op != "mlp":  # which changes its input: the second time it is another one
            for result, meant in zip(parts, expected, strict=True):
                assert difference(result, meant) <= case.at(cpu.facts()["level"])
        recorder.forget()
        assert recorder.replay() == []
