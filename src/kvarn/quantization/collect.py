"""kvarn.collect_imatrix: run a text through a model and sum up what every matrix reads, in the native backend.

Owns what is observed and under which names; the file is imatrix.py's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

import numpy as np

from kvarn.backends.native.backend import InputSums, NativeBackend
from kvarn.backends.native.tensors import matrix_names
from kvarn.checks import check_parameter
from kvarn.config import MAX_THREADS, MODEL_NAMES, EngineConfig, is_offline
from kvarn.engine.embed_score import token_states
from kvarn.engine.load import LoadedModel, load_model
from kvarn.errors import ConfigError, UnsupportedModel
from kvarn.evaluation.text import Chunks, RunningText, TextFiles, cut_chunks, read_text, text_paths
from kvarn.formats.open import open_weights
from kvarn.hub import OnProgress, resolve
from kvarn.models.spec import Attention, Encoder, MixtureOfExperts
from kvarn.quantization.disk import require_writable
from kvarn.quantization.imatrix import (
    ImportanceMatrix,
    InputStatistics,
    merged,
    read_imatrix,
    require_mergeable,
    write_imatrix,
)

SAVE_CHUNKS = 64  # between two saves of what has been collected
MIN_CHUNKS = 4  # fewer say little about a model

# What reads the input of a mixture whole; the shared expert's down is not observed.
ROUTED = ("ffn_gate_inp", "ffn_gate_shexp", "ffn_up_shexp")


@dataclass(frozen=True, slots=True)
class ImatrixOptions:
    """chunks: of the text, None for all. merge: matrices to add. resume: go on where the output file stopped.

    force: replace an output that exists.
    """

    chunks: int | None = None
    context: int = 512
    threads: int | None = None
    merge: Sequence[str | os.PathLike[str]] = ()
    resume: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        check_parameter.integer("chunks", self.chunks, 1, 1 << 30, optional=True)
        check_parameter.integer("context", self.context, 16, 1 << 20)
        check_parameter.integer("threads", self.threads, 1, MAX_THREADS, optional=True)
        check_parameter.flag("resume", self.resume)
        check_parameter.flag("force", self.force)
        check_parameter.instance("merge", self.merge, (list, tuple), "a list of files")
        for path in self.merge:
            check_parameter.path("merge", path, "a list of files")


def collect_imatrix(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    text: TextFiles,
    options: ImatrixOptions | None = None,
    progress: OnProgress | None = None,
) -> ImportanceMatrix:
    """Write the importance matrix of a model on a text, and return it."""
    check_parameter.instance("options", options, ImatrixOptions, "kvarn.ImatrixOptions, or None", optional=True)
    check_parameter.function("progress", progress)
    name, target = check_parameter.path("model", model, MODEL_NAMES), Path(check_parameter.path("output", output))
    chosen, words = options or ImatrixOptions(), read_text(text)
    path = resolve(name, offline=is_offline(), on_progress=progress)
    read = [*text_paths(text), *map(Path, chosen.merge)]
    require_writable(target, path, force=chosen.force or chosen.resume, inputs=read)
    before = _before(target, words, chosen)
    with _collection(path, words, chosen) as collection:
        return collection.run(target, before, progress)


def imatrix_of(
    path: Path, words: RunningText, options: ImatrixOptions, progress: OnProgress | None
) -> ImportanceMatrix:
    """The importance matrix of a model on a text, which is kept in no file."""
    with _collection(path, words, options) as collection:
        return collection.run(None, None, progress)


@contextmanager
def _collection(path: Path, words: RunningText, options: ImatrixOptions) -> Iterator[_Collection]:
    loaded = load_model(path, EngineConfig(threads=options.threads, context=options.context, backend="native"))
    try:
        yield _Collection(loaded, _file_names(path), words, options)
    finally:
        loaded.close()


def _before(output: Path, words: RunningText, options: ImatrixOptions) -> ImportanceMatrix | None:
    """What the output has already, where its collection is to go on."""
    if not options.resume or not output.exists():
        return None
    found = read_imatrix(output)
    if found.digests != words.digests or found.chunk_size != options.context:
        raise ConfigError(
            f"{str(output)!r} was collected on {', '.join(found.datasets) or 'another text'} in chunks of "
            f"{found.chunk_size:,} tokens; resume with the same text and context, or write to another file"
        )
    return found


def _file_names(path: Path) -> frozenset[str]:
    source = open_weights(path)
    try:
        return frozenset(source.tensors) if source.metadata.get("hf") is None else frozenset()
    finally:
        source.close()


class _Collection:
    """One text on its way through one model. names: the tensors of the file, none for a folder."""

    def __init__(self, model: LoadedModel, names: frozenset[str], words: RunningText, options: ImatrixOptions) -> None:
        backend = model.backend
        if not isinstance(backend, NativeBackend):
            raise UnsupportedModel("an importance matrix needs the native backend, which cannot run this model")
        if isinstance(model.spec.generation, Encoder):
            raise UnsupportedModel("an importance matrix needs a model that writes; this one is an encoder")
        self._model, self._backend, self._names = model, backend, names
        self._words, self._options = words, options
        self._head = np.zeros(model.spec.width), np.zeros(model.spec.width), np.zeros(model.spec.width, np.float32)
        self._num_rows = 0

    def run(
        self, output: Path | None, before: ImportanceMatrix | None, progress: OnProgress | None
    ) -> ImportanceMatrix:
        """Collect all chunks that are not in `before` yet, saving now and then where there is an output."""
        chunks, found = self._chunks(), before
        done = 0 if before is None else before.num_chunks
        others = [read_imatrix(path) for path in self._options.merge]
        self._backend.observe_inputs()
        known = self._names or set(matrix_names(self._model.spec))
        for one in others if before is None else [before, *others]:
            require_mergeable(one, self._matrix(0, None), known)
        for number in range(done, len(chunks.ids)):
            self._see(chunks.ids[number])
            if number + 1 == len(chunks.ids) or (number + 1 - done) % SAVE_CHUNKS == 0:
                found = self._matrix(number + 1 - done, before)
                _save(output, found)
            if progress is not None:
                progress(number + 1, len(chunks.ids), "imatrix" if output is None else output.name)
        assert found is not None
        if others:
            found = reduce(merged, others, found)
            _save(output, found)
        return replace(found, unobserved=self._unobserved(found))

    def _unobserved(self, found: ImportanceMatrix) -> tuple[str, ...]:
        """The matrices of layers that have no statistics: they weigh evenly."""
        names = [name for name in matrix_names(self._model.spec) if name.startswith("blk.")]
        fused = {name for name in self._names if name.endswith("attn_qkv.weight")} & found.entries.keys()
        is_fused = {f"{name.removesuffix('qkv.weight')}{part}.weight" for name in fused for part in "qkv"}
        return tuple(name for name in names if name not in found.entries and name not in is_fused)

    def _chunks(self) -> Chunks:
        options = self._options
        chunks = cut_chunks(self._words, self._model.tokenizer, options.context, options.chunks)
        if len(chunks.ids) < min(MIN_CHUNKS, options.chunks or MIN_CHUNKS):
            raise ConfigError(
                f"{', '.join(self._words.names)} gives {len(chunks.ids)} chunks of {options.context:,} tokens, which "
                f"says little about a model; give at least {MIN_CHUNKS}, some hundred are usual"
            )
        return chunks

    def _see(self, ids: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
        engine = self._model.engine
        for states in token_states(self._backend, engine.kv, ids, engine.max_batch_tokens):
            squares, magnitudes, largest = self._head
            sizes = np.abs(states)
            squares += np.square(states, dtype=np.float64).sum(axis=0)
            magnitudes += sizes.sum(axis=0, dtype=np.float64)
            np.maximum(largest, sizes.max(axis=0), out=largest)
            self._num_rows += len(states)

    def _matrix(self, num_chunks: int, before: ImportanceMatrix | None) -> ImportanceMatrix:
        matrix = ImportanceMatrix(
            entries={name: found for name, found in self._entries() if not self._names or name in self._names},
            datasets=self._words.names,
            digests=self._words.digests,
            num_chunks=num_chunks,
            chunk_size=self._options.context,
        )
        return matrix if before is None else merged(before, matrix)

    def _entries(self) -> Iterator[tuple[str, InputStatistics]]:
        spec = self._model.spec
        for layer, block in enumerate(spec.blocks):
            ffn = block.feed_forward
            experts = ffn.num_experts if isinstance(ffn, MixtureOfExperts) else 0
            inputs: list[tuple[str, int, int, tuple[str, ...]]] = [
                *_attention_inputs(block.mixer, spec.width),
                ("ffn_in", 1, spec.width, ROUTED if experts else ("ffn_gate", "ffn_up")),
                ("ffn_down", experts or 1, ffn.hidden, ("ffn_down_exps" if experts else "ffn_down",)),
            ]
            if experts:
                inputs.append(("expert_in", experts, spec.width, ("ffn_gate_exps", "ffn_up_exps")))
            for input, parts, columns, names in inputs:
                sums = self._backend.observed_inputs(layer, input, parts, columns)
                for name in names:
                    if self._names or name != "attn_qkv":
                        yield f"blk.{layer}.{name}.weight", _statistics(sums)
        if spec.head is not None:
            squares, magnitudes, largest = self._head
            rows = np.array([self._num_rows], np.uint64)
            sums = InputSums(squares[None], magnitudes[None], largest[None], rows)
            yield "token_embd.weight" if spec.head.tied else "output.weight", _statistics(sums)


def _save(output: Path | None, matrix: ImportanceMatrix) -> None:
    if output is not None:
        write_imatrix(output, matrix)


def _attention_inputs(mixer: object, width: int) -> Iterator[tuple[str, int, int, tuple[str, ...]]]:
    """None for latent attention and recurrent layers: their matrices read what is not observed, and weigh evenly."""
    if isinstance(mixer, Attention):
        shared = ("attn_k", "attn_v", "attn_qkv") if mixer.kv_source is None else ()
        yield "qkv", 1, width, ("attn_q", *shared)
        yield "attention_output", 1, mixer.num_heads * mixer.head_dim, ("attn_output",)


def _statistics(sums: InputSums) -> InputStatistics:
    return InputStatistics(
        sums.squares.astype(np.float32),
        sums.rows.astype(np.float32),
        sums.magnitudes.astype(np.float32),
        sums.largest,
    )
