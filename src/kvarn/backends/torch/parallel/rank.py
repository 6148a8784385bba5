"""One rank's part of a model behind the protocol: it computes its heads, columns and layers, and meets the others in
every sum. All ranks must be told the same calls in the same order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvarn.backends.batch import Batch, KVLayout
from kvarn.backends.torch.backend import TorchBackend
from kvarn.backends.torch.check import check_batch
from kvarn.backends.torch.device import Device
from kvarn.backends.torch.layers import Model, Ops, StepGraphs
from kvarn.backends.torch.parallel.groups import Ranks
from kvarn.backends.torch.parallel.ops import ShardedOps
from kvarn.backends.torch.parallel.shards import ShardWeights, shard_spec
from kvarn.backends.torch.plain import PlainOps
from kvarn.backends.torch.step import Step
from kvarn.backends.torch.weights import ModelWeights
from kvarn.formats.recast_weights import DenseWeights
from kvarn.formats.weights import WeightSource
from kvarn.models.spec import ModelSpec

WithStage = Callable[[int], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class StagedModel(Model):
    """A stage's layers: states come from the stage before, and go to the one after or back to rank 0."""

    ranks: Ranks

    def embed(self, step: Step) -> Tensor:
        place = self.ranks.place
        if place.is_first:
            return Model.embed(self, step)
        return self.ranks.receive((len(step.token_ids), self.weights.spec.width), place.rank - place.shape.tensor)

    def finish(self, x: Tensor, step: Step) -> Tensor:
        """The states of the output rows on rank 0; elsewhere nobody reads what is returned."""
        place, shape = self.ranks.place, self.ranks.place.shape
        if place.is_last:
            x = Model.finish(self, x, step)
            if shape.pipeline > 1 and place.part == 0:
                self.ranks.send(x, 0)
            return x
        self.ranks.send(x, place.rank + shape.tensor)
        if place.rank > 0:
            return x
        num_rows = len(x) if step.output_rows is None else len(step.output_rows)
        return self.ranks.receive((num_rows, x.shape[1]), shape.num_ranks - shape.tensor)


class RankBackend(TorchBackend):
    """The torch backend for one rank's share."""

    def __init__(
        self, device: Device, threads: int, ranks: Ranks, with_stage: WithStage = lambda _: nullcontext()
    ) -> None:
        """with_stage(rows) calls the other ranks of the first stage to the logits of so many rows."""
        super().__init__(device, threads)
        self._ranks = ranks
        self._with_stage = with_stage
        self._whole: ModelSpec | None = None

    def load(self, spec: ModelSpec, weights: WeightSource, progress: Callable[[int, int], None] | None = None) -> None:
        """Load this rank's share of a model."""
        stored = weights.stored if isinstance(weights, DenseWeights) else weights
        self._whole = spec
        place = self._ranks.place
        super().load(shard_spec(spec, place), ShardWeights(stored, spec, place), progress)

    def reserve_blocks(self, layout: KVLayout, num_blocks: int) -> None:
        """Reserve that many blocks for the heads and layers that are here."""
        blocks = self._loaded.weights.spec.blocks
        own = replace(layout, layers=tuple((b.attention.num_kv_heads, b.attention.head_dim) for b in blocks))
        self.reserve_kv(own, num_blocks * own.block_bytes)

    def check(self, batch: Batch) -> None:
        """Refuse a batch that does not fit, before other ranks hear of it."""
        check_batch(batch, self._loaded.weights.spec, self._paged, 0)

    @torch.inference_mode()
    def join_logits(self, num_rows: int) -> None:
        """Compute this rank's part of the logits of rank 0's states."""
        width, device = self._loaded.weights.spec.width, self.device
        self._logits(torch.empty(num_rows, width, dtype=device.dtype, device=device.torch_device))

    def _logits(self, hidden: Tensor) -> Tensor:
        if self._loaded.weights.head is None:
            return super()._logits(hidden)  # is refused there
        with self._with_stage(len(hidden)):
            return super()._logits(self._ranks.tensor.broadcast(hidden.contiguous()))

    def _make_ops(self, spec: ModelSpec, *, plain: bool = False) -> Ops:
        inner, whole = super()._make_ops(spec, plain=plain), self._whole
        assert isinstance(inner, PlainOps), "every table of operations rests on the plain one"
        assert whole is not None, "a model is being loaded"
        return ShardedOps(inner, self._ranks, whole)

    def _make_model(self, weights: ModelWeights, ops: Ops) -> Model:
        made = super()._make_model(weights, ops)
        return StagedModel(made.weights, made.ropes, made.block_ropes, made.ops, self._ranks)

    def _make_graphs(self, max_tokens: int) -> StepGraphs | None:  # noqa: ARG002
        """None: steps that meet other ranks are not captured."""
        return None
