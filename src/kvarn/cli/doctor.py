"""`kvarn doctor`: what Kvarn sees of this machine, what it chose, and why."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvarn import config, machine
from kvarn.cli.terminal.text import printable

if TYPE_CHECKING:
    from types import ModuleType

Lines = Iterable[tuple[str, str]]


def doctor(
    root: Annotated[Path, typer.Option("--root", help="Read /proc and /sys below this folder.", hidden=True)] = Path(
        "/"
    ),
) -> None:
    """Say what this machine offers: CPU, kernels, GPU, threads and why, memory, cgroup limits, store."""
    import kvarn

    _section("kvarn", [("version", kvarn.__version__), ("python", sys.version.split()[0])])
    _section("system", [("platform", platform.platform()), ("machine", platform.machine())])
    _section("kernels", kernel_lines())
    _section("torch", torch_lines())
    _section("threads", thread_lines(root))
    _section("memory", memory_lines(root))
    _section("store", store_lines())


def kernel_lines() -> Iterator[tuple[str, str]]:
    """CPU features and which table each kernel comes from."""
    native = _native()
    if native is None:
        yield "native core", "not installed: the slow reference backend is used; install with `pip install .`"
        return
    yield "native core", "installed"
    yield "CPU features", " ".join(native.cpu_features())
    names = native.isa_names()
    forced = config.forced_isa()
    yield "tables", ", ".join(names)
    if forced is not None and forced not in names:
        yield "KVARN_ISA", f"{forced!r} is not one of them: models will not load"
        return
    by_isa: dict[str, list[str]] = {}
    for kernel, isa in native.kernel_origins(forced or names[0]).items():
        by_isa.setdefault(isa, []).append(kernel)
    yield "chosen by", "KVARN_ISA" if forced else "the CPU"
    for isa, kernels in by_isa.items():
        yield f"from {isa}", ", ".join(sorted(kernels))


def torch_lines() -> Iterator[tuple[str, str]]:
    """The GPU's backend, where it is installed."""
    if importlib.util.find_spec("torch") is None:
        yield "torch", 'not installed: no GPU is used; for one, run `pip install "kvarn[torch]"`'
        return
    from kvarn.backends.torch.cuda.pick_store import stored_picks
    from kvarn.backends.torch.device import torch_lines

    yield from torch_lines()
    for where, count, path in stored_picks():
        yield "kernels", f"{count} chosen for {where.gpu}, torch {where.torch}, Triton {where.triton}: {path}"


def thread_lines(root: Path) -> Iterator[tuple[str, str]]:
    """The choice of threads and everything that bounds it."""
    choice, limits = machine.choose_threads(root), machine.cpu_limits(root)
    yield "chosen", f"{choice.count}, because of {choice.reason}"
    yield "affinity", f"{limits.allowed} CPUs"
    yield "physical cores", "unknown" if limits.physical is None else str(limits.physical)
    if limits.quota is None:
        yield "cgroup quota", "none"
    else:
        yield "cgroup quota", f"{limits.quota:g} cores ({limits.quota_file})"


def memory_lines(root: Path) -> Iterator[tuple[str, str]]:
    """What a model may take, and the cgroup's limit."""
    from kvarn.models.memory_plan import show_bytes

    memory = machine.available_memory(root)
    yield "available", f"{show_bytes(memory.num_bytes)}: {memory.reason}"
    if memory.total_bytes is not None:
        yield "total", show_bytes(memory.total_bytes)
    if memory.cgroup is None:
        yield "cgroup limit", "none"
    else:
        limit = memory.cgroup
        yield "cgroup limit", f"{show_bytes(limit.limit_bytes)}, {show_bytes(limit.used_bytes)} used ({limit.file})"


def store_lines() -> Iterator[tuple[str, str]]:
    """Where models are stored."""
    import shutil

    from kvarn.models.memory_plan import show_bytes

    home = config.kvarn_home()
    existing = next(path for path in (home, *home.parents) if os.path.exists(path))
    yield "home", f"{home}{_why_unusable(existing)}"
    yield "free disk", show_bytes(shutil.disk_usage(existing).free)
    yield "offline", "yes" if config.is_offline() else "no"


def _why_unusable(folder: Path) -> str:
    """What keeps this user from storing something; folder: the home, or where it would be made."""
    if not folder.is_dir():
        return f": {folder} is no folder; set KVARN_HOME to another one"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f": this user may not write to {folder}; set KVARN_HOME to another one, or change its rights"
    return ""


def _native() -> ModuleType | Any | None:
    try:
        from kvarn.backends.native import _native
    except ImportError:
        return None
    return _native


def _section(title: str, lines: Lines) -> None:
    print(title)
    for name, value in lines:
        print(f"  {name:<16} {printable(value)}")
