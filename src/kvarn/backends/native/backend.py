"""The CPU backend: hands a ModelSpec and its weights to the C++ core and calls it once per step.

Knows names and shapes of weights; every number is computed in csrc/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvarn.adapters.weights import LoraWeights
from kvarn.backends.adapted import head_adapters, with_head_adapters
from kvarn.backends.batch import Batch, BlockCopy, CanvasScores, Float32, KVLayout, Sampled, SampleRows, Scored
from kvarn.backends.code_hash import code_hash
from kvarn.backends.native import _native
from kvarn.backends.native.adapters import pack_adapter
from kvarn.backends.native.sampling_arrays import NO_IDS, SamplingArrays
from kvarn.backends.native.tensors import SegmentedWeights, matrix_names, read_vector, vector_names
from kvarn.backends.pooling import pool_rows
from kvarn.config import CPU_KV_DTYPES, MAX_THREADS
from kvarn.errors import BackendError, ConfigError
from kvarn.formats.weights import TensorInfo, TensorType, WeightSource
from kvarn.models.spec import ModelSpec, Pooling


class NativeBackend:
    """One model in the C++ core."""

    name = "native"
    min_prompt_rows = 1
    free_prompt_rows = 0
    runs_ahead = False
    lost = None

    def __init__(self, threads: int, isa: str | None = None, *, is_timed: bool = False) -> None:
        if isa and isa not in [*_native.isa_names(), *_native.kernels.emulated_tables()]:
            raise ConfigError(f"isa is {isa!r}; this machine and build have {', '.join(_native.isa_names())}")
        if not 1 <= threads <= MAX_THREADS:
            raise ConfigError(f"threads is {threads}; give 1 to {MAX_THREADS}")
        self._team = _native.ThreadTeam(threads, is_timed)  # of the one pool of the process
        self._isa = isa or ""
        self._model: _native.Model | None = None
        self._width = self._vocab_size = 0
        self._has_quants, self._sampling = False, SamplingArrays()

    @property
    def progress(self) -> int:
        """Changes with every task of its threads."""
        return self._team.progress

    def ticks(self) -> tuple[int, int, dict[str, tuple[int, int]]]:
        """Of a timed backend, so far: in parallel regions, in their tasks, and calls and ticks of each kernel."""
        return *self._team.region_ticks(), _native.kernel_ticks()

    @property
    def isa(self) -> str:
        """The instruction set whose kernels run."""
        return self._core.isa

    @property
    def logit_bytes(self) -> int:
        """The most memory that logits have taken at once."""
        return self._core.logit_bytes

    def unsupported(self, spec: ModelSpec) -> list[str]:
        """Name the fields of spec the core cannot run."""
        norms = {"embedding.norm": spec.embedding.norm, "output_norm": spec.output_norm}
        norms["embedding.joined"] = spec.embedding.joined
        for index, block in enumerate(spec.blocks):
            norms[f"blocks[{index}].norm"] = block.norm
            norms[f"blocks[{index}].attention.qk_norm"] = getattr(block.mixer, "qk_norm", None)
        is_biased = {name: norm is not None and norm.kind == "rms" and norm.has_bias for name, norm in norms.items()}
        return [f"{name}.has_bias of an rms norm" for name, biased in is_biased.items() if biased]

    def load(self, spec: ModelSpec, weights: WeightSource, progress: Callable[[int, int], None] | None = None) -> None:
        """Pack every weight into the core's layout, giving the file's pages back as it goes."""
        if spec.embedding.segments > 1:
            # The core knows one token type: tokens of the second text are rows of their own.
            weights = SegmentedWeights(weights)
            spec = replace(spec, vocab_size=2 * spec.vocab_size)
        model = _native.Model(spec, self._team, self._isa)
        # Largest first: while a matrix is packed its file pages are resident beside everything packed before it.
        matrices = sorted((weights.tensors[name] for name in matrix_names(spec)), key=lambda m: -m.num_bytes)
        model.reserve_weights(sum(_native.packed_bytes(m.type.id, *_stack_shape(m)) for m in matrices))
        total, done = sum(m.num_bytes for m in matrices), 0
        for matrix in matrices:
            model.add_matrices(matrix.name, matrix.type.id, *_stack_shape(matrix), weights.raw(matrix.name))
            weights.release_pages([matrix.name])
            done += matrix.num_bytes
            if progress is not None:
                progress(done, total)
        for name, size in vector_names(spec):
            model.add_vector(name, read_vector(weights, name, size))
        weights.verify_unchanged()
        model.finish_loading()
        self._model, self._width, self._vocab_size = model, spec.width, spec.vocab_size
        self._has_quants = any(matrix.type.block_values > 1 for matrix in matrices)

    def prepare_adapter(self, weights: LoraWeights) -> _native.Adapter:
        """Pack the pairs: as f16 beside quantised weights, whose activations are rounded further than that."""
        return pack_adapter(self._core, weights, is_half=self._has_quants)

    def reserve_kv(self, layout: KVLayout, budget_bytes: int) -> int:
        """Reserve address space for the cache; memory is committed when a block is first written."""
        if layout.block_size != _native.kv_block_size:
            raise ConfigError(f"block_size is {layout.block_size}; the native backend has {_native.kv_block_size}")
        if layout.dtype not in CPU_KV_DTYPES:
            raise ConfigError(f"kv dtype is {layout.dtype!r}; the native backend has {', '.join(CPU_KV_DTYPES)}")
        num_blocks = min(budget_bytes // layout.block_bytes, 2**31 - 1)
        if num_blocks < 1:
            raise ConfigError(f"kv_bytes is {budget_bytes:,}, one KV block needs {layout.block_bytes:,}")
        windows = list(layout.windowed), layout.num_window_blocks, layout.window_block_bytes
        try:
            self._core.reserve_kv(list(layout.layers), layout.dtype, num_blocks, layout.block_bytes, *windows)
            if layout.num_states:
                self._core.reserve_states(layout.num_states)
        except MemoryError:
            raise BackendError(f"the system refused {budget_bytes:,} bytes for the KV cache; set kv_bytes=") from None
        return num_blocks

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            self._core.copy_block(copy.source, copy.target, bool(copy.group))

    def kernel_identity(self) -> str:
        return f"native {self.isa} {code_hash([Path(_native.__file__)])}"

    def num_block_bytes(self) -> int:
        return self._core.block_bytes(0).nbytes

    def read_block(self, block_id: int) -> npt.NDArray[np.uint8]:
        return self._core.block_bytes(block_id).copy()

    def write_block(self, block_id: int, content: npt.NDArray[np.uint8]) -> None:
        self._core.block_bytes(block_id)[:] = content

    def populate_blocks(self, count: int) -> None:
        self._core.populate_blocks(count)

    def return_kv(self, block_ids: Iterable[int], group: int = 0) -> None:
        for block_id in block_ids:
            self._core.return_block(block_id, bool(group))

    def return_states(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._core.return_state(slot)

    def forward(self, batch: Batch) -> Float32:
        """Run one step; the result is (output rows, width)."""
        hidden = np.empty((len(batch.output_rows), self._width), np.float32)
        self._core.forward(batch, hidden)
        return with_head_adapters(hidden, batch)

    def embed_tokens(self, token_ids: npt.NDArray[np.int32]) -> Float32:
        rows = np.empty((len(token_ids), self._width), np.float32)
        self._core.embed_tokens(token_ids, rows)
        return rows

    def forward_from(self, first: int, batch: Batch, states: Float32) -> Float32:
        """Run the layers from `first` on. states (layers, tokens, width) is what each layer reads.

        A pass from layer 0 on fills it, a later one begins with the states of its first layer.
        """
        hidden = np.empty((len(batch.output_rows), self._width), np.float32)
        self._core.forward_from(first, batch, hidden, states.reshape(-1))
        return hidden

    def replace_matrix(self, name: str, type: TensorType, raw: npt.NDArray[np.uint8]) -> None:
        """Run with other bytes in place of a loaded matrix, until restore_matrix."""
        self._core.replace_matrices(name, type.id, raw)

    def restore_matrix(self, name: str) -> None:
        self._core.restore_matrices(name)

    def begin(self, batch: Batch) -> NativeResumableForward:
        """Start a batch that goes through the layers in pieces."""
        return NativeResumableForward(self._core, batch, self._width)

    def sample(self, hidden: Float32, rows: SampleRows) -> Sampled:
        """Choose one token for each row."""
        count = len(rows.rows)
        num_canvas = 0 if rows.canvas_starts is None else count  # then every row is one of a canvas
        best_ids, means = np.empty(num_canvas, np.int32), np.empty((num_canvas, self._width), np.float32)
        sampled = Sampled(
            token_ids=np.empty(count, np.int32),
            logprobs=np.zeros(count, np.float32),
            entropy=np.empty(count, np.float32),
            top_ids=np.zeros((count, rows.num_top), np.int32),
            top_logprobs=np.zeros((count, rows.num_top), np.float32),
        )
        self._core.sample(
            hidden,
            head_adapters(hidden),
            rows.rows,
            NO_IDS if rows.partners is None else rows.partners,
            self._sampling.of(rows.params),
            rows.want_logprobs,
            sampled.token_ids,
            sampled.logprobs,
            sampled.entropy,
            sampled.top_ids,
            sampled.top_logprobs,
            best_ids,
            means,
        )
        if rows.canvas_starts is None:
            return sampled
        parts = [slice(first, end) for first, end in pairwise(rows.canvas_starts.tolist())]
        scores = tuple([CanvasScores(best_ids[one], sampled.entropy[one], means[one].copy()) for one in parts])
        return replace(sampled, canvases=scores)

    def score(self, hidden: Float32, targets: npt.NDArray[np.int32], num_top: int) -> Scored:
        """Log-probability of one given token for each row."""
        count = len(targets)
        scored = Scored(
            logprobs=np.empty(count, np.float32),
            top_ids=np.empty((count, num_top), np.int32),
            top_logprobs=np.empty((count, num_top), np.float32),
        )
        self._core.score(hidden, head_adapters(hidden), targets, scored.logprobs, scored.top_ids, scored.top_logprobs)
        return scored

    def pool(self, hidden: Float32, row_starts: npt.NDArray[np.int32], pooling: Pooling) -> Float32:
        return pool_rows(hidden, row_starts, pooling)

    def logits(self, hidden: Float32) -> Float32:
        """All logits: for tests and Python samplers only."""
        out = np.empty((len(hidden), self._vocab_size), np.float32)
        self._core.logits(hidden, head_adapters(hidden), out)
        return out

    def observe_inputs(self) -> None:
        """From now on sum up what every matrix reads, beginning at zero."""
        self._core.observe_inputs()

    def observed_inputs(self, layer: int, input: str, parts: int, columns: int) -> InputSums:
        """What one input of a layer has summed up; parts: the experts of a mixture, otherwise 1."""
        shape = (parts, columns)
        sums = InputSums(np.empty(shape), np.empty(shape), np.empty(shape, np.float32), np.empty(parts, np.uint64))
        self._core.read_inputs(layer, input, sums.squares, sums.magnitudes, sums.largest, sums.rows)
        return sums

    def keep_rows(self, layer: int, *, keep: bool) -> None:
        """Whether the inputs of a layer's matrices are kept, beside their sums; only while they are observed."""
        self._core.keep_rows(layer, keep)

    def take_rows(self, layer: int, input: str, part: int, columns: int) -> Float32:
        """The rows that were kept since the last call, (rows, columns)."""
        rows = np.empty(self._core.num_kept(layer, input, part), np.float32)
        self._core.take_rows(layer, input, part, rows)
        return rows.reshape(-1, columns)

    def close(self) -> None:
        self._model = None

    @property
    def _core(self) -> _native.Model:
        if self._model is None:
            raise BackendError("no model is loaded in this backend")
        return self._model


@dataclass(frozen=True, slots=True)
class InputSums:
    """Column by column over all rows that were read: (parts, columns), and rows (parts)."""

    squares: npt.NDArray[np.float64]
    magnitudes: npt.NDArray[np.float64]
    largest: Float32
    rows: npt.NDArray[np.uint64]


class NativeResumableForward:
    """A batch under way; the core keeps the arrays it reads."""

    def __init__(self, core: _native.Model, batch: Batch, width: int) -> None:
        self._core = core
        self._batch = batch
        self._hidden = np.empty((len(batch.output_rows), width), np.float32)
        self._state = core.begin(batch)

    @property
    def piece_s(self) -> float:
        return self._state.piece_s

    def advance(self, seconds: float) -> Float32 | None:
        """Run pieces of layers for about that long, at least one."""
        is_done = self._core.advance(self._state, seconds, self._hidden)
        return with_head_adapters(self._hidden, self._batch) if is_done else None


def _stack_shape(info: TensorInfo) -> tuple[int, int, int]:
    """(parts, rows, columns) of a matrix or of a stack of experts."""
    parts = info.shape[0] if len(info.shape) == 3 else 1
    return parts, info.shape[-2], info.shape[-1]
