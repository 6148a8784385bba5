"""Our speed beside the peers' on one model file: every row of `kvarn bench model`, in turns, launch by launch.

    python -m benchmarks.peers MODEL.gguf [--launches 5] [--rows decode,batch-8] [--engines kvarn,openvino]
        [--python openvino=/path/to/python] [--llama-bench /path/to/llama-bench] [--ik-llama-bench /path/to/llama-bench]

Speed varies between launches of a process more than within one, so a figure is the median of launches, each a process
of its own, the engines taking turns. Engines that are not installed are named and left out. Prints a table and one line
of JSON, last; writes benchmarks/results/peers-MODEL.json and .svg.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tests.results import write_result

from benchmarks.engines import ENGINES, ik_llama, llama_bench
from benchmarks.goals import goals_of
from benchmarks.plot import svg
from benchmarks.turns import OURS, Runs, cell, command_line, make_parser, missing_of, parse, take_turns
from kvarn.bench.rows import Row, Samples, select_rows


def main() -> None:
    args = parse_arguments()
    rows = select_rows(filter(None, args.rows.split(",")))
    runs = _launch_all(args)
    figures = compare(args.model.stem, {name: found for name, found in runs.items() if found.launches}, rows)
    figures |= {"missing": missing_of(runs), "threads": args.threads, "file": args.model.name}
    name = f"peers-{args.model.stem}"
    path = write_result(name, figures, args.output, command=command_line("benchmarks.peers"))
    path.with_suffix(".svg").write_text(_plot(figures), encoding="utf-8")
    print_table(figures)
    print(json.dumps(figures))


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__.split("\n")[0], tuple(ENGINES))
    parser.add_argument("--rows", default="", help="comma-separated; default: all")
    parser.add_argument("--steps", type=int, default=32, help="decode steps of one measurement")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of a row within a launch")
    parser.add_argument("--llama-bench", metavar="PATH", help="native llama-bench (llama-batched-bench beside it)")
    parser.add_argument("--ik-llama-bench", metavar="PATH", help="the same of ik_llama.cpp")
    return parse(parser, words, ENGINES)


def _launch_all(args: argparse.Namespace) -> dict[str, Runs]:
    def command_of(name: str) -> list[str]:
        command = [args.pythons.get(name, sys.executable), "-m", "benchmarks.launch", name, str(args.model.resolve())]
        command += ["--threads", str(args.threads), "--rows", args.rows]
        return [*command, "--steps", str(args.steps), "--repeats", str(args.repeats)]

    binaries = {llama_bench.PATH_VARIABLE: args.llama_bench, ik_llama.PATH_VARIABLE: args.ik_llama_bench}
    variables = {name: str(Path(path).resolve()) for name, path in binaries.items() if path}
    return take_turns(args, command_of, variables)


def compare(model: str, runs: dict[str, Runs], rows: tuple[Row, ...]) -> dict[str, Any]:
    """Ours against the best peer of each row, with goal and ceiling."""
    engines = {name: _summary(found, rows) for name, found in runs.items()}
    rooflines = [launch["roofline"] for launch in runs[OURS].launches if launch.get("roofline")] if OURS in runs else []
    limits = (
        {key: max(found["limits"][key] for found in rooflines) for key in ("read_gbps", "dot_gops")}
        if rooflines
        else {}
    )
    ceilings = {row.name: max(found["ceilings"][row.name] for found in rooflines) for row in rows} if rooflines else {}
    isa = rooflines[0].get("isa") if rooflines else None
    goals = goals_of(model, isa)
    compared = {row.name: _compare_row(row.name, engines, goals, ceilings) for row in rows}
    return {"model": model, "isa": isa, "limits": limits, "rows": compared, "engines": engines}


def _summary(runs: Runs, rows: tuple[Row, ...]) -> dict[str, Any]:
    """Medians for JSON."""
    found = {row.name: samples for row in rows if (samples := _samples(runs, row)) is not None}
    return {
        "version": runs.version,
        "launches": len(runs.launches),
        "is_protected": all(launch["is_protected"] for launch in runs.launches),
        "peak_rss_mb": max(launch["peak_rss_mb"] for launch in runs.launches),
        "rows": {
            name: {"tokens_per_s": samples.median, "spread": round(samples.spread, 4), "samples": samples.values}
            for name, samples in found.items()
        },
    }


def _samples(runs: Runs, row: Row) -> Samples | None:
    found = [launch["rows"].get(row.name) for launch in runs.launches]
    values = tuple(entry["tokens_per_s"] for entry in found if entry and "tokens_per_s" in entry)
    return Samples(values) if values else None


def _compare_row(
    row: str, engines: dict[str, Any], goals: dict[str, float], ceilings: dict[str, float]
) -> dict[str, Any]:
    speeds = {name: found["rows"][row]["tokens_per_s"] for name, found in engines.items() if row in found["rows"]}
    ours = speeds.pop(OURS, None)
    best = max(speeds, key=lambda name: speeds[name], default=None)
    ratio = round(ours / speeds[best], 3) if ours and best else None
    ceiling = ceilings.get(row)
    return {
        "ours": ours,
        "best_peer": best,
        "peer": speeds[best] if best else None,
        "ratio": ratio,
        "goal": goals.get(row),
        "ceiling": ceiling,
        "of_ceiling": round(ours / ceiling, 4) if ours and ceiling else None,
    }


def print_table(figures: dict[str, Any]) -> None:
    """For people; tokens a second."""
    from benchmarks.tables import new_table, show

    engines = figures["engines"]
    table = new_table(figures["model"], "tokens/s", *engines, "ours / best", "goal", "ceiling", "of ceiling")
    for name, row in figures["rows"].items():
        found = [engine["rows"].get(name) for engine in engines.values()]
        speeds = [f"{one['tokens_per_s']:,.1f} ±{one['spread'] / 2:.0%}" if one else "-" for one in found]
        shares = [cell(row["ratio"], ".2f"), cell(row["goal"], ".2f"), cell(row["ceiling"], ",.0f")]
        table.add_row(name, *speeds, *shares, cell(row["of_ceiling"], ".0%"))
    show(table, figures["missing"], width=max(100, 20 * len(engines) + 60))


def _plot(figures: dict[str, Any]) -> str:
    speeds = {
        engine: {row: one["tokens_per_s"] for row, one in found["rows"].items()}
        for engine, found in figures["engines"].items()
    }
    ceilings = {name: row["ceiling"] for name, row in figures["rows"].items() if row["ceiling"]}
    return svg(f"{figures['model']}: tokens/s as shares of the measured ceiling", speeds, ceilings)


if __name__ == "__main__":
    main()
