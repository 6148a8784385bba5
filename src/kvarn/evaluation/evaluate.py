"""kvarn.evaluate: perplexity of models on a text, and how far each is from a source."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvarn.backends.protocol import Hidden
from kvarn.checks import check_parameter
from kvarn.config import MODEL_NAMES, EngineConfig, is_offline
from kvarn.errors import BrokenScores, InvalidParameter
from kvarn.evaluation.divergence import Float64, TokenDivergence, token_divergence, token_losses
from kvarn.evaluation.model import EvaluatedModel, Int32, file_facts
from kvarn.evaluation.report import EvaluationReport, divergence_of, perplexity_of
from kvarn.evaluation.text import Chunks, RunningText, TextFiles, cut_chunks, read_text, refuse_same_text
from kvarn.hub import OnProgress, resolve

DEFAULT_CHUNKS, DEFAULT_CONTEXT = 32, 512
MIN_CONTEXT, MAX_EVALUATION_CONTEXT = 16, 1 << 20
MAX_STATE_BYTES = 1 << 30  # of the source, kept for every model compared with it


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """chunks: how many of the text, None for all. context: tokens of each; the second half of them is scored."""

    chunks: int | None = DEFAULT_CHUNKS
    context: int = DEFAULT_CONTEXT
    threads: int | None = None
    backend: str = "auto"

    def __post_init__(self) -> None:
        check_parameter.integer("chunks", self.chunks, 1, 1 << 30, optional=True)
        check_parameter.integer("context", self.context, MIN_CONTEXT, MAX_EVALUATION_CONTEXT)
        self.engine_config()

    def engine_config(self) -> EngineConfig:
        """Settings to load a model with."""
        return EngineConfig(threads=self.threads, context=self.context, backend=self.backend)


def evaluate(
    model: str | os.PathLike[str],
    *,
    text: TextFiles,
    against: str | os.PathLike[str] | None = None,
    options: EvaluationOptions | None = None,
    progress: OnProgress | None = None,
) -> EvaluationReport:
    """Measure one model on a text file or several; against: the source to compare it with, token by token."""
    return evaluate_all([model], text=text, against=against, options=options, progress=progress)[-1]


def evaluate_all(
    models: Sequence[str | os.PathLike[str]],
    *,
    text: TextFiles,
    against: str | os.PathLike[str] | None = None,
    options: EvaluationOptions | None = None,
    progress: OnProgress | None = None,
) -> list[EvaluationReport]:
    """Measure several models on the same tokens; with a source, the first report is the source's own."""
    check_parameter.instance("options", options, EvaluationOptions, "kvarn.EvaluationOptions, or None", optional=True)
    check_parameter.function("progress", progress)
    for one in (*models, *(() if against is None else (against,))):
        check_parameter.path("model" if one is not against else "against", one, MODEL_NAMES)
    run = _Evaluation(read_text(text), options or EvaluationOptions(), progress)
    for one in (*(() if against is None else (against,)), *models):
        run.look_at(one)
    if against is None:
        return [run.measure(model, None) for model in models]
    with run.load(against) as source:
        reference = run.reference(source)
        return [reference.report, *(run.measure(model, reference) for model in models)]


@dataclass(frozen=True, slots=True)
class _Reference:
    """The source: its states for every chunk, from which its logits are made again for each model."""

    model: EvaluatedModel
    chunks: Chunks
    states: list[list[Hidden]]
    report: EvaluationReport


