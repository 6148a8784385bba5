"""OpenVINO GenAI: its continuous batching reads the same GGUF file; the precision it computes in is its own choice.

Driven step by step in this process. A shared prefix is found in its prefix cache, filled by a request before.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import openvino
import openvino_genai

from benchmarks.engines import random_ids
from kvarn.bench.rows import Row

CACHE_GB = 2


def version() -> str:
    return f"openvino-genai {openvino_genai.__version__}"


def open_engine(model: Path, threads: int, _rows: Sequence[Row]) -> OpenVino:
    return OpenVino(model, threads)


class OpenVino:
    def __init__(self, model: Path, threads: int) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.enable_prefix_caching = True
        scheduler.max_num_batched_tokens = 1024
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(model), scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}
        )
        self._seed = 0

    def tokens_per_s(self, row: Row, steps: int) -> float | None:
        if row.is_prefill:
            self._seed += 1
            self._add([random_ids(row.prompt, self._seed)], 1)
            return row.prompt / sum(self._step_to_end())
        prompts = [self._prompt(row, sequence) for sequence in range(row.batch)]
        if row.is_shared:
            self._add(prompts[:1], 1)
            self._step_to_end()
        self._add(prompts, steps + 8)
        return row.batch / float(np.median(self._step_to_end()[-steps:]))  # all decode together at the end

    def _prompt(self, row: Row, sequence: int) -> list[int]:
        common = random_ids(max(row.depth, 1) - row.is_shared, 7 if row.is_shared else sequence)
        return [*common, 2000 + sequence] if row.is_shared else common

    def _add(self, prompts: Sequence[list[int]], num_tokens: int) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = num_tokens, True, False
        self._handles = [
            self.pipeline.add_request(i, openvino.Tensor(np.array([ids], np.int64)), config)
            for i, ids in enumerate(prompts)
        ]

    def _step_to_end(self) -> list[float]:
        """Seconds of each step until all requests are finished."""
        times = []
        while self.pipeline.has_non_finished_requests():
            started = time.perf_counter()
            self.pipeline.step()
            times.append(time.perf_counter() - started)
        return times
