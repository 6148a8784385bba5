"""The reference backend: NumPy, float32, written to be read. It is the definition of every field of a ModelSpec.

Weights are dequantised at load; with dense=False their stored bytes are kept and dequantised at each use,
slower by far but a quarter of the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvarn.adapters.weights import LoraWeights
from kvarn.backends.adapted import adapted_head, adapted_weights, with_head_adapters
from kvarn.backends.batch import Batch, BlockCopy, KVLayout, Sampled, SampleRows, Scored
from kvarn.backends.code_hash import code_hash
from kvarn.backends.host_sampling import sample_rows, score_rows
from kvarn.backends.pooling import pool_rows
from kvarn.backends.reference.altup import correct, merge_streams, predict, scaled_active, split_streams
from kvarn.backends.reference.attention import Layer, PagedCache, attend
from kvarn.backends.reference.canvas import condition, output_scales
from kvarn.backends.reference.layers import (
    Float32,
    Weights,
    embed,
    feed_forward,
    normalise,
    softcap,
)
from kvarn.backends.reference.mla import LatentLayer, attend_latent
from kvarn.backends.reference.per_layer import add_laurel, beside_experts, per_layer_input, per_layer_parts
from kvarn.backends.reference.recurrent import RecurrentLayer, recur
from kvarn.backends.resumable_forward import SingleShotForward
from kvarn.errors import BackendError
from kvarn.formats.quants import dequantize
from kvarn.formats.weights import TensorInfo, WeightSource
from kvarn.models.recurrent import recurrent_of
from kvarn.models.spec import Attention, LatentAttention, ModelSpec, Pooling
from kvarn.models.state_layers import NoMixer


class ReferenceBackend:
    """Interprets a ModelSpec with NumPy."""

    name = "reference"
    min_prompt_rows = 1
    free_prompt_rows = 0
    runs_ahead = False
    progress = 0
    lost = None

    def __init__(self, *, dense: bool = True) -> None:
        self._dense = dense
        self._spec: ModelSpec | None = None
        self._weights: Weights = {}
        self._cache: PagedCache | None = None
        self._states: list[Float32] = []

    def unsupported(self, spec: ModelSpec) -> list[str]:  # noqa: ARG002 - the definition runs everything
        return []

    def load(self, spec: ModelSpec, weights: WeightSource, progress: Callable[[int, int], None] | None = None) -> None:
        total, done = sum(info.num_bytes for info in weights.tensors.values()), 0
        loaded: dict[str, Float32] = {}
        stored: dict[str, tuple[npt.NDArray[np.uint8], TensorInfo]] = {}
        for name, info in weights.tensors.items():
            if self._dense or len(info.shape) == 1:
                loaded[name] = np.array(weights.array(name), np.float32)
            else:
                stored[name] = np.array(weights.raw(name)), info
            done += info.num_bytes
            weights.release_pages((name,))
            if progress is not None:
                progress(done, total)
        weights.verify_unchanged()
        self._spec, self._weights = spec, loaded if self._dense else _LazyWeights(loaded, stored)

    def prepare_adapter(self, weights: LoraWeights) -> LoraWeights:
        """An adapter is its own handle."""
        return weights

    def reserve_kv(self, layout: KVLayout, budget_bytes: int) -> int:
        num_blocks = budget_bytes // layout.block_bytes
        self._cache = PagedCache(layout, num_blocks)
        self._states = [np.zeros((layout.num_states, floats), np.float32) for floats in layout.states]
        return num_blocks

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            self._paged().copy(copy)

    def kernel_identity(self) -> str:
        folder = Path(__file__).parent
        return f"reference numpy {np.__version__} {code_hash(sorted(folder.glob('*.py')))}"

    def num_block_bytes(self) -> int:
        return sum(part.nbytes for part in self._paged().block(0))

    def read_block(self, block_id: int) -> npt.NDArray[np.uint8]:
        return np.concatenate([part.reshape(-1).view(np.uint8) for part in self._paged().block(block_id)])

    def write_block(self, block_id: int, content: npt.NDArray[np.uint8]) -> None:
        start = 0
        for part in self._paged().block(block_id):
            part[...] = content[start : start + part.nbytes].view(part.dtype).reshape(part.shape)
            start += part.nbytes

    def populate_blocks(self, count: int) -> None:
        """Do nothing: the arrays' memory is the system's affair."""

    def return_kv(self, block_ids: Iterable[int], group: int = 0) -> None:
        """Do nothing: the arrays stay until close, their values are never read again."""

    def return_states(self, slots: Iterable[int]) -> None:
        """Do nothing, as with blocks."""

    def begin(self, batch: Batch) -> SingleShotForward:
        """The forward pass is computed in one piece here."""
        return SingleShotForward(self, batch)

    def forward(self, batch: Batch) -> Float32:
        """Run all rows through all blocks; the states of the output rows after the output norm."""
        spec, weights = self._loaded(), adapted_weights(self._weights, batch)
        _check_tokens(batch, spec)
        x = self._inputs(batch, weights)
        x = x if batch.canvases is None else condition(x, weights, spec, batch)
        parts = per_layer_parts(x, batch.token_ids, weights, spec)
        x = x if spec.altup is None else split_streams(x, weights, spec.altup)
        for layer in range(len(spec.blocks)):
            x = self._block(x, weights, layer, parts[:, layer], batch)
        x = x[batch.output_rows]
        x = x if spec.altup is None else merge_streams(x, weights, spec.altup)
        x = x if spec.output_norm is None else normalise(x, weights, "output_norm", spec.output_norm)
        return with_head_adapters(x, batch)

    def embed_tokens(self, token_ids: npt.NDArray[np.int32]) -> Float32:
        return embed(token_ids, np.zeros_like(token_ids), self._weights, self._loaded().embedding)

    def sample(self, hidden: Float32, rows: SampleRows) -> Sampled:
        return sample_rows(lambda wanted: self.logits(hidden[wanted]), rows, self._mean_embedding)

    def _mean_embedding(self, p: Float32) -> Float32:
        mean: Float32 = p @ self._weights["token_embd.weight"] * np.float32(self._loaded().embedding.scale)
        return mean

    def score(self, hidden: Float32, targets: npt.NDArray[np.int32], num_top: int) -> Scored:
        return score_rows(lambda wanted: self.logits(hidden[wanted]), targets, num_top)

    def pool(self, hidden: Float32, row_starts: npt.NDArray[np.int32], pooling: Pooling) -> Float32:
        return pool_rows(hidden, row_starts, pooling)

    def logits(self, hidden: Float32) -> Float32:
        head = self._loaded().head
        if head is None:
            raise BackendError("the model is an encoder and has no logits; use pool")
        y: Float32 = np.asarray(hidden) @ self._weights["token_embd.weight" if head.tied else "output.weight"].T
        y = adapted_head(self._weights, hidden, y)
        y = y + self._weights["output.bias"] if head.bias else y
        return softcap(y * np.float32(head.scale), head.softcap)

    def close(self) -> None:
        self._spec, self._weights, self._cache, self._states = None, {}, None, []

    def _inputs(self, batch: Batch, weights: Weights) -> Float32:
        """What the first layer reads."""
        embedding, width = self._loaded().embedding, self._loaded().width
        if embedding.joined is None:
            return embed(batch.token_ids, batch.positions, weights, embedding)
        assert batch.inputs is not None, "rows that are joined come with the batch"
        tokens = normalise(batch.inputs[:, :width], weights, "enorm", embedding.joined)
        states = normalise(batch.inputs[:, width:], weights, "hnorm", embedding.joined)
        joined: Float32 = np.concatenate([tokens, states], axis=1) @ weights["eh_proj.weight"].T
        return joined

    def _block(self, x: Float32, weights: Weights, layer: int, part: Float32, batch: Batch) -> Float32:
        spec, stem = self._loaded(), f"blk.{layer}"
        block, altup = spec.blocks[layer], spec.altup
        if altup is None:
            x = self._sublayers(x, weights, layer, batch)
            x = x + per_layer_input(x, part, weights, stem, block)
            return x * output_scales(weights, stem, batch, block) if block.output_scale else x
        guessed = predict(x, weights, stem, altup)
        computed = self._sublayers(guessed[:, altup.active], weights, layer, batch)
        x = correct(guessed, computed, weights, stem, altup)
        added = per_layer_input(scaled_active(x, weights, stem, altup), part, weights, stem, block)
        x[:, 1:] += added[:, None]
        return x

    def _mix(self, x: Float32, weights: Weights, layer: int, batch: Batch) -> Float32:
        """Attention, or what stands in its place or beside it."""
        found, block = np.zeros_like(x), self._loaded().blocks[layer]
        if isinstance(block.mixer, Attention):
            found = attend(x, weights, Layer(layer, block.mixer, self._cache), batch)
        if isinstance(block.mixer, LatentAttention):
            found = attend_latent(x, weights, LatentLayer(layer, block.mixer, self._cache), batch)
        if state := recurrent_of(block):
            slots = self._states[layer] if self._states else None
            found = found + recur(x, weights, RecurrentLayer(f"blk.{layer}", state, slots), batch)
        return found

    def _sublayers(self, x: Float32, weights: Weights, layer: int, batch: Batch) -> Float32:
        stem, block = f"blk.{layer}", self._loaded().blocks[layer]

        def norm(y: Float32, name: str) -> Float32:
            return normalise(y, weights, f"{stem}.{name}", block.norm)

        def attention(y: Float32) -> Float32:
            return self._mix(y, weights, layer, batch)

        def ffn(y: Float32) -> Float32:
            if block.beside is not None:
                return beside_experts(x, y, weights, stem, block)
            return feed_forward(y, weights, stem, block.feed_forward)

        if block.placement == "residual":
            attended = norm(x + attention(x), "attn_output_norm")
            x = norm(x + attended, "attn_norm_2") if block.second_norm else attended
            return norm(x + ffn(x), "layer_output_norm")
        scale = np.float32(block.residual_scale)
        if block.laurel is not None:
            normed = norm(x, "attn_norm")
            attended = x + norm(attention(normed), "post_attention_norm")
            x = add_laurel(attended, normed, weights, stem, block.norm)
            return x + norm(ffn(norm(x, "ffn_norm")), "post_ffw_norm")
        if block.placement == "sandwich":
            x = x + scale * norm(attention(norm(x, "attn_norm")), "post_attention_norm")
            return x + scale * norm(ffn(norm(x, "ffn_norm")), "post_ffw_norm")
        if block.placement == "post":
            x = x + scale * norm(attention(x), "post_attention_norm")
            return x + scale * norm(ffn(x), "post_ffw_norm")
        if block.placement == "parallel":
            found = attention(norm(x, "attn_norm")) + ffn(norm(x, "ffn_norm"))
            return x + scale * found
        if not isinstance(block.mixer, NoMixer):
            x = x + scale * attention(norm(x, "attn_norm") if block.attn_norm else x)
        return x + scale * ffn(norm(x, "ffn_norm")) if block.feed_forward.hidden else x

    def _loaded(self) -> ModelSpec:
        if self._spec is None:
            raise BackendError("no model is loaded; call load first")
        return self._spec

    def _paged(self) -> PagedCache:
        if self._cache is None:
            raise BackendError("no cache is reserved; call reserve_kv first")
        return self._cache


class _LazyWeights(Mapping[str, Float32]):
    """Vectors as floats, matrices dequantised at each use."""

    def __init__(self, vectors: Weights, stored: Mapping[str, tuple[npt.NDArray[np.uint8], TensorInfo]]) -> None:
        self._vectors = vectors
        self._stored = stored

    def __getitem__(self, name: str) -> Float32:
        if name in self._vectors:
            return self._vectors[name]
        raw, info = self._stored[name]
        return dequantize(raw, info.type, info.shape)

    def __iter__(self) -> Iterator[str]:
        yield from self._vectors
        yield from self._stored

    def __len__(self) -> int:
        return len(self._vectors) + len(self._stored)


def _check_tokens(batch: Batch, spec: ModelSpec) -> None:
    ids = batch.token_ids
    if len(ids) and not (ids.min() >= 0 and ids.max() < spec.vocab_size * spec.embedding.segments):
        raise BackendError(f"token ids run from {ids.min()} to {ids.max()}; the vocabulary has {spec.vocab_size}")
