"""How much memory is ours: the system's, or what a cgroup of the chain leaves."""

from __future__ import annotations

from pathlib import Path

from kvarn.machine import available_memory
from tests.unit.machine.tree import GIB, memory, v1, v2


def test_without_a_cgroup_the_systems_available_memory_counts(tmp_path: Path) -> None:
    found = available_memory(memory(tmp_path, 16 * GIB, 9 * GIB))
    assert (found.num_bytes, found.total_bytes, found.cgroup) == (9 * GIB, 16 * GIB, None)


def test_a_v2_limit_leaves_what_is_not_used(tmp_path: Path) -> None:
    memory(tmp_path, 16 * GIB, 9 * GIB)
    v2(tmp_path, "/app", {"app/memory.max": str(4 * GIB), "app/memory.current": str(GIB)})
    found = available_memory(tmp_path)
    assert found.num_bytes == 3 * GIB
    assert "memory.max" in found.reason


def test_page_cache_of_a_cgroup_counts_as_free(tmp_path: Path) -> None:
    memory(tmp_path, 16 * GIB, 9 * GIB)
    stat = f"anon 5\ninactive_file {GIB}\nactive_file {GIB}\nshmem 7"
    v2(tmp_path, "/", {"memory.max": str(4 * GIB), "memory.current": str(3 * GIB), "memory.stat": stat})
    assert available_memory(tmp_path).num_bytes == 3 * GIB


def test_the_tightest_cgroup_of_the_chain_counts(tmp_path: Path) -> None:
    memory(tmp_path, 16 * GIB, 9 * GIB)
    outer = {"pod/memory.max": str(2 * GIB), "pod/memory.current": str(GIB)}
    v2(tmp_path, "/pod/app", {**outer, "pod/app/memory.max": str(5 * GIB), "pod/app/memory.current": "0"})
    found = available_memory(tmp_path)
    assert found.num_bytes == GIB
    assert found.reason == "cgroup limit (/sys/fs/cgroup/pod/memory.max)"


def test_a_soft_limit_counts_as_a_limit(tmp_path: Path) -> None:
    memory(tmp_path, 16 * GIB, 9 * GIB)
    files = {"memory.max": "max", "memory.high": str(2 * GIB), "memory.current": "0"}
    v2(tmp_path, "/", files)
    assert available_memory(tmp_path).num_bytes == 2 * GIB


def test_a_v1_limit_leaves_what_is_not_used(tmp_path: Path) -> None:
    memory(tmp_path, 16 * GIB, 9 * GIB)
    files = {"memory/a/memory.limit_in_bytes": str(2 * GIB), "memory/a/memory.usage_in_bytes": str(GIB)}
    v1(tmp_path, "/a", {**files, "memory/a/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 2}"})
    assert available_memory(tmp_path).num_bytes == GIB + GIB // 2


def test_the_number_v1_writes_for_no_limit_is_no_limit(tmp_path: Path) -> None:
    memory(tmp_path, 16 * GIB, 9 * GIB)
    v1(tmp_path, "/", {"memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "5"})
    assert available_memory(tmp_path).cgroup is None


def test_a_cgroup_that_is_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    memory(tmp_path, 16 * GIB, 9 * GIB)
    v2(tmp_path, "/", {"memory.max": str(GIB), "memory.current": str(2 * GIB)})
    assert available_memory(tmp_path).num_bytes == 0


def test_a_roomy_limit_is_reported_but_does_not_bind(tmp_path: Path) -> None:
    memory(tmp_path, 16 * GIB, 9 * GIB)
    v2(tmp_path, "/", {"memory.max": str(12 * GIB), "memory.current": "0"})
    found = available_memory(tmp_path)
    assert found.num_bytes == 9 * GIB
    assert found.cgroup is not None
    assert found.cgroup.limit_bytes == 12 * GIB
