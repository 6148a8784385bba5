"""llama.cpp through llama-cpp-python's low-level interface, in the way of llama-bench: no sampling, random tokens.

Compiled for this machine when installed from source, so usually the fastest llama.cpp here. Deep rows: the better of
flash attention on and off. A shared prefix is computed once and copied to every sequence.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp as c

from benchmarks.engines import random_ids
from kvarn.bench.rows import Row

MAX_BATCH = 512  # llama-bench's -ub
FLASH = (-1, 0)  # flash attention: auto, off


def version() -> str:
    return f"llama-cpp-python {c.__version__}: {c.llama_print_system_info().decode().strip()}"


def open_engine(model: Path, threads: int, _rows: Sequence[Row]) -> LlamaPython:
    return LlamaPython(model, threads)


class LlamaPython:
    def __init__(self, model: Path, threads: int) -> None:
        c.llama_backend_init()
        self._silent = c.llama_log_callback(lambda *_: None)
        c.llama_log_set(self._silent, None)
        self._threads = threads
        self._model = c.llama_model_load_from_file(str(model).encode(), c.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        self._batch = c.llama_batch_init(MAX_BATCH, 0, 1)
        self._context: Any = None
        self._flash: dict[Row, int] = {}
        self._shape: tuple[Row, int, int] | None = None

    def tokens_per_s(self, row: Row, steps: int) -> float | None:
        """With flash attention on or off, whichever was faster the first time."""
        if row.depth and row not in self._flash:
            self._flash[row] = max(FLASH, key=lambda flash: self._measure(row, steps, flash))
        return self._measure(row, steps, self._flash.get(row, FLASH[0]))

    def _measure(self, row: Row, steps: int, flash: int) -> float:
        context = self._open(row, steps, flash)
        memory = c.llama_get_memory(context)
        for sequence in range(row.batch or 1):
            c.llama_memory_seq_rm(memory, sequence, row.depth, -1)
        if row.is_prefill:
            started = time.perf_counter()
            self._fill(context, row.prompt)
            return row.prompt / (time.perf_counter() - started)
        ids, sequences = random_ids(row.batch * steps, 1), list(range(row.batch))
        started = time.perf_counter()
        for step in range(steps):
            self._decode(context, ids[step * row.batch :][: row.batch], row.depth + step, sequences)
        return row.batch * steps / (time.perf_counter() - started)

    def _open(self, row: Row, steps: int, flash: int) -> Any:
        """A context with what this row expects in its cache, kept while it is measured: a new one has cold memory."""
        if self._shape == (row, steps, flash):
            return self._context
        if self._context is not None:
            c.llama_free(self._context)
        params = c.llama_context_default_params()
        params.n_seq_max = row.batch or 1
        params.n_ctx = (row.batch or 1) * (row.prompt + row.depth + steps + 64)
        params.n_batch = params.n_ubatch = MAX_BATCH
        params.n_threads = params.n_threads_batch = self._threads
        params.flash_attn_type = flash
        params.kv_unified = False
        self._context, self._shape = c.llama_init_from_model(self._model, params), (row, steps, flash)
        self._fill(self._context, row.depth)
        for sequence in range(1, row.batch if row.depth else 0):
            c.llama_memory_seq_cp(c.llama_get_memory(self._context), 0, sequence, -1, -1)
        return self._context

    def _fill(self, context: Any, num_tokens: int) -> None:
        ids = random_ids(num_tokens, 2)
        for begin in range(0, num_tokens, MAX_BATCH):
            self._decode(context, ids[begin : begin + MAX_BATCH], begin, [0])
        c.llama_synchronize(context)

    def _decode(self, context: Any, ids: Sequence[int], position: int, sequences: Sequence[int]) -> None:
        """One batch: a chunk of one sequence, or one token for each of several."""
        batch, is_chunk = self._batch, len(sequences) == 1
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i] = token
            batch.pos[i] = position + (i if is_chunk else 0)
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0 if is_chunk else sequences[i]
            batch.logits[i] = not is_chunk or i == len(ids) - 1
        if c.llama_decode(context, batch) != 0:
            raise RuntimeError(f"llama_decode failed for {len(ids)} tokens at {position}")
        c.llama_synchronize(context)
