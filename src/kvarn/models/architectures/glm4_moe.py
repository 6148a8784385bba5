"""GLM-4.5: experts chosen by sigmoid scores with a bias, in groups, beside one that every token meets."""

from __future__ import annotations

import re
from dataclasses import replace

from kvarn.formats.tensor_view import WeightView
from kvarn.models.architectures.llama import mixture_of_experts
from kvarn.models.dimensions import read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, ExpertGroups, FeedForward, MixtureOfExperts, ModelSpec, SharedExpert
from kvarn.models.spec_builder import decoder, rms_norm

SIGMOID = 2  # GGUF's number of this scoring function


def describe(hparams: HParams) -> ModelSpec:
    """Describe a GLM-4.5; GGUF says by tensors whether there are biases and norms of Q and K."""
    dims, norm = read_dimensions(hparams), rms_norm(hparams)
    if hparams.is_gguf:  # which counts the layers that draft tokens ahead
        dims = replace(dims, num_layers=dims.num_layers - hparams.integer("num_draft_layers", default=0))
    hparams.raw(None, "num_nextn_predict_layers")
    rope = read_rope(hparams, "half", dims.head_dim, dims.context_length)
    has_bias, has_norm = (hparams.has_tensor(f"blk.0.{name}") for name in ("attn_q.bias", "attn_q_norm.weight"))
    if not hparams.is_gguf:
        has_bias = hparams.flag(None, "attention_bias", default=False)
        has_norm = hparams.flag(None, "use_qk_norm", default=False)
    num_dense = hparams.integer("num_dense_layers", default=0)
    blocks = tuple(
        Block(
            mixer=dims.attention(layer, rope, qkv_bias=has_bias, qk_norm=norm if has_norm else None),
            feed_forward=FeedForward(dims.hidden[layer], hparams.activation("silu"))
            if layer < num_dense
            else _experts(hparams),
            norm=norm,
        )
        for layer in range(dims.num_layers)
    )
    return decoder(hparams, dims, blocks, norm)


def drop_draft_layers(spec: ModelSpec, view: WeightView) -> WeightView:
    """Leave out the layers behind the last one, which draft tokens ahead."""
    kept = {name: entry for name, entry in view.entries.items() if _layer(name) < len(spec.blocks)}
    return WeightView(view.source, kept)


def _layer(name: str) -> int:
    match = re.match(r"(?:blk|(?:model\.)*layers)\.(\d+)\.", name)
    return int(match.group(1)) if match else -1


def require_sigmoid(hparams: HParams) -> None:
    """Refuse experts that are scored in another way."""
    scoring = hparams.raw("expert_gating_func", "scoring_func")
    if scoring not in (None, SIGMOID, "sigmoid"):
        raise hparams.unsupported(f"experts are scored by {scoring!r:.20}; sigmoid (2) is known", "expert_gating_func")


def _experts(hparams: HParams) -> MixtureOfExperts:
    require_sigmoid(hparams)
    hidden, num_shared = hparams.integer("expert_hidden"), hparams.integer("num_shared_experts", default=0)
    renormalise = hparams.flag("expert_weights_norm", "norm_topk_prob", default=True)
    experts = mixture_of_experts(hparams, hparams.integer("num_experts"), hidden, renormalise=renormalise)
    groups = ExpertGroups(hparams.integer("num_groups", default=1), hparams.integer("num_active_groups", default=1))
    if experts.num_experts % groups.count or groups.num_active > groups.count:
        raise hparams.format_error(f"{experts.num_experts} experts cannot be in {groups.count} groups")
    return replace(
        experts,
        scoring="sigmoid",
        selection_bias=True,
        scale=hparams.number("expert_scale", default=1.0),
        groups=groups if groups.count > 1 else None,
        shared=SharedExpert(hidden * num_shared) if num_shared else None,
    )
