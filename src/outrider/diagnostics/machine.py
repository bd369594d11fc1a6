"""Facts about this machine: processor, cores, memory, and the memory bandwidth that bounds plain decoding."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ..cgroups import cpu_quota
from ..device import Device
from ..kernels import cpu

# Names of Arm's own cores (implementer 0x41): /proc/cpuinfo lists part numbers instead of names.
ARM_PARTS = {
    "0xd0c": "Neoverse-N1",
    "0xd40": "Neoverse-V1",
    "0xd49": "Neoverse-N2",
    "0xd4f": "Neoverse-V2",
    "0xd84": "Neoverse-V3",
    "0xd8e": "Neoverse-N3",
}


def usable_cores() -> int:
    """Count the cores that this process may use: a container may allow fewer than the machine has."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, int(cpu_quota() or cores)))


def processor() -> str:
    """Return the name of the processor as the system reports it."""
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
    """Describe processor, cores, threads, instruction-set level, memory and system."""
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
    """Describe the host and, if `device` is not the CPU, the accelerator."""
    return host_facts() | {"accelerator": getattr(device, "name", None)}


def machine_title(machine: dict[str, Any]) -> str:
    """Format `machine_facts` as one line for the head of a table."""
    accelerator: str | None = machine["accelerator"]
    return accelerator or f"{machine['processor']}, {machine['threads']} threads, {machine['level']}"


BUFFER_BYTES = 512 * 2**20  # larger than the last-level cache of most CPUs
COPY_BYTES = 2 * 2**30  # larger than the L2 cache of any GPU
COPIES = 8  # per pass, so that launch and synchronization are a small part of the time


@dataclass(frozen=True)
class Bandwidth:
    bytes_per_second: float  # of the fastest pass: slower ones were disturbed
    passes: tuple[float, ...]  # bytes per second of each pass


class BandwidthMeter(Protocol):
    def read(self, passes: int = 3) -> Bandwidth: ...


class HostBandwidthMeter:
    """Read a host buffer with the engine's threads and time each pass."""

    def __init__(self, size: int = BUFFER_BYTES) -> None:
        self.buffer = torch.ones(size, dtype=torch.uint8)  # written, so that every page is mapped

    def read(self, passes: int = 3) -> Bandwidth:
        rates = []
        for _ in range(passes):
            begin = time.perf_counter()
            cpu.stream_read(self.buffer)
            rates.append(self.buffer.numel() / (time.perf_counter() - begin))
        return Bandwidth(max(rates), tuple(rates))


class DeviceBandwidthMeter:
    """Copy between two device buffers and time each pass; bytes read and bytes written both count."""

    def __init__(self, device: Device, size: int = COPY_BYTES) -> None:
        self.device = device
        self.source = torch.ones(size, dtype=torch.uint8, device=device.torch_device)
        self.target = torch.zeros_like(self.source)

    def read(self, passes: int = 3) -> Bandwidth:
        rates = []
        for _ in range(passes):
            self.device.fence().wait()
            begin = time.perf_counter()
            for _ in range(COPIES):
                self.target.copy_(self.source)
            self.device.fence().wait()
            rates.append(2 * COPIES * self.source.numel() / (time.perf_counter() - begin))
        return Bandwidth(max(rates), tuple(rates))


def bandwidth_meter(device: Device, size: int, copied: int = COPY_BYTES) -> BandwidthMeter:
    """Return a meter for the memory that holds a model of `size` bytes.

    On the host the buffer is as large as the model, so that a model that fits into the last-level cache is compared
    with the cache; above `BUFFER_BYTES` no cache holds it and a larger buffer would only cost memory. On other devices
    `copied` bytes are copied.
    """
    if device.torch_device.type == "cpu":
        return HostBandwidthMeter(min(size, BUFFER_BYTES))
    return DeviceBandwidthMeter(device, copied)


def host_bandwidth(size: int = BUFFER_BYTES, passes: int = 5) -> Bandwidth:
    """Measure the memory bandwidth of the host once."""
    return HostBandwidthMeter(size).read(passes)
