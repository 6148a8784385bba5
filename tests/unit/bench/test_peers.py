"""benchmarks/peers.py in its short form: one launch of ours on a tiny model, and what is made of several engines'."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from benchmarks.engines import ik_llama
from benchmarks.goals import goals_of
from benchmarks.peers import Runs, compare, parse_arguments
from benchmarks.plot import svg

from kvarn.backends.select import has_native
from kvarn.bench.rows import select_rows
from tests.results import ROOT

ROWS = select_rows(["prefill-128", "decode"])
BATCHES = """
main: n_kv_max = 648, n_batch = 2048, n_ubatch = 512, flash_attn = 1, is_pp_shared = 0, n_threads = 2

|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |
|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|
|     1 |     16 |    8 |    136 |    0.021 |   380.95 |    0.336 |   381.25 |    0.357 |   380.95 |
"""


def _runs(*speeds: tuple[float | None, float], roofline: dict[str, Any] | None = None) -> Runs:
    launches = [
        {
            "is_protected": True,
            "peak_rss_mb": 100,
            "roofline": roofline or {},
            "rows": {"prefill-128": prefill and {"tokens_per_s": prefill}, "decode": {"tokens_per_s": decode}},
        }
        for prefill, decode in speeds
    ]
    return Runs(version="1", launches=launches)


def test_ours_is_compared_with_the_best_peer_of_each_row() -> None:
    roofline = {"limits": {"read_gbps": 20.0, "dot_gops": 300.0}, "ceilings": {"prefill-128": 1000.0, "decode": 200.0}}
    ours = _runs((600, 90), (500, 100), (700, 120), roofline=roofline)
    found = compare("smollm2", {"kvarn": ours, "a": _runs((500, 40)), "b": _runs((None, 50))}, ROWS)
    prefill, decode = found["rows"]["prefill-128"], found["rows"]["decode"]
    assert (prefill["ours"], prefill["best_peer"], prefill["ratio"], prefill["goal"]) == (600, "a", 1.2, 1.4)
    assert (decode["ours"], decode["best_peer"], decode["ratio"], decode["of_ceiling"]) == (100, "b", 2.0, 0.5)
    assert found["engines"]["kvarn"]["rows"]["decode"]["spread"] == 0.3
    assert "prefill-128" not in found["engines"]["b"]["rows"]


def test_without_peers_there_is_no_ratio() -> None:
    row = compare("unknown", {"kvarn": _runs((600, 90))}, ROWS)["rows"]["decode"]
    assert (row["ratio"], row["best_peer"], row["goal"], row["ceiling"]) == (None, None, None, None)


@pytest.mark.parametrize(
    ("model", "decode", "on_vnni"),
    [
        ("smollm2", 1.7, 2.2),
        ("smollm2-135m-Q4_0", 1.35, 1.35),
        ("qwen2.5-coder-0.5b", 1.5, 1.8),
        ("qwen2.5-0.5b-Q4_0", 1.35, 1.35),
        ("qwen2.5-0.5b-Q8_0", 1.3, 1.3),
        ("qwen2.5-1.5b-Q4_K_M", None, 1.8),
        ("llama-3.2-1b-Q4_K_M", 1.25, 1.25),
        ("llama-3.1-8b-Q4_K_M", None, None),
    ],
)
def test_goals_are_found_by_the_files_name_and_our_kernels(
    model: str, decode: float | None, on_vnni: float | None
) -> None:
    assert goals_of(model, "avx2").get("decode") == decode
    assert goals_of(model, "avx512_vnni").get("decode") == on_vnni


def test_the_plot_has_a_bar_for_every_speed_and_a_line_for_the_ceiling() -> None:
    text = svg("a & b", {"kvarn": {"decode": 100.0}, "peer <1>": {"decode": 50.0}}, {"decode": 200.0})
    shapes = [element.tag.partition("}")[2] for element in ElementTree.fromstring(text).iter()]
    assert shapes.count("title") == 2
    assert shapes.count("line") == 1


@pytest.mark.parametrize("words", [["missing.gguf"], [__file__, "--engines", "kvarn,vllm"]])
def test_wrong_arguments_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_arguments(words)
    assert "kvarn bench make" in (text := capsys.readouterr().err) or "no engine 'vllm'" in text


@pytest.mark.skipif(not has_native(), reason="needs the compiled core")
def test_one_launch_of_ours_writes_json_and_a_plot_and_names_what_is_missing(tiny: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.peers", str(tiny), "--launches", "1", "--rows", "decode,batch-2"]
    command += ["--engines", "kvarn,llama-bench", "--steps", "2", "--repeats", "1", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout.splitlines()[-1])
    written = json.loads((tmp_path / "peers-tiny-Q4_0.json").read_text())
    assert printed["rows"]["batch-2"]["ours"] > 0
    assert printed["missing"] == {"llama-bench": "give --llama-bench PATH"}
    assert written["figures"] == printed
    assert {"commit", "machine", "command"} <= written.keys()
    assert (tmp_path / "peers-tiny-Q4_0.svg").read_text().startswith("<svg")


def test_ik_llama_is_asked_for_deep_rows_in_its_own_way_and_its_table_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, batched = tmp_path / "llama-bench", tmp_path / "llama-batched-bench"
    bench.write_text(
        '#!/bin/sh\nprintf \'%s\\n\' "$*" >> $0.log\necho \'[{"avg_ts": 70.5, "build_commit": "8337e4cd"}]\'\n'
    )
    batched.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{BATCHES}\nEND\n")
    for binary in (bench, batched):
        binary.chmod(0o755)
    monkeypatch.setenv(ik_llama.PATH_VARIABLE, str(bench))
    rows = select_rows(["prefill-512", "decode", "decode-4096", "batch-8"])
    engine = ik_llama.open_engine(tmp_path / "model.gguf", 2, rows)
    assert [engine.tokens_per_s(row, 16) for row in rows] == [70.5, 70.5, 70.5, 381.25]
    asked = [line.partition(" -p ")[2] for line in (tmp_path / "llama-bench.log").read_text().splitlines()]
    assert asked == ["512 -n 0", "0 -n 16", "0 -n 0 -gp 4096,16"]
    assert "8337e4cd" in engine.version()
