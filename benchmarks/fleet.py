"""Fleets of `kvarn bench fleet` side by side, a process for each policy and size.

    python -m benchmarks.fleet [--sizes 4 16 64 256 1000] [--requests 200] [--full 1000] [--policies prefix]
        [--write NAME]
    python -m benchmarks.fleet --read NAME --plot FILE.svg

--full: requests of each replica in the largest fleet. Prints rows as they come, which --write keeps at once, and one
line of JSON, last. --read draws what --write kept.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tests.results import RESULTS, write_result

from kvarn.bench.fleet.curves import curves
from kvarn.bench.fleet.replicas import ReplicaShape
from kvarn.bench.fleet.runs import conversations, fit
from kvarn.bench.fleet.simulation import POLICY_NAMES, FleetFigures, FleetSimulation, as_json

SEED = 1


def run(policy: str, size: int, num_requests: int, rate: float, shape: ReplicaShape) -> FleetFigures:
    """One policy on one fleet."""
    return FleetSimulation(policy, size, shape).run(conversations(num_requests, rate, SEED)(size))


def rows(given: argparse.Namespace, shape: ReplicaShape) -> Iterator[dict[str, Any]]:
    """Every policy on every size, as they end; the largest fleets begin first."""
    sizes = sorted(given.sizes, reverse=True)
    counts = dict.fromkeys(sizes, given.requests) | ({sizes[0]: given.full} if given.full else {})
    with ProcessPoolExecutor(given.processes) as processes:
        jobs = [
            processes.submit(run, policy, size, counts[size], given.rate, shape)
            for size in sizes
            for policy in given.policies
        ]
        for job in as_completed(jobs):
            yield as_json(job.result())


def draw(name: str, path: Path) -> None:
    """The curves of kept figures, policies in the order of the router's own."""
    figures = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["figures"]
    found = [FleetFigures(**row) for row in figures["runs"]]
    found.sort(key=lambda one: (POLICY_NAMES.index(one.policy), one.replicas))
    path.write_text(curves(found, f"{figures['rate']:g} requests/s of each replica"), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 16, 64, 256, 1000])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--full", type=int, default=None)
    parser.add_argument("--rate", type=float, default=10.0)
    parser.add_argument("--processes", type=int, default=None)
    parser.add_argument("--policies", nargs="+", choices=POLICY_NAMES, default=POLICY_NAMES)
    parser.add_argument("--write", metavar="NAME", help="keep the figures in benchmarks/results/NAME.json")
    parser.add_argument("--read", metavar="NAME", help="run nothing, take the figures of an earlier run")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw what is read")
    given = parser.parse_args()
    if given.read:
        draw(given.read, given.plot)
        return
    found = fit(ReplicaShape(), conversations(given.requests, given.rate, SEED))
    print("real", as_json(found.real), "modelled", as_json(found.modelled), flush=True)
    model: dict[str, Any] = {
        "factor": found.shape.factor,
        "delay_s": found.shape.delay_s,
        "rate": given.rate,
        "runs": [],
    }
    command = shlex.join(["python", "-m", "benchmarks.fleet", *sys.argv[1:]])
    for row in rows(given, found.shape):
        model["runs"].append(row)
        print(json.dumps(row), flush=True)
        if given.write:
            write_result(given.write, model, command=command)
    print(json.dumps({"bench": "fleet", **model}))


if __name__ == "__main__":
    main()
