"""The interpreter of a ModelSpec over a table of operations; knows no arithmetic of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from kvarn.backends.batch import Batch
from kvarn.backends.torch.cache import DeviceCache
from kvarn.backends.torch.cuda.quantized.pack import QuantizedMatrix
from kvarn.backends.torch.denoising.canvas import condition, make_canvas_rows
from kvarn.backends.torch.denoising.confidence import Confident
from kvarn.backends.torch.elementwise import sigmoid, tanh
from kvarn.backends.torch.mixers.mla import attend_latent
from kvarn.backends.torch.mixers.recurrent import RowOps
from kvarn.backends.torch.rope import RopeTable
from kvarn.backends.torch.step import PagedTiles, Step, Tiles, make_step, of_windows, with_windows
from kvarn.backends.torch.streams.altup import correct, merge_streams, predict, scaled_active, split_streams
from kvarn.backends.torch.streams.per_layer import add_beside, add_laurel, gated_part, layer_part
from kvarn.backends.torch.weights import (
    BlockWeights,
    ExpertWeights,
    Linear,
    ModelWeights,
    NormWeights,
    StateSpaceWeights,
)
from kvarn.models.spec import Attention, FeedForward, LatentAttention, MixtureOfExperts
from kvarn.models.state_layers import NoMixer


class Ops(Protocol):
    """What a device has to compute; x is always (rows, width)."""

    can_be_captured: bool  # whole steps as graphs: no operation waits for the device
    reads_packed: bool  # whether matrices may be QuantizedMatrix

    def prepare(self, weights: ModelWeights) -> None:
        """Called once the weights are loaded."""

    def row_multiple(self, num_rows: int) -> int:
        """The rows of a step are padded to a multiple of this."""

    def plan(self, batch: Batch, cache: DeviceCache) -> Tiles | PagedTiles:
        """Which queries are computed together."""

    def lookup(self, tokens: Tensor | QuantizedMatrix, token_ids: Tensor) -> Tensor:
        """Rows of the embedding."""

    def linear(self, x: Tensor, linear: Linear) -> Tensor: ...

    def logits(self, x: Tensor, head: Linear) -> Tensor:
        """In float32."""

    def most_confident(self, logits: Tensor, banned: int) -> tuple[Tensor, Tensor, Tensor]:
        """As confidence.most_confident()."""

    def add_linear(self, residual: Tensor, x: Tensor, linear: Linear) -> Tensor:
        """residual + linear(x); may write into residual."""

    def normalise(self, x: Tensor, weights: NormWeights) -> Tensor: ...

    def linear_activate(self, x: Tensor, linear: Linear, ffn: FeedForward) -> Tensor:
        """The first half of a feed-forward: act(gate) * up, or act(up) without a gate."""

    def attend(
        self, qkv: Tensor, block: BlockWeights, rope: RopeTable | None, step: Step, cache: DeviceCache
    ) -> Tensor: ...

    def attend_latent(
        self, x: Tensor, block: BlockWeights, rope: RopeTable | None, step: Step, cache: DeviceCache, /
    ) -> Tensor | None:
        """Latent attention from a layer's input to what its output projection reads; None where no kernel has it."""

    def recur(self, x: Tensor, block: BlockWeights, step: Step, states: Tensor | None) -> Tensor:
        """What a recurrent layer's output projection reads; states (slots, floats), None: nothing is kept."""

    def experts(
        self, x: Tensor, weights: ExpertWeights, moe: MixtureOfExperts, step: Step, routed: Tensor | None = None
    ) -> Tensor:
        """The experts of x that the router chooses by `routed`, or by x itself; what is given for padding, which the
        step knows, does not matter."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a captured step leaves on the device; all but hidden is overwritten by the next one."""

    hidden: Tensor  # (rows, width)
    logits: Tensor | None  # (rows, vocabulary); None for a model without a head, or one that denoises
    greedy: Tensor | None  # (rows) int32: the most probable tokens
    confident: Confident | None = None  # instead of both, for a model that denoises


class StepGraphs(Protocol):
    """Steps that are launched as one."""

    def run(self, batch: Batch) -> Decoded | None:
        """Compute a step; None where it is of no shape that is captured."""


