"""From nothing to the first token, and the memory of one user: ours beside the peers, in turns.

    python -m benchmarks.cold MODEL.gguf [--launches 5] [--engines kvarn,xllamacpp,openvino] [--python ENGINE=PATH]

A launch starts a new interpreter that loads the model and answers 16 tokens with 64 (benchmarks/starts/): the clock
runs from the start of the process to its first token. Python and its imports count; that the file is in the system's
cache is the same for all, and that Python's bytecode is written, as an installation does it. Peak memory is the most
that the process has had resident, the file's pages included. Prints a table and one line of JSON, last; writes
benchmarks/results/cold-MODEL.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.results import write_result

from benchmarks.engines import random_ids
from benchmarks.engines.users import peak_rss_bytes
from benchmarks.goals import cold_goals_of
from benchmarks.quiet import protect
from benchmarks.turns import OURS, Runs, cell, command_line, make_parser, missing_of, parse, take_turns

STARTS = {OURS: "ours.py", "xllamacpp": "llama.py", "openvino": "openvino_cb.py"}
PROMPT, ANSWER = 16, 64


def main() -> None:
    args = parse_arguments()
    if args.inside:
        print(json.dumps({"is_protected": protect(), **measure(args)}), flush=True)
        return
    runs = take_turns(args, lambda name: _command(name, args))
    figures = {"model": args.model.stem, "threads": args.threads, "goals": cold_goals_of(args.model.stem)}
    figures |= {"engines": {name: summary(found) for name, found in runs.items() if found.launches}}
    figures |= {"missing": missing_of(runs)}
    write_result(f"cold-{args.model.stem}", figures, args.output, command=command_line("benchmarks.cold"))
    print_table(figures)
    print(json.dumps(figures))


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__.split("\n")[0], tuple(STARTS))
    parser.add_argument("--inside", choices=STARTS, help=argparse.SUPPRESS)  # this is a launch
    return parse(parser, words, STARTS)


def _command(name: str, args: argparse.Namespace) -> list[str]:
    command = [sys.executable, "-m", "benchmarks.cold", str(args.model.resolve()), "--inside", name]
    command += ["--threads", str(args.threads)]
    return [*command, "--python", f"{name}={args.pythons[name]}"] if name in args.pythons else command


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One launch of one engine: the process started here is the one that is measured."""
    script = Path(__file__).parent / "starts" / STARTS[args.inside]
    command = [args.pythons.get(args.inside, sys.executable), str(script), str(args.model.resolve())]
    command += map(str, (args.threads, ANSWER, *random_ids(PROMPT, 1)))
    pipe = subprocess.PIPE
    started = time.perf_counter()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        _read_to(process, "first")
        first_s = time.perf_counter() - started
        version = _read_to(process, "done")
        rss_mib = peak_rss_bytes(process.pid) / 2**20
        process.kill()
    return {"version": version, "first_s": round(first_s, 4), "rss_mib": round(rss_mib, 1)}


def _read_to(process: subprocess.Popen[str], word: str) -> str:
    """Wait for the line that begins with this word; gives its rest."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.split()[:1] == [word]:
            return line.removeprefix(word).strip()
    sys.exit(process.wait() or f"the process ended before {word!r}")  # why is the last line on stderr


def summary(runs: Runs) -> dict[str, Any]:
    """Medians of the launches."""
    return {
        "version": runs.version,
        "launches": len(runs.launches),
        "is_protected": all(launch["is_protected"] for launch in runs.launches),
        "first_s": runs.median("first_s"),
        "rss_mib": runs.median("rss_mib"),
        "samples": [launch["first_s"] for launch in runs.launches],
    }


def print_table(figures: dict[str, Any]) -> None:
    """For people."""
    from benchmarks.tables import new_table, show

    title = f"{figures['model']}: a cold process"
    table = new_table(title, "", "first token s", "fastest", "slowest", "peak MiB")
    for name, found in figures["engines"].items():
        extremes = [f"{extreme(found['samples']):.2f}" for extreme in (min, max)]
        table.add_row(name, f"{found['first_s']:.2f}", *extremes, f"{found['rss_mib']:,.0f}")
    goals = figures["goals"]
    table.add_row("goal", cell(goals.get("first_s"), ".2f"), "", "", cell(goals.get("rss_mib"), ",.0f"))
    show(table, figures["missing"])


if __name__ == "__main__":
    main()
