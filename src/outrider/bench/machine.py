"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

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


def describe() -> dict[str, Any]:
    facts = cpu.facts()
    return {
        "processor": processor(),
        "cores": usable_cores(),
        "threads": facts["threads"],
        "level": facts["level"],
        "memory_bytes": memory_bytes(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def measured_on(device: Device) -> dict[str, Any]:
    """The same beside what did the work, if that is not the processor."""
    return describe() | {"accelerator": getattr(device, "name", None)}


def place(machine: dict[str, Any]) -> str:
    """What `measured_on` found, for the head of a table."""
    accelerator: str | None = machine["accelerator"]
    return accelerator or f"{machine['processor']}, {machine['threads']} threads, {machine['level']}"