class _Evaluation:
    """One text and one set of options, for all models of a call."""

    def __init__(self, text: RunningText, options: EvaluationOptions, progress: OnProgress | None) -> None:
        self._text = text
        self._options = options
        self._progress = progress
        self._first = options.context // 2

    def look_at(self, model: str | os.PathLike[str]) -> None:
        """Before anything runs: every file is there, and none was made with this text."""
        path = self._path(model)
        refuse_same_text(file_facts(path).calibration, self._text, path.name)

    def load(self, model: str | os.PathLike[str]) -> EvaluatedModel:
        return EvaluatedModel(self._path(model), self._options.engine_config())

    def _path(self, model: str | os.PathLike[str]) -> Path:
        return resolve(os.fspath(model), offline=is_offline(), on_progress=self._progress)

    def reference(self, source: EvaluatedModel) -> _Reference:
        """Run the source over the text and keep its states."""
        chunks = self._chunks(source)
        self._refuse_large_states(source, chunks)
        states: list[list[Hidden]] = []
        losses: list[Float64] = []
        for number, ids in enumerate(chunks.ids):
            states.append(source.states(ids, self._first))
            losses += [token_losses(logits, targets) for logits, targets in self._scored(source, ids, states[-1])]
            self._show(number + 1, len(chunks.ids), source.name)
        return _Reference(source, chunks, states, self._report(source, chunks, np.concatenate(losses)))

    def measure(self, model: str | os.PathLike[str], reference: _Reference | None) -> EvaluationReport:
        """Run a model over the text, beside the source where there is one."""
        with self.load(model) as loaded:
            chunks = self._chunks(loaded)
            if reference is not None:
                _require_same_tokens(loaded, chunks, reference)
            losses: list[Float64] = []
            found: list[TokenDivergence] = []
            for number, ids in enumerate(chunks.ids):
                originals = None if reference is None else reference.model.logits(reference.states[number])
                for logits, targets in self._scored(loaded, ids, loaded.states(ids, self._first)):
                    losses.append(token_losses(logits, targets))
                    if originals is not None:
                        found.append(token_divergence(next(originals), logits))
                self._show(number + 1, len(chunks.ids), loaded.name)
            report = self._report(loaded, chunks, np.concatenate(losses))
        if reference is None:
            return report
        kl, agrees = np.concatenate([one.kl for one in found]), np.concatenate([one.agrees for one in found])
        return replace(report, divergence=divergence_of(reference.report.model, kl, agrees))

    def _chunks(self, model: EvaluatedModel) -> Chunks:
        return cut_chunks(self._text, model.tokenizer, self._options.context, self._options.chunks)

    def _scored(
        self, model: EvaluatedModel, ids: Int32, states: list[Hidden]
    ) -> Iterator[tuple[npt.NDArray[np.float32], Int32]]:
        """Logits with the tokens they should have predicted."""
        at = self._first + 1
        for logits in model.logits(states):
            yield logits, ids[at : at + len(logits)]
            at += len(logits)

    def _report(self, model: EvaluatedModel, chunks: Chunks, losses: Float64) -> EvaluationReport:
        if not np.isfinite(losses).all():
            raise BrokenScores(f"the scores of {model.name} are not numbers; the file may be damaged: make it again")
        perplexity, error = perplexity_of(losses)
        return EvaluationReport(
            model=model.name,
            num_bytes=model.facts.num_bytes,
            num_weights=model.facts.num_weights,
            bits_per_weight=model.facts.bits_per_weight,
            text=self._text.names,
            num_chunks=len(chunks.ids),
            context=self._options.context,
            num_scored=len(losses),
            perplexity=perplexity,
            perplexity_error=error,
            prefill_tokens_per_s=model.prefill_speed(),
            decode_tokens_per_s=model.decode_speed(chunks.ids[0]),
        )

    def _refuse_large_states(self, source: EvaluatedModel, chunks: Chunks) -> None:
        per_chunk = 4 * source.spec.width * (self._options.context - self._first)
        if len(chunks.ids) * per_chunk > MAX_STATE_BYTES:
            raise InvalidParameter(
                f"{len(chunks.ids):,} chunks would keep {len(chunks.ids) * per_chunk / 1e9:.1f} GB of the source's "
                f"states; compare with at most {MAX_STATE_BYTES // per_chunk:,} chunks",
                field="chunks",
            )

    def _show(self, done: int, total: int, name: str) -> None:
        if self._progress is not None:
            self._progress(done, total, name)


def _require_same_tokens(model: EvaluatedModel, chunks: Chunks, reference: _Reference) -> None:
    source = reference.model
    if model.spec.vocab_size != source.spec.vocab_size or not np.array_equal(chunks.ids, reference.chunks.ids):
        raise InvalidParameter(
            f"{model.name} ({model.spec.vocab_size:,} tokens) and {source.name} ({source.spec.vocab_size:,} tokens) "
            "encode the text differently, so their predictions cannot be compared; give the source of this model",
            field="against",
        )
