"""Limits that the control groups of Linux (versions 1 and 2) put on this process, as containers do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# By version of the groups: limit and use of memory; quota and period of CPU time.
MEMORY_FILES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}
CPU_FILES = {1: ("cpu.cfs_quota_us", "cpu.cfs_period_us"), 2: ("cpu.max",)}


def memory_allowances(root: Path = ROOT, own: Path = OWN) -> list[int]:
    """Return limit minus use, in bytes, of each memory group above this process."""
    allowances = []
    for folder, version in _groups("memory", root, own):
        limit, usage = MEMORY_FILES[version]
        if (folder / limit).exists() and (text := (folder / limit).read_text().strip()) != "max":
            used = int((folder / usage).read_text()) - _reclaimable_bytes(folder / "memory.stat")
            allowances.append(max(int(text) - used, 0))
    return allowances


def cpu_quota(root: Path = ROOT, own: Path = OWN) -> float | None:
    """Return the cores that this process may use at a time, by the smallest quota of its groups; None: no quota."""
    quotas = []
    for folder, version in _groups("cpu", root, own):
        files = [folder / name for name in CPU_FILES[version]]
        if all(file.exists() for file in files):
            quota, period = " ".join(file.read_text() for file in files).split()
            if quota not in ("max", "-1") and int(period) > 0:
                quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _groups(controller: str, root: Path, own: Path) -> Iterator[tuple[Path, int]]:
    """Yield the folder and the version of each group of this process, and of the groups above it."""
    for line in own.read_text().splitlines() if own.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controller if controllers else root
        group = base / path.strip("/")
        # In a container the path may be the host's. Then only the root of the mount can be read.
        for folder in [group, *[parent for parent in group.parents if parent.is_relative_to(base)]]:
            yield folder, 1 if controllers else 2


def _reclaimable_bytes(statistics: Path) -> int:
    """Return the file cache that counts as used, but that the kernel drops under memory pressure."""
    for line in statistics.read_text().splitlines() if statistics.exists() else []:
        name, _, value = line.partition(" ")
        if name == "inactive_file":
            return int(value)
    return 0
