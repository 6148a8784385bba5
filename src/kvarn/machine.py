"""Usable cores and memory of this machine, within affinity and cgroup limits (v1 and v2).

Reads /proc and /sys below a given root, so that tests can fake them; knows no model.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger("kvarn")

ROOT = Path("/")
UNLIMITED_V1 = 2**60  # v1 writes "no limit" as the largest page-aligned int64


@dataclass(frozen=True, slots=True)
class ThreadChoice:
    """How many threads to compute with, and the reason as a phrase."""

    count: int
    reason: str


@dataclass(frozen=True, slots=True)
class CpuLimits:
    """The limits of the thread count; None: no such limit."""

    allowed: int  # CPUs in the affinity mask
    physical: int | None  # physical cores among them
    quota: float | None  # cores of CPU time per second
    quota_file: str | None


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A cgroup's limit and what it already uses (page cache, which can be dropped, not counted)."""

    limit_bytes: int
    used_bytes: int
    file: str

    @property
    def free_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)


@dataclass(frozen=True, slots=True)
class MemoryAvailable:
    """Memory that is still available, and what limits it."""

    num_bytes: int
    reason: str
    total_bytes: int | None = None
    cgroup: MemoryLimit | None = None


def choose_threads(root: Path = ROOT) -> ThreadChoice:
    """One thread per usable physical core, rounded down, at least one."""
    limits = cpu_limits(root)
    bounds = [(float(limits.allowed), f"{limits.allowed} CPUs in the affinity mask")]
    if limits.physical is not None:
        bounds.append((float(limits.physical), f"{limits.physical} physical cores"))
    if limits.quota is not None:
        bounds.append((limits.quota, f"a cgroup quota of {limits.quota:g} cores ({limits.quota_file})"))
    smallest = min(value for value, _ in bounds)
    reason = next(text for value, text in reversed(bounds) if value == smallest)
    return ThreadChoice(max(1, math.floor(smallest)), reason)


def warn_of_excess_threads(threads: int | None, root: Path = ROOT) -> None:
    """Log a warning where more threads are configured than can run at once.

    Not an error: answers are the same, only slower, and the CPUs of a process can change while it runs.
    """
    warning = None if threads is None else excess_threads_warning(threads, root)
    if warning is not None:
        log.warning(warning)


def excess_threads_warning(threads: int, root: Path = ROOT) -> str | None:
    """A sentence that warns of more threads than CPUs run at once; None where there are enough.

    Two threads on the two hyperthreads of a core may be intended; a third would only wait.
    """
    limits = cpu_limits(root)
    usable, reason = limits.allowed, f"{limits.allowed} in the affinity mask"
    if limits.quota is not None and math.ceil(limits.quota) < usable:
        usable, reason = math.ceil(limits.quota), f"a cgroup quota of {limits.quota:g} cores, {limits.quota_file}"
    if threads <= usable:
        return None
    return (
        f"threads is {threads:,}, more than the CPUs this process may use ({reason}): they will wait for each other; "
        f"leave threads out, or give at most {usable}"
    )


def cpu_limits(root: Path = ROOT) -> CpuLimits:
    """Affinity, physical cores and the tightest CPU quota of the cgroup chain."""
    allowed = _allowed_cpus(root)
    quotas = list(_cpu_quotas(root))
    quota, file = min(quotas, default=(None, None))
    return CpuLimits(len(allowed), _physical_cores(root, allowed), quota, file)


def available_memory(root: Path = ROOT) -> MemoryAvailable:
    """The smallest of the system's available memory and what each cgroup of the chain leaves."""
    meminfo = _meminfo(root)
    total = meminfo.get("MemTotal")
    free = meminfo.get("MemAvailable", meminfo.get("MemFree"))
    tightest = min(_memory_limits(root), key=lambda limit: limit.free_bytes, default=None)
    if free is None:
        free, total = _sysconf_memory()
    if tightest is not None and tightest.free_bytes < free:
        return MemoryAvailable(tightest.free_bytes, f"cgroup limit ({tightest.file})", total, tightest)
    return MemoryAvailable(free, "free memory of the system", total, tightest)


def cpu_throttled_s(root: Path = ROOT) -> float:
    """Seconds for which the most throttled cgroup of our chain was throttled; 0.0 where that is not counted."""
    throttled_s = [0.0]
    for folder in _cgroup_chain(root, "cpu"):
        stat = _stat(folder / "cpu.stat")
        throttled_s.append(stat.get("throttled_usec", 0) / 1e6 + stat.get("throttled_time", 0) / 1e9)  # v2, v1
    return max(throttled_s)


