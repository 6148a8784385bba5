"""One launch of one engine: load a model, measure rows, print one line of JSON, last. Started by peers.py.

python -m benchmarks.launch ENGINE MODEL [--threads 2] [--rows decode,batch-8] [--steps 32] [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.engines import ENGINES, Engine, engine_module
from benchmarks.quiet import protect
from kvarn.bench.rows import Row, select_rows
from kvarn.machine import choose_threads

LONG_S = 8.0  # a row that takes longer is not repeated within one launch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=choose_threads().count)
    parser.add_argument("--rows", default="", help="comma-separated; default: all")
    parser.add_argument("--steps", type=int, default=32, help="decode steps of one measurement")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of a row, of which the median is kept")
    args = parser.parse_args()
    is_protected = protect()
    try:
        module = engine_module(args.engine)
    except ImportError as error:
        print(json.dumps({"engine": args.engine, "missing": str(error)}))
        return
    rows = select_rows(filter(None, args.rows.split(",")))
    engine = module.open_engine(args.model.resolve(), args.threads, rows)
    measured = {row.name: measure(engine, row, args.steps, args.repeats) for row in rows}
    peak_rss_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    found = {
        "engine": args.engine,
        "version": (engine if hasattr(engine, "version") else module).version(),
        "is_protected": is_protected,
        "rows": measured,
        "roofline": getattr(engine, "roofline", dict)(),
        "peak_rss_mb": peak_rss_mb,
    }
    print(json.dumps(found), flush=True)


def measure(engine: Engine, row: Row, steps: int, repeats: int) -> dict[str, Any] | None:
    """The median of a few measurements in this launch, without the first where that warms up."""
    num_cold = 0 if getattr(engine, "is_warm", False) else 1
    speeds: list[float] = []
    started = time.perf_counter()
    try:
        for _ in range(repeats + num_cold):
            speed = engine.tokens_per_s(row, steps)
            if speed is None:
                return None
            speeds.append(speed)
            if time.perf_counter() - started > LONG_S:
                break
    except Exception as error:  # one row a peer fails at must not cost the others
        print(f"{row.name}: {error}", file=sys.stderr)
        return {"error": str(error)[:200]}
    return {"tokens_per_s": round(statistics.median(speeds[num_cold:] or speeds), 2)}


if __name__ == "__main__":
    main()
