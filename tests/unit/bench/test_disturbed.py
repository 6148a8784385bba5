"""benchmarks/disturbed.py in its short form: one launch of ours on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.disturbed import busy_core

from kvarn.backends.select import has_native
from tests.results import ROOT


def test_the_other_process_uses_its_core_until_it_is_ended() -> None:
    with busy_core() as cpu_s:
        until = time.monotonic() + 60
        while cpu_s() < 0.05:
            assert time.monotonic() < until
            time.sleep(0.02)
    with pytest.raises(FileNotFoundError):
        cpu_s()


@pytest.mark.skipif(not has_native(), reason="needs the compiled core")
def test_one_launch_of_ours_writes_what_is_kept(tiny: Path, tmp_path: Path, patience: float) -> None:
    command = [sys.executable, "-m", "benchmarks.disturbed", str(tiny), "--launches", "1", "--rounds", "1"]
    command += ["--seconds", "0.05", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30 * patience, check=False)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout.splitlines()[-1])
    assert printed["engines"]["kvarn"]["kept"] > 0
    assert json.loads((tmp_path / "disturbed-tiny-Q4_0.json").read_text())["figures"] == printed
