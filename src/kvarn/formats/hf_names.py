"""The names Hugging Face gives to tensors, translated to GGUF's: one table for all models.

Also stacks the matrices of single experts into GGUF's (experts, out, in). Does not know what a model is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Literal

from kvarn.errors import FormatError
from kvarn.formats.encoder_names import DENSE, ENCODER, WHOLE_ENCODER, has_classifier, is_head, without_adapters
from kvarn.formats.hf_special_names import GPT_NAMES, STATE_NAMES, WHOLE_STATE_NAMES, of_one_stack
from kvarn.formats.tensor_view import RowRange, ViewEntry, WeightView, num_rows, renamed, stacked
from kvarn.formats.weights import TensorInfo, WeightSource

# turned: experts are (experts, in, out); two_way: one stack under two names, encoder.language_model and decoder
Dialect = Literal["decoder", "sandwich", "encoder", "turned", "two_way"]

LOCAL_NAMES: Mapping[Dialect, Callable[[str], str | None]] = {"encoder": without_adapters, "two_way": of_one_stack}
MAX_EXPERTS = 1024

# Hugging Face on the left, without the model's prefix; {} is the number of the layer.
DECODER = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "score": "cls.output",
    "layers.{}.input_layernorm": "blk.{}.attn_norm",
    **{f"layers.{{}}.self_attn.{part}_proj": f"blk.{{}}.attn_{part}" for part in ("q", "k", "v", "qkv")},
    **{f"layers.{{}}.self_attn.{part}_norm": f"blk.{{}}.attn_{part}_norm" for part in "qk"},
    "layers.{}.self_attn.o_proj": "blk.{}.attn_output",
    "layers.{}.self_attn.q_a_proj": "blk.{}.attn_q_a",
    "layers.{}.self_attn.q_a_layernorm": "blk.{}.attn_q_a_norm",
    "layers.{}.self_attn.q_b_proj": "blk.{}.attn_q_b",
    "layers.{}.self_attn.kv_a_proj_with_mqa": "blk.{}.attn_kv_a_mqa",
    "layers.{}.self_attn.kv_a_layernorm": "blk.{}.attn_kv_a_norm",
    "layers.{}.self_attn.kv_b_proj": "blk.{}.attn_kv_b",
    "layers.{}.post_attention_layernorm": "blk.{}.ffn_norm",
    "layers.{}.mlp.gate_up_proj": "blk.{}.ffn_up",  # gate rows, then up rows, as GGUF has them in ffn_up
    "layers.{}.mlp.gate": "blk.{}.ffn_gate_inp",
    "layers.{}.mlp.router": "blk.{}.ffn_gate_inp",
    "layers.{}.block_sparse_moe.gate": "blk.{}.ffn_gate_inp",
    "layers.{}.post_self_attn_layernorm": "blk.{}.post_attention_norm",
    "layers.{}.post_mlp_layernorm": "blk.{}.post_ffw_norm",
    "layers.{}.pre_mlp_layernorm": "blk.{}.ffn_norm",
    **dict.fromkeys(("layers.{}.post_norm1", "layers.{}.post_operator_norm"), "blk.{}.post_attention_norm"),
    **dict.fromkeys(("layers.{}.post_norm2", "layers.{}.post_ffn_norm"), "blk.{}.post_ffw_norm"),
    **dict.fromkeys(("layers.{}.self_attn.gate_proj", "layers.{}.self_attn.g_proj"), "blk.{}.attn_gate"),
    "layers.{}.mlp.router.gate": "blk.{}.ffn_gate_inp",
    **{
        f"layers.{{}}.{mixer}.{part}_layernorm": f"blk.{{}}.attn_{part[0]}_norm"
        for mixer in ("self_attn", "attention")
        for part in ("query", "key")
    },
    "layers.{}.self_attn.dense": "blk.{}.attn_output",
    "layers.{}.mlp.c_fc": "blk.{}.ffn_up",
    "layers.{}.mlp.c_proj": "blk.{}.ffn_down",
    "layers.{}.mlp.fc1": "blk.{}.ffn_up",
    "layers.{}.mlp.fc2": "blk.{}.ffn_down",
    # of layers behind the last, which predict further tokens
    **{f"layers.{{}}.{part}": f"blk.{{}}.nextn.{part}" for part in ("enorm", "hnorm", "eh_proj", "embed_tokens")},
    **{f"layers.{{}}.shared_head.{part}": f"blk.{{}}.nextn.shared_head_{part}" for part in ("norm", "head")},
    "layers.{}.final_layernorm": "blk.{}.nextn.shared_head_norm",
    "final_layernorm": "output_norm",
    "final_layer_norm": "output_norm",
    **GPT_NAMES,
    **{
        f"layers.{{}}.{ffn}.{shared}.{part}_proj": f"blk.{{}}.ffn_{part}_shexp"
        for ffn, shared in (
            *(("mlp", "shared_expert"), ("mlp", "shared_experts"), ("mlp", "shared_mlp")),
            ("feed_forward", "shared_expert"),
        )
        for part in ("gate", "up", "down")
    },
    **{
        f"layers.{{}}.{ffn}.{part}_proj": f"blk.{{}}.ffn_{part}"
        for ffn in ("mlp", "feed_forward")
        for part in ("gate", "up", "down")
    },
    "layers.{}.feed_forward.router": "blk.{}.ffn_gate_inp",
    "layers.{}.mlp.shared_expert_gate": "blk.{}.ffn_gate_inp_shexp",
    **{
        f"layers.{{}}.linear_attn.{theirs}": f"blk.{{}}.{ours}"
        for theirs, ours in {
            "in_proj_qkvz": "ssm_in",
            "in_proj_ba": "ssm_ba",
            "in_proj_qkv": "attn_qkv",
            "in_proj_z": "attn_gate",
            "in_proj_b": "ssm_beta",
            "in_proj_a": "ssm_alpha",
            "conv1d": "ssm_conv1d",
            "norm": "ssm_norm",
            "out_proj": "ssm_out",
        }.items()
    },
    **STATE_NAMES,
    "embedding_norm": "output_norm",
    "layers.{}.operator_norm": "blk.{}.attn_norm",
    "layers.{}.ffn_norm": "blk.{}.ffn_norm",
    "layers.{}.conv.in_proj": "blk.{}.shortconv.in_proj",
    "layers.{}.conv.conv": "blk.{}.shortconv.conv",
    "layers.{}.conv.out_proj": "blk.{}.shortconv.out_proj",
    "layers.{}.self_attn.out_proj": "blk.{}.attn_output",
    "layers.{}.self_attn.q_layernorm": "blk.{}.attn_q_norm",
    "layers.{}.self_attn.k_layernorm": "blk.{}.attn_k_norm",
    "layers.{}.feed_forward.w1": "blk.{}.ffn_gate",
    "layers.{}.feed_forward.w3": "blk.{}.ffn_up",
    "layers.{}.feed_forward.w2": "blk.{}.ffn_down",
    # Gemma's own: inputs of layers, and experts beside a feed-forward
    "embed_tokens_per_layer": "per_layer_token_embd",
    "per_layer_model_projection": "per_layer_model_proj",
    "per_layer_projection_norm": "per_layer_proj_norm",
    "layers.{}.per_layer_input_gate": "blk.{}.inp_gate",
    "layers.{}.per_layer_projection": "blk.{}.proj",
    "layers.{}.post_per_layer_input_norm": "blk.{}.post_norm",
    "layers.{}.post_feedforward_layernorm_1": "blk.{}.post_ffw_norm_1",
    "layers.{}.pre_feedforward_layernorm_2": "blk.{}.pre_ffw_norm_2",
    "layers.{}.post_feedforward_layernorm_2": "blk.{}.post_ffw_norm_2",
    "layers.{}.router.proj": "blk.{}.ffn_gate_inp",
    "layers.{}.block_sparse_moe.router.layer": "blk.{}.ffn_gate_inp",
    "layers.{}.feed_forward.gate": "blk.{}.ffn_gate_inp",
    "layers.{}.mlp.gate.wg": "blk.{}.ffn_gate_inp",
    "altup_projections.{}": "altup_proj.{}",
    "altup_unembed_projections.{}": "altup_unembd_proj.{}",
    "layers.{}.altup.correction_coefs": "blk.{}.altup_correct_coef",
    "layers.{}.altup.prediction_coefs": "blk.{}.altup_predict_coef",
    "layers.{}.altup.modality_router": "blk.{}.altup_router",
    "layers.{}.altup.router_norm": "blk.{}.altup_router_norm",
    "layers.{}.laurel.linear_left": "blk.{}.laurel_l",
    "layers.{}.laurel.linear_right": "blk.{}.laurel_r",
    "layers.{}.laurel.post_laurel_norm": "blk.{}.laurel_post_norm",
    # LLaDA's own
    "transformer.ff_out": "output",
    **{f"transformer.blocks.{{}}.{part}_proj": f"blk.{{}}.attn_{part}" for part in "qkv"},
    "transformer.blocks.{}.attn_norm": "blk.{}.attn_norm",
    "transformer.blocks.{}.attn_out": "blk.{}.attn_output",
    "transformer.blocks.{}.ff_norm": "blk.{}.ffn_norm",
    "transformer.blocks.{}.ff_proj": "blk.{}.ffn_gate",
    "transformer.blocks.{}.up_proj": "blk.{}.ffn_up",
    "transformer.blocks.{}.ff_out": "blk.{}.ffn_down",
}
# Whole names: these do not end in weight or bias, or not in the one that GGUF has.
WHOLE_NAMES = {
    "layers.{}.mlp.gate.e_score_correction_bias": "blk.{}.exp_probs_b.bias",
    "layers.{}.mlp.gate.expert_bias": "blk.{}.exp_probs_b.bias",
    **{f"layers.{{}}.mlp.{name}": "blk.{}.exp_probs_b.bias" for name in ("expert_bias", "e_score_correction_bias")},
    **{f"layers.{{}}.mlp.experts.{part}_proj": f"blk.{{}}.ffn_{part}_exps.weight" for part in ("gate", "up")},
    "layers.{}.block_sparse_moe.e_score_correction_bias": "blk.{}.exp_probs_b.bias",
    "layers.{}.mlp.moe_statics.e_score_correction_bias": "blk.{}.exp_probs_b.bias",
    "layers.{}.self_attn.sinks": "blk.{}.attn_sinks.weight",
    "layers.{}.altup.correct_output_scale": "blk.{}.altup_correct_scale.weight",
    "layers.{}.feed_forward.expert_bias": "blk.{}.exp_probs_b.bias",
    "layers.{}.layer_scalar": "blk.{}.layer_output_scale.weight",
    "layers.{}.router.scale": "blk.{}.ffn_gate_inp.scale",
    "layers.{}.router.per_expert_scale": "blk.{}.ffn_down_exps.scale",
    "layers.{}.linear_attn.dt_bias": "blk.{}.ssm_dt.bias",
    "layers.{}.linear_attn.A_log": "blk.{}.ssm_a_log",
    **WHOLE_STATE_NAMES,
    **WHOLE_ENCODER,
}
SANDWICH = DECODER | {
    "layers.{}.post_attention_layernorm": "blk.{}.post_attention_norm",
    "layers.{}.pre_feedforward_layernorm": "blk.{}.ffn_norm",
    "layers.{}.post_feedforward_layernorm": "blk.{}.post_ffw_norm",
}
TABLES: Mapping[Dialect, Mapping[str, str]] = {
    "decoder": DECODER,
    "sandwich": SANDWICH,
    "encoder": ENCODER,
    "turned": DECODER,
    "two_way": SANDWICH,
}
EXPERT_MATRICES = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}

_NUMBER = r"(0|[1-9][0-9]{0,3})"  # of a layer or an expert; what is written otherwise is an unknown name
_PREFIX = re.compile(
    r"^(?:(?:model|language_model|text_model|bert|gpt_neox|backbone|roberta|distilbert|nomic_bert)\.)*"
)
# Not part of the text model, or recomputed: heads, vision towers, cached positions and masks.
_IGNORED = re.compile(
    r"(^|\.)(pooler|cls|vision_tower|audio_tower|embed_vision|embed_audio|visual|vision_model|vision_embedder|multi_modal_projector|connector|mtp(?:_[a-z_]+)?)\.|\.(inv_freq|position_ids)$"
    r"|\.(attn|attention)\.(masked_)?bias$"
)
_EXPERT = re.compile(
    rf"^layers\.{_NUMBER}\.(?:mlp|block_sparse_moe|feed_forward|mixer)\.experts\.{_NUMBER}\.(w[123]|(?:gate|up|down)_proj)\.weight$"
)
_FUSED_EXPERTS = re.compile(
    rf"^layers\.{_NUMBER}\.(?:(?:(?:mlp|block_sparse_moe|feed_forward)\.)?experts\.(gate_up_proj|down_proj)"
    r"|block_sparse_moe\.(input_linear|output_linear)\.weight)$"
)
_LAYER = re.compile(rf"(?:blk|(?:model\.)*layers)\.{_NUMBER}\.")


def layer_of(name: str) -> int | None:
    """The number of the layer that a tensor belongs to."""
    match = _LAYER.match(name)
    return int(match.group(1)) if match else None


def translate(name: str, dialect: Dialect) -> str | None:
    """Return the GGUF name of a tensor; None when the table does not have it."""
    local = _PREFIX.sub("", name, count=1)
    number = re.search(rf"\.{_NUMBER}\.", local)
    whole_pattern = local if number is None else f"{local[: number.start()]}.{{}}.{local[number.end() :]}"
    pattern, _, suffix = whole_pattern.rpartition(".")
    found = TABLES[dialect].get(pattern) or DENSE.get(pattern)
    if whole := WHOLE_NAMES.get(whole_pattern):
        return whole.format(*number.groups() if number else ())
    if found is None or suffix not in ("weight", "bias"):
        return None
    return f"{found.format(*number.groups() if number else ())}.{suffix}"


def canonical_view(source: WeightSource, dialect: Dialect) -> WeightView:
    """View a safetensors folder under GGUF's names. Unknown names stay as they are, for the caller to refuse."""
    entries: dict[str, ViewEntry] = {}
    experts: dict[str, dict[int, ViewEntry]] = {}
    for name, info in source.tensors.items():
        plain = _PREFIX.sub("", name, count=1)
        local = LOCAL_NAMES[dialect](plain) if dialect in LOCAL_NAMES else plain
        if local is None:
            continue
        canonical = translate(local, dialect)
        is_classifier = dialect == "encoder" and has_classifier(source.tensors) and (canonical or "").startswith("cls.")
        if not is_classifier and (_IGNORED.search(name) or (dialect == "encoder" and is_head(local, canonical))):
            continue
        if match := _EXPERT.match(local):
            layer, index, matrix = match.groups()
            key = f"blk.{layer}.ffn_{EXPERT_MATRICES[matrix]}_exps.weight"
            experts.setdefault(key, {})[int(index)] = renamed(info, name)
        elif dialect != "turned" and (match := _FUSED_EXPERTS.match(local)):
            down = f"blk.{match.group(1)}.ffn_down_exps.weight"
            is_first = match.group(2) == "gate_up_proj" or match.group(3) == "input_linear"
            found = split_gate_up(info, f"blk.{match.group(1)}.") if is_first else {down: renamed(info, down)}
            _add_all(entries, found, source.path)
        else:
            known = canonical or name
            _add_all(entries, {known: renamed(info, known)}, source.path)
    _add_all(entries, {key: _stack(key, members, source.path) for key, members in experts.items()}, source.path)
    return WeightView(source, entries)


