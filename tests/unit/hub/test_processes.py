"""Real processes: two pulls at once, Ctrl-C, a full disk and a home that cannot be written."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvarn.hub import resolve, store
from kvarn.hub.names import HubName
from tests.unit.hub.servers import COMMIT, Site, add_repository
from tests.unit.hub.wheels import random_bytes

NAME = HubName("org/repo")
BODY = random_bytes(2_000_000)
FILE = f"/org/repo/resolve/{COMMIT}/m.gguf"
RESOLVE = """
import sys
from kvarn.errors import KvarnError
from kvarn.hub import resolve
try:
    print(resolve("hf:org/repo"))
except KvarnError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""

FILE_LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))\n"
# Root passes over file permissions; started again without CAP_DAC_OVERRIDE it does not.
OBEY_PERMISSIONS = """
import ctypes, os, sys
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE = 24, 1
if os.geteuid() == 0 and "again" not in sys.argv:
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0)
    os.execv(sys.executable, [*sys.orig_argv, "again"])
"""


def start(prepare: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", prepare + RESOLVE]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out.strip(), err.strip()


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"]


@pytest.fixture
def repo(hub: Site) -> Site:
    add_repository(hub, "org/repo", {"m.gguf": BODY})
    return hub


def test_two_pulls_at_once_download_once_and_both_succeed(repo: Site) -> None:
    repo.seconds_per_chunk = 0.02  # about 0.6 s in all, so that the two overlap
    results = [finish(process) for process in (start(), start())]
    assert [code for code, _, _ in results] == [0, 0]
    assert results[0][1] == results[1][1]
    assert Path(results[0][1]).read_bytes() == BODY
    assert len(repo.asked(FILE)) == 1


def test_ctrl_c_leaves_only_a_part_that_the_next_pull_continues(repo: Site, home: Path) -> None:
    repo.seconds_per_chunk = 0.05
    process = start()
    part = store.staged_files(store.partial_folder(NAME)) / "m.gguf.part"
    wait_for(lambda: part.exists() and part.stat().st_size > 0)
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] != 0
    assert store.list_models() == []
    written = part.stat().st_size
    assert 0 < written < len(BODY)
    repo.seconds_per_chunk = 0.0
    repo.requests.clear()
    assert resolve(str(NAME)).read_bytes() == BODY
    assert repo.asked(FILE)[0]["Range"] == f"bytes={written}-"


def test_a_killed_pull_does_not_block_the_next(repo: Site) -> None:
    repo.seconds_per_chunk = 0.05
    process = start()
    wait_for(lambda: bool(repo.asked(FILE)))
    process.kill()
    finish(process)
    repo.seconds_per_chunk = 0.0
    assert resolve(str(NAME)).read_bytes() == BODY


def test_a_full_disk_is_one_sentence_and_leaves_no_bytes(repo: Site, home: Path) -> None:
    code, out, err = finish(start(FILE_LIMIT))
    assert (code, out) == (1, "")
    assert err.startswith("DownloadError: cannot write m.gguf after")
    assert "KVARN_HOME" in err
    assert "\n" not in err
    assert files_below(home) == []


def test_a_home_that_cannot_be_written_is_one_sentence(repo: Site, home: Path) -> None:
    home.mkdir(mode=0o555)
    code, _, err = finish(start(OBEY_PERMISSIONS))
    assert code == 1
    assert err.startswith("DownloadError: cannot store models in")
    assert "Permission denied" in err
    assert "KVARN_HOME" in err


def test_a_stored_model_is_found_in_a_home_that_cannot_be_written(repo: Site, home: Path) -> None:
    path = resolve(str(NAME))
    for folder in (home / "models", home):
        folder.chmod(0o555)
    try:
        assert finish(start(OBEY_PERMISSIONS))[:2] == (0, str(path))
    finally:
        for folder in (home, home / "models"):
            folder.chmod(0o755)


def wait_for(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)
