"""llama.cpp through xllamacpp: the server of the wheel (a generic AVX2 build) in this process, timed by its own clock.

Sequences of a batch are the `n` answers to one prompt: all start in the same step, and a shared prompt is computed
once and copied. Decode counts the steps after the first token. Deep rows: the better of flash attention on and off.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xllamacpp

from benchmarks.engines import random_ids
from kvarn.bench.rows import Row


def version() -> str:
    return f"xllamacpp {xllamacpp.__version__}: {xllamacpp.get_system_info()}"


def open_engine(model: Path, threads: int, _rows: Sequence[Row]) -> ServerInProcess:
    return ServerInProcess(model, threads)


class ServerInProcess:
    def __init__(self, model: Path, threads: int) -> None:
        self._model, self._threads = model, threads
        self._seed = 0
        self._flash: dict[Row, bool] = {}
        self._shape: tuple[int, int, bool] | None = None
        self._server: Any = None

    def tokens_per_s(self, row: Row, steps: int) -> float | None:
        """With flash attention on or off, whichever was faster the first time."""
        if row.depth and row not in self._flash:
            self._flash[row] = max((True, False), key=lambda has_flash: self._measure(row, steps, has_flash))
        return self._measure(row, steps, self._flash.get(row, True))

    def _measure(self, row: Row, steps: int, has_flash: bool) -> float:
        self._open(row.batch or 1, row.prompt + row.depth + steps + 64, has_flash)
        self._seed += row.is_prefill
        timings: list[dict[str, float]] = []

        def collect(chunk: dict[str, Any]) -> bool:
            if "timings" in chunk:
                timings.append(chunk["timings"])
            return False

        request = {
            "prompt": random_ids(row.prompt or row.depth or 1, self._seed),
            "n_predict": 1 if row.is_prefill else steps + 1,
            "n": row.batch or 1,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": not row.is_prefill,
            "stream": True,
        }
        self._server.handle_completions(request, collect)
        if row.is_prefill:
            return timings[0]["prompt_n"] / timings[0]["prompt_ms"] * 1e3
        return sum((found["predicted_n"] - 1) / found["predicted_ms"] for found in timings) * 1e3

    def _open(self, parallel: int, context: int, has_flash: bool) -> None:
        """A server with exactly as many slots as the row has sequences."""
        shape = (parallel, context, has_flash)
        if shape == self._shape:
            return
        self._server = None  # free the old one first
        params = server_params(self._model, self._threads, parallel, context)
        flash = xllamacpp.llama_flash_attn_type
        params.flash_attn_type = flash.LLAMA_FLASH_ATTN_TYPE_AUTO if has_flash else flash.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._server, self._shape = xllamacpp.Server(params), shape


def server_params(model: Path, threads: int, parallel: int, context: int) -> Any:
    """For a server with so many slots, each of so many tokens."""
    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.n_parallel, params.n_ctx = parallel, parallel * context
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.fit_params = params.kv_unified = False
    params.verbosity = -1
    return params
