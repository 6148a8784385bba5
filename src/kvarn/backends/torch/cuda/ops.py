"""The operations of a model on an NVIDIA GPU: Triton kernels, and the vendor's matmuls where they give the same bits.

What no kernel covers (layers without a cache, the keys a sparse cache keeps, experts) the plain operations compute.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch import Tensor

from kvarn.backends.batch import Batch
from kvarn.backends.torch.cache import DeviceCache
from kvarn.backends.torch.cuda import attention as paged
from kvarn.backends.torch.cuda import rows
from kvarn.backends.torch.cuda.choose import Matmuls
from kvarn.backends.torch.cuda.matmul import Epilogue
from kvarn.backends.torch.keep import pack_kept
from kvarn.backends.torch.plain import PlainOps
from kvarn.backends.torch.rope import RopeTable
from kvarn.backends.torch.step import PIECE, PagedTiles, Step, Tiles, make_paged_tiles
from kvarn.backends.torch.weights import BlockWeights, FeedForwardWeights, Linear, ModelWeights, NormWeights
from kvarn.models.spec import Activation, Attention, FeedForward

log = logging.getLogger(__name__)

BUCKETS = (16, 32, 64, 96, 128, 192, 256)  # rows of a step ...
MULTIPLE = 128  # ... and of those with more
MAX_TILE_ROWS = 64  # queries of a prompt times the query heads of a KV head
MAX_SPLIT = 256  # tiles times KV heads below which a sequence's pieces are computed side by side


class CudaOps(PlainOps):
    """Made for one model: `attentions` are the kinds of its layers."""

    def __init__(self, attentions: frozenset[Attention]) -> None:
        self._matmuls = Matmuls()
        super().__init__(self._matmuls)
        self._group = max((one.num_heads // one.num_kv_heads for one in attentions), default=1)
        self._kv_heads = max((one.num_kv_heads for one in attentions), default=1)
        self.has_kernels = not any(_lacks_kernel(one) for one in attentions)
        if not self.has_kernels:
            log.warning("no attention kernel for this model's layers: plain operations, slower and not captured")

    def prepare(self, weights: ModelWeights) -> None:
        """Choose a kernel for every matrix of a decode step, by time."""
        shapes: dict[tuple[torch.Size, Epilogue, torch.dtype], list[Tensor]] = {}
        for weight, epilogue, dtype in _products(weights):
            shapes.setdefault((weight.shape, epilogue, dtype), []).append(weight)
        for (_, epilogue, dtype), matrices in shapes.items():
            self._matmuls.tune(matrices, BUCKETS, epilogue, dtype)

    def row_multiple(self, num_rows: int) -> int:
        """So few numbers of rows that a kernel can be chosen for each."""
        return next((bucket for bucket in BUCKETS if num_rows <= bucket), MULTIPLE)

    def plan(self, batch: Batch, cache: DeviceCache) -> Tiles | PagedTiles:
        if batch.block_tables.shape[1] == 0 or not self.has_kernels:
            return super().plan(batch, cache)
        longest = int((batch.row_starts[1:] - batch.row_starts[:-1]).max(initial=1))
        return make_paged_tiles(batch, 1 if longest == 1 else self.prompt_tile, cache.device)

    @property
    def prompt_tile(self) -> int:
        """Queries of one tile of a prompt."""
        return max(1, MAX_TILE_ROWS // self._group)

    def logits(self, x: Tensor, head: Linear) -> Tensor:
        return self._matmuls.in_float32(x, head.weight)

    def add_linear(self, residual: Tensor, x: Tensor, linear: Linear) -> Tensor:
        if linear.bias is not None:
            return residual.add_(self.linear(x, linear))
        return self._matmuls.add(residual, x, linear.weight)

    def linear_activate(self, x: Tensor, linear: Linear, ffn: FeedForward) -> Tensor:
        if not _is_fused(linear, ffn):
            return super().linear_activate(x, linear, ffn)
        return self._matmuls.gated(x, linear.weight)

    def normalise(self, x: Tensor, weights: NormWeights) -> Tensor:
        return rows.normalise(x.contiguous(), weights)

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
        attention = block.spec.attention
        kernel = paged.Kernel(attention, paged.rows_for(attention, tiles.tile), cache.block_size)
        scratch = self._scratch(tiles, kernel, q.device)
        return paged.attend(q, pair, tiles, step.positions, kernel, scratch).view(len(q), -1)

    def pieces_of(self, num_tiles: int, longest: int) -> int:
        """Pieces that are computed side by side for contexts up to so many slots; 1: each sequence by one program."""
        if num_tiles * self._kv_heads >= MAX_SPLIT:
            return 1
        return 1 << (-(-longest // PIECE) - 1).bit_length()

    def _scratch(self, tiles: PagedTiles, kernel: paged.Kernel, device: torch.device) -> paged.Pieces | None:
        num_pieces = self.pieces_of(len(tiles.sequences), tiles.num_pieces * PIECE)
        if num_pieces == 1:
            return None
        return paged.new_pieces(len(tiles.sequences), kernel, num_pieces * PIECE, device)


def _lacks_kernel(attention: Attention) -> bool:
    """Whether the kernels do not know it: sinks, temperatures, keys of other layers, norms of values, and
    norms of Q and K but rms norms of heads before rope."""
    norm = attention.qk_norm
    is_usual = norm is None or (norm.kind == "rms" and not norm.has_bias and not attention.qk_norm_after_rope)
    is_shared = attention.kv_source is not None or attention.value_norm_eps is not None
    is_other = attention.sinks or attention.temperature is not None or attention.qk_norm_span == "row"
    return is_shared or is_other or not is_usual


def _is_fused(linear: Linear, ffn: FeedForward) -> bool:
    return ffn.gated and ffn.activation == "silu" and ffn.gate_cutoff is None and linear.bias is None


def _products(weights: ModelWeights) -> Iterator[tuple[Tensor, Epilogue, torch.dtype]]:
    """Every dense product of a forward pass: its matrix, what becomes of it, and its type."""
    dtype = weights.tokens.dtype
    for block in weights.blocks:
        ffn, inner = block.spec.feed_forward, block.feed_forward
        is_changed = block.spec.placement in ("sandwich", "post") or block.spec.residual_scale != 1
        adds = Epilogue.STORE if is_changed else Epilogue.ADD
        yield block.qkv.weight, Epilogue.STORE, dtype
        yield block.output.weight, adds if block.output.bias is None else Epilogue.STORE, dtype
        if isinstance(inner, FeedForwardWeights) and isinstance(ffn, FeedForward):
            gated = Epilogue.SILU_GATED if _is_fused(inner.gate_up, ffn) else Epilogue.STORE
            yield inner.gate_up.weight, gated, dtype
            yield inner.down.weight, adds if inner.down.bias is None else Epilogue.STORE, dtype
    if weights.head is not None:
        yield weights.head.weight, Epilogue.STORE, torch.float32
