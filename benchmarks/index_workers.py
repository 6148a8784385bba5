"""What more processes give to `kvarn index add`: the same folder with one and with several, by turns.

    python -m benchmarks.index_workers [--workers 2] [--files 1000] [--words 120] [--rounds 5] [--write NAME]

One process computes on all cores; several have a share of them each. Clock time of the whole command, the load of the
embedding model (all-MiniLM-L6-v2) included. Prints a row for each round and one line of JSON, last.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.results import write_result
from tests.unit.cli.test_index_workers import index_add, write_folder

from kvarn.bench.report import describe_machine


def seconds(folder: Path, home: Path, workers: int) -> float:
    """One command, from its start to its end."""
    began = time.perf_counter()
    process = index_add(home, folder, "--workers", str(workers))
    told, problems = process.communicate()
    assert process.returncode == 1, problems  # one file cannot be read
    assert f"{len(list(folder.iterdir())) - 1} added" in told, told
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--words", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", metavar="NAME", help="keep the figures in benchmarks/results/NAME.json")
    given = parser.parse_args()
    rounds = []
    with tempfile.TemporaryDirectory() as name:
        folder = write_folder(Path(name) / "docs", given.files, given.words)
        for number in range(given.rounds):
            counts = [1, given.workers] if number % 2 == 0 else [given.workers, 1]
            took = {count: seconds(folder, Path(name) / f"{number}-{count}", count) for count in counts}
            rounds.append({"one_s": round(took[1], 2), "several_s": round(took[given.workers], 2)})
            print(rounds[-1], flush=True)
    speed = statistics.median(one["one_s"] / one["several_s"] for one in rounds)
    figures = {"files": given.files, "words": given.words, "workers": given.workers, "rounds": rounds}
    figures |= {"speed": round(speed, 3)}
    if given.write:
        command = shlex.join(["python", "-m", "benchmarks.index_workers", *sys.argv[1:]])
        write_result(given.write, figures, command=command)
    print(json.dumps({"bench": "index_workers", "machine": describe_machine(), **figures}))


if __name__ == "__main__":
    main()
