"""What a cut does to predictions, before any file is written: the source, loaded, with the parts to go set to zero.

A layer whose attn_output and ffn_down are zero adds nothing, a channel or head whose columns are zero neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvarn.backends.native.backend import NativeBackend
from kvarn.config import EngineConfig
from kvarn.engine.embed_score import batch_of
from kvarn.engine.load import LoadedModel, load_model
from kvarn.errors import InvalidParameter, UnsupportedModel
from kvarn.evaluation.divergence import Float64, token_divergence, token_losses
from kvarn.evaluation.model import fitting_context
from kvarn.evaluation.text import RunningText, cut_chunks
from kvarn.formats.weights import TensorType

Float32 = npt.NDArray[np.float32]

LENGTH, NUM_SEQUENCES = 512, 3  # the second half of each sequence is scored, as in an evaluation
LOGIT_ROWS = 32  # at one time
MAX_KEPT_BYTES = 256 << 20  # of the source's logits; beyond, they are made again for each measurement


class CutProbe:
    """One text and the source's predictions on it; close() frees the model.

    states: what each layer reads and the last one leaves, (layers + 1, tokens, width); of the latter the directions.
    """

    def __init__(self, path: Path, text: RunningText, threads: int, output_norm: Float32) -> None:
        self._text, self._threads, self._length = text, threads, fitting_context(path, LENGTH)
        self._model = self._load(path)
        self.tokenizer = self._model.tokenizer
        try:
            self._backend = _native_backend(self._model)
            self._cut_text()
            spec = self._model.spec
            states = np.empty((len(spec.blocks), self._ids.size, spec.width), np.float32)
            self._hidden = self._run(self._model, states)
            # The output norm has scaled the last state row by row and by its weight: the direction is left.
            last = self._hidden / np.where(output_norm == 0, np.float32(1), output_norm)
            self.states = np.concatenate([states, last[None]])
            self._logits = self._kept_logits()
        except BaseException:
            self.close()
            raise

    def divergence(self, replaced: Mapping[str, Float32]) -> float:
        """Mean KL from the source, in nats, with these matrices in place of its own."""
        try:
            for name, values in replaced.items():
                raw = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint8)
                self._backend.replace_matrix(name, TensorType.F32, raw)
            return self._against(self._backend, self._run(self._model))[0]
        finally:
            for name in replaced:
                self._backend.restore_matrix(name)

    def perplexity(self) -> float:
        """Of the source, on the text."""
        return self._against(self._backend, self._hidden)[1]

    def of_file(self, path: Path) -> tuple[float, float]:
        """Mean KL from the source and perplexity of another file of the same tokens, on the same text."""
        model = self._load(path)
        try:
            return self._against(_native_backend(model), self._run(model))
        finally:
            model.close()

    def close(self) -> None:
        self._model.close()

    def _load(self, path: Path) -> LoadedModel:
        return load_model(path, EngineConfig(threads=self._threads, context=self._length, backend="native"))

    def _cut_text(self) -> None:
        length, chunks = self._length, cut_chunks(self._text, self._model.tokenizer, self._length, None).ids
        if len(chunks) < NUM_SEQUENCES:
            raise InvalidParameter(
                f"{', '.join(self._text.names)} gives {len(chunks)} chunks of {length} tokens, measuring needs "
                f"{NUM_SEQUENCES}; give a longer text",
                field="text",
            )
        self._ids = chunks[[(2 * i + 1) * len(chunks) // (2 * NUM_SEQUENCES) for i in range(NUM_SEQUENCES)]]
        row = np.arange(self._ids.size) % length
        self._scored = np.flatnonzero((row >= length // 2) & (row < length - 1))

    def _run(self, model: LoadedModel, states: Float32 | None = None) -> Float32:
        """The states of every token; states: filled with what each layer reads."""
        backend, kv, found = _native_backend(model), model.engine.kv, []
        for number, ids in enumerate(self._ids):
            try:
                batch = batch_of(kv, ["prune"], [ids], 0)
                if states is None:
                    found.append(backend.forward(batch))
                else:
                    read = np.empty((len(states), len(ids), states.shape[2]), np.float32)
                    found.append(backend.forward_from(0, batch, read))
                    states[:, number * len(ids) : (number + 1) * len(ids)] = read
            finally:
                kv.release("prune")
        return np.concatenate(found)

    def _kept_logits(self) -> list[Float32] | None:
        if 4 * len(self._scored) * self._model.spec.vocab_size > MAX_KEPT_BYTES:
            return None
        return list(self._logits_of(self._backend, self._hidden))

    def _logits_of(self, backend: NativeBackend, hidden: Float32) -> Iterator[Float32]:
        for at in range(0, len(self._scored), LOGIT_ROWS):
            yield backend.logits(np.ascontiguousarray(hidden[self._scored[at : at + LOGIT_ROWS]]))

    def _against(self, backend: NativeBackend, hidden: Float32) -> tuple[float, float]:
        originals = self._logits or self._logits_of(self._backend, self._hidden)
        targets = self._ids.reshape(-1)[self._scored + 1]
        kl: list[Float64] = []
        losses: list[Float64] = []
        for number, (source, logits) in enumerate(zip(originals, self._logits_of(backend, hidden), strict=True)):
            kl.append(token_divergence(source, logits).kl)
            losses.append(token_losses(logits, targets[number * LOGIT_ROWS :][: len(logits)]))
        return float(np.concatenate(kl).mean()), float(np.exp(np.concatenate(losses).mean()))


def _native_backend(model: LoadedModel) -> NativeBackend:
    if not isinstance(model.backend, NativeBackend):
        raise UnsupportedModel("pruning needs the native backend, which cannot run this model")
    return model.backend
