"""`outrider doctor` describes the GPU and the backend that `auto` resolves to."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils import collect_env

PROPERTIES = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=150 * 10**9)


@pytest.fixture(params=[(9, 0), (7, 5)], ids=["serves", "too old"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Pretend that the machine has a GPU of this compute capability."""
    major, minor = request.param
    seen = SimpleNamespace(**{**vars(PROPERTIES), "major": major, "minor": minor})
    for name, value in {
        "torch.version.cuda": "12.8",
        "torch.version.hip": None,
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.get_device_capability": lambda: (major, minor),
        "torch.cuda.get_device_name": lambda: PROPERTIES.name,
        "torch.cuda.get_device_properties": lambda index: seen,
        "outrider.device.cuda.find_spec": lambda name: object(),
    }.items():
        monkeypatch.setattr(name, value)
    monkeypatch.setattr(collect_env, "get_nvidia_driver_version", lambda run: "570.86.15")
    return major, minor


def test_the_gpu_is_described_with_the_backend_it_allows(outrider: Any, gpu: tuple[int, int]) -> None:
    found = json.loads(outrider("doctor", "--json").stdout)
    capability = f"{gpu[0]}.{gpu[1]}"
    assert found["gpu"] == {
        "name": "NVIDIA H200",
        "capability": capability,
        "processors": 132,
        "memory_bytes": 150 * 10**9,
        "driver": "570.86.15",
        "cuda": "12.8",
    }
    text = outrider("doctor").stdout
    for words in ("NVIDIA H200", capability, "150.0 GB", "570.86.15", "12.8"):
        assert words in text
    serves = gpu >= (8, 0)
    assert found["backend"] == ("cuda" if serves else "cpu")
    expected = (
        "`auto` is `cuda`: models run on the GPU"
        if serves
        else "`auto` is `cpu`: the GPU `NVIDIA H200` has compute capab"
    )
    assert found["findings"][0].startswith(expected)


def test_a_machine_without_a_gpu_runs_on_the_cpu(outrider: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", "12.8")
    found = json.loads(outrider("doctor", "--json").stdout)
    assert (found["gpu"], found["backend"]) == (None, "cpu")
    assert found["findings"][0].startswith("`auto` is `cpu`: torch sees no NVIDIA GPU")
    assert "triton" in found["versions"]
    assert "GPU\n" not in outrider("doctor").stdout
