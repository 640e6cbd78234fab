"""Limits of made-up control groups, of both versions."""

from __future__ import annotations

import os

import psutil
import pytest

from surge_beam.gpu import host

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
NO_LIMIT = 2**63 - 4096  # how version 1 says so


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Writes the process's membership and the files of its groups."""

    def make(membership, **files):
        monkeypatch.setattr(host, "_GROUPS", tmp_path / "cgroup")
        monkeypatch.setattr(host, "_MEMBERSHIP", tmp_path / "membership")
        if membership is not None:
            (tmp_path / "membership").write_text(membership)
        for folder, contents in files.items():
            at = tmp_path / "cgroup" / folder.replace("__", "/").strip("/")
            at.mkdir(parents=True, exist_ok=True)
            for name, text in contents.items():
                (at / name).write_text(f"{text}\n")

    return make


def version_2(limit, used, cached=0):
    stat = f"anon 5\ninactive_file {cached}\nactive_file 7"
    return {"memory.max": limit, "memory.current": used, "memory.stat": stat}


def version_1(limit, used, cached=0):
    stat = f"cache 9\ninactive_file 1\ntotal_inactive_file {cached}"
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": stat}


def nearly_free():
    """What is free changes meanwhile."""
    return pytest.approx(psutil.virtual_memory().available, rel=0.2)


def test_the_tightest_group_above_counts(groups):
    groups(
        "0::/pod/container\n",
        pod=version_2(900_000, 400_000),
        pod__container=version_2("max", 300_000),
    )
    assert host.available_memory() == 500_000


def test_cached_file_pages_are_given_up_when_asked_for(groups):
    groups("0::/\n", **{"__": version_2(1_000_000, 950_000, cached=600_000)})
    assert host.available_memory() == 650_000


def test_version_1_in_a_container_that_sees_its_hosts_path(groups):
    groups(
        "5:cpuset:/\n4:memory:/docker/0123\n3:cpu,cpuacct:/docker/0123\n0::/\n",
        memory=version_1(2_000_000, 500_000, cached=100_000),
        cpu={"cpu.cfs_quota_us": 50_000, "cpu.cfs_period_us": 100_000},
    )
    assert host.available_memory() == 1_600_000
    assert host.usable_cores() == 1


def test_more_used_than_allowed_leaves_nothing(groups):
    groups("0::/a\n", a=version_2(100, 250))
    assert host.available_memory() == 0


@pytest.mark.parametrize(
    ("membership", "files"),
    [
        (None, {}),
        ("0::/\n", {}),
        ("4:memory:/\n", {"memory": version_1(NO_LIMIT, 10)}),
        ("0::/\n", {"__": version_2("max", 10)}),
        ("0::/\n", {"__": {"memory.max": "17"}}),
        ("3:cpu:/\n", {"cpu": {"cpu.cfs_quota_us": -1, "cpu.cfs_period_us": 100_000}}),
        ("0::/\n", {"__": {"cpu.max": "max 100000"}}),
        ("0::/\n", {"__": {"cpu.max": "nonsense"}}),
    ],
)
def test_without_limits_the_host_counts(groups, membership, files):
    groups(membership, **files)
    assert host.available_memory() == nearly_free()
    assert host.usable_cores() == CORES


@pytest.mark.parametrize(("quota", "cores"), [("100000 100000", 1), ("1 100000", 1)])
def test_a_quota_is_rounded_up_to_whole_cores(groups, quota, cores):
    groups("0::/a/b\n", a={"cpu.max": quota}, a__b={"cpu.max": "max 100000"})
    assert host.usable_cores() == cores
