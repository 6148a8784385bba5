"""What a model IS: frozen data, no arithmetic and no tensors.

Each backend interprets a ModelSpec; the NumPy reference backend is the definition of every field.
Tensor names are GGUF's (`blk.3.attn_q.weight`). One fact, one field: nothing is inferred from another field.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh"]  # gelu is the exact erf form
Mask = Literal["causal", "bidirectional", "block_causal"]
Pooling = Literal["mean", "cls", "last"]


@dataclass(frozen=True, slots=True)
class Norm:
    """`<name>.weight`, and `<name>.bias` when has_bias. rms: x / rms(x) * w; layer: (x - mean) / std * w + b."""

    kind: Literal["rms", "layer"]
    eps: float
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions with every scaling method already folded into the frequencies.

    angle(position, i) = position * inverse_frequencies[i]; cos and sin are both multiplied by magnitude.
    interleaved rotates the pairs (2i, 2i+1); half rotates (i, i + n) with n = len(inverse_frequencies).
    Dimensions from 2n on pass through unrotated.
    """

    style: Literal["interleaved", "half"]
    inverse_frequencies: tuple[float, ...]
    magnitude: float = 1.0


@dataclass(frozen=True, slots=True)
class Attention:
    """Tensors attn_q, attn_k, attn_v, attn_output (.weight, and .bias as flagged); attn_q_norm, attn_k_norm.

    Order: project, add bias, qk_norm over each head, rope, cache, scores * scale, softcap, mask, softmax.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None
    mask: Mask = "causal"
    window: int | None = None  # a query at p sees keys in (p - window, p]
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Norm | None = None  # over head_dim, one weight vector for all heads
    softcap: float | None = None  # scores = cap * tanh(scores / cap)
    mask_block: int | None = None  # block_causal: a query at p sees keys before (p // mask_block + 1) * mask_block


@dataclass(frozen=True, slots=True)
class FeedForward:
    """gated: down(act(gate(x)) * up(x)); plain: down(act(up(x))). Tensors ffn_gate, ffn_up, ffn_down."""

    hidden: int
    activation: Activation
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """Router ffn_gate_inp (experts, width); experts ffn_{gate,up,down}_exps (experts, out, in), all gated.

    p = softmax(router(x)) over all experts; the num_active largest are used, ties to the lower index;
    renormalise divides their p by their sum. Output = sum p_e * expert_e(x), in ascending expert index.
    """

    num_experts: int
    num_active: int
    hidden: int
    activation: Activation
    renormalise: bool


@dataclass(frozen=True, slots=True)
class Block:
    """One layer: an attention and a feed-forward sublayer around a residual stream x.

    pre:      x += sub(norm(x))              attn_norm, ffn_norm
    sandwich: x += post(sub(norm(x)))        attn_norm, post_attention_norm, ffn_norm, post_ffw_norm
    residual: x = norm(x + sub(x))           attn_output_norm, layer_output_norm
    """

    attention: Attention
    feed_forward: FeedForward | MixtureOfExperts
    norm: Norm
    placement: Literal["pre", "sandwich", "residual"] = "pre"


@dataclass(frozen=True, slots=True)
class InputEmbedding:
    """x = token_embd[token] * scale (+ position_embd[position]) (+ token_types[0]), then token_embd_norm.

    segments 2: a token id + vocab_size is the same token in the second of two texts, with token_types[1].
    """

    scale: float = 1.0
    positions: int | None = None  # number of learned positions
    token_types: bool = False
    segments: int = 1
    norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class Head:
    """logits = output.weight @ x (token_embd.weight when tied), then cap * tanh(logits / cap) if softcap."""

    tied: bool
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class Autoregressive:
    """Left-to-right generation."""


@dataclass(frozen=True, slots=True)
class MaskedDiffusion:
    """Denoising of masked positions; shift: the logits of position i are found in row i - 1.

    block is the length of the blocks a block-diffusion model was trained with, None for full attention.
    """

    mask_id: int
    shift: bool
    block: int | None


@dataclass(frozen=True, slots=True)
class Classifier:
    """scores = cls.output @ tanh(cls @ x + bias) + bias, for x of the first token: (labels)."""

    labels: int


@dataclass(frozen=True, slots=True)
class Encoder:
    """No generation: hidden states pooled to one vector per text, or scored by a classifier."""

    pooling: Pooling
    classifier: Classifier | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    architecture: str  # for people and error messages; no backend may look at it
    name: str
    width: int
    vocab_size: int
    context_length: int
    embedding: InputEmbedding
    blocks: tuple[Block, ...]
    output_norm: Norm | None  # tensor output_norm
    head: Head | None  # None for encoders
    generation: Autoregressive | MaskedDiffusion | Encoder
