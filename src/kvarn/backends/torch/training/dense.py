"""A dense decoder in torch that can be differentiated: whole sequences at once, no cache. An interpreter of ModelSpec.

Its weights are float32 tensors by GGUF's names; the residual stream and norms stay float32, what is between them is in
the type of the autocast around it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from kvarn.backends.torch.rope import RopeTable
from kvarn.models.spec import Attention, Block, FeedForward, ModelSpec, Norm, Rope

ReadArray = Callable[[str], npt.NDArray[np.float32]]

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {  # torch's own, whose gradients cannot overflow
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class DenseDecoder:
    """A model of dense layers with RMS norms; weights by name."""

    def __init__(self, spec: ModelSpec, names: list[str], read: ReadArray, device: torch.device) -> None:
        self.spec, self.device = spec, device
        self.weights: Mapping[str, Tensor] = {
            name: torch.from_numpy(np.array(read(name), np.float32)).to(device) for name in names
        }
        ropes = {block.attention.rope for block in spec.blocks} - {None}
        self._ropes: dict[Rope, RopeTable] = {rope: RopeTable(rope, device) for rope in ropes if rope is not None}

    def hidden(self, ids: Tensor) -> Tensor:
        """The states that predict the next tokens, (sequences, length, width)."""
        x = F.embedding(ids, self.weights["token_embd.weight"]) * self.spec.embedding.scale
        for layer, block in enumerate(self.spec.blocks):
            x = self._block(x, f"blk.{layer}.", block)
        assert self.spec.output_norm is not None
        return self._norm(x, "output_norm", self.spec.output_norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """Of some states, over the vocabulary."""
        head = self.spec.head
        assert head is not None
        found = F.linear(hidden, self.weights["token_embd.weight" if head.tied else "output.weight"]).float()
        found = found * head.scale
        return found if head.softcap is None else head.softcap * torch.tanh(found / head.softcap)

    def _block(self, x: Tensor, prefix: str, block: Block) -> Tensor:
        assert isinstance(block.feed_forward, FeedForward)
        added = self._attention(self._norm(x, f"{prefix}attn_norm", block.norm), prefix, block.attention)
        x = x + self._after(added, f"{prefix}post_attention_norm", block) * block.residual_scale
        added = self._feed_forward(self._norm(x, f"{prefix}ffn_norm", block.norm), prefix, block.feed_forward)
        return x + self._after(added, f"{prefix}post_ffw_norm", block) * block.residual_scale

    def _after(self, added: Tensor, name: str, block: Block) -> Tensor:
        return self._norm(added, name, block.norm) if block.placement == "sandwich" else added

    def _norm(self, x: Tensor, name: str, norm: Norm) -> Tensor:
        y = x.float()
        return y * torch.rsqrt(y.square().mean(dim=-1, keepdim=True) + norm.eps) * self.weights[f"{name}.weight"]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _feed_forward(self, x: Tensor, prefix: str, ffn: FeedForward) -> Tensor:
        up = self._linear(x, f"{prefix}ffn_up")
        if ffn.gated:
            up = ACTIVATIONS[ffn.activation](self._linear(x, f"{prefix}ffn_gate")) * up
        else:
            up = ACTIVATIONS[ffn.activation](up)
        return self._linear(up, f"{prefix}ffn_down")

    def _attention(self, x: Tensor, prefix: str, attention: Attention) -> Tensor:
        sequences, length, _ = x.shape
        q, k, v = (
            self._linear(x, f"{prefix}attn_{kind}").view(sequences * length, -1, attention.head_dim) for kind in "qkv"
        )
        if attention.qk_norm is not None:
            q = self._norm(q, f"{prefix}attn_q_norm", attention.qk_norm)
            k = self._norm(k, f"{prefix}attn_k_norm", attention.qk_norm)
        if attention.rope is not None:
            positions = torch.arange(length, device=x.device).repeat(sequences)
            q, k = (self._ropes[attention.rope].rotate(part, positions) for part in (q, k))
        shared = attention.num_heads // attention.num_kv_heads
        k, v = (part.repeat_interleave(shared, dim=1) for part in (k, v))
        q, k, v = (part.view(sequences, length, -1, attention.head_dim).transpose(1, 2) for part in (q, k, v))
        mask = _window_mask(length, attention, x.device)
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=attention.scale)
        flat = out.transpose(1, 2).reshape(sequences, length, -1)
        return self._linear(flat, f"{prefix}attn_output")


def unsupported(spec: ModelSpec) -> list[str]:
    """Name what this interpreter does not compute."""
    found = []
    for block in spec.blocks:
        attention = block.attention
        activation = block.feed_forward.activation
        wrong = {
            "experts": not isinstance(block.feed_forward, FeedForward),
            f"the activation {activation}": activation not in ACTIVATIONS,
            f"placement {block.placement}": block.placement not in ("pre", "sandwich"),
            "layer norms": block.norm.kind != "rms",
            "a softcap of scores": attention.softcap is not None,
            "sinks": attention.sinks,
            "keys of another layer": attention.kv_source is not None,
            "norms of values": attention.value_norm_eps is not None,
            "inputs of layers": block.per_layer is not None,
            "low-rank maps beside attention": block.laurel is not None,
            "gates with a cutoff": isinstance(block.feed_forward, FeedForward)
            and block.feed_forward.gate_cutoff is not None,
            "several residual streams": spec.altup is not None,
            "experts beside a feed-forward": block.beside is not None,
            "factors behind a layer": block.output_scale,
            "temperature": attention.temperature is not None,
            "chunks": attention.is_chunked,
            f"mask {attention.mask}": attention.mask != "causal",
            "norms of whole rows of Q and K": attention.qk_norm is not None
            and (attention.qk_norm_span == "row" or attention.qk_norm_after_rope),
        }
        found += [name for name, is_wrong in wrong.items() if is_wrong and name not in found]
    return found


def _window_mask(length: int, attention: Attention, device: torch.device) -> Tensor | None:
    """None where a token sees all before it, which torch has faster kernels for."""
    if attention.window is None or attention.window >= length:
        return None
    at = torch.arange(length, device=device)
    distance = at[:, None] - at[None, :]
    return (distance >= 0) & (distance < attention.window)
