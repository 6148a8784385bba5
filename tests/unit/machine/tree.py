"""Faked /proc and /sys below a folder."""

from __future__ import annotations

from pathlib import Path

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def cpus(root: Path, allowed: str, siblings: dict[int, str]) -> Path:
    """CPUs in the affinity mask, and which of them share a physical core."""
    topology = {f"sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list": text for cpu, text in siblings.items()}
    return write(root, {"proc/self/status": f"Name:\tx\nCpus_allowed_list:\t{allowed}", **topology})


def memory(root: Path, total: int, available: int) -> Path:
    return write(root, {"proc/meminfo": f"MemTotal: {total // 1024} kB\nMemAvailable: {available // 1024} kB"})


def v2(root: Path, cgroup: str, files: dict[str, str], mount_root: str = "/") -> Path:
    """A unified hierarchy; files are named relative to the mount point."""
    mount = f"35 24 0:30 {mount_root} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
    placed = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    return write(root, {"proc/self/cgroup": f"0::{cgroup}", "proc/self/mountinfo": mount, **placed})


def v1(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    """Two v1 hierarchies, cpu,cpuacct and memory, beside an empty v2 one."""
    mounts = [
        "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct",
        "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory",
        "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw",
    ]
    own = f"4:memory:{cgroup}\n2:cpu,cpuacct:{cgroup}\n1:name=systemd:/other\n0::/other"
    placed = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    return write(root, {"proc/self/cgroup": own, "proc/self/mountinfo": "\n".join(mounts), **placed})
