"""A model under evaluation: loaded once, run over chunks of text. Knows batches and backends, nothing of divergence."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvarn.backends.protocol import Hidden
from kvarn.config import EngineConfig
from kvarn.engine.embed_score import token_states
from kvarn.engine.load import load_model
from kvarn.errors import UnsupportedModel
from kvarn.evaluation.text import calibration_digests
from kvarn.formats.open import open_weights
from kvarn.models.describe import describe
from kvarn.models.spec import Autoregressive

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]

LOGIT_BYTES = 32 << 20  # of the rows of logits alive at one time
DECODE_STEPS = 24
MIN_CONTEXT = 64  # of a model whose predictions are measured on a text


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What the file says before it is run. calibration: sha256 of the texts it was calibrated with."""

    num_bytes: int
    num_weights: int
    tensor_bytes: int
    calibration: tuple[str, ...]

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.tensor_bytes / self.num_weights


def file_facts(path: Path) -> FileFacts:
    """Size and weights of a model's files."""
    source = open_weights(path)
    try:
        infos = source.tensors.values()
        return FileFacts(
            num_bytes=getattr(source, "num_bytes", sum(info.num_bytes for info in infos)),
            num_weights=sum(info.num_values for info in infos),
            tensor_bytes=sum(info.num_bytes for info in infos),
            calibration=calibration_digests(source.metadata),
        )
    finally:
        source.close()


def fitting_context(path: Path, wanted: int) -> int:
    """So many tokens, or as many as the model was made for, where those are fewer."""
    source = open_weights(path)
    try:
        length = describe(source).spec.context_length
    finally:
        source.close()
    if length < MIN_CONTEXT:
        raise UnsupportedModel(
            f"{path} was made for {length} tokens, measuring needs sequences of {MIN_CONTEXT}; use rtn or imatrix "
            "with a shorter --context"
        )
    return min(wanted, length)


class EvaluatedModel:
    """A loaded left-to-right model; close() frees it."""

    def __init__(self, path: Path, config: EngineConfig, progress: Callable[[int, int], None] | None = None) -> None:
        self.name = os.path.basename(path) or str(path)
        self.facts = file_facts(path)
        self._model = load_model(path, config, progress)
        if not isinstance(self._model.spec.generation, Autoregressive):
            self.close()
            raise UnsupportedModel(
                f"{self.name} does not write from left to right, so it has no perplexity; evaluate a decoder model"
            )
        self.tokenizer = self._model.tokenizer
        self.spec = self._model.spec
        self._seconds = 0.0
        self._num_tokens = 0

    def states(self, ids: Int32, first: int) -> list[Hidden]:
        """The states that predict tokens first + 1 .. of a chunk, in pieces."""
        engine = self._model.engine
        started = time.perf_counter()
        found = list(token_states(engine.backend, engine.kv, ids[:-1], engine.max_batch_tokens, first))
        self._seconds += time.perf_counter() - started
        self._num_tokens += len(ids)
        return found

    def logits(self, states: list[Hidden]) -> Iterator[Float32]:
        """The logits of states, a few rows at a time, in order."""
        rows = max(1, LOGIT_BYTES // (4 * self.spec.vocab_size))
        for piece in states:
            for begin in range(0, len(piece), rows):
                started = time.perf_counter()
                found = self._model.backend.logits(piece[begin : begin + rows])
                self._seconds += time.perf_counter() - started
                yield found

    def prefill_speed(self) -> float:
        """Tokens per second of everything that ran so far, the head of the scored ones included."""
        return self._num_tokens / self._seconds if self._seconds else 0.0

    def decode_speed(self, ids: Int32) -> float:
        """Tokens per second one at a time, from the start of a chunk on."""
        engine = self._model.engine
        steps = ids[: DECODE_STEPS + 1]
        for state in token_states(engine.backend, engine.kv, steps[:2], 1, 0):  # the first steps warm up
            engine.backend.score(state, steps[:1], 0)
        started = time.perf_counter()
        for state in token_states(engine.backend, engine.kv, steps[:-1], 1, 0):
            engine.backend.score(state, steps[:1], 0)
        return (len(steps) - 1) / (time.perf_counter() - started)

    def close(self) -> None:
        self._model.close()

    def __enter__(self) -> EvaluatedModel:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
