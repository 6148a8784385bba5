"""How many threads, and why: affinity, physical cores, cgroup quotas of both versions."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvarn.machine import choose_threads, cpu_limits, excess_threads_warning, parse_cpu_list
from tests.unit.machine.tree import cpus, v1, v2

FOUR_CORES = {cpu: str(cpu) for cpu in range(4)}


@pytest.mark.parametrize(("text", "expected"), [("0", {0}), ("0-3,8", {0, 1, 2, 3, 8}), ("", set())])
def test_the_kernels_cpu_lists_are_read(text: str, expected: set[int]) -> None:
    assert parse_cpu_list(text) == expected


def test_without_limits_every_physical_core_gets_a_thread(tmp_path: Path) -> None:
    choice = choose_threads(cpus(tmp_path, "0-3", FOUR_CORES))
    assert choice.count == 4
    assert "4 physical cores" in choice.reason


def test_siblings_of_one_core_count_once(tmp_path: Path) -> None:
    cpus(tmp_path, "0-7", {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)})
    assert choose_threads(tmp_path).count == 4


def test_the_affinity_mask_bounds_the_threads(tmp_path: Path) -> None:
    assert choose_threads(cpus(tmp_path, "1,3", FOUR_CORES)).count == 2


def test_unknown_topology_falls_back_to_the_mask(tmp_path: Path) -> None:
    choice = choose_threads(cpus(tmp_path, "0-2", {}))
    assert choice.count == 3
    assert "affinity" in choice.reason


@pytest.mark.parametrize(
    ("quota", "count"), [("100000 100000", 1), ("250000 100000", 2), ("30000 100000", 1), ("max 100000", 4)]
)
def test_a_v2_quota_is_rounded_down_to_at_least_one(tmp_path: Path, quota: str, count: int) -> None:
    cpus(tmp_path, "0-3", FOUR_CORES)
    v2(tmp_path, "/app", {"app/cpu.max": quota})
    assert choose_threads(tmp_path).count == count


def test_the_reason_names_the_quota_and_its_file(tmp_path: Path) -> None:
    cpus(tmp_path, "0-1", {0: "0", 1: "1"})
    v2(tmp_path, "/app", {"app/cpu.max": "100000 100000"})
    choice = choose_threads(tmp_path)
    assert choice.count == 1
    assert "quota of 1 cores (/sys/fs/cgroup/app/cpu.max)" in choice.reason


@pytest.mark.parametrize(("threads", "is_warned"), [(1, False), (8, False), (9, True), (1000, True)])
def test_more_threads_than_cpus_are_warned_of_and_siblings_are_cpus(
    tmp_path: Path, threads: int, is_warned: bool
) -> None:
    cpus(tmp_path, "0-7", {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)})
    warning = excess_threads_warning(threads, tmp_path)
    assert (warning is not None) == is_warned
    if warning is not None:
        assert f"threads is {threads:,}" in warning
        assert "at most 8" in warning


def test_more_threads_than_a_quota_rounded_up_are_warned_of(tmp_path: Path) -> None:
    cpus(tmp_path, "0-3", FOUR_CORES)
    v2(tmp_path, "/app", {"app/cpu.max": "150000 100000"})
    assert excess_threads_warning(2, tmp_path) is None
    assert "quota of 1.5 cores, /sys/fs/cgroup/app/cpu.max" in (excess_threads_warning(3, tmp_path) or "")


def test_an_ancestors_quota_counts_too(tmp_path: Path) -> None:
    cpus(tmp_path, "0-3", FOUR_CORES)
    v2(tmp_path, "/pod/app", {"pod/cpu.max": "200000 100000", "pod/app/cpu.max": "max 100000"})
    assert choose_threads(tmp_path).count == 2


def test_a_v1_quota_is_found_in_the_controllers_own_hierarchy(tmp_path: Path) -> None:
    cpus(tmp_path, "0-3", FOUR_CORES)
    quota = {"cpu.cfs_quota_us": "300000", "cpu.cfs_period_us": "100000"}
    v1(tmp_path, "/docker/a", {f"cpu,cpuacct/docker/a/{name}": text for name, text in quota.items()})
    choice = choose_threads(tmp_path)
    assert choice.count == 3
    assert choice.reason.endswith("(/sys/fs/cgroup/cpu,cpuacct/docker/a/cpu.cfs_quota_us)")


def test_a_v1_quota_of_minus_one_is_no_limit(tmp_path: Path) -> None:
    cpus(tmp_path, "0-3", FOUR_CORES)
    v1(tmp_path, "/", {"cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_period_us": "100000"})
    assert cpu_limits(tmp_path).quota is None


def test_a_container_that_sees_only_its_own_subtree_finds_its_quota_at_the_mount(tmp_path: Path) -> None:
    cpus(tmp_path, "0-3", FOUR_CORES)
    v2(tmp_path, "/docker/abc", {"cpu.max": "200000 100000"}, mount_root="/docker/abc")
    assert choose_threads(tmp_path).count == 2


def test_a_path_outside_the_cgroup_namespace_is_not_followed(tmp_path: Path) -> None:
    cpus(tmp_path, "0-3", FOUR_CORES)
    v2(tmp_path, "/../../other", {"cpu.max": "200000 100000"})
    assert choose_threads(tmp_path).count == 2


@pytest.mark.parametrize("text", ["", "garbage", "1 2 3", "x y", "100000 0"])
def test_a_quota_file_we_cannot_read_is_no_limit(tmp_path: Path, text: str) -> None:
    cpus(tmp_path, "0-3", FOUR_CORES)
    v2(tmp_path, "/", {"cpu.max": text})
    assert choose_threads(tmp_path).count == 4


def test_a_machine_without_proc_has_at_least_one_thread(tmp_path: Path) -> None:
    assert choose_threads(tmp_path).count == (os.cpu_count() or 1)


@pytest.fixture
def cgroup_of_one_core() -> Iterator[Path]:
    """A real cgroup with a quota of one core; skipped where we may not make one."""
    v1_parent, v2_parent = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    is_v1 = (v1_parent / "cpu.cfs_quota_us").exists()
    folder = (v1_parent if is_v1 else v2_parent) / f"kvarn-test-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"cannot make a cgroup: {error}")
    try:
        (folder / ("cpu.cfs_quota_us" if is_v1 else "cpu.max")).write_text("100000" if is_v1 else "100000 100000")
    except OSError as error:
        folder.rmdir()
        pytest.skip(f"cannot set a quota: {error}")
    yield folder
    folder.rmdir()


def test_in_a_real_cgroup_of_one_core_one_thread_is_chosen(cgroup_of_one_core: Path) -> None:
    code = (
        "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid()))\n"
        "from kvarn.machine import choose_threads; choice = choose_threads(); print(choice.count, choice.reason)"
    )
    command = [sys.executable, "-c", code, str(cgroup_of_one_core / "cgroup.procs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("1 a cgroup quota of 1 cores")
    assert cgroup_of_one_core.name in done.stdout
