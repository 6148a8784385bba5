"""The operations of a model on an NVIDIA GPU: Triton kernels, and the vendor's matmuls where they give the same bits.

What no kernel covers (layers without a cache, the keys a sparse cache keeps, whole models of `_lacks_kernels`) the
plain operations compute.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kvarn.backends.batch import Batch
from kvarn.backends.torch.cache import DeviceCache
from kvarn.backends.torch.cuda import attention as paged
from kvarn.backends.torch.cuda import confidence, recurrent, rows
from kvarn.backends.torch.cuda.experts import ExpertRows, run_experts
from kvarn.backends.torch.cuda.latents import latent
from kvarn.backends.torch.cuda.matmul import Epilogue, multiply
from kvarn.backends.torch.cuda.pick_store import open_store
from kvarn.backends.torch.cuda.quantized.matmuls import QuantizedMatmuls
from kvarn.backends.torch.cuda.quantized.pack import QuantizedMatrix
from kvarn.backends.torch.denoising.keep import pack_kept
from kvarn.backends.torch.mixers.recurrent import RowOps, make_state_rows
from kvarn.backends.torch.plain import PlainOps
from kvarn.backends.torch.rope import RopeTable
from kvarn.backends.torch.step import PagedTiles, Step, Tiles, make_paged_tiles
from kvarn.backends.torch.weights import (
    NOTHING,
    BlockWeights,
    DeltaNetWeights,
    ExpertWeights,
    FeedForwardWeights,
    Linear,
    ModelWeights,
    NormWeights,
    ShortConvWeights,
    StateSpaceWeights,
)
from kvarn.models.recurrent import attentions, recurrent_of
from kvarn.models.spec import Activation, Attention, FeedForward, LatentAttention, MixtureOfExperts, ModelSpec
from kvarn.models.state_layers import GatedDeltaNet, Mamba, Mamba2, ShortConv

log = logging.getLogger(__name__)

Product = tuple[Tensor | QuantizedMatrix, Epilogue, torch.dtype]

BUCKETS = (1, 4, 8, 16, 32, *range(48, 257, 16))  # rows of a step ...
MULTIPLE = 128  # ... and of those with more
MAX_TILE_ROWS = 64  # queries of a prompt times the query heads of a KV head ...
LARGE_TILE_ROWS = 128  # ... of the kernel for large ones
MAX_SPLIT = 256  # tiles times KV heads below which a sequence's tiles of keys are computed side by side ...
MAX_PART_BYTES = 256 << 20  # ... in scratch memory of at most this size


class CudaOps(PlainOps):
    """Made for one model."""

    reads_packed = True

    def __init__(self, spec: ModelSpec) -> None:
        self._matmuls = QuantizedMatmuls(open_store())
        super().__init__(self._matmuls)
        self._attentions = frozenset(attentions(spec))
        self._group = max((one.num_heads // one.num_kv_heads for one in attentions(spec)), default=1)
        self._kv_heads = max((one.num_kv_heads for one in attentions(spec)), default=1)
        self._latents = frozenset(one.mixer for one in spec.blocks if isinstance(one.mixer, LatentAttention))
        groups = (one.num_heads // latent.program_heads(one) for one in self._latents)
        self._kv_heads = max(self._kv_heads, *groups, 0)
        self._finished = torch.zeros(0, dtype=torch.int32)
        self.can_be_captured = not _lacks_kernels(spec)
        if not self.can_be_captured:
            log.warning("some layers have no kernel for their attention: plain operations, slower and not captured")

    def prepare(self, weights: ModelWeights) -> None:
        """Choose a kernel for every matrix of a decode step, by time."""
        self._finished = torch.zeros(MAX_SPLIT, dtype=torch.int32, device=weights.tokens.device)
        shapes: dict[tuple[object, ...], list[Product]] = {}
        for product in _products(weights):
            weight, epilogue, dtype = product
            types = weight.types if isinstance(weight, QuantizedMatrix) else ()
            shapes.setdefault((weight.shape, types, epilogue, dtype), []).append(product)
        for products in shapes.values():
            _, epilogue, dtype = products[0]
            dense = [weight for weight, _, _ in products if isinstance(weight, Tensor)]
            packed = [weight for weight, _, _ in products if isinstance(weight, QuantizedMatrix)]
            if dense:
                self._matmuls.tune(dense, BUCKETS, epilogue, dtype)
            else:
                self._matmuls.tune_quantized(packed, BUCKETS, epilogue, dtype)

    def lookup(self, tokens: Tensor | QuantizedMatrix, token_ids: Tensor) -> Tensor:
        if isinstance(tokens, Tensor):
            return super().lookup(tokens, token_ids)
        return self._matmuls.lookup(tokens, token_ids)

    def refine(self, num_rows: int, step_us: Callable[[], float]) -> None:
        """Choose kernels by the time of a captured step of so many rows."""
        self._matmuls.refine(num_rows, step_us)

    def row_multiple(self, num_rows: int) -> int:
        """So few numbers of rows that a kernel can be chosen for each."""
        return next((bucket for bucket in BUCKETS if num_rows <= bucket), MULTIPLE)

    def plan(self, batch: Batch, cache: DeviceCache) -> Tiles | PagedTiles:
        if batch.block_tables.shape[1] == 0 or not self.can_be_captured:
            return super().plan(batch, cache)
        longest = int((batch.row_starts[1:] - batch.row_starts[:-1]).max(initial=1))
        tile = 1 if longest == 1 else self.prompt_tile(len(batch.token_ids), cache)
        num_tiles = int((-(-(batch.row_starts[1:] - batch.row_starts[:-1]) // tile)).sum())
        return make_paged_tiles(batch, tile, self.key_tiles_of(num_tiles, int(batch.context_lens.max())), cache.device)

    def prompt_tile(self, num_rows: int, cache: DeviceCache) -> int:
        """Queries of one tile of prompts of so many rows in all: large ones where they still fill the device."""
        is_narrow = cache.dtype.itemsize == 1  # products of such types have another order in other tiles: one size
        if self._latents:
            return 1 if is_narrow else min(latent.prompt_tile(one) for one in self._latents)
        if is_narrow:
            return max(1, paged.MIN_ROWS // self._group)
        large = LARGE_TILE_ROWS // self._group
        is_large = large > 0 and num_rows // large * self._kv_heads >= MAX_SPLIT and cache.dtype == torch.bfloat16
        if is_large and all(paged.Kernel(one, large, cache.block_size).is_large for one in self._attentions):
            return large
        return max(1, MAX_TILE_ROWS // self._group)

    def logits(self, x: Tensor, head: Linear) -> Tensor:
        return self._matmuls.in_float32(x, head.weight)

    def most_confident(self, logits: Tensor, banned: int) -> tuple[Tensor, Tensor, Tensor]:
        return confidence.most_confident(logits, banned)

    def add_linear(self, residual: Tensor, x: Tensor, linear: Linear) -> Tensor:
        if linear.bias is not None:
            return residual.add_(self.linear(x, linear))
        return self._matmuls.add(residual, x, linear.weight)

    def linear_activate(self, x: Tensor, linear: Linear, ffn: FeedForward) -> Tensor:
        if not _is_fused(linear, ffn):
            return super().linear_activate(x, linear, ffn)
        return self._matmuls.gated(x, linear.weight)

    def normalise(self, x: Tensor, weights: NormWeights) -> Tensor:
        return rows.normalise(x, weights)

    def activate(self, x: Tensor, activation: Activation, *, gated: bool) -> Tensor:
        if activation not in rows.ACTIVATIONS:
            return super().activate(x, activation, gated=gated)
        return rows.activate(x, activation, gated=gated)

    def attend(
        self, qkv: Tensor, block: BlockWeights, rope: RopeTable | None, step: Step, cache: DeviceCache
    ) -> Tensor:
        tiles = step.tiles
        if isinstance(tiles, Tiles):
            return super().attend(qkv, block, rope, step, cache)
        pair = cache.layers[block.index]
        q = rows.rotate_and_store(qkv, block, rope, step, pair)
        if step.batch.keep:
            pack_kept(q.float(), block, step, cache, self.all_heads)
        kernel = paged.Kernel(block.attention, tiles.tile, cache.block_size)
        parts = self._parts(tiles, kernel)
        return paged.attend(q, pair, block.sinks, tiles, step.positions, kernel, parts).view(len(q), -1)

    def attend_latent(
        self, x: Tensor, block: BlockWeights, rope: RopeTable | None, step: Step, cache: DeviceCache
    ) -> Tensor | None:
        mixer, tiles = block.spec.mixer, step.tiles
        if isinstance(tiles, Tiles) or not isinstance(mixer, LatentAttention) or rope is None:
            return None
        kernel = latent.LatentKernel(mixer, tiles.tile, cache.block_size)
        num_tiles, num_key_tiles, parts = len(tiles.sequences), tiles.num_key_tiles, None
        if num_key_tiles > 1 and kernel.part_bytes(num_tiles, num_key_tiles) <= MAX_PART_BYTES:
            parts = kernel.new_parts(num_tiles, num_key_tiles, self._finished)
        own, (cached, _) = RowOps(self.linear, self.normalise), cache.layers[block.index]
        return latent.attend_latent(x, block, own, rope, step, cached, kernel, parts)

    def recur(self, x: Tensor, block: BlockWeights, step: Step, states: Tensor | None) -> Tensor:
        mixer, weights = block.spec.mixer, block.recurrent
        if isinstance(weights, StateSpaceWeights):
            return super().recur(x, block, step, states)
        rows = step.states or make_state_rows(step.batch, len(x), x.device)
        states = states if states is not None else torch.empty(0, 0, device=x.device)  # no row has a slot
        if isinstance(mixer, ShortConv) and isinstance(weights, ShortConvWeights):
            return recurrent.short_conv(self.linear(x, block.qkv), weights.conv, mixer, rows, states)
        assert isinstance(mixer, GatedDeltaNet), "an attention has no state"
        assert isinstance(weights, DeltaNetWeights), "a delta net has its own weights"
        qkv, gate = (self.linear(x, part) for part in (block.qkv, weights.gate))
        alpha, beta = (_narrow(x, part, x.dtype) for part in (weights.alpha, weights.beta))
        return recurrent.delta_net(recurrent.Projections(qkv, gate, alpha, beta), weights, mixer, rows, states)

    def experts(
        self, x: Tensor, weights: ExpertWeights, moe: MixtureOfExperts, step: Step, routed: Tensor | None = None
    ) -> Tensor:
        if not moe.gated or moe.weighs_input or moe.mixer_margin is not None or moe.output_bias:
            return super().experts(x, weights, moe, step, routed)
        shared = None
        if weights.shared is not None and moe.shared is not None:
            ffn = FeedForward(moe.shared.hidden, moe.activation)
            shared = self.linear(self.linear_activate(x, weights.shared.gate_up, ffn), weights.shared.down)
        logits = _narrow(x if routed is None else routed, weights.router, torch.float32)
        return run_experts(ExpertRows(x, logits, shared, step.slots, step.num_rows), weights, moe)

    def key_tiles_of(self, num_tiles: int, longest: int) -> int:
        """Tiles of keys that are computed side by side for contexts up to so many slots; 1: one after the other."""
        if num_tiles * self._kv_heads >= MAX_SPLIT:
            return 1
        return 1 << (-(-longest // paged.KEY_TILE) - 1).bit_length()

    def _parts(self, tiles: PagedTiles, kernel: paged.Kernel) -> paged.Parts | None:
        num_tiles, num_key_tiles = len(tiles.sequences), tiles.num_key_tiles
        if num_key_tiles == 1 or paged.part_bytes(num_tiles, kernel, num_key_tiles) > MAX_PART_BYTES:
            return None
        return paged.new_parts(num_tiles, kernel, num_key_tiles, self._finished)


def _lacks_kernels(spec: ModelSpec) -> bool:
    """Whether some layer has what no kernel knows: keys of other layers, norms of values, other streams, chunks, scores
    by distance, state spaces, experts that are chosen or weighed in another way."""
    has_inputs = spec.embedding.per_layer is not None or spec.altup is not None
    is_other = any(block.beside or isinstance(recurrent_of(block), Mamba2 | Mamba) for block in spec.blocks)
    mixtures = [block.feed_forward for block in spec.blocks if isinstance(block.feed_forward, MixtureOfExperts)]
    is_other = is_other or any(one.weighs_input or one.mixer_margin is not None or one.output_bias for one in mixtures)
    return has_inputs or is_other or any(map(_lacks_kernel, attentions(spec)))


def _lacks_kernel(attention: Attention) -> bool:
    is_offset = attention.temperature is not None and attention.temperature.offset > 0
    is_other = attention.kv_source is not None or attention.value_norm_eps is not None
    return is_offset or is_other or attention.is_chunked or attention.alibi is not None


def _narrow(x: Tensor, linear: Linear, dtype: torch.dtype) -> Tensor:
    """x @ weight.T for a few columns: not worth a choice by time, whose checks take longer the fewer they are."""
    weight = linear.weight
    assert isinstance(weight, Tensor), "narrow matrices are not packed"
    return multiply(x, weight, torch.empty(len(x), len(weight), device=x.device, dtype=dtype))


def _is_fused(linear: Linear, ffn: FeedForward) -> bool:
    return ffn.gated and ffn.activation == "silu" and ffn.gate_cutoff is None and linear.bias is None


def _products(weights: ModelWeights) -> Iterator[Product]:
    """Every dense product of a forward pass: its matrix, what becomes of it, and its type."""
    dtype = weights.tokens.dtype
    for block in weights.blocks:
        ffn, inner = block.spec.feed_forward, block.feed_forward
        is_changed = block.spec.placement in ("sandwich", "post") or block.spec.residual_scale != 1
        adds = Epilogue.STORE if is_changed else Epilogue.ADD
        if block.qkv is not NOTHING:
            yield block.qkv.weight, Epilogue.STORE, dtype
            yield block.output.weight, adds if block.output.bias is None else Epilogue.STORE, dtype
        if block.latent is not None and block.latent.q_b is not None:
            yield block.latent.q_b.weight, Epilogue.STORE, dtype
        if isinstance(inner, FeedForwardWeights) and isinstance(ffn, FeedForward) and ffn.hidden:
            gated = Epilogue.SILU_GATED if _is_fused(inner.gate_up, ffn) else Epilogue.STORE
            yield inner.gate_up.weight, gated, dtype
            yield inner.down.weight, adds if inner.down.bias is None else Epilogue.STORE, dtype
        if isinstance(inner, ExpertWeights) and isinstance(ffn, MixtureOfExperts):
            if inner.shared is not None:
                yield (
                    inner.shared.gate_up.weight,
                    Epilogue.SILU_GATED if ffn.activation == "silu" else Epilogue.STORE,
                    dtype,
                )
                yield inner.shared.down.weight, Epilogue.STORE, dtype
        if block.output_gate is not None:
            yield block.output_gate.weight, Epilogue.STORE, dtype
        if isinstance(block.recurrent, DeltaNetWeights):
            yield block.recurrent.gate.weight, Epilogue.STORE, dtype
        if isinstance(block.recurrent, StateSpaceWeights) and block.spec.state is not None:
            yield block.recurrent.input.weight, Epilogue.STORE, dtype
            yield block.recurrent.output.weight, Epilogue.STORE, dtype
    if weights.head is not None:
        yield weights.head.weight, Epilogue.STORE, torch.float32
