"""`kvarn bench` on a tiny model: a table, and one line of JSON at the end."""

from __future__ import annotations

import json

from tests.unit.cli.conftest import Kvarn


def test_bench_engine_prints_a_table_and_then_json(kvarn: Kvarn, model: str) -> None:
    done = kvarn("bench", "engine", "-m", model, "-r", "1", "-r", "3", "--steps", "4", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    *table, last = done.stdout.decode().splitlines()
    assert table[0].split()[:2] == ["requests", "step"]
    report = json.loads(last)
    assert [run["requests"] for run in report["runs"]] == [1, 3]
    for run in report["runs"]:
        assert run["step_ms"] >= run["backend_ms"] > 0
        assert 0 <= run["overhead_share"] < 1
        assert run["num_steps"] >= 4
