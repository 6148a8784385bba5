"""The paged KV cache on the device: for every layer K and V as (blocks, kv_heads, block_size, head_dim).

A head's keys of one block lie together, as attention reads them. Slot s of a sequence is row
table[s // block_size] * block_size + s % block_size; layers of the window group have blocks and tables of their own.
All rows start as zeros: kernels may read a slot that was never written, so long as they give it no weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvarn.backends.batch import BlockCopy, KVLayout
from kvarn.backends.torch.device import on_device
from kvarn.errors import ConfigError

DTYPES = {"f16": torch.float16, "f32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}

MAX_FP8 = torch.finfo(torch.float8_e4m3fn).max

Int64 = npt.NDArray[np.int64]


class DeviceCache:
    """K and V of every layer."""

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        if layout.dtype not in DTYPES:
            raise ConfigError(f"kv_dtype is {layout.dtype!r}; the torch backend has {', '.join(DTYPES)}")
        self.block_size = layout.block_size
        self.num_blocks, self.num_window_blocks = num_blocks, layout.num_window_blocks
        self.windowed = layout.windowed or (False,) * len(layout.layers)
        self.dtype = DTYPES[layout.dtype]
        self.device = device
        sizes = zip(layout.layers, layout.value_dims, self.windowed, strict=True)
        self.layers: list[tuple[Tensor, Tensor]] = [
            (self._zeros((heads, layout.block_size, dim), one), self._zeros((heads, layout.block_size, value_dim), one))
            for (heads, dim), value_dim, one in sizes
        ]
        # (slots, floats) of the states of recurrent layers, by layer
        self.states = [torch.zeros(layout.num_states, floats, device=device) for floats in layout.states]

    def store(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write rows (n, kv_heads, head_dim) of keys and values."""
        blocks, offsets = slots // self.block_size, slots % self.block_size
        for cache, values in zip(self.layers[layer], (k, v), strict=True):
            _bits(cache)[blocks, :, offsets] = _bits(_rounded(values, cache.dtype))

    def rows(self, layer: int) -> tuple[CachedRows, CachedRows]:
        """K and V of a layer, to be read by row."""
        k, v = self.layers[layer]
        return CachedRows(k), CachedRows(v)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks of each group, in the order given where one depends on another."""
        for group in {copy.group for copy in copies}:
            self._copy([copy for copy in copies if copy.group == group], is_windowed=bool(group))

    def _copy(self, copies: Sequence[BlockCopy], *, is_windowed: bool) -> None:
        sources, targets = [copy.source for copy in copies], [copy.target for copy in copies]
        if set(sources) & set(targets) and len(copies) > 1:
            for copy in copies:
                self._copy([copy], is_windowed=is_windowed)
            return
        source, target = (torch.tensor(ids, device=self.device) for ids in (sources, targets))
        for pair, one in zip(self.layers, self.windowed, strict=True):
            for cache in map(_bits, pair) if one == is_windowed else ():
                cache[target] = cache[source]

    def pack(self, layer: int, source_table: Int64, kept: Tensor, target_table: Int64) -> None:
        """Copy the kept slots of every KV head (kv_heads, kept) of one table to the first slots of another."""
        heads = torch.arange(len(kept), device=self.device)[:, None]
        source = self._rows(source_table, kept)
        target = self._rows(target_table, torch.arange(kept.shape[1], device=self.device))
        target = target[None, :].expand_as(source)
        for cache in map(_bits, self.layers[layer]):
            found = cache[source // self.block_size, heads, source % self.block_size]
            cache[target // self.block_size, heads, target % self.block_size] = found

    def _rows(self, table: Int64, slots: Tensor) -> Tensor:
        blocks = on_device(table, self.device)
        return blocks[slots // self.block_size] * self.block_size + slots % self.block_size

    def _zeros(self, block: tuple[int, ...], is_windowed: bool) -> Tensor:
        num_blocks = self.num_window_blocks if is_windowed else self.num_blocks
        return torch.zeros(num_blocks, *block, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class CachedRows:
    """K or V of one layer; indexed by rows, it gives them as (..., kv_heads, head_dim)."""

    blocks: Tensor

    def __getitem__(self, rows: Tensor) -> Tensor:
        size = self.blocks.shape[2]
        return _bits(self.blocks)[rows // size, :, rows % size].view(self.blocks.dtype)


def _bits(values: Tensor) -> Tensor:
    """A view that can be indexed: torch does not copy single values of a type of one byte but as bytes."""
    return values.view(torch.uint8) if values.dtype.itemsize == 1 else values


def _rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """E4M3 has no infinity, and what is too large would become no number: its largest number instead."""
    if dtype != torch.float8_e4m3fn:
        return values.to(dtype)
    return values.clamp(-MAX_FP8, MAX_FP8).to(dtype)
