"""llama.cpp's own llama-bench, a binary the user points at; batched rows with the llama-batched-bench beside it.

Deep rows: the better of flash attention on and off.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvarn.bench.rows import Row

PATH_VARIABLE = "KVARN_LLAMA_BENCH"  # set by peers.py


def open_engine(model: Path, threads: int, _rows: Sequence[Row]) -> LlamaBench:
    if PATH_VARIABLE not in os.environ:
        raise SystemExit("give --llama-bench PATH")
    return LlamaBench(Path(os.environ[PATH_VARIABLE]), model, threads)


class LlamaBench:
    is_warm = True  # every measurement is a process that runs once before it measures

    def __init__(self, binary: Path, model: Path, threads: int) -> None:
        self._binary, self._batched_binary = binary, binary.with_name("llama-batched-bench")
        self._arguments = ["-m", str(model), "-t", str(threads)]
        self._commit = "unknown"

    def version(self) -> str:
        return f"llama-bench, build {self._commit}"

    def tokens_per_s(self, row: Row, steps: int) -> float | None:
        if row.batch > 1:
            return self._batched(row, steps) if self._batched_binary.exists() else None
        command = [str(self._binary), *self._arguments, "-p", str(row.prompt)]
        command += ["-n", "0" if row.is_prefill else str(steps), "-d", str(row.depth), "-r", "1", "-o", "json"]
        found = json.loads(output_of([*command, "-fa", "on,off"] if row.depth else command))
        self._commit = found[0]["build_commit"]
        return max(float(one["avg_ts"]) for one in found)

    def _batched(self, row: Row, steps: int) -> float:
        command = [str(self._batched_binary), *self._arguments, *batch_arguments(row, steps)]
        lines = output_of([*command, "--output-format", "jsonl"]).splitlines()
        found: list[dict[str, Any]] = [json.loads(line) for line in lines if line.startswith("{")]
        return float(found[-1]["speed_tg"])


def batch_arguments(row: Row, steps: int) -> list[str]:
    """What llama-batched-bench needs to know about a row."""
    context = row.batch * (row.depth + steps + 64)
    sizes = ["-npp", str(row.depth or 1), "-ntg", str(steps), "-npl", str(row.batch)]
    return ["-c", str(context), *sizes, *(["-pps"] if row.is_shared else [])]


def output_of(command: Sequence[str]) -> str:
    """What a program prints on stdout."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
