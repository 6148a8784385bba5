"""Several users of one server: ours over HTTP beside llama.cpp over HTTP and OpenVINO without, in turns.

    python -m benchmarks.users MODEL.gguf [--launches 5] [--rows users-8,shared-32] [--engines kvarn,openvino]
        [--python xllamacpp=/path/to/python] [--answer 128]

`users-8`: 8 users stream, 24 requests of 129 tokens in and 64 out, every prompt another. `shared-32`: 32 requests at
once that share 400 tokens and have 20 of their own, 128 out. Greedy, the answers never end early, and a launch answers
two other requests first. Tokens/s: all tokens out over the whole time; the others are medians over requests and gaps.
Prints a table and one line of JSON, last; writes benchmarks/results/users-MODEL.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict
from typing import Any

from tests.results import write_result

from benchmarks.engines.users import USERS
from benchmarks.goals import server_goals_of
from benchmarks.serving import ENGINES
from benchmarks.turns import OURS, Runs, cell, command_line, make_parser, missing_of, parse, take_turns

FIGURES = ("tokens_per_s", "first_s", "gap_ms", "rss_mb")


def main() -> None:
    args = parse_arguments()
    runs = {row: take_turns(args, lambda name, row=row: _command(name, row, args)) for row in args.rows.split(",")}
    loads = {row: asdict(USERS[row].resized(args.requests, args.answer)) for row in runs}
    figures = {
        "model": args.model.stem,
        "threads": args.threads,
        "rows": {row: {"asked": loads[row], **compare(args.model.stem, row, found)} for row, found in runs.items()},
        "missing": {name: reason for found in runs.values() for name, reason in missing_of(found).items()},
    }
    write_result(f"users-{args.model.stem}", figures, args.output, command=command_line("benchmarks.users"))
    print_table(figures)
    print(json.dumps(figures))


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__.split("\n")[0], ENGINES)
    parser.add_argument("--rows", default=",".join(USERS), help="comma-separated; default: all")
    parser.add_argument("--requests", type=int, help="instead of the row's")
    parser.add_argument("--answer", type=int, help="tokens of every answer, instead of the row's")
    args = parse(parser, words, ENGINES)
    unknown = sorted(set(args.rows.split(",")) - set(USERS))
    if unknown:
        parser.error(f"--rows: no row {unknown[0]!r}; choose from {', '.join(USERS)}")
    return args


def _command(name: str, row: str, args: argparse.Namespace) -> list[str]:
    """A peer's interpreter runs its server or, where there is none, the launch itself."""
    python = args.pythons.get(name, sys.executable)
    command = [python if name == "openvino" else sys.executable, "-m", "benchmarks.serving"]
    command += [name, str(args.model.resolve()), row, "--threads", str(args.threads), "--server-python", python]
    for option in ("requests", "answer"):
        if (value := getattr(args, option)) is not None:
            command += [f"--{option}", str(value)]
    return command


def compare(model: str, row: str, runs: dict[str, Runs]) -> dict[str, Any]:
    """Medians of every engine, and ours against the peer with most tokens a second."""
    engines = {name: _summary(found) for name, found in runs.items() if found.launches}
    speeds = {name: found["tokens_per_s"] for name, found in engines.items()}
    ours = speeds.pop(OURS, None)
    best = max(speeds, key=lambda name: speeds[name], default=None)
    return {
        "engines": engines,
        "best_peer": best,
        "ratio": round(ours / speeds[best], 3) if ours and best else None,
        "goals": server_goals_of(model, row),
    }


def _summary(runs: Runs) -> dict[str, Any]:
    samples = [launch["tokens_per_s"] for launch in runs.launches]
    return {
        "version": runs.version,
        "launches": len(samples),
        "is_protected": all(launch["is_protected"] for launch in runs.launches),
        **{name: runs.median(name) for name in FIGURES},
        "spread": round((max(samples) - min(samples)) / statistics.median(samples), 4),
        "samples": samples,
    }


def print_table(figures: dict[str, Any]) -> None:
    """For people."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=110)
    for name, row in figures["rows"].items():
        table = Table(name, title=f"{figures['model']}, {name}", title_justify="left", box=None, pad_edge=False)
        for heading in ("tokens/s", "first token s", "between ms", "RSS MB"):
            table.add_column(heading, justify="right")
        for engine, found in row["engines"].items():
            speed = f"{found['tokens_per_s']:,.1f} ±{found['spread'] / 2:.0%}"
            rest = (cell(found["first_s"], ".2f"), cell(found["gap_ms"], ".1f"), cell(found["rss_mb"], ",.0f"))
            table.add_row(engine, speed, *rest)
        console.print(table)
        goals = ", ".join(f"{key} {value:g}" for key, value in row["goals"].items())
        console.print(f"ours / {row['best_peer']}: {cell(row['ratio'], '.2f')}  (goals: {goals or 'none'})\n")
    for name, reason in figures["missing"].items():
        console.print(f"{name} was left out: {reason}", markup=False, highlight=False)


if __name__ == "__main__":
    main()
