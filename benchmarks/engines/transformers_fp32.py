"""transformers in float32 on torch: the GGUF file dequantised when it is loaded. What most people start with.

Sequences of a batch start as copies of one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import accelerate  # noqa: F401 - transformers wants both for GGUF files
import gguf  # noqa: F401
import torch
import transformers

from benchmarks.engines import random_ids
from kvarn.bench.rows import Row


def version() -> str:
    return f"transformers {transformers.__version__}, torch {torch.__version__}, float32"


def open_engine(model: Path, threads: int, _rows: Sequence[Row]) -> Transformers:
    return Transformers(model, threads)


class Transformers:
    def __init__(self, model: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        transformers.logging.set_verbosity_error()
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            str(model.parent), gguf_file=model.name, dtype=torch.float32
        ).eval()

    @torch.inference_mode()
    def tokens_per_s(self, row: Row, steps: int) -> float | None:
        if row.is_prefill:
            ids = torch.tensor([random_ids(row.prompt, 1)])
            started = time.perf_counter()
            self._model(input_ids=ids, use_cache=True, logits_to_keep=1)
            return row.prompt / (time.perf_counter() - started)
        ids = torch.tensor([random_ids(max(row.depth, 1), 1)])
        out = self._model(input_ids=ids, use_cache=True, logits_to_keep=1)
        cache, logits = out.past_key_values, out.logits.expand(row.batch, -1, -1)
        cache.batch_repeat_interleave(row.batch)
        started = time.perf_counter()
        for _ in range(steps):
            out = self._model(input_ids=logits[:, -1:].argmax(-1), past_key_values=cache, use_cache=True)
            logits = out.logits
        return row.batch * steps / (time.perf_counter() - started)
