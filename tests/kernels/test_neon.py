"""The ARM tables, cross-compiled and emulated: no x86 machine can run them otherwise.

The measuring is done by neon_check.cpp; here the whole core is built for AArch64 and the program run on emulated CPUs.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
TARGET = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={COMPILER}"]
MISSING = [tool for tool in (COMPILER, EMULATOR, "cmake", "ninja") if shutil.which(tool) is None]

pytestmark = [
    pytest.mark.long,  # a minute of cross-compiling and emulating
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} (g++-aarch64-linux-gnu, qemu-user)"),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the core, every file of it but the bindings, and neon_check on top."""
    build = tmp_path_factory.mktemp("aarch64")
    _run(["cmake", "-G", "Ninja", "-S", str(ROOT), "-B", str(build), "-DKVARN_PYTHON=OFF", *TARGET])
    _run(["ninja", "-C", str(build)])
    sources = [str(path) for path in sorted(Path(__file__).parent.glob("neon_check*.cpp"))]
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-static", f"-I{ROOT / 'csrc'}"]
    _run([COMPILER, *flags, *sources, str(build / "libkvarn_core.a"), "-o", str(build / "neon_check")])
    return build / "neon_check"


@pytest.mark.parametrize(
    ("cpu", "tables"),
    [
        ("cortex-a72", "neon scalar"),
        ("neoverse-n1", "neon_dot neon scalar"),
        ("max", "neon_i8mm neon_dot neon scalar"),
    ],
)
def test_a_cpu_is_offered_the_tables_it_can_run(program: Path, cpu: str, tables: str) -> None:
    assert _run([EMULATOR, "-cpu", cpu, str(program), "names"]) == f"tables: {tables}\n"


def test_every_arm_kernel_keeps_its_promises(program: Path) -> None:
    assert "0 broken promises" in _run([EMULATOR, "-cpu", "max", str(program)])


def test_the_base_table_runs_on_a_cpu_of_armv8_0(program: Path) -> None:
    assert "0 broken promises" in _run([EMULATOR, "-cpu", "cortex-a53", str(program)])


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
