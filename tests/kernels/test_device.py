"""The CPU device: fresh tensors, no waiting, free memory by the strictest limit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from outrider import cgroups, device
from outrider.device import cpu
from outrider.kernels.cpu import runtime


def test_uploads_are_fresh_tensors_of_the_given_type_and_shape() -> None:
    table = np.arange(6, dtype=np.int64).reshape(2, 3)
    found = device.Cpu().upload(table, torch.int32)
    table[0, 0] = 9
    assert (found.dtype, found.tolist()) == (torch.int32, [[0, 1, 2], [3, 4, 5]])
    assert device.Cpu().upload([], torch.int32).shape == (0,)
    assert device.Cpu().upload([0.5], torch.float32).dtype == torch.float32


def test_capture_is_the_function_and_a_fence_returns() -> None:
    opened = device.open_device("cpu")
    assert opened.torch_device == torch.device("cpu")
    assert opened.capture(torch.zeros) is torch.zeros
    opened.fence().wait()


def test_an_unknown_backend_has_no_device() -> None:
    with pytest.raises(ValueError, match="`tpu`"):
        device.open_device("tpu")


def test_free_memory_is_the_least_of_system_and_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < device.Cpu().free_bytes() < 1 << 50
    monkeypatch.setattr(cpu, "_available_memory", lambda: 1000)
    monkeypatch.setattr(cpu, "memory_allowances", lambda: [2000, 300])
    assert device.Cpu().free_bytes() == 300
    monkeypatch.setattr(cpu, "memory_allowances", list)
    assert device.Cpu().free_bytes() == 1000


def test_free_memory_is_within_the_limit_of_the_address_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_available_memory", lambda: 1 << 60)
    monkeypatch.setattr(cpu, "memory_allowances", list)
    assert device.Cpu().free_bytes() == 1 << 60
    monkeypatch.setattr(cpu.resource, "getrlimit", lambda which: (1 << 50, 1 << 50))
    assert 1 << 49 < device.Cpu().free_bytes() < 1 << 50
    monkeypatch.setattr(cpu.resource, "getrlimit", lambda which: (1, 1))
    assert device.Cpu().free_bytes() == 0


def group(folder: Path, **files: int | str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{value}\n")


def test_groups_of_version_two_and_their_ancestors(tmp_path: Path) -> None:
    group(tmp_path / "a", memory_max=5000, memory_current=1500, memory_stat="anon 900\ninactive_file 500")
    group(tmp_path / "a" / "b", memory_max="max", memory_current=700)
    own = tmp_path / "own"
    own.write_text("0::/a/b\n")
    assert cgroups.memory_allowances(tmp_path, own) == [4000]
    group(tmp_path / "a" / "b", memory_max=600)
    assert cgroups.memory_allowances(tmp_path, own) == [0, 4000]


def test_groups_of_version_one(tmp_path: Path) -> None:
    group(tmp_path / "memory" / "x", memory_limit_in_bytes=900, memory_usage_in_bytes=200)
    own = tmp_path / "own"
    own.write_text("5:cpu,cpuacct:/x\n4:memory:/x\n")
    assert cgroups.memory_allowances(tmp_path, own) == [700]


def test_no_groups_at_all(tmp_path: Path) -> None:
    assert cgroups.memory_allowances(tmp_path, tmp_path / "missing") == []


def test_the_smallest_cpu_quota_of_version_two_counts(tmp_path: Path) -> None:
    group(tmp_path / "a", cpu_max="250000 100000")
    group(tmp_path / "a" / "b", cpu_max="max 100000")
    own = tmp_path / "own"
    own.write_text("0::/a/b\n")
    assert cgroups.cpu_quota(tmp_path, own) == 2.5
    group(tmp_path / "a" / "b", cpu_max="50000 100000")
    assert cgroups.cpu_quota(tmp_path, own) == 0.5


def test_the_cpu_quota_of_version_one_counts(tmp_path: Path) -> None:
    group(tmp_path / "cpu" / "x", cpu_cfs_quota_us=-1, cpu_cfs_period_us=100_000)
    group(tmp_path / "cpu", cpu_cfs_quota_us=300_000, cpu_cfs_period_us=100_000)
    own = tmp_path / "own"
    own.write_text("5:cpu,cpuacct:/x\n4:memory:/x\n0::/\n")
    assert cgroups.cpu_quota(tmp_path, own) == 3
    group(tmp_path / "cpu", cpu_cfs_quota_us=-1)
    assert cgroups.cpu_quota(tmp_path, own) is None


@pytest.mark.parametrize(
    "quota, given, expected", [(2.9, None, 2), (0.5, None, 1), (99.0, None, 4), (None, None, 4), (2.0, "3", 4)]
)
def test_the_default_number_of_threads_is_within_the_quota(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, given: str | None, expected: int
) -> None:
    monkeypatch.delenv("OUTRIDER_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OUTRIDER_THREADS", given)
    counts = [4]  # what the native library takes from affinity or the variable
    monkeypatch.setattr(runtime, "cpu_quota", lambda: quota)
    monkeypatch.setattr(runtime._native, "thread_count", lambda: counts[-1])
    monkeypatch.setattr(runtime._native, "set_thread_count", counts.append)
    runtime._start()
    assert counts[-1] == expected


def test_a_buffer_keeps_its_memory_and_nothing_of_the_step_before() -> None:
    buffer = device.Cpu().buffer(3, torch.int32)
    tensor, where = buffer.tensor, buffer.tensor.data_ptr()
    buffer.fill([1, 2, 3])
    buffer.fill([4, 5, 6])
    assert tensor.tolist() == [4, 5, 6] and buffer.tensor.data_ptr() == where
    with pytest.raises(ValueError, match=r"broadcast|structures"):
        buffer.fill([7, 8])
