"""benchmarks/cold.py in its short form: one launch of ours on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.goals import cold_goals_of

from kvarn.backends.select import has_native
from kvarn.bench.synthetic import write_shape
from tests.results import ROOT
from tests.unit.bench.conftest import TINY


def test_goals_go_by_the_files_name() -> None:
    assert cold_goals_of("smollm2") == {"first_s": 0.5, "rss_mib": 260.0}
    assert cold_goals_of("qwen2.5-0.5b-Q4_0")["first_s"] == 1.8
    assert cold_goals_of("qwen2.5-0.5b-Q4_K_M") == {}


@pytest.mark.skipif(not has_native(), reason="needs the compiled core")
def test_one_launch_of_ours_writes_time_and_memory(tmp_path: Path, patience: float) -> None:
    model = tmp_path / "tiny-Q4_0.gguf"
    write_shape(model, replace(TINY, vocab=20_480), "Q4_0", "tiny")  # the prompt's ids go up to 20,000
    command = [sys.executable, "-m", "benchmarks.cold", str(model), "--launches", "1", "--output", str(tmp_path)]
    command += ["--engines", "kvarn"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30 * patience, check=False)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout.splitlines()[-1])
    assert printed["missing"] == {}, printed
    assert printed["engines"]["kvarn"]["first_s"] > 0
    assert printed["engines"]["kvarn"]["rss_mib"] > 10
    assert json.loads((tmp_path / "cold-tiny-Q4_0.json").read_text())["figures"] == printed