@dataclass(frozen=True, slots=True)
class Model:
    """Everything a forward pass needs but the batch."""

    weights: ModelWeights
    ropes: tuple[RopeTable, ...]
    block_ropes: tuple[RopeTable | None, ...]  # by layer
    ops: Ops

    def make_step(self, batch: Batch, cache: DeviceCache) -> Step:
        """Bring a batch to the device."""
        multiple = self.ops.row_multiple(len(batch.token_ids))
        step = make_step(batch, cache.block_size, multiple, self.ops.plan(batch, cache))
        if batch.canvases is not None:
            width, device = self.weights.spec.width, step.token_ids.device
            step = replace(step, canvas=make_canvas_rows(batch, len(step.token_ids), width, device))
        if not any(cache.windowed) or step.slots is None:
            return step
        windows = of_windows(batch)
        return with_windows(step, windows, cache.block_size, self.ops.plan(windows, cache))

    def embed(self, step: Step) -> Tensor:
        """Turn tokens into the first state of the residual stream."""
        weights, embedding = self.weights, self.weights.spec.embedding
        vocabulary = weights.spec.vocab_size
        token_ids = step.token_ids if embedding.segments == 1 else step.token_ids % vocabulary
        x = self.ops.lookup(weights.tokens, token_ids)
        dtype = x.dtype
        if embedding.scale != 1.0:
            x = x.float() * embedding.scale
        if weights.positions is not None:
            x = x.float() + weights.positions[step.positions]
        if weights.token_types is not None:
            x = x.float() + weights.token_types[step.token_ids // vocabulary]
        if weights.embedding_norm is not None:
            x = self.ops.normalise(x, weights.embedding_norm)
        return x.to(dtype)

    def embed_ids(self, token_ids: Tensor) -> Tensor:
        """Rows of the embedding in float32, times its scale."""
        return self.ops.lookup(self.weights.tokens, token_ids).float() * self.weights.spec.embedding.scale

    def enter(self, step: Step) -> Tensor:
        """What the first layer reads: the tokens, or several streams of them."""
        x, streams, canvas = self.embed(step), self.weights.streams, self.weights.canvas
        if step.canvas is not None and canvas is not None:
            x = condition(x, step.canvas, canvas, self.ops)
        return x if streams is None else split_streams(x, streams[0], self.ops)

    def run_block(self, x: Tensor, index: int, step: Step, cache: DeviceCache) -> Tensor:
        """One layer; x may be overwritten."""
        block, altup = self.weights.blocks[index], self.weights.spec.altup
        if altup is None or block.altup is None:
            x = self._run_sublayers(x, index, step, cache)
            x = x if block.per_layer is None else x + self._own_input(x, index, step)
            return x if block.output_scale is None else (x * _output_scale(block, step)).to(x.dtype)
        guessed = predict(x, altup, block.altup, self.ops)
        computed = self._run_sublayers(guessed[:, altup.active].contiguous(), index, step, cache)
        x = correct(guessed, computed, altup, block.altup, self.ops)
        x[:, 1:] += self._own_input(scaled_active(x, altup, block.altup), index, step)[:, None]
        return x

    def _own_input(self, x: Tensor, index: int, step: Step) -> Tensor:
        assert self.weights.per_layer is not None, "layers with inputs of their own have an embedding for them"
        part = layer_part(self.embed(step), step.token_ids, index, self.weights.per_layer, self.ops)
        return gated_part(x, part, self.weights.blocks[index], self.ops)

    def _mix(self, x: Tensor, index: int, step: Step, cache: DeviceCache) -> Tensor:
        """What the output projection of attention, or of what stands in its place, reads."""
        block, ops, rope = self.weights.blocks[index], self.ops, self.block_ropes[index]
        if block.recurrent is not None and block.spec.state is None:
            return ops.recur(x, block, step, cache.states[index] if cache.states else None)
        if block.latent is not None:
            found = ops.attend_latent(x, block, rope, step, cache)
            own_ops = RowOps(ops.linear, ops.normalise)
            return attend_latent(x, block, own_ops, step, cache, rope=rope) if found is None else found
        source = block.attention.kv_source
        own = step if step.slots is None else step.of_layer(cache.windowed[index if source is None else source])
        found = ops.attend(ops.linear(x, block.qkv), block, rope, own, cache)
        if block.output_gate is None:
            return found
        return (found.float() * sigmoid(ops.linear(x, block.output_gate).float())).to(found.dtype)

    def _run_sublayers(self, x: Tensor, index: int, step: Step, cache: DeviceCache) -> Tensor:
        block, ops = self.weights.blocks[index], self.ops

        def attention(y: Tensor) -> Tensor:
            return self._mix(y, index, step, cache)

        placement, norms, scale = block.spec.placement, block.norms, block.spec.residual_scale
        if isinstance(block.spec.mixer, NoMixer):
            return self._add_feed_forward(x, ops.normalise(x, norms["ffn_norm"]), block, step)
        if placement == "residual":
            entry = x.clone() if block.spec.second_norm else x
            x = ops.normalise(ops.add_linear(x, attention(x), block.output), norms["attn_output_norm"])
            x = ops.normalise(entry + x, norms["attn_norm_2"]) if block.spec.second_norm else x
            return ops.normalise(self._add_feed_forward(x, x, block, step), norms["layer_output_norm"])
        normed = x if placement == "post" or not block.spec.attn_norm else ops.normalise(x, norms["attn_norm"])
        found = attention(normed)
        if block.laurel is not None:
            attended = ops.normalise(ops.linear(found, block.output), norms["post_attention_norm"])
            x = add_laurel(x, normed, attended, block, ops)
            found = self._feed_forward(ops.normalise(x, norms["ffn_norm"]), block, step)
            return x + ops.normalise(found, norms["post_ffw_norm"])
        if placement in ("sandwich", "post"):
            x = x + scale * ops.normalise(ops.linear(found, block.output), norms["post_attention_norm"])
            read = x if placement == "post" else ops.normalise(x, norms["ffn_norm"])
            found = self._feed_forward(read, block, step)
            found = found if block.beside is None else add_beside(found, x, block, ops, step)
            return x + scale * ops.normalise(found, norms["post_ffw_norm"])
        if isinstance(block.recurrent, StateSpaceWeights) and block.spec.state is not None:
            state = ops.recur(normed, block, step, cache.states[index] if cache.states else None)
            x = x + scale * ops.linear(state, block.recurrent.output)
        before = ops.normalise(x, norms["ffn_norm"]) if placement == "parallel" else None
        x = ops.add_linear(x, found, block.output) if scale == 1 else x + scale * ops.linear(found, block.output)
        if not block.spec.feed_forward.hidden:
            return x
        before = ops.normalise(x, norms["ffn_norm"]) if before is None else before
        return self._add_feed_forward(x, before, block, step)

    def finish(self, x: Tensor, step: Step) -> Tensor:
        """The states of the output rows after the output norm."""
        norm, streams = self.weights.output_norm, self.weights.streams
        x = x if streams is None else merge_streams(x, streams[1], self.ops)
        x = x if norm is None else self.ops.normalise(x, norm)
        return x if step.output_rows is None else x[step.output_rows]

    def logits(self, hidden: Tensor) -> Tensor:
        """(output rows, vocabulary)."""
        head, spec_head = self.weights.head, self.weights.spec.head
        assert head is not None, "an encoder has no head"
        assert spec_head is not None, "an encoder has no head"
        y = self.ops.logits(hidden, head)
        y = y if head.bias is None else y + head.bias
        y = y if spec_head.scale == 1 else y * spec_head.scale
        return y if spec_head.softcap is None else spec_head.softcap * tanh(y / spec_head.softcap)

    def _add_feed_forward(self, residual: Tensor, x: Tensor, block: BlockWeights, step: Step) -> Tensor:
        weights, ffn = block.feed_forward, block.spec.feed_forward
        if isinstance(weights, ExpertWeights) or block.spec.residual_scale != 1:
            found = self._feed_forward(x, block, step)
            return residual + (found if block.spec.residual_scale == 1 else block.spec.residual_scale * found)
        assert isinstance(ffn, FeedForward), "only experts have expert weights"
        hidden = self.ops.linear_activate(x, weights.gate_up, ffn)
        return self.ops.add_linear(residual, hidden, weights.down)

    def _feed_forward(self, x: Tensor, block: BlockWeights, step: Step) -> Tensor:
        weights, ffn = block.feed_forward, block.spec.feed_forward
        if isinstance(weights, ExpertWeights):
            assert isinstance(ffn, MixtureOfExperts), "only experts have expert weights"
            return self.ops.experts(x, weights, ffn, step)
        assert isinstance(ffn, FeedForward), "only experts have expert weights"
        hidden = self.ops.linear_activate(x, weights.gate_up, ffn)
        return self.ops.linear(hidden, weights.down)


def make_model(weights: ModelWeights, ops: Ops, device: torch.device) -> Model:
    """A model with the tables of its ropes."""
    mixers = [block.mixer for block in weights.spec.blocks]
    by_layer = [mixer.rope if isinstance(mixer, Attention | LatentAttention) else None for mixer in mixers]
    tables = {rope: RopeTable(rope, device) for rope in by_layer if rope is not None}
    block_ropes = tuple(None if rope is None else tables[rope] for rope in by_layer)
    return Model(weights, tuple(tables.values()), block_ropes, ops)


def _output_scale(block: BlockWeights, step: Step) -> Tensor:
    """What rows are multiplied by behind a layer, (1), or (rows, 1)."""
    assert block.output_scale is not None, "only layers that have a factor come here"
    if block.text_scale is None:
        return block.output_scale
    if step.canvas is None:
        return block.text_scale
    return torch.where(step.canvas.is_canvas, block.output_scale, block.text_scale)
