"""Our speed beside the peers' on one model file: every row of `kvarn bench model`, in turns, launch by launch.

    python -m benchmarks.peers MODEL.gguf [--launches 5] [--rows decode,batch-8] [--engines kvarn,openvino]
        [--python openvino=/path/to/python] [--llama-bench /path/to/llama-bench]

Speed varies between launches of a process more than within one, so a figure is the median of launches, each a process
of its own, the engines taking turns. Engines that are not installed are named and left out. Prints a table and one line
of JSON, last; writes benchmarks/results/peers-MODEL.json and .svg.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.results import RESULTS, ROOT, write_result

from benchmarks.engines import ENGINES
from benchmarks.engines.llama_bench import PATH_VARIABLE
from benchmarks.goals import goals_of
from benchmarks.plot import svg
from kvarn.bench.rows import Row, Samples, chosen_rows
from kvarn.machine import choose_threads

OURS = "kvarn"


@dataclass
class Runs:
    """What the launches of one engine found."""

    version: str = ""
    missing: str = ""
    launches: list[dict[str, Any]] = field(default_factory=list)

    def samples(self, row: Row) -> Samples | None:
        found = [launch["rows"].get(row.name) for launch in self.launches]
        values = tuple(entry["tokens_per_s"] for entry in found if entry and "tokens_per_s" in entry)
        return Samples(values) if values else None

    def summary(self, rows: tuple[Row, ...]) -> dict[str, Any]:
        """Medians for JSON."""
        found = {row.name: samples for row in rows if (samples := self.samples(row)) is not None}
        return {
            "version": self.version,
            "launches": len(self.launches),
            "is_protected": all(launch["is_protected"] for launch in self.launches),
            "peak_rss_mb": max(launch["peak_rss_mb"] for launch in self.launches),
            "rows": {
                name: {"tokens_per_s": samples.median, "spread": round(samples.spread, 4), "samples": samples.values}
                for name, samples in found.items()
            },
        }


def main() -> None:
    args = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a running launch is ended too
    rows = chosen_rows(filter(None, args.rows.split(",")))
    runs = {name: Runs() for name in args.engines.split(",")}
    for number in range(args.launches):
        for name, found in runs.items():
            if not found.missing:
                _launch(name, found, args, f"launch {number + 1} of {args.launches}")
    print(file=sys.stderr)
    missing = {name: found.missing for name, found in runs.items() if found.missing}
    figures = compare(args.model.stem, {name: found for name, found in runs.items() if found.launches}, rows)
    figures |= {"missing": missing, "threads": args.threads, "file": args.model.name}
    path = write_result(
        f"peers-{args.model.stem}",
        figures,
        args.output,
        command=shlex.join(["python", "-m", "benchmarks.peers", *map(_without_folders, sys.argv[1:])]),
    )
    path.with_suffix(".svg").write_text(_plot(figures), encoding="utf-8")
    print_table(figures)
    print(json.dumps(figures))


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--launches", type=int, default=5)
    parser.add_argument("--threads", type=int, default=choose_threads().count)
    parser.add_argument("--rows", default="", help="comma-separated; default: all")
    parser.add_argument("--engines", default=",".join(ENGINES), help="comma-separated; default: all that are installed")
    parser.add_argument("--steps", type=int, default=32, help="decode steps of one measurement")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of a row within a launch")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one launch")
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PATH", help="its interpreter")
    parser.add_argument("--llama-bench", metavar="PATH", help="native llama-bench (llama-batched-bench beside it)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the JSON file and the plot")
    args = parser.parse_args(words)
    unknown = sorted(set(args.engines.split(",")) - set(ENGINES))
    if unknown:
        parser.error(f"--engines: no engine {unknown[0]!r}; choose from {', '.join(ENGINES)}")
    if not args.model.is_file():
        parser.error(f"{args.model} is not a file; make one with `kvarn bench make`")
    args.pythons = dict(entry.partition("=")[::2] for entry in args.python)
    return args


def _launch(name: str, runs: Runs, args: argparse.Namespace, where: str) -> None:
    """One process; whatever goes wrong in it is the engine's own affair."""
    if name == "llama-bench" and not args.llama_bench:
        runs.missing = "give --llama-bench PATH"
        return
    print(f"\r{where}: {name:<20}", end="", file=sys.stderr, flush=True)
    python = args.pythons.get(name, sys.executable)
    command = [python, "-m", "benchmarks.launch", name, str(args.model.resolve()), "--threads", str(args.threads)]
    command += ["--rows", args.rows, "--steps", str(args.steps), "--repeats", str(args.repeats)]
    found = _last_json(command, args)
    if "missing" in found:
        runs.missing = found["missing"]
        print(f"\n{name} is left out: {runs.missing}", file=sys.stderr)
    else:
        runs.version = found["version"]
        runs.launches.append(found)


