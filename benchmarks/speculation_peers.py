"""Speculation of kvarn serve and of llama.cpp's server on the same chats: tokens per CPU second, with it and without.

    python -m benchmarks.speculation_peers MODEL [--server-python PYTHON] [--kind ngram_mod] [--case quoting]

Four servers with one thread each are asked in turns over HTTP, prompts cached. CPU seconds of a server's processes, and
what each kind gains over the same engine without. PYTHON has xllamacpp. Prints a table and one line of JSON, last.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from tests.results import write_result

from benchmarks.serving import Server, running_server
from benchmarks.speculation import CASES, TOGETHER, Ask, chat

CONTEXT = 2048
TICKS = os.sysconf("SC_CLK_TCK")
PAIRS = {"kvarn": ("kvarn off", "kvarn on"), "llama-server": ("llama-server off", "llama-server on")}


def main() -> None:
    options = _options()
    with ExitStack() as stack:
        servers = {name: stack.enter_context(running_server(command)) for name, command in _commands(options).items()}
        versions = {name.split()[0]: server.version for name, server in servers.items()}
        found = {name: measure(servers, name, options.rounds, options.tokens) for name in options.case or CASES}
    figures = {"model": options.model.name, "kind": options.kind, "versions": versions, "cases": found}
    if options.write:
        write_result(options.write, figures, command=f"python -m benchmarks.speculation_peers {_told(options)}")
    print(json.dumps(figures))


def measure(servers: dict[str, Server], case: str, rounds: int, tokens: int) -> dict[str, Any]:
    """Medians of rounds in turns, after one that fills caches and learns."""
    ask, _ = CASES[case]
    assert case not in TOGETHER, "requests come one after another here"
    rates: dict[str, list[float]] = {name: [] for name in servers}
    for turn in range(rounds + 1):
        for name, server in list(servers.items())[:: 1 if turn % 2 else -1]:
            before = cpu_s(server.pid)
            num_tokens = sum(answer(server.url, one) for one in ask(tokens, turn))
            rates[name].append(num_tokens / (cpu_s(server.pid) - before))
    figures: dict[str, Any] = {name: round(median(found[1:]), 1) for name, found in rates.items()}
    for engine, (off, on) in PAIRS.items():
        figures[f"{engine} speedup"] = round(
            median(b / a for a, b in zip(rates[off][1:], rates[on][1:], strict=True)), 3
        )
    print(f"{case:12}", "  ".join(f"{name} {value}" for name, value in figures.items()), flush=True)
    return figures


def answer(url: str, ask: Ask) -> int:
    """Tokens that a server answers one chat with."""
    params, model = ask.params, httpx.get(f"{url}/v1/models", timeout=30).json()["data"][0]["id"]
    body: dict[str, Any] = {"model": model, "messages": chat(ask.text), "max_tokens": params.max_tokens, "seed": 1}
    body["temperature"] = params.temperature
    if params.prediction is not None:  # llama.cpp's server has no use for it
        body["prediction"] = {"type": "content", "content": params.prediction}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300)
    assert response.is_success, response.text
    num_tokens: int = response.json()["usage"]["completion_tokens"]
    return num_tokens


def cpu_s(pid: int) -> float:
    """Of a process and its children, so far."""
    found = 0.0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(folder.name) == pid or int(fields[1]) == pid:
            found += (int(fields[11]) + int(fields[12])) / TICKS
    return found


def _commands(options: argparse.Namespace) -> dict[str, list[str]]:
    model = str(options.model.resolve())
    ours = [sys.executable, "-m", "kvarn.cli.main", "serve", "--port", "0", "--model", model, "--threads", "1"]
    ours += ["--context", str(CONTEXT), "--no-prefix-cache"]
    theirs = [options.server_python, "-m", "benchmarks.engines.xllama_server", model, "1", "1", str(CONTEXT)]
    return {
        "kvarn off": ours,
        "kvarn on": [*ours, "--speculate", "auto,suffix"],
        "llama-server off": theirs,
        "llama-server on": [*theirs, "--speculate", options.kind],
    }


def _told(options: argparse.Namespace) -> str:
    words = [word for word in sys.argv[1:] if word not in (str(options.model), options.server_python)]
    return f"MODEL {shlex.join(word for word in words if word != '--server-python')}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--server-python", default=sys.executable)
    parser.add_argument("--kind", default="ngram_mod", help="of llama.cpp's speculation, with its defaults")
    parser.add_argument("--case", action="append", choices=[name for name in CASES if name not in TOGETHER])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--write", metavar="NAME", help="keep the figures in benchmarks/results/NAME.json")
    options = parser.parse_args()
    options.case = options.case or [name for name in CASES if name not in TOGETHER]
    return options


if __name__ == "__main__":
    main()
