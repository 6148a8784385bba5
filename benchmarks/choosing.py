"""What choosing tokens costs in a decode step of 32 sequences: greedy, and with temperature, top-k and top-p.

    python -m benchmarks.choosing MODEL.gguf [--steps 32] [--threads 2]

The native core computes the product with the LM head and chooses in one call, `sample`, so choosing is what that call
takes beyond the product. Greedily it looks for the largest logit of each piece of 256 while the piece is in the cache:
that is timed by itself, with the kernel it uses, and what is left of the greedy call is the product. All that `sample`
with options takes beyond this product counts as choosing: keeping whole rows of logits too, and passing over the head
more than once when they are too many. The context is empty, which makes a step short and the share large. Everything
is timed in turns on the hidden states of each step, and medians taken. Meant for a large vocabulary: `kvarn bench make
qwen2.5-0.5b Q4_0`. Prints a table and one line of JSON, last; writes benchmarks/results/choosing-MODEL.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tests.results import RESULTS, write_result

from benchmarks.quiet import protect
from benchmarks.turns import command_line
from kvarn.backends.batch import Batch, RowSampling, SampleRows
from kvarn.backends.select import has_native
from kvarn.bench.model import ModelRuns, open_runs
from kvarn.bench.rows import Row
from kvarn.config import EngineConfig
from kvarn.machine import choose_threads

GOAL_SHARE = 0.1
WARM_UP = 3  # steps that are not counted
CACHED_LOGITS, CALLS = 8192, 64
GREEDY = "greedy"
WAYS = {GREEDY: RowSampling(), "top-k 40, top-p 0.95": RowSampling(temperature=0.8, top_k=40, top_p=0.95)}

Times = dict[str, list[float]]


def main() -> None:
    args = parse_arguments()
    is_protected = protect()
    if not has_native():
        raise SystemExit("choosing is measured in the compiled core, which is not here")
    row = Row(f"batch-{args.batch}", batch=args.batch)
    with open_runs(args.model, [row], args.steps + WARM_UP, EngineConfig(threads=args.threads)) as runs:
        times = measure(runs, row, args.steps)
        figures = {"model": args.model.stem, "vocabulary": runs.spec.vocab_size, "batch": args.batch}
        figures |= {"threads": runs.threads, "isa": runs.isa, "is_protected": is_protected, "goal_share": GOAL_SHARE}
    figures |= shares({name: 1000 * statistics.median(found) for name, found in times.items()})
    write_result(f"choosing-{args.model.stem}", figures, args.output, command=command_line("benchmarks.choosing"))
    print_table(figures)
    print(json.dumps(figures))


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=choose_threads().count)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the JSON file")
    args = parser.parse_args(words)
    if not args.model.is_file():
        parser.error(f"{args.model} is not a file; make one with `kvarn bench make`")
    return args


def measure(runs: ModelRuns, row: Row, steps: int) -> Times:
    """Seconds of everything, step by step."""
    backend, times = runs.backend, defaultdict[str, list[float]](list)
    tokens = np.arange(1, row.batch + 1, dtype=np.int32)
    for position in range(steps + WARM_UP):
        hidden = _timed(times["forward"], partial(backend.forward, _batch(runs, row, tokens, position)))
        for name, way in WAYS.items():
            chosen = _timed(times[name], partial(backend.sample, hidden, _rows(way, row.batch, position)))
            tokens = chosen.token_ids
        times["largest"].append(largest_s(runs.isa) * row.batch * runs.spec.vocab_size / runs.threads)
    return {name: found[WARM_UP:] for name, found in times.items()}


def _timed(into: list[float], work: Callable[[], Any]) -> Any:
    started = time.perf_counter()
    found = work()
    into.append(time.perf_counter() - started)
    return found


def _batch(runs: ModelRuns, row: Row, tokens: np.ndarray, position: int) -> Batch:
    return Batch(
        token_ids=tokens,
        positions=np.full(row.batch, position, np.int32),
        row_starts=np.arange(row.batch + 1, dtype=np.int32),
        context_lens=np.full(row.batch, position + 1, np.int32),
        block_tables=runs.runs[row].table,
        output_rows=np.arange(row.batch, dtype=np.int32),
    )


def _rows(way: RowSampling, count: int, position: int) -> SampleRows:
    ways = tuple(replace(way, seed=index, position=position) for index in range(count))
    return SampleRows(np.arange(count, dtype=np.int32), ways)


def largest_s(isa: str) -> float:
    """Seconds a logit takes while the largest is looked for, on one thread."""
    from kvarn.backends.native._native import kernels

    logits = np.random.default_rng(1).standard_normal(CACHED_LOGITS).astype(np.float32)
    kernels.argmax(isa, logits)
    started = time.perf_counter()
    for _ in range(CALLS):
        kernels.argmax(isa, logits)
    return (time.perf_counter() - started) / (CALLS * CACHED_LOGITS)


def shares(ms: dict[str, float]) -> dict[str, Any]:
    """What choosing takes of a step, from medians in milliseconds."""
    product = ms[GREEDY] - ms["largest"]
    ways = {}
    for name in WAYS:
        step, choosing = ms["forward"] + ms[name], ms[name] - product
        ways[name] = {
            "step_ms": round(step, 3),
            "sample_ms": round(ms[name], 3),
            "choosing_ms": round(choosing, 3),
            "share": round(choosing / step, 4),
        }
    return {"ms": {name: round(value, 3) for name, value in ms.items()}, "ways": ways}


def print_table(figures: dict[str, Any]) -> None:
    """For people."""
    from benchmarks.tables import new_table, show

    title = f"{figures['model']}: a step of {figures['batch']} sequences, vocabulary {figures['vocabulary']:,}"
    table = new_table(title, "ms", "step", "sample", "of that choosing", "share of the step", "goal")
    for name, found in figures["ways"].items():
        times = [f"{found[key]:.1f}" for key in ("step_ms", "sample_ms", "choosing_ms")]
        table.add_row(name, *times, f"{found['share']:.1%}", f"< {figures['goal_share']:.0%}")
    show(table, {}, width=110)


if __name__ == "__main__":
    main()