def _without_folders(argument: str) -> str:
    """Where somebody keeps files is nobody's business."""
    return re.sub(r"(^|=)/\S*/", r"\1", argument)


def _last_json(command: list[str], args: argparse.Namespace) -> dict[str, Any]:
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if args.llama_bench:
        environment[PATH_VARIABLE] = str(Path(args.llama_bench).resolve())
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as child:
        try:
            out, err = child.communicate(timeout=args.timeout)
        except subprocess.TimeoutExpired:
            return {"missing": f"a launch took more than {args.timeout:g} s"}
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if child.returncode != 0 or not lines:
        return {"missing": " ".join(err.strip().splitlines()[-1:])[:300] or f"exit code {child.returncode}"}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def compare(model: str, runs: dict[str, Runs], rows: tuple[Row, ...]) -> dict[str, Any]:
    """Ours against the best peer of each row, with goal and ceiling."""
    engines = {name: found.summary(rows) for name, found in runs.items()}
    facts = [launch["facts"] for launch in runs[OURS].launches if launch.get("facts")] if OURS in runs else []
    limits = {key: max(fact["limits"][key] for fact in facts) for key in ("read_gbps", "dot_gops")} if facts else {}
    ceilings = {row.name: max(fact["ceilings"][row.name] for fact in facts) for row in rows} if facts else {}
    goals = goals_of(model)
    compared = {row.name: _compare_row(row.name, engines, goals, ceilings) for row in rows}
    return {"model": model, "limits": limits, "rows": compared, "engines": engines}


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
    from rich.console import Console
    from rich.table import Table

    engines = figures["engines"]
    table = Table("tokens/s", title=figures["model"], title_justify="left", box=None, pad_edge=False)
    for heading in (*engines, "ours / best", "goal", "ceiling", "of ceiling"):
        table.add_column(heading, justify="right")
    for name, row in figures["rows"].items():
        found = [engine["rows"].get(name) for engine in engines.values()]
        speeds = [f"{one['tokens_per_s']:,.1f} ±{one['spread'] / 2:.0%}" if one else "-" for one in found]
        shares = [_cell(row["ratio"], ".2f"), _cell(row["goal"], ".2f"), _cell(row["ceiling"], ",.0f")]
        table.add_row(name, *speeds, *shares, _cell(row["of_ceiling"], ".0%"))
    console = Console(width=max(100, 20 * len(engines) + 60))
    console.print(table)
    for name, reason in figures["missing"].items():
        console.print(f"{name} was left out: {reason}", markup=False, highlight=False)


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _plot(figures: dict[str, Any]) -> str:
    speeds = {
        engine: {row: one["tokens_per_s"] for row, one in found["rows"].items()}
        for engine, found in figures["engines"].items()
    }
    ceilings = {name: row["ceiling"] for name, row in figures["rows"].items() if row["ceiling"]}
    return svg(f"{figures['model']}: tokens/s as shares of the measured ceiling", speeds, ceilings)


if __name__ == "__main__":
    main()
