"""What this process may use of its host: cores and memory, by affinity and control groups.

A container sees its host's cores and memory in the system's own figures; what it is given stands in
its control groups (Linux, both versions of them).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import psutil

_GROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
# limit, usage, and the line of memory.stat with cached file pages that are given up when asked for
_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def usable_cores() -> int:
    """Cores of this process by affinity and by its control groups' quotas, at least 1."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    for folder in _control_groups("cpu"):
        quota = _quota(folder)
        if quota is not None:
            cores = min(cores, quota)
    return max(cores, 1)


def available_memory() -> int:
    """Bytes that this process can still allocate: the host's free ones, and its groups' at most."""
    free = int(psutil.virtual_memory().available)
    for folder in _control_groups("memory"):
        for limit, usage, cached in _MEMORY_FILES:
            try:
                most, used = int(_read(folder / limit)), int(_read(folder / usage))
                stat = dict(line.split(" ") for line in _read(folder / "memory.stat").splitlines())
                free = min(free, most - used + int(stat.get(cached, 0)))
            except (OSError, ValueError):
                continue
    return max(free, 0)


def _quota(folder: Path) -> int | None:
    """Cores that a group's quota allows, rounded up; None without one."""
    try:
        quota, period = _read(folder / "cpu.max").split()
    except (OSError, ValueError):
        try:
            quota = _read(folder / "cpu.cfs_quota_us")
            period = _read(folder / "cpu.cfs_period_us")
        except OSError:
            return None
    try:
        return -(-int(quota) // int(period)) if int(quota) > 0 else None
    except (ValueError, ZeroDivisionError):
        return None


def _control_groups(controller: str) -> Iterator[Path]:
    """The folders of this process's groups and of those above them.

    In a container the path may be the host's while the container's own group is mounted at the
    top, so folders need not exist.
    """
    try:
        lines = _read(_MEMBERSHIP).splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        base = _GROUPS / controller if names else _GROUPS
        inside = PurePosixPath(path).relative_to("/")
        for part in (inside, *inside.parents) if inside.parts else (inside,):
            yield base / part


def _read(file: Path) -> str:
    return file.read_text(encoding="ascii").strip()
