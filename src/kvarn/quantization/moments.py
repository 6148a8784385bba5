"""Second moments of what the matrices of some layers read: the mean of x x^T over a text, for each of their inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvarn.backends.native.backend import NativeBackend
from kvarn.config import EngineConfig
from kvarn.engine.embed_score import token_states
from kvarn.engine.load import load_model
from kvarn.errors import InvalidParameter, UnsupportedModel
from kvarn.evaluation.model import fitting_context
from kvarn.evaluation.text import RunningText, cut_chunks
from kvarn.hub import OnProgress
from kvarn.models.spec import Attention, Block, FeedForward, ModelSpec

Float32 = npt.NDArray[np.float32]

CONTEXT, MAX_CHUNKS, MIN_CHUNKS = 256, 48, 4
MAX_BYTES = 1 << 30  # of moments at one time; a model that has more is run over the text several times


@dataclass(frozen=True, slots=True)
class LayerInput:
    """An input of a layer with the matrices that read it."""

    layer: int
    name: str
    columns: int
    matrices: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        return 4 * self.columns * self.columns


class MomentCollector:
    """A loaded model and a text; close() frees it. means: of the inputs that collect() saw last."""

    means: dict[LayerInput, Float32]

    def __init__(self, path: Path, text: RunningText, threads: int) -> None:
        context = fitting_context(path, CONTEXT)
        self._model = load_model(path, EngineConfig(threads=threads, context=context, backend="native"))
        try:
            if not isinstance(self._model.backend, NativeBackend):
                raise UnsupportedModel("error feedback needs the native backend, which cannot run this model")
            self._backend = self._model.backend
            self._chunks = cut_chunks(text, self._model.tokenizer, context, MAX_CHUNKS).ids
            if len(self._chunks) < MIN_CHUNKS:
                raise InvalidParameter(
                    f"{', '.join(text.names)} gives {len(self._chunks)} chunks of {context} tokens, error feedback "
                    f"needs {MIN_CHUNKS}, better {MAX_CHUNKS}; give a longer text",
                    field="text",
                )
        except BaseException:
            self.close()
            raise

    def bands(self) -> list[list[LayerInput]]:
        """All inputs of all layers, in groups of layers whose moments fit into memory together."""
        bands: list[list[LayerInput]] = [[]]
        for layer, block in enumerate(self._model.spec.blocks):
            inputs = list(_inputs(self._model.spec, layer, block))
            held = sum(one.num_bytes for one in bands[-1])
            if bands[-1] and held + sum(one.num_bytes for one in inputs) > MAX_BYTES:
                bands.append([])
            bands[-1] += inputs
        return bands

    def collect(self, inputs: Sequence[LayerInput], progress: OnProgress | None) -> dict[LayerInput, Float32]:
        """Run the text and return the moments of these inputs."""
        found = {one: np.zeros((one.columns, one.columns), np.float32) for one in inputs}
        self.means = {one: np.zeros(one.columns, np.float32) for one in inputs}
        share = np.float32(self._chunks.size**-0.5)
        for _ in self._run({one.layer for one in inputs}, progress, "second moments"):
            for one in inputs:
                rows = self._backend.take_rows(one.layer, one.name, 0, one.columns) * share
                found[one] += rows.T @ rows
                self.means[one] += rows.sum(axis=0) * share
        return found

    def observe(self, progress: OnProgress | None) -> None:
        """Run the text for the magnitudes alone, which are those of every input."""
        for _ in self._run(set(), progress, "magnitudes"):
            pass

    def _run(self, kept_layers: set[int], progress: OnProgress | None, label: str) -> Iterator[None]:
        """Chunk by chunk; the rows that the matrices of some layers read are kept until they are taken."""
        engine = self._model.engine
        self._backend.observe_inputs()
        for number, ids in enumerate(self._chunks):
            for layer in kept_layers:
                self._backend.keep_rows(layer, keep=True)  # forgets the rows of inputs that nobody took
            for _ in token_states(self._backend, engine.kv, ids, engine.max_batch_tokens, len(ids)):
                pass
            yield
            if progress is not None:
                progress(number + 1, len(self._chunks), label)

    def magnitudes(self, one: LayerInput) -> tuple[Float32, Float32]:
        """The mean and the largest magnitude of each column, over the last run."""
        sums = self._backend.observed_inputs(one.layer, one.name, 1, one.columns)
        return (sums.magnitudes[0] / max(1, int(sums.rows[0]))).astype(np.float32), sums.largest[0]

    def squares(self, one: LayerInput) -> Float32:
        """The mean square of each column, over the last collect()."""
        sums = self._backend.observed_inputs(one.layer, one.name, 1, one.columns)
        found: Float32 = (sums.squares[0] / max(1, int(sums.rows[0]))).astype(np.float32)
        return found

    def close(self) -> None:
        self._model.close()


def _inputs(spec: ModelSpec, layer: int, block: Block) -> Iterator[LayerInput]:
    """The inputs of a layer; experts have too few tokens each, and of mixers only plain attention is observed."""
    mixer, ffn = block.mixer, block.feed_forward

    def named(*kinds: str) -> tuple[str, ...]:
        return tuple(f"blk.{layer}.{kind}.weight" for kind in kinds)

    if isinstance(mixer, Attention):
        yield LayerInput(layer, "qkv", spec.width, named("attn_q", "attn_k", "attn_v", "attn_qkv"))
        yield LayerInput(layer, "attention_output", mixer.num_heads * mixer.head_dim, named("attn_output"))
    if isinstance(ffn, FeedForward):
        yield LayerInput(layer, "ffn_in", spec.width, named("ffn_gate", "ffn_up"))
        yield LayerInput(layer, "ffn_down", ffn.hidden, named("ffn_down"))