def parse_cpu_list(text: str) -> set[int]:
    """Read the kernel's list form: '0-3,8' is {0, 1, 2, 3, 8}."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def _allowed_cpus(root: Path) -> set[int]:
    for line in _read(root / "proc/self/status").splitlines():
        if line.startswith("Cpus_allowed_list:"):
            return parse_cpu_list(line.split(":", 1)[1])
    return set(range(os.cpu_count() or 1))


def _physical_cores(root: Path, allowed: Iterable[int]) -> int | None:
    cores: set[str] = set()
    for cpu in allowed:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = _read(topology / "core_cpus_list") or _read(topology / "thread_siblings_list")
        if not siblings:
            return None
        cores.add(siblings)
    return len(cores)


def _cpu_quotas(root: Path) -> Iterator[tuple[float, str]]:
    for folder in _cgroup_chain(root, "cpu"):
        for quota, file in ((_quota_v2(folder), "cpu.max"), (_quota_v1(folder), "cpu.cfs_quota_us")):
            if quota is not None:
                yield quota, _display_path(root, folder / file)


def _quota_v2(folder: Path) -> float | None:
    words = _read(folder / "cpu.max").split()
    if len(words) != 2 or words[0] == "max":
        return None
    return _ratio(words[0], words[1])


def _quota_v1(folder: Path) -> float | None:
    return _ratio(_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us"))


def _ratio(quota: str, period: str) -> float | None:
    numbers = _integer(quota), _integer(period)
    if numbers[0] is None or numbers[1] is None or numbers[0] <= 0 or numbers[1] <= 0:
        return None
    return numbers[0] / numbers[1]


def _memory_limits(root: Path) -> Iterator[MemoryLimit]:
    for folder in _cgroup_chain(root, "memory"):
        stat = _stat(folder / "memory.stat")
        for limit_name, used_name, prefix in (
            ("memory.max", "memory.current", ""),
            ("memory.high", "memory.current", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ):
            limit, used = _integer(_read(folder / limit_name)), _integer(_read(folder / used_name))
            if limit is None or used is None or limit >= UNLIMITED_V1:
                continue
            cache = stat.get(prefix + "inactive_file", 0) + stat.get(prefix + "active_file", 0)
            yield MemoryLimit(limit, max(0, used - cache), _display_path(root, folder / limit_name))


def _cgroup_chain(root: Path, controller: str) -> Iterator[Path]:
    """Our cgroup's folder and its ancestors, in the v2 hierarchy and in the controller's v1 hierarchy."""
    for mount in _cgroup_mounts(root, controller):
        cgroup = _own_cgroup(root, None if mount.is_v2 else controller)
        if cgroup is None:
            continue
        top = root / mount.point.lstrip("/")
        folder = top / _relative(cgroup, mount.root)
        yield folder
        yield from (parent for parent in folder.parents if parent == top or top in parent.parents)


@dataclass(frozen=True, slots=True)
class _CgroupMount:
    is_v2: bool
    root: str  # path within the hierarchy that is visible at point
    point: str


def _own_cgroup(root: Path, controller: str | None) -> str | None:
    """Our path in /proc/self/cgroup, lines of 'id:controllers:path'; the v2 line names no controllers."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        names, _, path = line.partition(":")[2].partition(":")
        if (not names) if controller is None else (controller in names.split(",")):
            return path
    return None


def _cgroup_mounts(root: Path, controller: str) -> Iterator[_CgroupMount]:
    """The hierarchies that may hold the controller; lines of mountinfo, see proc_pid_mountinfo(5)."""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2" or (kind[0] == "cgroup" and controller in kind[2].split(",")):
            yield _CgroupMount(kind[0] == "cgroup2", fields[3], fields[4])


def _relative(cgroup: str, mount_root: str) -> str:
    """The cgroup's path below a mount; "" when a container sees a path outside of what is mounted."""
    base = mount_root.rstrip("/")
    parts = [part for part in cgroup[len(base) :].split("/") if part]
    is_inside = cgroup == base or cgroup.startswith(base + "/")
    return "/".join(parts) if is_inside and ".." not in parts else ""


def _meminfo(root: Path) -> dict[str, int]:
    values = {}
    for line in _read(root / "proc/meminfo").splitlines():
        words = line.split()
        number = _integer(words[1]) if len(words) == 3 else None
        if number is not None:
            values[words[0].rstrip(":")] = number * 1024
    return values


def _stat(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in _read(path).splitlines())
    return {words[0]: int(words[1]) for words in pairs if len(words) == 2 and words[1].isdigit()}


def _sysconf_memory() -> tuple[int, int]:
    """Where there is no /proc (macOS): all of the memory; its page cache makes 'free' meaningless."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total, total


def _display_path(root: Path, path: Path) -> str:
    return "/" + str(path.relative_to(root))


def _integer(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def release_free_memory() -> None:
    """Give memory that was freed back to the system: glibc keeps what threads have freed, 150 MB after a load."""
    if sys.platform == "linux":
        import ctypes

        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
