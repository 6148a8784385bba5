"""What Ray adds to a server: first tokens and streams of one replica, plain and through `kvarn deploy ray`, by turns.

    python -m benchmarks.ray_serve [--requests 100] [--write NAME]

The same tiny random model behind both. First tokens: one request at a time, from the first byte sent to the first event
with text. Streams: eight at a time of 500 tokens each, tokens a second. Prints a table and one line of JSON, last.
Under benchmarks.quiet the processes of Ray, which have sessions of their own, are put first as well.
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
import time
from contextlib import suppress
from pathlib import Path

from tests.chat_model import write_chat_model
from tests.results import write_result
from tests.server.on_ray import RayServer, ray_nodes
from tests.server.process import ServerProcess

from benchmarks.router import first_tokens
from kvarn.bench.connection import Address, Connection, request_bytes
from kvarn.bench.report import describe_machine

STREAMS, TOKENS = 8, 500


def _put_first() -> None:
    """What benchmarks.quiet does, for all processes below this one."""
    own = Path("/proc/self/autogroup")
    if not own.exists() or "nice -20" not in own.read_text(encoding="ascii"):
        return
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    for pid in parents:
        ancestor: int | None = pid
        while ancestor not in (None, os.getpid()):
            ancestor = parents.get(ancestor or 0)
        if ancestor is not None:
            with suppress(OSError):
                Path(f"/proc/{pid}/autogroup").write_text("-20", encoding="ascii")


async def _stream(address: Address) -> None:
    connection = await Connection.open(address)
    body = {"model": "tiny", "prompt": "once", "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
    await connection.exchange(request_bytes(address, "POST", "/v1/completions", body=body), 120.0)
    connection.close()


async def _tokens_per_s(url: str) -> float:
    began = time.perf_counter()
    await asyncio.gather(*(_stream(Address.of(url)) for _ in range(STREAMS)))
    return STREAMS * TOKENS / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--write", metavar="NAME", help="keep the figures in benchmarks/results/NAME.json")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ray_nodes(1) as (address, _):
        folder = Path(name)
        model = write_chat_model(folder / "tiny.gguf")
        with (
            ServerProcess("--model", f"tiny={model}", "--threads", "1") as plain,
            RayServer(address, "--model", f"tiny={model}", "--drain-delay", "0", folder=folder) as on_ray,
        ):
            _put_first()
            urls = [plain.url, on_ray.url]
            asyncio.run(first_tokens(urls, 20, 200))
            direct, routed = asyncio.run(first_tokens(urls, given.requests, 200))
            streams = [[asyncio.run(_tokens_per_s(url)) for url in urls] for _ in range(7)]
    row = {
        "direct_p50_ms": round(1000 * statistics.median(direct), 2),
        "ray_p50_ms": round(1000 * statistics.median(routed), 2),
        "direct_tokens_per_s": round(statistics.median(one for one, _ in streams)),
        "ray_tokens_per_s": round(statistics.median(one for _, one in streams)),
    }
    print(row)
    if given.write:
        command = shlex.join(["python", "-m", "benchmarks.ray_serve", *sys.argv[1:]])
        write_result(given.write, {"requests": given.requests, "runs": [row]}, command=command)
    print(json.dumps({"bench": "ray_serve", "machine": describe_machine(), "runs": [row]}))


if __name__ == "__main__":
    main()
