"""What decoding keeps of its speed while another process keeps one core busy.

    python -m benchmarks.disturbed MODEL.gguf [--launches 5] [--rounds 5] [--seconds 2] [--engines kvarn,xllamacpp]

One sequence is decoded alone and beside a loop that never ends, in turns. The loop is a process of the same session and
niceness as the engine, tied to one core, so the system shares that core fairly: nothing protects the engine from it,
though both are protected from the rest of the machine. A speed is all tokens of a round over its time; what is kept is
the quotient of the medians. Prints a table and one line of JSON, last; writes benchmarks/results/disturbed-MODEL.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.results import write_result

from benchmarks.engines import ENGINES, Engine, engine_module
from benchmarks.quiet import protect
from benchmarks.turns import OURS, Runs, command_line, make_parser, missing_of, parse, take_turns
from kvarn.bench.rows import select_rows

GOAL_KEPT = 0.5
STEPS = 32
BUSY = "import os; os.sched_setaffinity(0, {%d}); print(flush=True)\nwhile True: pass"


def main() -> None:
    args = parse_arguments()
    if args.inside:
        print(json.dumps(measure(args)), flush=True)
        return
    runs = take_turns(args, lambda name: _command(name, args))
    engines = {name: summary(found) for name, found in runs.items() if found.launches}
    figures = {"model": args.model.stem, "threads": args.threads, "goal_kept": GOAL_KEPT, "rounds": args.rounds}
    figures |= {"engines": engines, "missing": missing_of(runs)}
    write_result(f"disturbed-{args.model.stem}", figures, args.output, command=command_line("benchmarks.disturbed"))
    print_table(figures)
    print(json.dumps(figures))


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__.split("\n")[0], (OURS,))
    parser.add_argument("--rounds", type=int, default=5, help="alone and disturbed, so often within a launch")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a round, of each kind")
    parser.add_argument("--inside", choices=ENGINES, help=argparse.SUPPRESS)  # this is a launch
    return parse(parser, words, ENGINES)


def _command(name: str, args: argparse.Namespace) -> list[str]:
    command = [args.pythons.get(name, sys.executable), "-m", "benchmarks.disturbed", str(args.model.resolve())]
    command += ["--inside", name, "--threads", str(args.threads)]
    return [*command, "--rounds", str(args.rounds), "--seconds", str(args.seconds)]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One launch of one engine."""
    is_protected = protect()
    try:
        module = engine_module(args.inside)
    except ImportError as error:
        return {"missing": str(error)}
    row = select_rows(["decode"])[0]
    engine = module.open_engine(args.model.resolve(), args.threads, (row,))
    engine.tokens_per_s(row, STEPS)
    alone, disturbed, others = [], [], []
    for _ in range(args.rounds):
        alone.append(_speed(engine, args.seconds))
        with busy_core() as cpu_s:
            before, started = cpu_s(), time.perf_counter()
            disturbed.append(_speed(engine, args.seconds))
            others.append((cpu_s() - before) / (time.perf_counter() - started))
    return {
        "version": module.version(),
        "is_protected": is_protected,
        "alone": statistics.median(alone),
        "disturbed": statistics.median(disturbed),
        "kept": round(statistics.median(disturbed) / statistics.median(alone), 4),
        "core_of_other": round(statistics.median(others), 4),
    }


def _speed(engine: Engine, seconds: float) -> float:
    """Tokens over time: rounds of equal length, so the harmonic mean."""
    row = select_rows(["decode"])[0]
    found: list[float] = []
    end = time.perf_counter() + seconds
    while not found or time.perf_counter() < end:
        speed = engine.tokens_per_s(row, STEPS)
        assert speed is not None
        found.append(speed)
    return round(statistics.harmonic_mean(found), 2)


@contextmanager
def busy_core() -> Iterator[Any]:
    """A process that keeps the last core busy; gives what tells its processor time in seconds."""
    core = max(os.sched_getaffinity(0))
    with subprocess.Popen([sys.executable, "-c", BUSY % core], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield lambda: _cpu_s(process.pid)
        finally:
            process.kill()


def _cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime, stime


def summary(runs: Runs) -> dict[str, Any]:
    """Medians of the launches."""
    return {
        "version": runs.version,
        "launches": len(runs.launches),
        "is_protected": all(launch["is_protected"] for launch in runs.launches),
        **{name: runs.median(name) for name in ("alone", "disturbed", "kept", "core_of_other")},
        "samples": [launch["kept"] for launch in runs.launches],
    }


def print_table(figures: dict[str, Any]) -> None:
    """For people; tokens a second."""
    from benchmarks.tables import new_table, show

    title = f"{figures['model']}: decode beside a busy core"
    table = new_table(title, "tokens/s", "alone", "disturbed", "kept", "goal", "core of the other")
    for name, found in figures["engines"].items():
        speeds = (f"{found['alone']:,.1f}", f"{found['disturbed']:,.1f}")
        goal = f"{figures['goal_kept']:.0%}" if name == OURS else "-"
        table.add_row(name, *speeds, f"{found['kept']:.0%}", goal, f"{found['core_of_other']:.0%}")
    show(table, figures["missing"])


if __name__ == "__main__":
    main()
