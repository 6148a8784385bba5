"""The torch backend: CUDA, Apple GPUs or the CPU behind the protocol.

Knows how a model is loaded and where its cache lies; layers.py interprets the spec, an Ops computes. Same request, same
bytes: on the CPU, and on a GPU with Triton's kernels.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvarn.backends import host_sampling
from kvarn.backends.batch import Batch, BlockCopy, Float32, KVLayout, Sampled, SampleRows, Scored
from kvarn.backends.pooling import pool_rows
from kvarn.backends.torch.cache import DeviceCache
from kvarn.backends.torch.check import check_batch
from kvarn.backends.torch.denoising.canvas import with_canvases
from kvarn.backends.torch.denoising.confidence import Confident, asks_for_confidence, confident_rows
from kvarn.backends.torch.device import Device, computing, on_device
from kvarn.backends.torch.layers import Decoded, Model, Ops, StepGraphs, make_model
from kvarn.backends.torch.loading.kernels import KERNELS, is_build_failure, make_ops, needs_kernels, tell_plain
from kvarn.backends.torch.loading.load import load_weights
from kvarn.backends.torch.loading.reader import WeightReader
from kvarn.backends.torch.plain import PlainOps
from kvarn.backends.torch.resumable import TorchResumableForward
from kvarn.backends.torch.sampling import Drawn, PendingSample, draw_rows, is_greedy, score_rows
from kvarn.backends.torch.step import with_chosen
from kvarn.backends.torch.weights import ModelWeights
from kvarn.errors import BackendError, ConfigError
from kvarn.formats.weights import WeightSource
from kvarn.models.diffusion.uniform import UniformDiffusion
from kvarn.models.spec import MaskedDiffusion, ModelSpec, Pooling
from kvarn.sampling.token_masks import allowed_tokens

CHOSEN_ROWS = 4096  # tokens of one step that the next may take on the device
GPU_PROMPT_ROWS = 256, 2048  # fewer do not take less time: launching does; the largest step captured in any case


class TorchBackend:
    """One model on one device."""

    name = "torch"
    lost = None

    def __init__(self, device: Device, threads: int, max_rows: int = 0) -> None:
        """max_rows: of a step, for which one that has so many is captured."""
        self.device, self._max_rows, self.progress = device, max_rows, 0
        self.min_prompt_rows, self.free_prompt_rows = GPU_PROMPT_ROWS if device.kind == "cuda" else (1, 0)
        self._model: Model | None = None
        self._cache: DeviceCache | None = None
        self._graphs: StepGraphs | None = None
        self._is_packed = False  # some matrix, so that only kernels read it
        self._decoded: Decoded | None = None  # of the last step, where it was a captured one
        self.runs_ahead = device.kind == "cuda"
        self._chosen = torch.zeros(CHOSEN_ROWS, dtype=torch.int32, device=device.torch_device)  # by sample_later()
        self._num_chosen = 0
        self._allowed: Tensor | None = None  # which ids some token has, once a model was seen where not all do
        if device.kind == "cpu":
            torch.set_num_threads(threads)

    def unsupported(self, spec: ModelSpec) -> list[str]:
        """Every field has its plain operation; what a canvas feeds back is added up in float64."""
        is_lacking = self.device.kind == "mps" and isinstance(spec.generation, UniformDiffusion)
        return ["generation: canvases of random tokens"] if is_lacking else []

    @computing
    def load(self, spec: ModelSpec, weights: WeightSource, progress: Callable[[int, int], None] | None = None) -> None:
        self.device.use()
        try:
            self._load(spec, weights, progress, self._make_ops(spec))
        except Exception as error:
            if not is_build_failure(error):
                raise
            tell_plain(error)
            self.close()
            self._load(spec, weights, progress, self._make_ops(spec, plain=True))
        self._cache = DeviceCache(KVLayout(1, ()), 0, self.device.torch_device)  # until one is reserved

    def _load(
        self, spec: ModelSpec, weights: WeightSource, progress: Callable[[int, int], None] | None, ops: Ops
    ) -> None:
        with closing(WeightReader(weights, self.device, progress, packs=ops.reads_packed)) as reader:
            loaded = load_weights(reader, spec)
            self._is_packed = reader.has_packed
        weights.verify_unchanged()
        self._model = self._make_model(loaded, ops)
        self._model.ops.prepare(loaded)

    @computing
    def reserve_kv(self, layout: KVLayout, budget_bytes: int) -> int:
        self.device.use()
        num_blocks = budget_bytes // layout.block_bytes
        if num_blocks < 1:
            raise ConfigError(f"kv_bytes is {budget_bytes:,}, one KV block needs {layout.block_bytes:,}")
        try:
            self._cache = DeviceCache(layout, num_blocks, self.device.torch_device)
        except torch.OutOfMemoryError:
            raise BackendError(f"the device refused {budget_bytes:,} bytes for the KV cache; set kv_bytes=") from None
        max_tokens = min(self._loaded.weights.spec.context_length, num_blocks * layout.block_size)
        for rope in self._loaded.ropes:
            rope.reserve(max_tokens)
        try:
            self._graphs = self._make_graphs(max_tokens)
            self._warm_up(layout.block_size, num_blocks, max_tokens)
        except Exception as error:
            if not is_build_failure(error):
                raise
            self._graphs = None
            self._use_plain(error)
        return num_blocks

    @computing
    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        self.device.use()
        self._paged.copy(copies)

    def return_kv(self, block_ids: Iterable[int], group: int = 0) -> None:
        """Do nothing: a device's memory is taken once and kept until close."""

    def return_states(self, slots: Iterable[int]) -> None:
        """Do nothing, as with blocks."""

    @computing
    def forward(self, batch: Batch) -> Tensor:
        """Run all rows through all blocks; (output rows, width) on the device."""
        self.device.use()
        if self._graphs is not None:
            check_batch(batch, self._loaded.weights.spec, self._paged, self._num_chosen)
            self._decoded = self._graphs.run(batch)
            if self._decoded is not None:
                self.progress += 1
                return self._decoded.hidden
        passage = self.begin(batch)
        while (hidden := passage.run_next()) is None:
            pass
        return hidden

    def begin(self, batch: Batch) -> TorchResumableForward:
        self.device.use()
        model, cache = self._loaded, self._paged
        check_batch(batch, model.weights.spec, cache, self._num_chosen)
        for rope in model.ropes:
            rope.reserve(int(batch.positions.max(initial=0)) + 1)
        step = with_chosen(model.make_step(batch, cache), self._chosen)
        return TorchResumableForward(model, step, cache, on_layer=self._count_layer, synchronise=self.synchronise)

    def _count_layer(self) -> None:
        self.progress += 1

    @computing
    def sample(self, hidden: Tensor, rows: SampleRows) -> Sampled:
        if self.device.kind == "mps":  # has no float64
            return host_sampling.sample_rows(lambda wanted: self.logits(hidden[wanted]), rows.with_unused_masked())
        sampled = self._pending(self._draw(hidden, rows), hidden, rows).read()
        return with_canvases(sampled, lambda some: self._logits(hidden[some]), self._loaded.embed_ids, rows)

    @computing
    def sample_later(self, hidden: Tensor, rows: SampleRows) -> Callable[[], Sampled]:
        if len(rows.rows) > CHOSEN_ROWS:
            raise BackendError(f"{len(rows.rows)} rows choose a token at once; at most {CHOSEN_ROWS} can")
        drawn = self._draw(hidden, rows)
        self._num_chosen = len(rows.rows)
        self._chosen[: self._num_chosen].copy_(drawn.token_ids)
        return self._pending(drawn, hidden, rows).read

    def _draw(self, hidden: Tensor, rows: SampleRows) -> Drawn:
        """Begin to choose: among the logits that a captured step has left, or computing them from the states."""
        decoded, device = self._decoded, self.device.torch_device
        if decoded is not None and decoded.hidden is not hidden:
            decoded = None
        generation = self._loaded.weights.spec.generation
        if isinstance(generation, MaskedDiffusion) and asks_for_confidence(rows, generation.mask_id):
            return self._confident(decoded, hidden, generation.mask_id).drawn(rows)
        if decoded is None or decoded.logits is None:
            return draw_rows(lambda wanted: self._logits(hidden[wanted]), rows.with_unused_masked(), device)
        if decoded.greedy is not None and is_greedy(rows):
            return self._greedy(decoded.greedy, rows)
        logits = decoded.logits
        return draw_rows(lambda wanted: logits[wanted], rows.with_unused_masked(), device)

    def _confident(self, decoded: Decoded | None, hidden: Tensor, mask_id: int) -> Confident:
        """Of all output rows of a denoising step."""
        if decoded is not None and decoded.confident is not None:
            return decoded.confident
        best_of = self._loaded.ops.most_confident
        return confident_rows(lambda some: self._logits(hidden[some]), len(hidden), best_of, mask_id)

    def _greedy(self, greedy: Tensor, rows: SampleRows) -> Drawn:
        """Of the largest logits; where an id that no token has is largest, the others are looked at when it is read."""
        count, device = len(rows.rows), self.device.torch_device
        is_all = count == len(greedy) and bool((rows.rows == np.arange(count)).all())
        token_ids = greedy if is_all else greedy[on_device(rows.rows.astype(np.int64), device)]
        if rows.unused_mask is None:
            return Drawn(token_ids)
        if self._allowed is None:
            self._allowed = on_device(allowed_tokens(rows.unused_mask, self._loaded.weights.spec.vocab_size), device)
        return Drawn(token_ids, self._allowed[token_ids.clamp(min=0)])

    def _pending(self, drawn: Drawn, hidden: Tensor, rows: SampleRows) -> PendingSample:
        return PendingSample(drawn, lambda wanted: self._logits(hidden[wanted]), rows, self.device.torch_device)

    @computing
    def score(self, hidden: Tensor, targets: npt.NDArray[np.int32], num_top: int) -> Scored:
        if self.device.kind == "mps":
            return host_sampling.score_rows(lambda wanted: self.logits(hidden[wanted]), targets, num_top)
        return score_rows(lambda wanted: self._logits(hidden[wanted]), targets, num_top)

    def pool(self, hidden: Tensor, row_starts: npt.NDArray[np.int32], pooling: Pooling) -> Float32:
        return pool_rows(_on_host(hidden), row_starts, pooling)

    @computing
    def logits(self, hidden: Tensor) -> Float32:
        return _on_host(self._logits(hidden))

    def close(self) -> None:
        self._model, self._cache, self._graphs, self._decoded = None, None, None, None
        if self.device.kind == "cuda":
            torch.cuda.empty_cache()

    def synchronise(self) -> None:
        """Wait until the device has computed everything."""
        if self.device.kind == "cuda":
            torch.cuda.synchronize(self.device.torch_device)

    def _logits(self, hidden: Tensor) -> Tensor:
        if self._loaded.weights.head is None:
            raise BackendError("the model is an encoder and has no logits; use pool")
        return self._loaded.logits(hidden)

    def _make_model(self, weights: ModelWeights, ops: Ops) -> Model:
        return make_model(weights, ops, self.device.torch_device)

    def _make_ops(self, spec: ModelSpec, *, plain: bool = False) -> Ops:
        return PlainOps() if plain else make_ops(spec, self.device)

    def _use_plain(self, error: Exception) -> None:
        """The same weights with plain operations, once a kernel was missing that they could do without."""
        if self._is_packed:
            raise needs_kernels(error) from error
        tell_plain(error)
        self._model = replace(self._loaded, ops=self._make_ops(self._loaded.weights.spec, plain=True))

    def _make_graphs(self, max_tokens: int) -> StepGraphs | None:
        """Captured decode steps, where no operation waits for the device."""
        model = self._loaded
        if not model.ops.can_be_captured:
            return None
        steps = importlib.import_module(f"{KERNELS}.steps.graphs")
        return cast(StepGraphs, steps.CapturedSteps(model, self._paged, self._chosen, max_tokens, self._max_rows))

    def _warm_up(self, block_size: int, num_blocks: int, max_tokens: int) -> None:
        """Compile and capture before the first request: a step that takes seconds would mislead the scheduler."""
        if self._graphs is None:
            return
        steps = importlib.import_module(f"{KERNELS}.steps.warm_up")
        is_denoising, cache = isinstance(self._loaded.weights.spec.generation, MaskedDiffusion), self._paged
        batches_of = steps.denoising_warm_up_batches if is_denoising else steps.warm_up_batches
        for batch in batches_of(block_size, num_blocks, max_tokens, self._max_rows):
            self.forward(steps.with_groups(batch, len(cache.states[0]) if cache.states else 0, cache.num_window_blocks))
        self.synchronise()

    @property
    def _loaded(self) -> Model:
        if self._model is None:
            raise BackendError("no model is loaded; call load first")
        return self._model

    @property
    def _paged(self) -> DeviceCache:
        if self._cache is None:
            raise BackendError("no cache is reserved; call reserve_kv first")
        return self._cache


def _on_host(values: Tensor) -> Float32:
    found: Float32 = values.float().cpu().numpy()
    return found
