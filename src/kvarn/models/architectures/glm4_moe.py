"""GLM-4.5: experts chosen by sigmoid scores with a bias, in groups, beside one that every token meets."""

from __future__ import annotations

from dataclasses import replace

from kvarn.formats.hf_names import layer_of
from kvarn.formats.tensor_view import WeightView
from kvarn.models.architectures.draft_layer import draft_block
from kvarn.models.architectures.llama import mixture_of_experts
from kvarn.models.dimensions import Dimensions, read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, ExpertGroups, FeedForward, MixtureOfExperts, ModelSpec, SharedExpert
from kvarn.models.spec_builder import decoder, rms_norm

SIGMOID = 2  # GGUF's number of this scoring function


def describe(hparams: HParams) -> ModelSpec:
    """Describe a GLM-4.5; GGUF says by tensors whether there are biases and norms of Q and K."""
    dims, norm = without_draft_layers(hparams, read_dimensions(hparams, hidden=_no_dense(hparams))), rms_norm(hparams)
    hparams.raw(None, "num_nextn_predict_layers")
    rope = read_rope(hparams, "half", dims.head_dim, dims.context_length)
    has_bias, has_norm = (hparams.has_tensor(f"blk.0.{name}") for name in ("attn_q.bias", "attn_q_norm.weight"))
    if not hparams.is_gguf:
        has_bias = hparams.flag(None, "attention_bias", default=False)
        has_norm = hparams.flag(None, "use_qk_norm", default=False)
    num_dense = hparams.integer("num_dense_layers", default=0)
    has_experts = num_dense < dims.num_layers or hparams.integer("num_experts", default=0) > 0
    experts = sigmoid_experts(hparams) if has_experts else None  # read also where every layer is dense
    blocks = tuple(
        Block(
            mixer=dims.attention(layer, rope, qkv_bias=has_bias, qk_norm=norm if has_norm else None),
            feed_forward=FeedForward(dims.hidden[layer], hparams.activation("silu"))
            if layer < num_dense or experts is None
            else experts,
            norm=norm,
        )
        for layer in range(dims.num_layers)
    )
    return replace(decoder(hparams, dims, blocks, norm), draft=draft_block(hparams, blocks))


def _no_dense(hparams: HParams) -> int | None:
    """A model type of which no layer is dense has no size for them."""
    return None if hparams.is_gguf or hparams.has_key("intermediate_size") else 1


def without_draft_layers(hparams: HParams, dims: Dimensions) -> Dimensions:
    """Leave out the layers that draft tokens ahead, which GGUF counts."""
    num_draft = hparams.integer("num_draft_layers", default=0) if hparams.is_gguf else 0
    if num_draft >= dims.num_layers:
        raise hparams.format_error(
            f"nextn_predict_layers is {num_draft} of {dims.num_layers} layers (block_count); expected fewer"
        )
    return replace(dims, num_layers=dims.num_layers - num_draft)


def drop_draft_layers(spec: ModelSpec, view: WeightView) -> WeightView:
    """Leave out the layers behind the last one, which draft tokens ahead."""
    kept = {name: entry for name, entry in view.entries.items() if (layer_of(name) or 0) < len(spec.blocks)}
    return WeightView(view.source, kept)


def require_sigmoid(hparams: HParams) -> None:
    """Refuse experts that are scored in another way."""
    scoring = hparams.raw("expert_gating_func", "scoring_func")
    if scoring not in (None, SIGMOID, "sigmoid"):
        raise hparams.unsupported(f"experts are scored by {scoring!r:.20}; sigmoid (2) is known", "expert_gating_func")


def sigmoid_experts(hparams: HParams) -> MixtureOfExperts:
    """Describe the layer of experts."""
    require_sigmoid(hparams)
    hidden, num_shared = hparams.integer("expert_hidden"), hparams.integer("num_shared_experts", default=0)
    shared_hidden = hparams.integer("shared_hidden", default=hidden * num_shared)
    renormalise = hparams.flag("expert_weights_norm", "norm_topk_prob", default=True)
    experts = mixture_of_experts(hparams, hparams.integer("num_experts"), hidden, renormalise=renormalise)
    groups = ExpertGroups(hparams.integer("num_groups", default=1), hparams.integer("num_active_groups", default=1))
    check_groups(hparams, experts, groups)
    return replace(
        experts,
        scoring="sigmoid",
        selection_bias=True,
        scale=hparams.number("expert_scale", default=1.0),
        groups=groups if groups.count > 1 else None,
        shared=SharedExpert(shared_hidden) if shared_hidden else None,
    )


def check_groups(hparams: HParams, experts: MixtureOfExperts, groups: ExpertGroups) -> None:
    """Refuse groups with fewer experts than judge them, and fewer kept ones than a token meets."""
    size = experts.num_experts // groups.count
    if experts.num_experts % groups.count or (groups.count > 1 and size < groups.num_judged):
        raise hparams.format_error(f"{experts.num_experts} experts cannot be in {groups.count} groups (n_group)")
    if groups.num_active > groups.count:
        raise hparams.format_error(f"{groups.num_active} of {groups.count} groups are kept (topk_group)")
    if groups.count > 1 and groups.num_active * size < experts.num_active:
        raise hparams.format_error(
            f"the {groups.num_active} kept groups (topk_group) have {groups.num_active * size} experts, "
            f"and a token meets {experts.num_active} (num_experts_per_tok); expected at most as many"
        )
