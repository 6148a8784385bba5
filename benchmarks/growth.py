"""How time and memory grow: a prompt with its length, a decode step with context and batch, the process with the batch.

    python -m benchmarks.quiet python -m benchmarks.growth MODEL.gguf [--rounds 3] [--longest 8000]

Writes growth-MODEL.json and a plot, .svg, to benchmarks/results/; prints a table and one JSON line, last.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from benchmarks.lines import Panel, svg
from kvarn.bench.model import open_runs
from kvarn.bench.report import describe_machine
from kvarn.bench.rows import Row
from kvarn.config import EngineConfig

RESULTS = Path(__file__).parent / "results"
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8000)
DEPTHS = (64, 256, 1024, 4096)
BATCHES = (1, 2, 4, 8, 16, 32)
STEPS = 8

Found = dict[Row, dict[str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description="How time and memory grow.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--longest", type=int, default=8000, help="tokens of the longest prompt")
    args = parser.parse_args()
    prompts = [Row(f"prefill-{n}", prompt=n) for n in LENGTHS if n <= args.longest]
    depths = [Row(f"decode-{n}", batch=1, depth=n) for n in DEPTHS if n < args.longest]
    batches = [Row(f"batch-{n}", batch=n, depth=64) for n in BATCHES]
    found = {row: measure(args.model, row, args.rounds) for row in (*prompts, *depths, *batches)}
    for row, figures in found.items():
        print(f"{row.name:14} {figures['ms']:10.2f} ms {figures['rss_mb']:8.0f} MB")
    name = f"growth-{args.model.stem}"
    (RESULTS / f"{name}.svg").write_text(svg(panels(prompts, depths, batches, found)))
    report = {"figures": {row.name: figures for row, figures in found.items()}, "machine": describe_machine()}
    (RESULTS / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


def measure(model: Path, row: Row, rounds: int) -> dict[str, float]:
    """Milliseconds of the prompt or of a step, and what the process then holds."""
    with open_runs(model, [row], STEPS, EngineConfig()) as runs:
        speed = statistics.median(runs.tokens_per_s(row, STEPS) for _ in range(rounds))
        return {"ms": round(1000 * (row.prompt or row.batch) / speed, 3), "rss_mb": round(resident_mb(), 1)}


def resident_mb() -> float:
    """Of this process, now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def panels(
    prompts: list[Row], depths: list[Row], batches: list[Row], found: dict[Row, dict[str, float]]
) -> list[Panel]:
    def line(rows: list[Row], x: str, y: str) -> list[tuple[float, float]]:
        return [(getattr(row, x), found[row][y]) for row in rows]

    measured = line(prompts, "prompt", "ms")
    linear = [(x, measured[0][1] * x / measured[0][0]) for x, _ in measured]
    return [
        Panel("prompt, ms", "tokens", {"measured": measured, "linear": linear}),
        Panel("decode step of one, ms", "tokens cached", {"measured": line(depths, "depth", "ms")}),
        Panel("decode step, ms", "sequences", {"measured": line(batches, "batch", "ms")}),
        Panel("process, MB", "sequences", {"measured": line(batches, "batch", "rss_mb")}),
    ]


if __name__ == "__main__":
    main()
