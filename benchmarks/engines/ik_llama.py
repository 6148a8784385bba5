"""ik_llama.cpp: its own llama-bench, a binary the user points at; batched rows with the llama-batched-bench beside it.

As it is run on a CPU: weights repacked at load, flash attention. Its llama-bench has no `-d`; a deep row is `-gp`,
steps after a prompt that is not timed. Its llama-batched-bench prints a table only, on stderr, and writes a log file.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.engines.llama_bench import batch_arguments, output_of
from kvarn.bench.rows import Row

PATH_VARIABLE = "KVARN_IK_LLAMA_BENCH"  # set by peers.py
NUM_COLUMNS, SPEED_COLUMN = 10, 7  # of the table: S_TG t/s


def open_engine(model: Path, threads: int, _rows: Sequence[Row]) -> IkLlamaBench:
    if PATH_VARIABLE not in os.environ:
        raise SystemExit("give --ik-llama-bench PATH")
    return IkLlamaBench(Path(os.environ[PATH_VARIABLE]), model, threads)


class IkLlamaBench:
    is_warm = True  # every measurement is a process that runs once before it measures

    def __init__(self, binary: Path, model: Path, threads: int) -> None:
        self._binary, self._batched_binary = binary, binary.with_name("llama-batched-bench")
        self._arguments = ["-m", str(model), "-t", str(threads), "-fa", "1"]
        self._commit = "unknown"

    def version(self) -> str:
        return f"ik_llama.cpp, build {self._commit}, -rtr 1 -fa 1"

    def tokens_per_s(self, row: Row, steps: int) -> float | None:
        if row.batch > 1:
            return self._batched(row, steps) if self._batched_binary.exists() else None
        command = [str(self._binary), *self._arguments, "-rtr", "1", "-r", "1", "-o", "json", "-p", str(row.prompt)]
        command += ["-n", "0" if row.is_prefill or row.depth else str(steps)]
        command += ["-gp", f"{row.depth},{steps}"] if row.depth else []
        found = json.loads(output_of(command))[0]
        self._commit = found["build_commit"]
        return float(found["avg_ts"])

    def _batched(self, row: Row, steps: int) -> float:
        command = [str(self._batched_binary), *self._arguments, "-rtr", *batch_arguments(row, steps)]
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
        return speed_in(done.stderr)


def speed_in(table: str) -> float:
    """Tokens a second of the last row of llama-batched-bench's table."""
    rows = [line.strip().strip("|").split("|") for line in table.splitlines() if line.lstrip().startswith("|")]
    return float(next(row for row in reversed(rows) if len(row) == NUM_COLUMNS)[SPEED_COLUMN])
