"""How far a model's predictions move when some of its matrices are replaced: KL divergence on a short text.

With tokens drawn from the source's own distribution p, KL(p || q) = log mean exp(d) - mean d over their differences of
logits d, so that no pass over the vocabulary is needed; the layers before the first one replaced are not run again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvarn.backends.native.backend import NativeBackend
from kvarn.backends.native.tensors import matrix_names
from kvarn.config import EngineConfig
from kvarn.engine.embed_score import batch_of
from kvarn.engine.load import LoadedModel, load_model
from kvarn.errors import InvalidParameter, UnsupportedModel
from kvarn.evaluation.divergence import Float64, token_divergence
from kvarn.evaluation.model import fitting_context
from kvarn.evaluation.text import RunningText, cut_chunks
from kvarn.formats.open import open_weights
from kvarn.formats.quants import dequantize
from kvarn.formats.weights import TensorType, WeightSource
from kvarn.models.describe import describe
from kvarn.models.spec import Autoregressive

Float32 = npt.NDArray[np.float32]

LENGTH, NUM_SEQUENCES = 128, 2
FIRST_SCORED = 16  # of each sequence: before, predictions know too little to be typical
SAMPLES = 128  # tokens drawn for each prediction
LOGIT_ROWS = 32  # at one time
SEED = 18


@dataclass(frozen=True, slots=True)
class Replacement:
    """The bytes of a matrix in another type."""

    type: TensorType
    raw: npt.NDArray[np.uint8]


class DivergenceProbe:
    """The source, loaded, with its own predictions on the text; close() frees it."""

    def __init__(self, path: Path, text: RunningText, threads: int | None) -> None:
        context = fitting_context(path, NUM_SEQUENCES * LENGTH)
        self._length = context // NUM_SEQUENCES
        config = EngineConfig(threads=threads, context=context, backend="native")
        self._model = load_model(path, config)
        self._opened = open_weights(path)
        try:
            self._backend = _writer(self._model)
            self.weights: WeightSource = describe(self._opened).weights
            self.names = frozenset(matrix_names(self._model.spec))
            self._open_batch(text)
            self._run_source()
        except BaseException:
            self.close()
            raise

    def divergence(self, replaced: Mapping[str, Replacement]) -> float:
        """Mean KL from the source, in nats, with these matrices in place of its own; by the tokens drawn."""
        with self._with(replaced):
            hidden = self._forward(min(map(self._layer, replaced)))
        differences = self._logits(hidden, replaced.get(self._head)) - self._expected
        largest = differences.max(axis=1, keepdims=True)
        means = np.exp(differences - largest).mean(axis=1)
        kl: Float64 = np.log(means) + largest[:, 0] - differences.mean(axis=1)
        return float(np.maximum(kl, 0.0).mean())

    def full_divergence(self, replaced: Mapping[str, Replacement]) -> float:
        """The same over the whole vocabulary."""
        pieces = range(0, len(self._hidden), LOGIT_ROWS)
        source = [self._backend.logits(self._hidden[at : at + LOGIT_ROWS]) for at in pieces]
        with self._with(replaced):
            hidden = self._forward(0)
            found = [
                token_divergence(logits, self._backend.logits(hidden[at : at + LOGIT_ROWS])).kl
                for at, logits in zip(pieces, source, strict=True)
            ]
        return float(np.concatenate(found).mean())

    @contextmanager
    def _with(self, replaced: Mapping[str, Replacement]) -> Iterator[None]:
        try:
            for name, new in replaced.items():
                self._backend.replace_matrix(name, new.type, new.raw)
            yield
        finally:
            for name in replaced:
                self._backend.restore_matrix(name)

    def close(self) -> None:
        self._opened.close()
        self._model.close()

    def _open_batch(self, text: RunningText) -> None:
        length, chunks = self._length, cut_chunks(text, self._model.tokenizer, self._length, None).ids
        if len(chunks) < NUM_SEQUENCES:
            raise InvalidParameter(
                f"{', '.join(text.names)} gives {len(chunks)} chunks of {length} tokens, measuring needs "
                f"{NUM_SEQUENCES}; give a longer text",
                field="text",
            )
        picked = [(2 * i + 1) * len(chunks) // (2 * NUM_SEQUENCES) for i in range(NUM_SEQUENCES)]
        names = [f"probe-{i}" for i in range(NUM_SEQUENCES)]
        self._batch = batch_of(self._model.engine.kv, names, [chunks[number] for number in picked], 0)
        row = np.arange(NUM_SEQUENCES * length) % length
        self._scored = row >= FIRST_SCORED

    def _run_source(self) -> None:
        spec = self._model.spec
        self._states = np.empty((len(spec.blocks), NUM_SEQUENCES * self._length, spec.width), np.float32)
        hidden = self._hidden = self._backend.forward_from(0, self._batch, self._states)[self._scored]
        rng = np.random.default_rng(SEED)
        drawn = [self._drawn(hidden[at : at + LOGIT_ROWS], rng) for at in range(0, len(hidden), LOGIT_ROWS)]
        tokens, self._index = np.unique(np.concatenate(drawn), return_inverse=True)
        self._index = self._index.reshape(-1, SAMPLES)
        self._head = "token_embd.weight" if spec.head is None or spec.head.tied else "output.weight"
        self._tokens = tokens
        info = self.weights.tensors[self._head]
        self._head_rows = self._rows_of(self.weights.raw(self._head), info.type)
        self._expected = self._logits(hidden, None)

    def _drawn(self, hidden: Float32, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        """SAMPLES tokens for each row, from the model's own distribution."""
        logits = self._backend.logits(hidden).astype(np.float64)
        shares = np.exp(logits - logits.max(axis=1, keepdims=True)).cumsum(axis=1)
        found = [np.searchsorted(row, rng.random(SAMPLES) * row[-1], side="right") for row in shares]
        drawn: npt.NDArray[np.int64] = np.minimum(np.stack(found), logits.shape[1] - 1)
        return drawn

    def _layer(self, name: str) -> int:
        """The first layer that a matrix changes: an output matrix changes none."""
        parts = name.split(".")
        if parts[0] == "blk":
            return int(parts[1])
        return len(self._states) if name == "output.weight" else 0

    def _forward(self, first: int) -> Float32:
        if first == len(self._states):
            return self._hidden
        if first == 0:
            return self._backend.forward(self._batch)[self._scored]
        return self._backend.forward_from(first, self._batch, self._states)[self._scored]

    def _logits(self, hidden: Float32, head: Replacement | None) -> Float64:
        """Of the tokens drawn: (rows, SAMPLES)."""
        rows = self._head_rows if head is None else self._rows_of(head.raw, head.type)
        logits: npt.NDArray[Any] = np.take_along_axis(hidden @ rows.T, self._index, axis=1).astype(np.float64)
        spec = self._model.spec
        if spec.head is not None and spec.head.softcap is not None:
            logits = spec.head.softcap * np.tanh(logits / spec.head.softcap)
        return logits

    def _rows_of(self, raw: npt.NDArray[np.uint8], type: TensorType) -> Float32:
        num_rows, columns = self.weights.tensors[self._head].shape
        rows = raw.reshape(num_rows, -1)[self._tokens]
        return dequantize(rows.reshape(-1), type, (len(rows), columns))


def _writer(model: LoadedModel) -> NativeBackend:
    if not isinstance(model.backend, NativeBackend):
        raise UnsupportedModel("choosing types by measurement needs the native backend, which cannot run this model")
    if not isinstance(model.spec.generation, Autoregressive):
        raise UnsupportedModel("choosing types by measurement needs a model that writes from left to right")
    return model.backend
