"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ..device import Device
from ..kernels import cpu

# Arm processors give numbers instead of names (implementer 0x41 is Arm itself).
ARM_PARTS = {
    "0xd0c": "Neoverse-N1",
    "0xd40": "Neoverse-V1",
    "0xd49": "Neoverse-N2",
    "0xd4f": "Neoverse-V2",
    "0xd84": "Neoverse-V3",
    "0xd8e": "Neoverse-N3",
}


def usable_cores() -> int:
    """The cores that this process may run on, which a container may make fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor() -> str:
    source = Path("/proc/cpuinfo")
    if not source.exists():
        return platform.processor() or platform.machine()
    fields: dict[str, str] = {}
    for line in source.read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    part = fields.get("CPU part", "")
    return fields.get("model name") or ARM_PARTS.get(part) or f"{platform.machine()} {part}".strip()


def memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def host_facts() -> dict[str, Any]:
    facts = cpu.facts()
    return {
        "processor": processor(),
        "cores": usable_cores(),
        "threads": facts["threads"],
        "level": facts["level"],
        "memory_bytes": memory_bytes(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def machine_facts(device: Device) -> dict[str, Any]:
    """The same beside what did the work, if that is not the processor."""
    return host_facts() | {"accelerator": getattr(device, "name", None)}


def machine_title(machine: dict[str, Any]) -> str:
    """What `measured_on` found, for the head of a table."""
    accelerator: str | None = machine["accelerator"]
    return accelerator or f"{machine['processor']}, {machine['threads']} threads, {machine['level']}"


BUFFER_BYTES = 512 * 2**20  # beyond the caches of most CPUs
COPY_BYTES = 2 * 2**30  # beyond the caches of any GPU
COPIES = 8  # in a pass, so that the launch of the first and the wait for the last do not count


@dataclass(frozen=True)
class Bandwidth:
    bytes_per_second: float  # the best pass: everything slower was disturbed
    passes: tuple[float, ...]  # each pass, in bytes per second


class BandwidthMeter(Protocol):
    def read(self, passes: int = 3) -> Bandwidth: ...


class HostBandwidthMeter:
    """A buffer, and the time that a pass over it takes."""

    def __init__(self, size: int = BUFFER_BYTES) -> None:
        self.buffer = torch.ones(size, dtype=torch.uint8)  # written, so that every page is really there

    def read(self, passes: int = 3) -> Bandwidth:
        found = []
        for _ in range(passes):
            begin = time.perf_counter()
            cpu.stream_read(self.buffer)
            found.append(self.buffer.numel() / (time.perf_counter() - begin))
        return Bandwidth(max(found), tuple(found))


class DeviceBandwidthMeter:
    """Two buffers on a device, and the time that copying one to the other takes."""

    def __init__(self, device: Device, size: int = COPY_BYTES) -> None:
        self.device = device
        self.source = torch.ones(size, dtype=torch.uint8, device=device.torch_device)
        self.target = torch.zeros_like(self.source)

    def read(self, passes: int = 3) -> Bandwidth:
        found = []
        for _ in range(passes):
            self.device.fence().wait()
            begin = time.perf_counter()
            for _ in range(COPIES):
                self.target.copy_(self.source)
            self.device.fence().wait()
            found.append(2 * COPIES * self.source.numel() / (time.perf_counter() - begin))
        return Bandwidth(max(found), tuple(found))


def bandwidth_meter(device: Device, size: int, copied: int = COPY_BYTES) -> BandwidthMeter:
    """What measures the memory that a model of `size` bytes lies in. copied: bytes, where that is done by copying.

    On the host, what no cache holds need not be as large as the model: that would take its memory once more.
    """
    return (
        HostBandwidthMeter(min(size, BUFFER_BYTES))
        if device.torch_device.type == "cpu"
        else DeviceBandwidthMeter(device, copied)
    )


def host_bandwidth(size: int = BUFFER_BYTES, passes: int = 5) -> Bandwidth:
    """One measurement of the host, with the buffer made and thrown away."""
    return HostBandwidthMeter(size).read(passes)
