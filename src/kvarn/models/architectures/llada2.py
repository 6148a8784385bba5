"""LLaDA 2: block diffusion with experts in groups, chosen by sigmoid scores with a bias, beside one for every token."""

from __future__ import annotations

from dataclasses import replace

from kvarn.models.architectures.glm4_moe import check_groups
from kvarn.models.architectures.llada_moe import MASK_ID
from kvarn.models.architectures.llama import mixture_of_experts
from kvarn.models.diffusion.masked import as_masked_diffusion
from kvarn.models.dimensions import Dimensions, read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, ExpertGroups, FeedForward, MixtureOfExperts, ModelSpec, SharedExpert
from kvarn.models.spec_builder import decoder, rms_norm

BLOCK_LENGTH = 32  # what these models were trained with; not in their config.json
SIGMOID = 2  # GGUF's number of this scoring function


def describe(hparams: HParams) -> ModelSpec:
    """Describe a LLaDA 2; GGUF says by tensors whether there are biases and norms of Q and K."""
    _refuse_insertions(hparams)
    dims, norm = read_dimensions(hparams), rms_norm(hparams)
    rope = read_rope(hparams, "half", dims.head_dim, dims.context_length)
    names = ("attn_qkv.bias", "attn_output.bias", "attn_q_norm.weight")
    keys = ("use_qkv_bias", "use_bias", "use_qk_norm")
    qkv_bias, output_bias, has_norm = (
        hparams.has_tensor(f"blk.0.{name}") if hparams.is_gguf else hparams.flag(None, key, default=False)
        for name, key in zip(names, keys, strict=True)
    )
    biases = {"qkv_bias": qkv_bias, "output_bias": output_bias}
    feed_forwards = _feed_forwards(hparams, dims)
    blocks = tuple(
        Block(
            mixer=dims.attention(layer, rope, qk_norm=norm if has_norm else None, **biases),
            feed_forward=feed_forwards[layer],
            norm=norm,
        )
        for layer in range(dims.num_layers)
    )
    block = hparams.integer("diffusion_block_length", default=BLOCK_LENGTH)
    spec = decoder(hparams, dims, blocks, norm)
    return as_masked_diffusion(hparams, spec, shift=False, block=block, mask_id=MASK_ID)


def _feed_forwards(hparams: HParams, dims: Dimensions) -> tuple[FeedForward | MixtureOfExperts, ...]:
    num_dense, experts = hparams.integer("num_dense_layers", default=0), _experts(hparams)
    dense = FeedForward(dims.hidden[0], hparams.activation("silu"))
    return tuple(dense if layer < num_dense else experts for layer in range(dims.num_layers))


def _experts(hparams: HParams) -> MixtureOfExperts:
    _require("expert_gating_func", "score_function", hparams, (SIGMOID, "sigmoid"))
    _require("expert_weights_norm", "norm_topk_prob", hparams, (True,))
    hidden, num_shared = hparams.integer("expert_hidden"), hparams.integer("num_shared_experts", default=0)
    shared_hidden = hidden * num_shared
    if hparams.integer("shared_hidden", default=shared_hidden) != shared_hidden:
        raise hparams.unsupported("the shared expert has another size", "expert_shared_feed_forward_length")
    experts = mixture_of_experts(hparams, hparams.integer("num_experts"), hidden, renormalise=True)
    groups = ExpertGroups(hparams.integer("num_groups", default=1), hparams.integer("num_active_groups", default=1))
    check_groups(hparams, experts, groups)
    return replace(
        experts,
        renormalise=experts.num_active > 1,  # the share of one expert stays its score
        scoring="sigmoid",
        selection_bias=True,
        scale=hparams.number("expert_scale", default=1.0),
        groups=groups if groups.count > 1 else None,
        shared=SharedExpert(shared_hidden) if num_shared else None,
    )


def _require(gguf: str, hf: str, hparams: HParams, known: tuple[object, ...]) -> None:
    value, key = hparams.raw(gguf, hf), gguf if hparams.is_gguf else hf
    if value is not None and value not in known:
        raise hparams.unsupported(f"{key} is {value!r:.20}; {known[-1]} is known", key)


def _refuse_insertions(hparams: HParams) -> None:
    """LLaDA 2.2 deletes and inserts tokens of a block, which moves those behind them."""
    config = {} if hparams.is_gguf else hparams.weights.metadata["hf"]
    for key in ("delete_token_id", "insert_token_id", "split_token_id"):
        if config.get(key) is not None:
            raise hparams.unsupported(f"{key} is {config[key]!r:.20}; tokens are replaced, never moved", key)
