"""What a router adds to the first token: the same requests to a replica and through `kvarn route`, by turns.

    python -m benchmarks.router [--requests 300] [--real] [--write NAME]

Two real servers behind a router, on one connection each, one request at a time; the time from the first byte sent to
the first event with text. A script answers in place of a model, so that what a model takes does not hide what a router
adds; --real: a tiny random model answers. Prints a table and one line of JSON, last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import statistics
import sys
import tempfile
from pathlib import Path

from tests.results import write_result
from tests.server.routed import CHAT, SERVER, Cluster, cluster

from kvarn.bench.connection import Address, Connection, request_bytes
from kvarn.bench.report import describe_machine

PROMPT_BYTES = (200, 1400)


async def first_tokens(urls: list[str], num_requests: int, num_bytes: int, script: str = "") -> list[list[float]]:
    """Seconds to the first event with text, for each address, requests by turns; script: of tests.page.scripted."""
    addresses = [Address.of(url) for url in urls]
    connections = [await Connection.open(address) for address in addresses]
    found: list[list[float]] = [[] for _ in urls]
    for number in range(num_requests):
        messages = [{"role": "user", "content": f"{number % 7} " + "x" * num_bytes}]
        if script:
            messages += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": script}]
        body = {"model": "tiny", "messages": messages, "max_tokens": 8}
        body |= {"stream": True, "temperature": 0, "ignore_eos": True}
        for times, address, connection in zip(found, addresses, connections, strict=True):
            answer = await connection.exchange(request_bytes(address, "POST", CHAT, body=body), 60.0)
            assert answer.first_at is not None, answer
            times.append(answer.first_at - answer.sent_at)
    for connection in connections:
        connection.close()
    return found


def _cpu_s(pid: int) -> float:
    """CPU time of a process; on a busy machine it says more than the clock."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measured(both: Cluster, num_requests: int, num_bytes: int, script: str) -> dict[str, float]:
    """One row: the same requests to both replicas and through the router."""
    urls = [both.replicas[0].url, both.router.url, both.replicas[1].url]
    asyncio.run(first_tokens(urls, 20, num_bytes, script))
    cpu_s = _cpu_s(both.router.process.pid)
    first, routed, second = asyncio.run(first_tokens(urls, num_requests, num_bytes, script))
    cpu_s = _cpu_s(both.router.process.pid) - cpu_s
    row: dict[str, float] = {"prompt_bytes": num_bytes, "requests": num_requests}
    for name, times in (("direct", first + second), ("routed", routed)):
        tenths = [round(1000 * one, 3) for one in statistics.quantiles(times, n=10)]
        row |= {f"{name}_p10_ms": tenths[0], f"{name}_p50_ms": tenths[4], f"{name}_p90_ms": tenths[-1]}
    for part in ("p10", "p50"):
        row[f"added_{part}_ms"] = round(row[f"routed_{part}_ms"] - row[f"direct_{part}_ms"], 3)
    row["router_cpu_ms"] = round(1000 * cpu_s / num_requests, 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--real", action="store_true", help="let the tiny model answer, not a script")
    parser.add_argument("--write", metavar="NAME", help="keep the figures in benchmarks/results/NAME.json")
    given = parser.parse_args()
    module, script = (SERVER, "") if given.real else ("tests.page.scripted", "say: " + "word " * 20)
    figures = []
    with tempfile.TemporaryDirectory() as folder, cluster(Path(folder), module=module) as both:
        for num_bytes in PROMPT_BYTES:
            figures.append(measured(both, given.requests, num_bytes, script))
            print(figures[-1])
    if given.write:
        write_result(
            given.write, {"runs": figures}, command=shlex.join(["python", "-m", "benchmarks.router", *sys.argv[1:]])
        )
    print(json.dumps({"bench": "router", "machine": describe_machine(), "runs": figures}))


if __name__ == "__main__":
    main()
