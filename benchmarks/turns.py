"""Engines that take turns: each launch is a process of its own, whose last line of JSON is what it found.

Speed varies between launches of a process more than within one, so a figure is the median of launches, and engines that
are compared are launched in turns. Knows no engine and no figure.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.results import RESULTS, ROOT

from kvarn.machine import choose_threads

OURS = "kvarn"


@dataclass
class Runs:
    """What the launches of one engine found."""

    version: str = ""
    missing: str = ""
    launches: list[dict[str, Any]] = field(default_factory=list)

    def median(self, key: str) -> float | None:
        """Of one figure, over the launches that have it."""
        found = [launch[key] for launch in self.launches if launch.get(key) is not None]
        return statistics.median(found) if found else None


def make_parser(description: str, engines: Sequence[str]) -> argparse.ArgumentParser:
    """The options that every comparison has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model", type=Path)
    parser.add_argument("--launches", type=int, default=5)
    parser.add_argument("--threads", type=int, default=choose_threads().count)
    parser.add_argument("--engines", default=",".join(engines), help="comma-separated; default: all that are installed")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one launch")
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PATH", help="its interpreter")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for what is written")
    return parser


def parse(parser: argparse.ArgumentParser, words: list[str] | None, known: Iterable[str]) -> argparse.Namespace:
    """Read and check them; adds `pythons`, by engine."""
    args = parser.parse_args(words)
    unknown = sorted(set(args.engines.split(",")) - set(known))
    if unknown:
        parser.error(f"--engines: no engine {unknown[0]!r}; choose from {', '.join(known)}")
    if not args.model.is_file():
        parser.error(f"{args.model} is not a file; make one with `kvarn bench make`")
    args.pythons = dict(entry.partition("=")[::2] for entry in args.python)
    return args


def take_turns(
    args: argparse.Namespace, command_of: Callable[[str], list[str]], variables: Mapping[str, str] | None = None
) -> dict[str, Runs]:
    """Launch every engine so often; whatever goes wrong in a launch is the engine's own affair."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a running launch is ended too
    runs = {name: Runs() for name in args.engines.split(",")}
    for number in range(args.launches):
        for name in (name for name, found in runs.items() if not found.missing):
            print(f"\rlaunch {number + 1} of {args.launches}: {name:<20}", end="", file=sys.stderr, flush=True)
            _take(name, runs[name], last_json(command_of(name), args.timeout, variables))
    print(file=sys.stderr)
    return runs


def _take(name: str, runs: Runs, found: dict[str, Any]) -> None:
    if "missing" in found:
        runs.missing = found["missing"]
        print(f"\n{name} is left out: {runs.missing}", file=sys.stderr)
    else:
        runs.version = found["version"]
        runs.launches.append(found)


def last_json(command: list[str], timeout_s: float, variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run a command in a session of its own; `missing` says why there is nothing else."""
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | dict(variables or {})
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as child:
        try:
            out, err = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return {"missing": f"a launch took more than {timeout_s:g} s"}
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if child.returncode != 0 or not lines:
        return {"missing": " ".join(err.strip().splitlines()[-1:])[:300] or f"exit code {child.returncode}"}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def missing_of(runs: Mapping[str, Runs]) -> dict[str, str]:
    """Why engines were left out."""
    return {name: found.missing for name, found in runs.items() if found.missing}


def command_line(module: str) -> str:
    """How this was called."""
    return shown(["python", "-m", module, *sys.argv[1:]])


def shown(command: Sequence[str]) -> str:
    """A command without the folders: results are published, and paths of a machine are private."""
    return shlex.join(re.sub(r"(^|=)/\S*/", r"\1", word) for word in command)


def cell(value: float | None, form: str) -> str:
    """For a table."""
    return "-" if value is None else format(value, form)
