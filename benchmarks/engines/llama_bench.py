"""llama.cpp's own llama-bench, a binary the user points at; batched rows with the llama-batched-bench beside it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvarn.bench.rows import Row

PATH_VARIABLE = "KVARN_LLAMA_BENCH"  # set by peers.py


def version() -> str:
    return f"llama-bench {os.environ[PATH_VARIABLE]}"


def open_engine(model: Path, threads: int, _rows: Sequence[Row]) -> LlamaBench:
    if PATH_VARIABLE not in os.environ:
        raise SystemExit("give --llama-bench PATH")
    return LlamaBench(model, threads)


class LlamaBench:
    def __init__(self, model: Path, threads: int) -> None:
        self._model, self._threads = model, threads
        self._flash: dict[Row, str] = {}

    def tokens_per_s(self, row: Row, steps: int) -> float | None:
        if row.batch > 1:
            return self._batched(row, steps)
        if row.depth and row not in self._flash:
            self._flash[row] = max(("1", "0"), key=lambda flash: self._single(row, steps, flash))
        return self._single(row, steps, self._flash.get(row, "auto"))

    def _single(self, row: Row, steps: int, flash: str) -> float:
        command = [_binary("llama-bench"), "-m", str(self._model), "-t", str(self._threads), "-r", "1", "-o", "json"]
        command += ["-p", str(row.prompt), "-n", "0" if row.is_prefill else str(steps), "-d", str(row.depth)]
        if flash != "auto":
            command += ["-fa", flash]
        return float(_run(command)[0]["avg_ts"])

    def _batched(self, row: Row, steps: int) -> float | None:
        binary = _binary("llama-batched-bench")
        if not Path(binary).exists():
            return None
        context = row.batch * (row.depth + steps + 64)
        command = [binary, "-m", str(self._model), "-t", str(self._threads), "-c", str(context)]
        command += ["-npp", str(row.depth or 1), "-ntg", str(steps), "-npl", str(row.batch), "--output-format", "jsonl"]
        command += ["-pps"] if row.is_shared else []
        return float(_run(command)[-1]["speed_tg"])


def _binary(name: str) -> str:
    return str(Path(os.environ[PATH_VARIABLE]).with_name(name))


def _run(command: list[str]) -> list[dict[str, Any]]:
    """JSON from the output, a list or one object a line."""
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    text = done.stdout.strip()
    if text.startswith("["):
        found: list[dict[str, Any]] = json.loads(text)
        return found
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]
