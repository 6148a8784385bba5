"""Keep what a command found: its last line of JSON becomes results/NAME.json, with commit, machine, date and command.

    python -m benchmarks.record NAME COMMAND [ARGUMENTS ...]

For commands that print that line and write nothing, such as `kvarn bench engine`. Knows no figure.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.results import RESULTS, write_result

from benchmarks.turns import shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", help="of the result, without .json")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND [ARGUMENTS ...]")
    args = parser.parse_args()
    if not args.command:
        parser.error("a command is needed, for example `kvarn bench engine`")
    path = record(args.name, args.command, RESULTS)
    print(f"{path.name} written", file=sys.stderr)


def record(name: str, command: Sequence[str], folder: Path) -> Path:
    """Run a command, show what it prints, and write its last line of JSON; kvarn is this interpreter's."""
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    done = subprocess.run(command, env=os.environ | {"PATH": search}, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, end="")
    found = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not found:
        sys.exit(f"{shown(command)} ended with {done.returncode} and {len(found)} lines of JSON; nothing is written")
    return write_result(name, json.loads(found[-1]), folder, command=shown(command))


if __name__ == "__main__":
    main()
