"""benchmarks/choosing.py in its short form."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.choosing import shares

from kvarn.backends.select import has_native
from tests.results import ROOT


def test_choosing_is_what_a_call_takes_beyond_the_product() -> None:
    ways = shares({"forward": 60.0, "greedy": 20.0, "top-k 40, top-p 0.95": 40.0, "largest": 2.0})["ways"]
    assert ways["greedy"]["choosing_ms"] == 2.0
    assert ways["greedy"]["share"] == 0.025
    assert ways["top-k 40, top-p 0.95"]["choosing_ms"] == 22.0
    assert ways["top-k 40, top-p 0.95"]["share"] == 0.22


@pytest.mark.skipif(not has_native(), reason="needs the compiled core")
def test_a_short_run_writes_the_share_of_both_ways(tiny: Path, tmp_path: Path, patience: float) -> None:
    command = [sys.executable, "-m", "benchmarks.choosing", str(tiny), "--steps", "2", "--batch", "4"]
    command += ["--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30 * patience, check=False)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout.splitlines()[-1])
    assert len(printed["ways"]) == 2
    assert all(way["sample_ms"] > 0 for way in printed["ways"].values())
    assert json.loads((tmp_path / "choosing-tiny-Q4_0.json").read_text())["figures"] == printed