def _add_all(entries: dict[str, ViewEntry], new: Mapping[str, ViewEntry], path: str) -> None:
    for name, entry in new.items():
        if name in entries:
            raise FormatError(f"two tensors are {name}: one of them is {entry.parts[0].tensor}", file=path)
        entries[name] = entry


def _stack(name: str, members: Mapping[int, ViewEntry], path: str) -> ViewEntry:
    count = max(members) + 1
    if count > MAX_EXPERTS:
        raise FormatError(f"{name} has expert {count - 1}; at most {MAX_EXPERTS} experts are allowed", file=path)
    missing = [index for index in range(count) if index not in members]
    if missing:
        raise FormatError(f"{name} lacks expert {missing[0]} of {count}; the download may be incomplete", file=path)
    return stacked(name, (members[index] for index in range(count)))


def split_gate_up(info: TensorInfo, stem: str) -> dict[str, ViewEntry]:
    """Cut (experts, gate rows + up rows, in) into its two stacks."""
    if len(info.shape) != 3 or info.shape[1] % 2:
        raise FormatError(f"tensor {info.name} has shape {info.shape}; expected (experts, 2 * hidden, width)")
    count, rows, width = info.shape
    half, found = rows // 2, {}
    assert num_rows(info) == count * rows
    for start, part in ((0, "gate"), (half, "up")):
        name = f"{stem}ffn_{part}_exps.weight"
        parts = tuple(RowRange(info.name, index * rows + start, half) for index in range(count))
        found[name] = ViewEntry(TensorInfo(name, info.type, (count, half, width)), parts)
    return found
