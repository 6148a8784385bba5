"""One launch of one engine with several users: prints one line of JSON, last. Started by users.py.

    python -m benchmarks.serving ENGINE MODEL ROW [--threads 2] [--answer 64] [--server-python PYTHON]

Kvarn and llama.cpp are servers in processes of their own, asked over HTTP by the load generator of `kvarn bench serve`
in this one; OpenVINO runs in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.engines import engine_module
from benchmarks.engines.users import USERS, Users, peak_rss_mb
from benchmarks.quiet import protect

ENGINES = ("kvarn", "xllamacpp", "openvino")
SLOTS = 8  # of llama.cpp; more would each compute a shared prompt anew
SPARE_TOKENS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model", type=Path)
    parser.add_argument("row", choices=USERS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--requests", type=int, help="instead of the row's")
    parser.add_argument("--answer", type=int, help="tokens of every answer, instead of the row's")
    parser.add_argument("--server-python", default=sys.executable)
    args = parser.parse_args()
    is_protected = protect()
    users = USERS[args.row].resized(args.requests, args.answer)
    found = (_in_process if args.engine == "openvino" else _over_http)(args, users)
    if found["completion_tokens"] != users.requests * users.answer:
        sys.exit(f"{found['completion_tokens']} tokens came, not {users.requests} x {users.answer}")
    print(json.dumps({"is_protected": is_protected, **found}), flush=True)


def _in_process(args: argparse.Namespace, users: Users) -> dict[str, Any]:
    module = engine_module(args.engine)
    from benchmarks.engines.openvino_users import serve_users

    found = serve_users(module.open_engine(args.model.resolve(), args.threads, ()), users)
    return {"version": module.version(), **found}


def _over_http(args: argparse.Namespace, users: Users) -> dict[str, Any]:
    with running_server(_command(args, users)) as server:
        _load(server.url, replace(users, requests=2, answer=2), seed=2)
        found = _load(server.url, users, seed=1)
        return {"version": server.version, **found, "rss_mb": peak_rss_mb(server.pid)}


def _command(args: argparse.Namespace, users: Users) -> list[str]:
    model, threads = str(args.model.resolve()), str(args.threads)
    if args.engine == "kvarn":
        command = [args.server_python, "-m", "kvarn.cli.main", "serve", "--port", "0"]
        return [*command, "--model", model, "--threads", threads]
    context = users.shared + users.own + users.answer + SPARE_TOKENS
    command = [args.server_python, "-m", "benchmarks.engines.xllama_server", model, threads]
    return [*command, str(SLOTS), str(context)]


@dataclass(frozen=True, slots=True)
class Server:
    """One that answers."""

    pid: int
    version: str
    url: str


@contextmanager
def running_server(command: list[str]) -> Iterator[Server]:
    """A server process until the end of the block; what it says on its way goes to stderr."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield _wait_for(process)
        finally:
            process.kill()


def _wait_for(process: subprocess.Popen[str]) -> Server:
    """Read up to the line with the address."""
    import kvarn

    version = f"kvarn {kvarn.__version__}"
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("xllamacpp"):
            version = line.strip()
        _, found, rest = line.rstrip().rpartition("http://")
        if found:
            return Server(process.pid, version, f"http://{rest}")
    sys.exit(process.wait())  # why is the last line on stderr


def _load(url: str, users: Users, seed: int) -> dict[str, Any]:
    from kvarn.bench.serve import Load, require_success, run_load

    load = Load(
        url,
        concurrency=users.concurrency,
        num_requests=users.requests,
        prompt_ids=users.prompts(seed),
        max_tokens=users.answer,
        temperature=0.0,
        ignores_end=True,
    )
    report = asyncio.run(run_load(load))
    require_success(report)
    if report["succeeded"] < users.requests:
        sys.exit(
            f"{report['succeeded']} of {users.requests} requests succeeded; the first failure: {report['example']}"
        )
    names = ("completion_tokens", "prompt_tokens", "cached_tokens", "seconds", "tokens_per_s")
    first_s = report["first_token_ms"]["p50"] / 1000
    gap_ms = report["inter_token_ms"]["p50"] if report["inter_token_ms"] else 0.0  # each answer may be one event
    return {name: report[name] for name in names} | {"first_s": round(first_s, 4), "gap_ms": gap_ms}


if __name__ == "__main__":
    main()
