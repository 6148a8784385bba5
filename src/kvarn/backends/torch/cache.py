"""The paged KV cache on the device: for every layer K and V as (slots of all blocks, kv_heads, head_dim).

Slot s of a sequence is row table[s // block_size] * block_size + s % block_size. All rows start as zeros: kernels may
read a slot that was never written, so long as they give it no weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvarn.backends.batch import BlockCopy, KVLayout
from kvarn.errors import ConfigError

DTYPES = {"f16": torch.float16, "f32": torch.float32}

Int64 = npt.NDArray[np.int64]


class DeviceCache:
    """K and V of every layer."""

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        if layout.dtype not in DTYPES:
            raise ConfigError(f"kv_dtype is {layout.dtype!r}; the torch backend has {', '.join(DTYPES)}")
        self.block_size = layout.block_size
        self.num_blocks = num_blocks
        self.dtype = DTYPES[layout.dtype]
        self.device = device
        slots = num_blocks * layout.block_size
        self.layers: list[tuple[Tensor, Tensor]] = [
            (self._zeros((slots, heads, dim)), self._zeros((slots, heads, value_dim)))
            for (heads, dim), value_dim in zip(layout.layers, layout.value_dims, strict=True)
        ]
        # (slots, floats) of the states of recurrent layers, by layer
        self.states = [torch.zeros(layout.num_states, floats, device=device) for floats in layout.states]

    def store(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        for cache, values in zip(self.layers[layer], (k, v), strict=True):
            cache[slots] = values.to(cache.dtype)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks, in the order given where one depends on another."""
        sources, targets = [copy.source for copy in copies], [copy.target for copy in copies]
        if set(sources) & set(targets) and len(copies) > 1:
            for copy in copies:
                self.copy([copy])
            return
        source, target = (torch.tensor(ids, device=self.device) for ids in (sources, targets))
        for pair in self.layers:
            for cache in pair:
                blocks = cache.view(self.num_blocks, self.block_size, *cache.shape[1:])
                blocks[target] = blocks[source]

    def pack(self, layer: int, source_table: Int64, kept: Tensor, target_table: Int64) -> None:
        """Copy the kept slots of every KV head (kv_heads, kept) of one table to the first slots of another."""
        heads = torch.arange(len(kept), device=self.device)[:, None]
        source = self._rows(source_table, kept)
        target = self._rows(target_table, torch.arange(kept.shape[1], device=self.device))
        for cache in self.layers[layer]:
            cache[target[None, :].expand_as(source), heads] = cache[source, heads]

    def _rows(self, table: Int64, slots: Tensor) -> Tensor:
        blocks = torch.from_numpy(table).to(self.device)
        return blocks[slots // self.block_size] * self.block_size + slots % self.block_size

    def _zeros(self, shape: tuple[int, int, int]) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)
