"""`kvarn bench` on a tiny model: a table, and one line of JSON at the end."""

from __future__ import annotations

import json
from pathlib import Path

from kvarn.bench.diffusion import DiffusionBench
from kvarn.cli.terminal.options import EngineOptions, open_llm
from tests.diffusing import write_talking_model
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


def test_bench_engine_makes_room_for_as_many_requests_as_it_measures(kvarn: Kvarn, endless: str) -> None:
    done = kvarn("bench", "engine", "-m", endless, "-r", "66", "--steps", "2", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(done.stdout.decode().splitlines()[-1])["runs"]
    assert run["requests"] == 66


def test_bench_engine_makes_room_for_the_tokens_of_many_requests(kvarn: Kvarn, model: str) -> None:
    done = kvarn("bench", "engine", "-m", model, "-r", "256", "--steps", "34", "--rounds", "1")
    assert done.returncode == 0, done.stderr


def test_a_step_has_a_row_for_every_request_that_is_measured(model: str) -> None:
    with open_llm(model, EngineOptions(), at_once=600) as llm:
        assert (llm.config.max_running, llm.config.max_batch_tokens) == (600, 600)


def test_bench_model_prints_a_table_and_then_json(kvarn: Kvarn, model: str) -> None:
    done = kvarn("bench", "model", "-m", model, "-r", "decode", "-r", "batch-2", "--rounds", "1", "--steps", "2")
    assert done.returncode == 0, done.stderr
    *table, last = done.stdout.decode().splitlines()
    assert any(line.startswith("batch-2") for line in table)
    assert list(json.loads(last)["rows"]) == ["decode", "batch-2"]


def test_bench_model_with_json_prints_one_line(kvarn: Kvarn, model: str) -> None:
    done = kvarn("bench", "model", "-m", model, "-r", "decode", "--rounds", "1", "--steps", "2", "--json")
    assert json.loads(done.stdout)["bench"] == "model"


def test_bench_make_refuses_an_unknown_shape(kvarn: Kvarn) -> None:
    done = kvarn("bench", "make", "gpt-5", "Q4_0")
    assert done.returncode == 2
    assert b"choose one of smollm2-135m" in done.stderr


def test_bench_diffusion_measures_every_way_and_what_is_beside(kvarn: Kvarn, model: str, tmp_path: Path) -> None:
    path = str(write_talking_model(tmp_path / "talking.gguf"))
    sizes = ("--prompt-tokens", "9", "--tokens", "16", "--block", "8", "--requests", "3", "--threads", "1")
    done = kvarn("bench", "diffusion", path, *sizes, "--no-attention", "--beside", model, "-l", "1", "-l", "9")
    assert done.returncode == 0, done.stderr
    *table, last = done.stdout.decode().splitlines()
    assert table[0].split()[:2] == ["way", "tokens/s"]
    report = json.loads(last)
    ways = report["ways"]
    assert tuple(ways) == DiffusionBench().ways
    assert ways["full"]["steps"] == 16
    assert ways["full"]["rows"] == 16 * 25
    assert ways["dual"]["rows"] == 2 * 25 + 14 * 8
    assert ways["dual"]["outside_keys"] == 17
    assert ways["sparse"]["outside_keys"] == 8
    assert ways["dual+threshold"]["steps"] <= 16
    assert report["crowd"]["requests"] == 3
    assert report["beside"]["share"] > 0
    assert list(report["time_by_length"]) == ["1", "9"]
    assert report["logit_bytes"] > 0


def test_bench_diffusion_refuses_what_is_none(kvarn: Kvarn, model: str) -> None:
    done = kvarn("bench", "diffusion", model)
    assert done.returncode == 2
    assert b"no full-attention diffusion model" in done.stderr
    assert kvarn("bench", "diffusion", model, "--way", "magic").returncode == 2
