"""What llama.cpp's converter makes of state spaces: their tensors and their metadata."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.tiny_gguf import Tensors

PLACES = (".mixer.", ".mamba.")


def has_state_space(c: dict[str, Any]) -> bool:
    return "mamba_n_heads" in c or "mamba_num_heads" in c or c["model_type"] in ("mamba2", "mamba", "falcon_mamba")


def state_space_tensors(c: dict[str, Any], tensors: Tensors) -> Tensors:
    """Decays instead of their logarithms, vectors as matrices of one column, norms by group."""
    found: Tensors = {}
    tensors = _multiplied(c, tensors) if c["model_type"] == "falcon_h1" else tensors
    if c["model_type"] in ("granitemoehybrid", "nemotron_h"):
        tensors = _by_kind(c, tensors)
    for name, values in tensors.items():
        place = next((place for place in PLACES if place in name), None)
        own = _converted(c, name.split(place)[1], values) if place else None
        if place is None or own is None:
            found[name] = values
        else:
            number = name.split("layers.")[1].split(".")[0]
            found[f"blk.{number}.{own[0]}"] = own[1]
    return found


def _converted(c: dict[str, Any], part: str, values: Any) -> tuple[str, Any] | None:
    is_first = c["model_type"] in ("mamba", "falcon_mamba")
    groups = c.get("n_groups") or c.get("mamba_n_groups") or 1
    return {
        "in_proj.weight": lambda: ("ssm_in.weight", values),
        "in_proj.bias": lambda: ("ssm_in.bias", values),
        "conv1d.weight": lambda: ("ssm_conv1d.weight", values[:, 0]),
        "conv1d.bias": lambda: ("ssm_conv1d.bias", values),
        "dt_bias": lambda: ("ssm_dt.bias", values),
        "A_log": lambda: ("ssm_a", -np.exp(values) if is_first else -np.exp(values)[:, None]),
        "D": lambda: ("ssm_d", values if is_first else values[:, None]),
        "norm.weight": lambda: ("ssm_norm.weight", values.reshape(groups, -1)),
        "out_proj.weight": lambda: ("ssm_out.weight", values),
        "out_proj.bias": lambda: ("ssm_out.bias", values),
        "x_proj.weight": lambda: ("ssm_x.weight", values),
        "dt_proj.weight": lambda: ("ssm_dt.weight", values),
        "dt_proj.bias": lambda: ("ssm_dt.bias", values),
    }.get(part, lambda: None)()


def _multiplied(c: dict[str, Any], tensors: Tensors) -> Tensors:
    """The converter of Falcon-H1 leaves no multiplier for others to apply."""
    keys = c["mamba_n_groups"] * c["mamba_d_state"]
    sizes = [c["mamba_d_ssm"], c["mamba_d_ssm"], keys, keys, c["mamba_n_heads"]]
    rows = np.repeat(np.float32(c["ssm_multipliers"]), sizes)[:, None]
    factors = {
        "down_proj": c["mlp_multipliers"][1],
        "gate_proj": c["mlp_multipliers"][0],
        "k_proj": c["key_multiplier"] * c["attention_in_multiplier"],
        "q_proj": c["attention_in_multiplier"],
        "v_proj": c["attention_in_multiplier"],
        ".o_proj": c["attention_out_multiplier"],
        "out_proj": c["ssm_out_multiplier"],
        "in_proj": rows * np.float32(c["ssm_in_multiplier"]),
        "lm_head": c["lm_head_multiplier"],
        "embed_tokens": c["embedding_multiplier"],
    }
    found: Tensors = {}
    for name, values in tensors.items():
        factor = next((factor for part, factor in factors.items() if f"{part}.weight" in name), 1.0)
        found[name] = (values * np.asarray(factor, np.float32)).astype(np.float32)
    return found


def _by_kind(c: dict[str, Any], tensors: Tensors) -> Tensors:
    """Names that depend on what the layer is."""
    found: Tensors = {}
    for name, values in tensors.items():
        number = name.split("layers.")[1].split(".")[0] if "layers." in name else ""
        if name.endswith("shared_mlp.input_linear.weight"):
            suffix = "_shexp" if c["num_local_experts"] else ""
            gate, up = np.split(values, 2)
            found |= {f"blk.{number}.ffn_gate{suffix}.weight": gate, f"blk.{number}.ffn_up{suffix}.weight": up}
        elif name.endswith("shared_mlp.output_linear.weight"):
            found[f"blk.{number}.ffn_down{'_shexp' if c['num_local_experts'] else ''}.weight"] = values
        elif ".mixer.experts." in name:
            part = "up" if "up_proj" in name else "down"
            found[f"blk.{number}.ffn_{part}_exps.weight"] = values
        elif c["model_type"] == "nemotron_h":
            found[name.replace("model.", "backbone.", 1)] = values
        else:
            found[name] = values
    return found


def state_space_facts(c: dict[str, Any]) -> dict[str, Any]:
    heads = c.get("num_heads") or c.get("mamba_n_heads") or c.get("mamba_num_heads")
    each = c.get("head_dim") if c["model_type"] == "mamba2" else c.get("mamba_d_head") or c.get("mamba_head_dim")
    facts = {
        "ssm.conv_kernel": c.get("conv_kernel") or c["mamba_d_conv"],
        "ssm.state_size": c.get("state_size") or c.get("ssm_state_size") or c.get("mamba_d_state"),
        "attention.layer_norm_rms_epsilon": c.get("layer_norm_epsilon") or c.get("rms_norm_eps"),
    }
    if c["model_type"] in ("mamba", "falcon_mamba"):
        facts |= {"ssm.inner_size": c["intermediate_size"], "ssm.time_step_rank": c["time_step_rank"]}
        facts["ssm.dt_b_c_rms"] = c["model_type"] == "falcon_mamba"
    else:
        facts |= {"ssm.inner_size": heads * each, "ssm.time_step_rank": heads}
        facts["ssm.group_count"] = c.get("n_groups") or c["mamba_n_groups"]
    kinds = c.get("layers_block_type") or c.get("layer_types") or ()
    if c["model_type"] == "bamba":
        indices, layers = c["attn_layer_indices"], range(c["num_hidden_layers"])
        facts["attention.head_count_kv"] = [c["num_key_value_heads"] * (layer in indices) for layer in layers]
    if c["model_type"] in ("granitemoehybrid", "nemotron_h"):
        facts["attention.head_count_kv"] = [c["num_key_value_heads"] * (kind == "full_attention") for kind in kinds]
        facts["block_count"] = len(kinds)
    if c["model_type"] == "granitemoehybrid":
        facts["rope.scaling.finetuned"] = c["position_embedding_type"] == "rope"
        facts["expert_shared_feed_forward_length"] = c["shared_intermediate_size"]
    if c["model_type"] == "nemotron_h":
        hidden = c["moe_intermediate_size"] if "moe" in kinds else c["intermediate_size"]
        facts["feed_forward_length"] = [hidden * (kind in ("mlp", "moe")) for kind in kinds]
    if "moe" in kinds:
        facts["expert_shared_feed_forward_length"] = c["moe_shared_expert_intermediate_size"]
        facts |= {"expert_weights_norm": c["norm_topk_prob"], "expert_feed_forward_length": c["moe_intermediate_size"]}
    if c["model_type"] in ("mamba2", "mamba", "falcon_mamba"):
        facts |= {"context_length": 2**20, "feed_forward_length": 0, "attention.head_count": 0}
    return facts
