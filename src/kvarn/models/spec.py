"""What a model IS: frozen data, no arithmetic and no tensors.

Each backend interprets a ModelSpec; the NumPy reference backend is the definition of every field.
Tensor names are GGUF's (`blk.3.attn_q.weight`). One fact, one field: nothing is inferred from another field.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvarn.errors import UnsupportedModel
from kvarn.models.diffusion.uniform import UniformDiffusion
from kvarn.models.encoders.pooled import Classifier, DenseLayer
from kvarn.models.residual import AltUp, PerLayerEmbedding, PerLayerInput
from kvarn.models.state_layers import GatedDeltaNet, Mamba, Mamba2, NoMixer, ShortConv

# gelu is the exact erf form, relu2 the square of relu. swiglu_oai, gated only:
# (clip(up, -7, 7) + 1) * g * sigmoid(1.702 g) with g = min(gate, 7)
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_oai"]
# canvas: rows of a text are causal; those of a canvas behind it see the keys that its first row would see with a
# causal mask, and all of the canvas
Mask = Literal["causal", "bidirectional", "block_causal", "canvas"]
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
class Temperature:
    """Queries are multiplied by 1 + beta * ln(1 + (position + offset) // length)."""

    length: int
    beta: float
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Attention:
    """Tensors attn_q, attn_k, attn_v, attn_output (.weight, and .bias as flagged); attn_{q,k}_norm; attn_sinks.

    Order: project, add bias, qk_norm, rope, temperature, cache, scores * scale, softcap, alibi, mask, softmax.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None
    mask: Mask = "causal"
    window: int | None = None  # a query at p sees keys in (p - window, p]; bidirectional: (p - window, p + window) ...
    is_chunked: bool = False  # ... of these only those of its own chunk: from p - p % window on
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Norm | None = None
    qk_norm_span: Literal["head", "row"] = "head"  # over each head with one weight vector, or over all heads together
    qk_norm_after_rope: bool = False
    softcap: float | None = None  # scores = cap * tanh(scores / cap)
    alibi: tuple[float, ...] | None = None  # by head: scores -= slope * |position of the query - of the key|
    mask_block: int | None = None  # block_causal: a query at p sees keys before (p // mask_block + 1) * mask_block
    sinks: bool = False  # softmax over the scores and one more per head, attn_sinks (heads), whose value is zero
    temperature: Temperature | None = None
    output_gate: bool = False  # what the heads give is multiplied by sigmoid(attn_gate(x)) before attn_output
    value_norm_eps: float | None = None  # V / rms(V) for each head, without a weight
    kv_source: int | None = None  # of that earlier layer, which caches them; then attn_k, attn_v, attn_k_norm are none


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Attention (causal) whose cache has one row for all heads of a token: a latent (rank), then a key (rope_dim).

    Tensors attn_q, or where there is a query_rank attn_q_a, attn_q_a_norm, attn_q_b; attn_kv_a_mqa, attn_kv_a_norm,
    attn_k_b (heads, rank, nope_dim), attn_v_b (heads, value_dim, rank), attn_output; no biases.
    row = attn_kv_a_mqa(x), its first rank dimensions normed, its last rope_dim rotated: this is cached
    q = attn_q(x), or attn_q_b(norm(attn_q_a(x))): of each head nope_dim, and rope_dim that are rotated
    p = softmax((attn_k_b q_nope, q_rope) . row * scale); head = attn_v_b (sum of p * the row's first rank dimensions)
    """

    num_heads: int
    query_rank: int | None
    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    rope: Rope
    norm: Norm  # of the latent and of what attn_q_a gives

    @property
    def row_dim(self) -> int:
        """Values of one token in the cache."""
        return self.rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class FeedForward:
    """gated: down(act(gate(x)) * up(x)); plain: down(act(up(x))). Tensors ffn_gate, ffn_up, ffn_down.

    hidden 0: there is none, and no ffn_norm.
    """

    hidden: int
    activation: Activation
    gated: bool = True
    bias: bool = False
    gate_cutoff: float | None = None  # of a row's gate g, max(0, g - mean(g) - gate_cutoff * std(g)) is activated


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Experts in `count` groups of neighbours: only the num_active whose num_judged best experts have the largest sums
    are chosen from, ties to the lower index."""

    count: int
    num_active: int
    num_judged: int = 2


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An expert that every token meets: ffn_{gate,up,down}_shexp, times sigmoid(ffn_gate_inp_shexp . x) if gate."""

    hidden: int
    gate: bool = False


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """Router ffn_gate_inp (experts, width); experts ffn_{gate,up,down}_exps (experts, out, in), as FeedForward gated.

    p = softmax or sigmoid of router(x), over all experts; the num_active largest are used, ties to the lower index,
    where selection_bias by p + exp_probs_b; renormalise divides their p by their sum, scale multiplies them.
    Output = sum p_e * expert_e(x), or where weighs_input of expert_e(p_e * x), in ascending expert index, then the
    shared expert's. mixer_margin: experts are taken one by one, the largest l = router(x) first, and p is a softmax
    over those not yet taken with (l_max - l_e) / max(|l_e|, l_max) <= mixer_margin.
    """

    num_experts: int
    num_active: int
    hidden: int
    activation: Activation
    renormalise: bool
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    scale: float = 1.0
    groups: ExpertGroups | None = None
    shared: SharedExpert | None = None
    router_bias: bool = False
    selection_bias: bool = False
    expert_bias: bool = False
    gated: bool = True  # and the shared expert
    expert_scale: bool = False  # p_e, renormalised, is multiplied by ffn_down_exps.scale (experts)
    weighs_input: bool = False
    mixer_margin: float | None = None
    output_bias: bool = False  # at last, + ffn_exps.bias (width)


@dataclass(frozen=True, slots=True)
class Block:
    """One layer: an attention, or what stands in its place, and a feed-forward sublayer around a residual stream x.

    pre:      x += sub(norm(x))              attn_norm, ffn_norm
    sandwich: x += post(sub(norm(x)))        attn_norm, post_attention_norm, ffn_norm, post_ffw_norm
    residual: x = norm(x + sub(x))           attn_output_norm, layer_output_norm
              with second_norm, x = attn_norm_2(x + attn_output_norm(x + attention(x))), then the feed-forward
    post:     x += post(sub(x))              post_attention_norm, post_ffw_norm
    parallel: x += attention(norm(x)) + ffn(other norm(x))    attn_norm, ffn_norm
    All but residual multiply what they add by residual_scale. Without attn_norm, of pre only, attention reads x itself.
    beside, of sandwich only: experts beside the feed-forward, which read the same x and sub(norm(x)) is the sum of
              post_ffw_norm_1(ffn(ffn_norm(x))) + post_ffw_norm_2(experts(pre_ffw_norm_2(x)))
              where the router reads ffn_gate_inp_norm(x)
    laurel, of sandwich only: with y = attn_norm(x), attention and a low-rank map of `laurel` columns side by side:
              x = (x + post_attention_norm(attention(y)) + y + laurel_post_norm(laurel_r(laurel_l(y)))) / sqrt(2)
    state, of pre only: a layer with a state that reads what attention reads; both are added to x
    """

    mixer: Attention | LatentAttention | GatedDeltaNet | ShortConv | Mamba2 | Mamba | NoMixer
    feed_forward: FeedForward | MixtureOfExperts
    norm: Norm
    placement: Literal["pre", "sandwich", "residual", "post", "parallel"] = "pre"
    attn_norm: bool = True
    second_norm: bool = False
    residual_scale: float = 1.0
    beside: MixtureOfExperts | None = None
    per_layer: PerLayerInput | None = None
    output_scale: bool = False  # at last, x *= layer_output_scale (1)
    text_scale: bool = False  # then rows before a canvas have one of their own, enc_layer_output_scale (1)
    laurel: int | None = None
    state: Mamba2 | None = None

    @property
    def attention(self) -> Attention:
        """The mixer of a layer that has attention; for what can do with nothing else."""
        if not isinstance(self.mixer, Attention) or self.state is not None:
            kind = type(self.state or self.mixer).__name__
            names = {"LatentAttention": "latent attention", "NoMixer": "layers without attention"}
            name = names.get(kind, "recurrent layers")
            raise UnsupportedModel(f"the model has {name} ({kind}); this works for models without it only")
        return self.mixer


@dataclass(frozen=True, slots=True)
class InputEmbedding:
    """x = token_embd[token] * scale (+ position_embd[position]) (+ token_types[0]), then token_embd_norm.

    joined: instead, x = eh_proj(enorm(e), hnorm(h)), one behind the other, of what the batch has as inputs.
    """

    scale: float = 1.0
    positions: int | None = None  # number of learned positions
    token_types: bool = False
    segments: int = 1  # 2: id + vocab_size is the same token in the second of two texts, with token_types[1]
    norm: Norm | None = None
    per_layer: PerLayerEmbedding | None = None
    joined: Norm | None = None  # enorm and hnorm


@dataclass(frozen=True, slots=True)
class Head:
    """logits = (output.weight @ x (token_embd.weight when tied) + output.bias) * scale, then cap * tanh(that / cap)."""

    tied: bool
    softcap: float | None = None
    bias: bool = False
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Autoregressive:
    """Left-to-right generation."""


@dataclass(frozen=True, slots=True)
class MaskedDiffusion:
    """Denoising of masked positions; shift: the logits of position i are found in row i - 1."""

    mask_id: int
    shift: bool
    block: int | None  # length of the blocks that a block-diffusion model was trained with; None: full attention


@dataclass(frozen=True, slots=True)
class Encoder:
    """No generation: hidden states pooled to one vector per text, which dense layers change or a classifier scores."""

    pooling: Pooling
    classifier: Classifier | None = None
    dense: tuple[DenseLayer, ...] = ()


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
    generation: Autoregressive | MaskedDiffusion | UniformDiffusion | Encoder
    altup: AltUp | None = None
    draft: Block | None = None  # the file's layer behind these, see architectures/draft_layer.py

    @property
    def is_diffusion(self) -> bool:
        return isinstance(self.generation, MaskedDiffusion | UniformDiffusion)
