"""Fleets of `kvarn bench fleet` side by side, a process for each policy and size.

    python -m benchmarks.fleet [--sizes 4 16 64 256 1000] [--requests 200] [--full 1000] [--policies prefix]
        [--write NAME]

--full: requests of each replica in the largest fleet. Prints rows as they come and one line of JSON, last.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed

from tests.results import write_result

from kvarn.bench.fleet.replicas import ReplicaShape
from kvarn.bench.fleet.runs import conversations, fit
from kvarn.bench.fleet.simulation import POLICY_NAMES, FleetFigures, FleetSimulation, as_json

SEED = 1


def run(policy: str, size: int, num_requests: int, rate: float, shape: ReplicaShape) -> FleetFigures:
    """One policy on one fleet."""
    return FleetSimulation(policy, size, shape).run(conversations(num_requests, rate, SEED)(size))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 16, 64, 256, 1000])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--full", type=int, default=None)
    parser.add_argument("--rate", type=float, default=10.0)
    parser.add_argument("--processes", type=int, default=None)
    parser.add_argument("--policies", nargs="+", choices=POLICY_NAMES, default=POLICY_NAMES)
    parser.add_argument("--write", metavar="NAME", help="keep the figures in benchmarks/results/NAME.json")
    given = parser.parse_args()
    found = fit(ReplicaShape(), conversations(given.requests, given.rate, SEED))
    print("real", as_json(found.real), "modelled", as_json(found.modelled), flush=True)
    sizes = sorted(given.sizes, reverse=True)
    counts = dict.fromkeys(sizes, given.requests) | ({sizes[0]: given.full} if given.full else {})
    with ProcessPoolExecutor(given.processes) as processes:
        jobs = [
            processes.submit(run, policy, size, counts[size], given.rate, found.shape)
            for size in sizes
            for policy in given.policies
        ]
        rows = []
        for job in as_completed(jobs):
            rows.append(as_json(job.result()))
            print(json.dumps(rows[-1]), flush=True)
    model = {"factor": found.shape.factor, "delay_s": found.shape.delay_s, "rate": given.rate}
    if given.write:
        write_result(
            given.write, model | {"runs": rows}, command=shlex.join(["python", "-m", "benchmarks.fleet", *sys.argv[1:]])
        )
    print(json.dumps({"bench": "fleet", **model, "runs": rows}))


if __name__ == "__main__":
    main()
