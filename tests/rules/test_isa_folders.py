"""Kernels of one instruction set stay to themselves.

An inline function compiled once with AVX2 and once without is one weak symbol to the linker, which may keep the AVX2
copy for everybody: a crash on older machines. So ISA folders include next to nothing and emit no weak symbol.
Their common code is in kernels/shared: templates that each folder compiles anew with its own flags. Everything there is
in an unnamed namespace, so that the linker never merges two copies.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.rules.tree import CSRC, shown

KERNELS = CSRC / "kernels"
CONTRACT = {"table.h", "packed.h"}  # the contract and plain data: no function bodies
TEMPLATES = KERNELS / "shared"  # templates over lanes, with internal linkage
STANDARD = {"cstdint", "cstddef"}
INTRINSICS = {"immintrin.h", "arm_neon.h"}
# Flags beside -std=c++20, as in CMakeLists.txt; a new ISA folder needs an entry here.
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
AVX512_BF16 = [*AVX512, "-mavx512vnni", "-mavx512vbmi", "-mavx512bf16"]
X86 = {
    "avx2": AVX2,
    "avx512": AVX512,
    "avx512_vnni": [*AVX512, "-mavx512vnni"],
    "avx512_amx": [*AVX512_BF16, "-mamx-tile", "-mamx-bf16"],
    "avx512_amx_emulated": AVX512_BF16,
}
ARM = {
    "neon": ["-march=armv8-a"],
    "neon_dot": ["-march=armv8.2-a+dotprod"],
    "neon_i8mm": ["-march=armv8.2-a+dotprod+i8mm"],
}
# Folders whose headers another may compile anew with its own flags; those headers define nothing but local symbols.
PARENTS = {
    "avx512": ["avx2"],
    "avx512_vnni": ["avx2"],
    "avx512_amx": ["avx512_vnni"],
    "avx512_amx_emulated": ["avx512_amx"],
    "neon_dot": ["neon"],
    "neon_i8mm": ["neon", "neon_dot"],
}

INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
COMPILER = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
CROSS_COMPILER = shutil.which("aarch64-linux-gnu-g++")
MACHINE = platform.machine()


def _compilers() -> dict[str, tuple[str, list[str]]]:
    """Return compiler and flags for each folder this machine can compile."""
    native: dict[str, list[str]] = {"scalar": []}
    native |= X86 if MACHINE in {"x86_64", "AMD64"} else ARM if MACHINE in {"aarch64", "arm64"} else {}
    found = {isa: (COMPILER, flags) for isa, flags in native.items()} if COMPILER else {}
    if CROSS_COMPILER and MACHINE in {"x86_64", "AMD64"}:
        found |= {isa: (CROSS_COMPILER, flags) for isa, flags in ARM.items()}
    return found


COMPILERS = _compilers()


def _folders() -> list[str]:
    return sorted(path.name for path in KERNELS.iterdir() if path.is_dir() and path != TEMPLATES)


def _templates() -> list[Path]:
    return sorted(TEMPLATES.glob("*.h"))


def _sources(isa: str, *patterns: str) -> list[Path]:
    return sorted(path for pattern in patterns for path in (KERNELS / isa).glob(pattern))


def test_scalar_and_avx2_kernels_exist() -> None:
    assert {"scalar", "avx2"} <= set(_folders())


@pytest.mark.parametrize("isa", _folders())
def test_an_isa_folder_includes_only_intrinsics_the_table_and_shared_templates(isa: str) -> None:
    allowed = STANDARD | INTRINSICS | {f"../shared/{path.name}" for path in _templates()}
    allowed |= {f"../{name}" for name in CONTRACT} | {path.name for path in _sources(isa, "*.h")}
    allowed |= {f"../{parent}/{path.name}" for parent in PARENTS.get(isa, []) for path in _sources(parent, "*.h")}
    sources = _sources(isa, "*.cpp", "*.h")
    assert sources
    strays = [
        f"{shown(path)}: {name}"
        for path in sources
        for name in INCLUDE.findall(path.read_text(encoding="utf-8"))
        if name not in allowed
    ]
    assert not strays


@pytest.mark.parametrize("name", sorted(CONTRACT))
def test_a_header_of_the_contract_includes_no_code(name: str) -> None:
    assert set(INCLUDE.findall((KERNELS / name).read_text(encoding="utf-8"))) <= STANDARD | CONTRACT


@pytest.mark.parametrize("header", _templates(), ids=lambda path: path.name)
def test_a_shared_template_includes_only_the_contract_and_is_in_an_unnamed_namespace(header: Path) -> None:
    text = header.read_text(encoding="utf-8")
    allowed = {f"../{name}" for name in CONTRACT} | {path.name for path in _templates()}
    assert set(INCLUDE.findall(text)) <= allowed
    opened, closed = "namespace kvarn::shared {\nnamespace {\n", "}  // namespace\n}  // namespace kvarn::shared\n"
    assert text.count("\nnamespace ") == 2  # these two
    before, _, inside = text.partition(opened)
    assert inside.endswith(closed)
    assert all(line.startswith(("//", "#")) or not line for line in before.splitlines())


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
@pytest.mark.parametrize("isa", _folders())
def test_an_isa_folder_defines_no_weak_symbol_and_nothing_outside_its_namespace(isa: str, tmp_path: Path) -> None:
    if isa not in COMPILERS:
        pytest.skip(f"no compiler for {isa} here")
    strays = []
    for source in _sources(isa, "*.cpp"):
        for kind, name in _symbols(_compiled(source, *COMPILERS[isa], tmp_path)):
            if kind in "WVwvu" or (kind in "TDRBC" and not name.startswith(f"kvarn::{isa}::")):
                strays.append(f"{shown(source)}: {kind} {name}")
    assert not strays


@pytest.mark.skipif(COMPILER is None or shutil.which("nm") is None, reason="needs a C++ compiler and nm")
def test_an_inline_function_is_found_as_a_weak_symbol(tmp_path: Path) -> None:
    source = tmp_path / "inline.cpp"
    source.write_text("inline int twice(int x) { return 2 * x; }\nint (*use)(int) = twice;\n", encoding="utf-8")
    assert "W" in {kind for kind, name in _symbols(_compiled(source, str(COMPILER), [], tmp_path)) if "twice" in name}


def _compiled(source: Path, compiler: str, flags: list[str], folder: Path) -> Path:
    """Compile without optimisation, so that no inlining hides a symbol that another compiler might emit."""
    target = folder / f"{source.stem}.o"
    command = [compiler, "-std=c++20", "-O0", "-fno-exceptions", "-c", *flags, str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return target


def _symbols(target: Path) -> list[tuple[str, str]]:
    listing = subprocess.run(["nm", "-C", str(target)], capture_output=True, text=True, timeout=60, check=True).stdout
    # "0000 R kvarn::scalar::store_kernels", "     U memcpy"
    lines = [re.sub(r"^[0-9a-fA-F]*\s+", "", line) for line in listing.splitlines()]
    return [(line[0], line[2:]) for line in lines if line and line[0] != "U"]
