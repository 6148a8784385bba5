"""`kvarn bench model`: every row on a tiny model, and the ceilings it is compared with."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvarn.backends.select import has_native
from kvarn.bench.limits import Limits, Work, measure_limits
from kvarn.bench.model import ModelBench, block_table, measure
from kvarn.bench.report import report
from kvarn.bench.rows import ROWS, Row, Samples, select_rows
from kvarn.config import EngineConfig
from kvarn.errors import ConfigError

native = pytest.mark.skipif(not has_native(), reason="needs the compiled core")
# SmolLM2-135M in Q4_1, in the numbers of performance.md
SMOLLM2 = Work(layer_bytes=66.5e6, layer_values=106e6, head_bytes=30.1e6, head_values=28.3e6, token_bytes=23_040)
MACHINE = Limits(threads=2, table="avx2", read_gbps=28, dot_gops=316)


def _row(name: str) -> Row:
    return select_rows([name])[0]


@native
def test_every_row_of_a_tiny_model_is_measured_and_reported(tiny: Path) -> None:
    seen: list[tuple[int, int]] = []
    figures = measure(
        tiny, ModelBench(ROWS, 2, 2), EngineConfig(threads=1), lambda done, total: seen.append((done, total))
    )
    found = json.loads(json.dumps(report(figures)))
    assert list(found["rows"]) == [row.name for row in ROWS]
    assert seen == [(1, 2), (2, 2)]
    for row in found["rows"].values():
        assert len(row["samples"]) == 2
        assert 0 < min(row["samples"]) <= row["tokens_per_s"] <= max(row["samples"])
        assert row["of_ceiling"] == pytest.approx(row["tokens_per_s"] / row["ceiling"], rel=0.02)
    assert found["machine"]["cores"] >= 1


@native
def test_a_model_on_torch_is_measured_without_the_limits_of_the_cpu_kernels(tiny: Path) -> None:
    pytest.importorskip("torch")
    figures = measure(tiny, ModelBench(ROWS[:1], 1, 2), EngineConfig(threads=1, backend="torch"))
    assert figures.limits is None
    assert figures.samples[ROWS[0]].median > 0


def test_a_row_deeper_than_the_models_context_is_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"decode-4096 needs 4,099 tokens, 'tiny' has 2,048; choose other rows"):
        measure(tiny, ModelBench(select_rows(["decode-4096"]), 1, 2), EngineConfig(threads=1))


@native
def test_limits_of_this_machine_are_positive() -> None:
    limits = measure_limits(1, seconds=0.002, rounds=2)
    assert limits is not None
    assert limits.read_gbps > 0
    assert limits.dot_gops > 0


@native
def test_a_probe_refuses_what_it_cannot_measure() -> None:
    from kvarn.backends.native._native import kernels

    with pytest.raises(ValueError, match="no kernel table 'mmx'"):
        kernels.dot_rate("mmx", 0.001)
    with pytest.raises(ValueError, match="1 MiB"):
        kernels.read_rate(np.ones(100, np.uint8), 0.001)


def test_one_sequence_reads_every_weight_once_per_token() -> None:
    ceiling = SMOLLM2.ceiling(_row("decode"), MACHINE)
    assert ceiling.bound == "memory"
    assert ceiling.tokens_per_s == pytest.approx(290, rel=0.01)


def test_cached_tokens_are_read_too() -> None:
    assert SMOLLM2.ceiling(_row("decode-1024"), MACHINE).tokens_per_s == pytest.approx(233, rel=0.01)


def test_a_prompt_is_bound_by_arithmetic_and_pays_for_one_row_of_logits() -> None:
    ceiling = SMOLLM2.ceiling(_row("prefill-512"), MACHINE)
    assert ceiling.bound == "arithmetic"
    assert ceiling.tokens_per_s == pytest.approx(1490, rel=0.01)


def test_a_shared_prefix_is_read_once_for_all_sequences() -> None:
    slow = Limits(threads=2, table="avx2", read_gbps=1, dot_gops=1e6)
    shared = Row("shared", batch=32, depth=400, is_shared=True)
    apart = Row("apart", batch=32, depth=400)
    extra_bytes = 31 * 400 * SMOLLM2.token_bytes
    times = [32 / SMOLLM2.ceiling(row, slow).tokens_per_s for row in (apart, shared)]
    assert times[0] - times[1] == pytest.approx(extra_bytes / 1e9)


def test_sequences_share_the_whole_blocks_of_a_prefix_and_nothing_else() -> None:
    table = block_table(Row("shared", batch=3, depth=40, is_shared=True), 60, 16)
    assert table.tolist() == [[0, 1, 2, 3], [0, 1, 4, 5], [0, 1, 6, 7]]
    assert block_table(Row("apart", batch=2, depth=40), 60, 16).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_rows_are_chosen_by_name_in_the_tables_order() -> None:
    assert [row.name for row in select_rows(["batch-8", "decode"])] == ["decode", "batch-8"]
    assert select_rows([]) == ROWS
    assert [row.depth for row in select_rows(["decode-16384", "decode-4096"])] == [4096, 16384]
    with pytest.raises(ConfigError, match="choose from prefill-128"):
        select_rows(["decode-7"])


def test_spread_is_the_distance_of_the_extremes_over_the_median() -> None:
    samples = Samples((90.0, 100.0, 120.0))
    assert (samples.median, samples.spread) == (100.0, pytest.approx(0.3))
