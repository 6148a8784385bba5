"""benchmarks/users.py in its short form: one launch of our server, and what is made of several engines'."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.engines.users import USERS, Answer, summary_of
from benchmarks.turns import Runs
from benchmarks.users import compare

from kvarn.backends.select import has_native
from kvarn.bench.synthetic import write_shape
from tests.results import ROOT
from tests.unit.bench.conftest import TINY


def _runs(*speeds: float) -> Runs:
    figures = {"is_protected": True, "first_s": 1.0, "gap_ms": 10.0, "rss_mb": 300.0}
    return Runs(version="1", launches=[{"tokens_per_s": speed, **figures} for speed in speeds])


def test_prompts_share_only_what_the_row_says() -> None:
    prompts = USERS["shared-32"].prompts()
    assert {len(ids) for ids in prompts} == {420}
    assert len({ids[:400] for ids in prompts}) == 1
    assert len({ids[400:] for ids in prompts}) == 32
    assert len({ids[0] for ids in USERS["users-8"].prompts()}) > 1


def test_medians_of_an_engine_in_the_process_are_over_requests_and_gaps() -> None:
    answers = [Answer(0.0, [1.0, 1.5, 1.75], 3), Answer(1.0, [3.0, 3.25], 2)]
    assert summary_of(answers, 2.0) == {
        "completion_tokens": 5,
        "seconds": 2.0,
        "tokens_per_s": 2.5,
        "first_s": 1.0,
        "gap_ms": 250.0,
    }


def test_ours_is_compared_with_the_peer_of_most_tokens_a_second() -> None:
    found = compare("smollm2", "users-8", {"kvarn": _runs(300, 200, 250), "a": _runs(100), "b": _runs(125)})
    assert (found["best_peer"], found["ratio"], found["goals"]["ratio"]) == ("b", 2.0, 2.6)
    assert found["engines"]["kvarn"]["spread"] == 0.4


@pytest.mark.skipif(not has_native(), reason="needs the compiled core")
def test_one_launch_of_our_server_writes_json(tmp_path: Path, patience: float) -> None:
    model = tmp_path / "tiny-Q4_0.gguf"
    write_shape(model, replace(TINY, vocab=20_480), "Q4_0", "tiny")  # the prompts' ids go up to 20,000
    command = [sys.executable, "-m", "benchmarks.users", str(model), "--launches", "1", "--engines", "kvarn"]
    command += ["--requests", "3", "--answer", "4", "--rows", "shared-32", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30 * patience, check=False)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout.splitlines()[-1])
    assert printed["missing"] == {}, printed
    row = printed["rows"]["shared-32"]
    assert row["asked"]["requests"] == 3
    assert row["engines"]["kvarn"]["tokens_per_s"] > 0
    assert json.loads((tmp_path / "users-tiny-Q4_0.json").read_text())["figures"] == printed
