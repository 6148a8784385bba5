"""Tools in `auto`: how many of fifty questions a server answers with a tool call, and with valid arguments.

    python -m benchmarks.tools_auto NAME=URL [NAME=URL ...] [--model ID] [--max-tokens 200] [--write NAME] [--show]

Each URL is a server with /v1/chat/completions that serves the same model; every question is asked once, at
temperature 0. Prints a table and one line of JSON, last; --write NAME adds the figures to benchmarks/results/NAME.json.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from typing import Any

import httpx
import jsonschema_rs
from tests.results import RESULTS, write_result

from benchmarks.tool_tasks import TASKS, TOOLS, Task

TIMEOUT_S = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("servers", nargs="+", metavar="NAME=URL")
    parser.add_argument("--model", help="default: the first that the server names")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--write", metavar="NAME")
    parser.add_argument("--show", action="store_true", help="print what is no valid call of the right tool")
    args = parser.parse_args()
    figures = {}
    for server in args.servers:
        name, _, url = server.partition("=")
        figures[name] = measure(url, args.model, args.max_tokens, shows=args.show)
        print(f"{name:24}" + "".join(f"  {key} {value}" for key, value in figures[name].items()))
    if args.write:
        path = RESULTS / f"{args.write}.json"
        earlier = json.loads(path.read_text(encoding="utf-8"))["figures"] if path.exists() else {}
        given = [arg.partition("=")[0] for arg in sys.argv[1:]]  # without addresses
        command = shlex.join(["python", "-m", "benchmarks.tools_auto", *given])
        write_result(args.write, earlier | figures, command=command)
    print(json.dumps(figures))


def measure(
    url: str, model: str | None, max_tokens: int, tasks: Sequence[Task] = TASKS, *, shows: bool = False
) -> dict[str, Any]:
    """Ask everything and count."""
    figures: dict[str, Any] = {"questions": len(tasks)}
    figures |= dict.fromkeys(("recognised", "right_tool", "valid_arguments", "calls"), 0)
    started_at = time.monotonic()
    with httpx.Client(base_url=url, timeout=TIMEOUT_S) as client:
        model = model or client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        for task in tasks:
            message = ask(client, model, task, max_tokens)
            calls = message.get("tool_calls") or []
            is_right = any(call["function"]["name"] == task.wanted for call in calls)
            is_valid = bool(calls) and all(is_valid_call(call["function"]) for call in calls)
            figures["recognised"] += bool(calls)
            figures["right_tool"] += is_right
            figures["valid_arguments"] += is_valid
            figures["calls"] += len(calls)
            if shows and not (is_right and is_valid):
                print(f"--- {task.question} {task.tools}\n{message}", file=sys.stderr)
    return figures | {"seconds": round(time.monotonic() - started_at, 1)}


def ask(client: httpx.Client, model: str, task: Task, max_tokens: int) -> dict[str, Any]:
    """One question, its answer."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": task.question}],
        "tools": [TOOLS[name] for name in task.tools],
        "tool_choice": "auto",
        "temperature": 0,
        "max_tokens": max_tokens,
    }
    answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
    message: dict[str, Any] = answer["choices"][0]["message"]
    return message


def is_valid_call(function: dict[str, Any]) -> bool:
    """Whether a declared tool is called with arguments that follow its schema."""
    try:
        arguments = json.loads(function["arguments"])
        schema = TOOLS[function["name"]]["function"]["parameters"]
    except (ValueError, KeyError):
        return False
    return jsonschema_rs.validator_for(schema).is_valid(arguments)


if __name__ == "__main__":
    main()
