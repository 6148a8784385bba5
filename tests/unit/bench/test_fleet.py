"""Fleets in simulated time: traces, policies side by side, and the model beside the real scheduler."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvarn.bench.fleet.curves import curves
from kvarn.bench.fleet.replicas import ReplicaShape
from kvarn.bench.fleet.runs import conversations, fit
from kvarn.bench.fleet.simulation import POLICY_NAMES, FleetFigures, FleetSimulation
from kvarn.bench.fleet.trace import read_trace
from kvarn.cli.main import app
from kvarn.errors import FormatError
from tests.conftest import Size

SHAPE = ReplicaShape(num_blocks=512)


def run(
    policy: str, num_replicas: int, num_requests: int, *, rate: float = 10.0, is_real: bool = False
) -> FleetFigures:
    simulation = FleetSimulation(policy, num_replicas, SHAPE, is_real=is_real)
    figures = simulation.run(conversations(num_requests, rate, 3)(num_replicas))
    for replica in simulation.replicas:
        replica.kv.check()
        assert replica.load.running == replica.load.waiting == 0
    return figures


def test_a_trace_is_in_order_and_its_turns_begin_with_the_turns_before() -> None:
    trace = list(conversations(200, 10.0, 1)(2))
    assert len(trace) == 400
    assert all(one.at <= other.at for one, other in pairwise(trace))
    longest = max(trace, key=lambda one: len(one.pieces))
    before = [one for one in trace if one.pieces == longest.pieces[: len(one.pieces)] and one.at < longest.at]
    assert before
    texts = before[-1].prefix().texts
    assert longest.prefix().texts[: len(texts)] == texts
    assert list(conversations(200, 10.0, 1)(2)) == trace


def test_prefixes_are_found_more_often_than_by_turns(size: Size) -> None:
    found = {policy: run(policy, 8, size(60, 500)) for policy in POLICY_NAMES}
    assert found["prefix"].hit_rate > found["round_robin"].hit_rate + 0.1
    assert found["prefix"].hit_rate > found["least_loaded"].hit_rate + 0.1
    assert found["prefix"].ttft_mean < found["round_robin"].ttft_mean
    assert found["prefix"].index_blocks > 0
    assert found["round_robin"].spread <= 1.01


def test_the_index_equals_the_simulated_caches_in_the_end() -> None:
    simulation = FleetSimulation("prefix", 4, SHAPE)
    simulation.run(conversations(150, 20.0, 5)(4))
    router = simulation._router
    for number, replica in enumerate(simulation.replicas):
        router.tell(number)
        held = {int.from_bytes(digest[:8], "little") for digest in replica.kv.groups[0].index.digests}
        assert set(router.fleet.index.digests_of(number)) == held  # type: ignore[union-attr]


def test_the_model_is_fitted_to_the_real_scheduler() -> None:
    found = fit(SHAPE, conversations(50, 10.0, 1))
    assert found.shape.factor >= 1.0
    assert found.modelled.ttft_p50 == pytest.approx(found.real.ttft_p50, rel=0.25)
    assert found.modelled.hit_rate == pytest.approx(found.real.hit_rate, abs=0.05)


def test_recorded_traces_are_read_and_broken_lines_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 1500, "input_length": 700, "output_length": 20, "hash_ids": [5, 9]}]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    (request,) = read_trace(path)
    assert (request.at, request.pieces, request.output_tokens) == (1.5, ((5, 512), (9, 188)), 20)
    path.write_text(json.dumps(lines[0]) + '\n{"timestamp": 3}\n', encoding="utf-8")
    with pytest.raises(FormatError, match="line 2"):
        list(read_trace(path))


def test_curves_name_every_policy() -> None:
    figures = [run(policy, number, 20) for policy in ("prefix", "round_robin") for number in (2, 4)]
    drawn = curves(figures, "a <title>")
    assert drawn.count("<polyline") == 6
    assert "a &lt;title&gt;" in drawn


def test_the_command_prints_a_table_and_json(tmp_path: Path) -> None:
    options = ["bench", "fleet", "-r", "2", "--requests", "30", "--policy", "prefix", "--real"]
    result = CliRunner().invoke(app, [*options, "--plot", str(tmp_path / "fleet.svg")])
    assert result.exit_code == 0, result.output
    report = json.loads(result.output.splitlines()[-1])
    assert report["runs"][0]["policy"] == "prefix"
    assert report["is_real"] is True
    assert (tmp_path / "fleet.svg").read_text(encoding="utf-8").startswith("<svg")
