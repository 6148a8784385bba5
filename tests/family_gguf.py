"""A folder of transformers as a GGUF file: names of the `gguf` package, metadata as llama.cpp's converter has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.numpy import load_file

from kvarn.formats.gguf.writer import Stored, write_gguf
from kvarn.formats.weights import TensorType
from tests.state_space_gguf import has_state_space, state_space_facts, state_space_tensors
from tests.tiny_families import WINDOW
from tests.tiny_gguf import GGUF_KEYS, Tensors, longrope_magnitude, stack_experts, unrotated

ARCHITECTURES = {
    **dict.fromkeys(("mistral", "mixtral", "internlm3"), "llama"),
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "olmo3": "olmo2",
    "llama4_text": "llama4",
    "solar_open": "glm4moe",
    "hunyuan_v1_dense": "hunyuan-dense",
    "cohere": "command-r",
    "phi": "phi2",
    "ministral3": "mistral3",
    "qwen2_moe": "qwen2moe",
    "qwen2_vl": "qwen2vl",
    "qwen2_5_vl": "qwen2vl",
    "qwen3_vl": "qwen3vl",
    "qwen3_vl_moe": "qwen3vlmoe",
    "gpt_neox": "gptneox",
    "gpt_bigcode": "starcoder",
    "gpt_oss": "gpt-oss",
    "glm4_moe": "glm4moe",
    "minimax_m2": "minimax-m2",
    "qwen3_next": "qwen3next",
    "qwen3_5": "qwen35",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "gemma4_text": "gemma4",
    "gemma4_unified_text": "gemma4",
    "glm": "chatglm",
    "granitemoeshared": "granitemoe",
    "lfm2_moe": "lfm2moe",
    "ernie4_5_moe": "ernie4_5-moe",
    "hunyuan_v1_moe": "hunyuan-moe",
    "gemma3n_text": "gemma3n",
    "falcon_h1": "falcon-h1",
    **dict.fromkeys(("granitemoehybrid", "bamba"), "granitehybrid"),
    "falcon_mamba": "mamba",
    "exaone_moe": "exaone-moe",
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), "deepseek2"),
}
# Architectures of llama.cpp that the package lacks: their tensors have the names of another one's.
NAMED_LIKE = {"hy_v3": "exaone-moe"}
PERMUTED = (
    "llama",
    "mistral",
    "mixtral",
    "internlm3",
    "smollm3",
    "granite",
    "granitemoe",
    "granitemoeshared",
    "granitemoehybrid",
    "bamba",
    "ministral3",
    "arcee",
)  # Q and K, for the rotation of neighbours
NAMELESS = ("helium", "ministral", "gpt_neo", "gptj", "opt", "lfm3", "hyperclovax")
# What GGUF cannot say, or the converter does not.
WITHOUT_GGUF = {
    ("qwen2", 1): "which layers have windows is not written",
    ("qwen3", 1): "which layers have windows is not written",
    ("qwen3_moe", 1): "dense layers among those with experts have no names",
    ("gemma2", 1): "its activation and the scale of its scores are not written",
    ("gemma3_text", 2): "its activation and the scale of its scores are not written",
    ("falcon_mamba", 2): "two epsilons are not written",
    **{("bamba", shape): "Q and K are stored as if whole heads were rotated" for shape in (1, 2)},
    ("falcon_h1", 1): "biases and norms before the gate are not written",
    ("falcon_h1", 2): "biases and norms before the gate are not written",
    ("nemotron_h", 2): "the least time step is not written",
    ("mamba2", 2): "limits of the time step are not written",
    ("llama4_text", 1): "which layers have experts, norms or no positions is not written",
    ("llama4_text", 2): "its tuning is not written",
    ("phimoe", 1): "the margin of its router is not written",
    ("phimoe", 2): "the margin of its router is not written",
    ("gemma", 1): "the base of its rope is not written",
    ("starcoder2", 1): "its window is not written",
    ("cohere2", 2): "which layers have windows is not written",
    ("gpt2", 2): "its activation is not written",
    ("gpt_bigcode", 1): "one KV head is written whatever the model has",
    ("gpt_bigcode", 2): "its activation is not written",
    ("qwen2_moe", 1): "norm_topk_prob is not written",
    ("qwen2_moe", 2): "dense layers among those with experts have no names",
    ("qwen3_next", 1): "dense layers among those with experts have no names",
    ("qwen3_5_text", 1): "which layers have attention is a period",
    ("ernie4_5_moe", 1): "moe_layer_end_index is not written",
    ("falcon", 1): "the length of its feed-forward is not written",
    ("falcon", 2): "its activation is not written",
    ("lfm2_moe", 1): "norm_topk_prob is not written",
    ("gemma3n_text", 1): "altup_correct_scale is not written",
    ("deepseek_v3", 2): "all its files have neighbours that are rotated",
    ("glm4_moe_lite", 1): "dense layers among those with experts have no names",
    **{("minicpm3", shape): "its scales are not written" for shape in (1, 2)},
    ("internlm3", 1): "its frequencies are a tensor",
    ("afmoe", 2): "its windows and that embeddings are not scaled are not written",
    ("exaone_moe", 1): "dense layers among those with experts have no names",
    ("dots1", 1): "its windows are not written",
    ("dots1", 2): "its groups are not written",
    **{(family, shape): "no architecture" for family in NAMELESS for shape in range(3)},
}
KEYS = GGUF_KEYS | {
    "norm_epsilon": "attention.layer_norm_epsilon",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
    "use_parallel_residual": "use_parallel_residual",
    "norm_eps": "attention.layer_norm_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "n_embd": "embedding_length",
    "n_layer": "block_count",
    "n_head": "attention.head_count",
    "n_positions": "context_length",
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "conv_L_cache": "shortconv.l_cache",
    "num_kv_shared_layers": "attention.shared_kv_layers",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
    "final_logit_softcapping": "final_logit_softcapping",
    "top_k_experts": "expert_used_count",
    "moe_topk": "expert_used_count",
    "num_kv_heads": "attention.head_count_kv",
    "moe_k": "expert_used_count",
    "moe_num_experts": "expert_count",
    "moe_num_shared_experts": "expert_shared_count",
    "moe_layer_start_index": "leading_dense_block_count",
    "moe_layer_interval": "interleave_moe_layer_step",
    "num_dense_layers": "leading_dense_block_count",
    "altup_num_inputs": "altup.num_inputs",
    "altup_active_idx": "altup.active_idx",
    "interleave_moe_layer_step": "interleave_moe_layer_step",
    "num_shared_experts": "expert_shared_count",
    "route_scale": "expert_weights_scale",
    "router_scaling_factor": "expert_weights_scale",
}
OFFSET_NORMS = ("gemma", "gemma2", "gemma3_text", "nemotron")
STATE_SPACES = ("mamba2", "mamba", "falcon_mamba")
WITHOUT_ROPE = ("gpt2", "gpt_bigcode", "bloom", *STATE_SPACES)
UNWRITTEN = {"starcoder2": ("sliding_window",), "gemma": ("rope_theta",)}


def family_gguf(folder: Path, type: TensorType = TensorType.F32) -> Path:
    """Write the GGUF file beside the folder."""
    config = json.loads((folder / "config.json").read_text())
    arch = gguf_architecture(config["model_type"])
    if "moe" in config.get("layers_block_type", ()):
        arch = "nemotron_h_moe"
    config |= config.get("text_config", {})
    texts = {name: values for name, values in load_file(folder / "model.safetensors").items() if "visual" not in name}
    tensors = _gguf_tensors(config, texts, arch)
    config["written_hidden"] = len(next((v for n, v in tensors.items() if n.endswith("ffn_up.weight")), ()))
    stored = {name: Stored.quantized(values, _type_of(name, values, type)) for name, values in tensors.items()}
    path = folder.with_suffix(".gguf")
    metadata = {f"{arch}.{key}": value for key, value in gguf_facts(config).items()}
    write_gguf(path, {"general.architecture": arch, "general.name": folder.name} | metadata, stored)
    return path


def gguf_architecture(model_type: str) -> str:
    return ARCHITECTURES.get(model_type, model_type)


def gguf_facts(c: dict[str, Any]) -> dict[str, Any]:
    """The metadata of a config.json, without the prefix."""
    family, rope = c["model_type"], _full_rope(c)
    unwritten = UNWRITTEN.get(family, ())
    facts = {key: c[name] for name, key in KEYS.items() if c.get(name) is not None and name not in unwritten}
    if "head_dim" in c and family != "granite":
        facts |= {"attention.key_length": c["head_dim"], "attention.value_length": c["head_dim"]}
    if "rope_theta" in rope and "rope_theta" not in unwritten:
        facts["rope.freq_base"] = _rope_base(c, rope)
    if family not in WITHOUT_ROPE:
        head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
        facts["rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    if rope.get("rope_type") in ("yarn", "linear"):
        facts |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope.get("rope_type") in ("yarn", "longrope"):
        facts["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if rope.get("rope_type") == "longrope":
        facts["rope.scaling.attn_factor"] = longrope_magnitude(c["max_position_embeddings"], rope)
    if c.get("sliding_window") and "sliding_window" not in unwritten and c.get("layer_types"):
        facts["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in c["layer_types"]]
    if family == "falcon":
        facts |= {"feed_forward_length": 4 * c["hidden_size"], "tensor_data_layout": "jploski"}
        del facts["rope.dimension_count"], facts["rope.freq_base"]
    if family in ("gpt2", "gpt_bigcode"):
        facts["feed_forward_length"] = 4 * c["n_embd"]
    if family == "gpt_bigcode":
        facts["attention.head_count_kv"] = 1
    if family == "bloom":
        facts |= {"feed_forward_length": 4 * c["hidden_size"], "context_length": 2048}
    if family == "glm4_moe":
        facts |= {"expert_gating_func": 2, "expert_weights_norm": c["norm_topk_prob"], "nextn_predict_layers": 1}
        facts["block_count"] += 1
    if family in ("dots1", "solar_open"):
        facts |= {"expert_gating_func": 2, "expert_weights_norm": c["norm_topk_prob"]}
        for key in ("attention.sliding_window", "attention.sliding_window_pattern"):
            facts.pop(key, None)
    if family in ("afmoe", "exaone_moe", "hy_v3"):
        facts |= _sigmoid_facts(c, facts)
    if family == "afmoe":
        del facts["attention.sliding_window_pattern"]
    if family == "hy_v3":
        del facts["expert_shared_count"]
    if family == "gpt_oss":
        facts |= {
            "expert_feed_forward_length": c["intermediate_size"],
            "rope.scaling.yarn_beta_fast": rope["beta_fast"],
        }
        del facts["attention.sliding_window_pattern"]
    if family == "llama4_text":
        facts |= {"expert_feed_forward_length": c["intermediate_size"], "attention.sliding_window": WINDOW}
        facts |= {"feed_forward_length": c["intermediate_size_mlp"]}
        facts |= {"attention.temperature_length": c["floor_scale"], "attention.temperature_scale": c["attn_scale"]}
    if family == "minimax_m2":
        facts |= {"expert_feed_forward_length": c["intermediate_size"], "expert_gating_func": 2}
    if "linear_num_value_heads" in c:
        facts["ssm.inner_size"] = c["linear_num_value_heads"] * c["linear_value_head_dim"]
        facts["full_attention_interval"] = 1 + c["layer_types"].index("full_attention")
    if family == "lfm2_moe":
        facts["expert_gating_func"] = 2
    if family == "hunyuan_v1_moe":
        facts["expert_feed_forward_length"] = facts["expert_shared_feed_forward_length"] = c["intermediate_size"]
        facts["expert_shared_count"] = 1
    if family == "granitemoeshared":
        facts["expert_shared_feed_forward_length"] = c["shared_intermediate_size"]
    if family in ("lfm2", "lfm2_moe"):
        facts["attention.layer_norm_rms_epsilon"] = facts.pop("attention.layer_norm_epsilon")
        facts["feed_forward_length"] = c["written_hidden"]
        facts["attention.head_count_kv"] = [
            0 if kind == "conv" else c["num_key_value_heads"] for kind in c["layer_types"]
        ]
    if family in ("gemma4_text", "gemma4_unified_text"):
        facts |= _gemma4_facts(c)
    if family == "gemma3_text":
        facts["rope.freq_base_swa"] = c["rope_parameters"]["sliding_attention"]["rope_theta"]
    if family == "gemma3n_text":
        shares = torch.tensor(c["activation_sparsity_pattern"])
        facts["activation_sparsity_scale"] = torch.distributions.normal.Normal(0, 1).icdf(shares).tolist()
        facts["rope.freq_base_swa"] = c["rope_parameters"]["sliding_attention"]["rope_theta"]
    if "kv_lora_rank" in c:
        facts |= _latent_facts(c, rope)
    if has_state_space(c):
        facts |= state_space_facts(c)
        facts.pop("attention.layer_norm_epsilon", None)
    if family == "falcon_h1":
        facts.pop("embedding_scale")
    if family == "nemotron_h" and "moe" not in c["layers_block_type"]:
        facts = {key: value for key, value in facts.items() if not key.startswith("expert_")}
    if family == "nemotron_h":
        facts.pop("rope.dimension_count")
    if family in STATE_SPACES:
        for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
            facts.pop(key, None)
    if family == "ministral3":
        facts |= {"attention.temperature_scale": rope["llama_4_scaling_beta"]}
        facts["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
    return facts


def _sigmoid_facts(c: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    found = {"expert_gating_func": 2, "expert_weights_norm": c.get("norm_topk_prob", True)}
    if c["model_type"] != "afmoe":
        found["expert_shared_feed_forward_length"] = c["num_shared_experts"] * c["moe_intermediate_size"]
    if num_draft := c.get("num_nextn_predict_layers"):
        found |= {"nextn_predict_layers": num_draft, "block_count": facts["block_count"] + num_draft}
    return found


def _gemma4_facts(c: dict[str, Any]) -> dict[str, Any]:
    own = c["per_layer_config"]
    full = next(iter(own.values()))["head_dim"]
    layers = range(c["num_hidden_layers"])
    kv_heads = [own.get(str(layer), {}).get("num_key_value_heads", c["num_key_value_heads"]) for layer in layers]
    is_shared = [layer >= len(layers) - c["num_kv_shared_layers"] for layer in layers]
    hidden = [c["intermediate_size"] * (2 if shared and c["use_double_wide_mlp"] else 1) for shared in is_shared]
    return {
        **{f"attention.{part}_length_swa": c["head_dim"] for part in ("key", "value")},
        **{f"attention.{part}_length": full for part in ("key", "value")},
        "attention.head_count_kv": kv_heads,
        "feed_forward_length": hidden,
        "rope.dimension_count": full,
        "rope.dimension_count_swa": c["head_dim"],
        "rope.freq_base_swa": c["rope_parameters"]["sliding_attention"]["rope_theta"],
    }


def _latent_facts(c: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    key, value, rank = c["qk_nope_head_dim"] + c["qk_rope_head_dim"], c["v_head_dim"], c["kv_lora_rank"]
    facts = {
        "rope.dimension_count": c["qk_rope_head_dim"],
        "attention.key_length": key,
        "attention.value_length": value,
    }
    if has_latents_cut(c):
        facts |= {"attention.key_length": rank + c["qk_rope_head_dim"], "attention.value_length": rank}
        facts |= {"attention.key_length_mla": key, "attention.value_length_mla": value, "attention.head_count_kv": 1}
    if "n_routed_experts" in c:
        is_sigmoid = c["model_type"] != "deepseek_v2"
        facts |= {"expert_gating_func": 2 if is_sigmoid else 1, "expert_weights_norm": c["norm_topk_prob"]}
        facts["leading_dense_block_count"] = 1
    if rope.get("mscale_all_dim"):
        facts["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    return facts


def has_latents_cut(c: dict[str, Any]) -> bool:
    """Whether attn_k_b and attn_v_b are written; files of the first form have attn_kv_b."""
    return c["model_type"] != "minicpm3" and c["num_attention_heads"] != 5


def _cut_latents(c: dict[str, Any], tensors: Tensors) -> Tensors:
    found: Tensors = {}
    for name, values in tensors.items():
        if not name.endswith("kv_b_proj.weight") or not has_latents_cut(c):
            found[name] = values
            continue
        heads = values.reshape(c["num_attention_heads"], -1, values.shape[1])
        keys, own = np.split(heads, [c["qk_nope_head_dim"]], axis=1)
        found[name.replace("kv_b_proj", "k_b_proj")] = keys.swapaxes(1, 2)
        found[name.replace("kv_b_proj", "v_b_proj")] = own
    return found


def _full_rope(c: dict[str, Any]) -> dict[str, Any]:
    rope: dict[str, Any] = c.get("rope_parameters") or {}
    return rope.get("full_attention", rope)


def _rope_base(c: dict[str, Any], rope: dict[str, Any]) -> float:
    stretch = rope.get("alpha", 1.0) ** (c["head_dim"] / (c["head_dim"] - 2)) if "alpha" in rope else 1.0
    return float(rope["rope_theta"] * stretch)


def _gguf_tensors(c: dict[str, Any], tensors: Tensors, arch: str) -> Tensors:
    number = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == NAMED_LIKE.get(arch, arch))
    names = gguf.get_tensor_name_map(
        number, 1 + (c.get("num_hidden_layers") or c.get("n_layer") or len(c["layers_block_type"]))
    )
    found: Tensors = {}
    tensors = _apart(tensors) if arch == "gpt-oss" else tensors
    stacked = tensors if arch == "gpt-oss" else stack_experts(tensors)
    if c["model_type"] in ("gemma4_text", "gemma4_unified_text"):
        found["rope_freqs.weight"] = _proportional_factors(c)
    if c["model_type"] == "phi3" and "long_factor" in c["rope_parameters"]:
        for kind in ("long", "short"):
            found[f"rope_factors_{kind}.weight"] = np.asarray(c["rope_parameters"][f"{kind}_factor"], np.float32)
    if c["model_type"] in ("llama4_text", "qwen3_vl_moe_text"):
        stacked = _split_experts(stacked, is_turned=c["model_type"] == "llama4_text")
    if c["model_type"] in ("granitemoe", "granitemoeshared", "granitemoehybrid"):
        stacked = _split_granite(stacked, c["model_type"] == "granitemoeshared")
    if c["model_type"] == "gemma3n_text":
        stacked = _stacked_streams(stacked)
    if "linear_num_value_heads" in c:
        stacked = delta_net_tensors(c, stacked)
    if has_state_space(c):
        stacked = state_space_tensors(c, stacked)
    if "kv_lora_rank" in c:
        stacked = _cut_latents(c, stacked)
    for theirs, values in stacked.items():
        name = theirs.removeprefix("transformer.") if arch == "bloom" else theirs
        name = name.replace("e_score_correction_bias", "e_score_correction.bias").replace("language_model.", "")
        if arch == "hy_v3":
            name = name.replace(".final_layernorm.", ".shared_head.norm.")
        else:
            name = name.replace(".expert_bias", ".expert_bias.bias")
        canonical = names.get_name(name, try_suffixes=(".weight", ".bias"))
        canonical = name if name.startswith("blk.") else canonical
        canonical = _unmapped_name(name) or canonical
        assert canonical is not None, name
        found[canonical] = np.ascontiguousarray(_converted(c, name, values))
    return found


def _split_experts(tensors: Tensors, *, is_turned: bool) -> Tensors:
    """Gates and ups apart, as (experts, out, in)."""
    found: Tensors = {}
    for name, values in tensors.items():
        straight = values.swapaxes(1, 2) if is_turned and ".experts." in name else values
        if name.endswith("experts.gate_up_proj"):
            gate, up = np.split(straight, 2, axis=1)
            stem = name.removesuffix("gate_up_proj")
            found |= {f"{stem}gate_proj.weight": gate, f"{stem}up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            found[f"{name}.weight"] = straight
        else:
            found[name] = values
    return found


def _split_granite(tensors: Tensors, is_shared: bool) -> Tensors:
    found: Tensors = {}
    for name, values in tensors.items():
        if name.endswith("moe.input_linear.weight"):
            layer = name.removeprefix("model.layers.").split(".")[0]
            gate, up = np.split(values, 2, axis=1)
            found |= {f"blk.{layer}.ffn_gate_exps.weight": gate, f"blk.{layer}.ffn_up_exps.weight": up}
        elif is_shared and name.endswith("shared_mlp.input_linear.weight"):
            layer = name.removeprefix("model.layers.").split(".")[0]
            gate, up = np.split(values, 2)
            found |= {f"blk.{layer}.ffn_gate_shexp.weight": gate, f"blk.{layer}.ffn_up_shexp.weight": up}
        elif is_shared and name.endswith("shared_mlp.output_linear.weight"):
            found[f"blk.{name.removeprefix('model.layers.').split('.')[0]}.ffn_down_shexp.weight"] = values
        else:
            found[name] = values
    return found


def _stacked_streams(tensors: Tensors) -> Tensors:
    """The matrices of the streams as one tensor; what does not end in weight there."""
    found = {name: values for name, values in tensors.items() if "model.altup_" not in name}
    for name in ("altup_projections", "altup_unembed_projections"):
        members = [values for theirs, values in sorted(tensors.items()) if theirs.startswith(f"model.{name}.")]
        found[f"model.{name}.weight"] = np.stack(members)
    return {f"{name}.weight" if name.endswith("_scale") else name: values for name, values in found.items()}


def _proportional_factors(c: dict[str, Any]) -> Any:
    """What does not turn is divided by so much that it does not turn."""
    head_dim = next(iter(c["per_layer_config"].values()))["head_dim"]
    rotated = int(head_dim * c["rope_parameters"]["full_attention"]["partial_rotary_factor"] / 2)
    return np.where(np.arange(head_dim // 2) < rotated, 1.0, 1e30).astype(np.float32)


def _unmapped_name(name: str) -> str | None:
    """What the package has no name for, or what does not end in weight there."""
    layer = name.removeprefix("model.layers.").split(".")[0]
    for theirs, ours in {
        "layer_scalar": "layer_output_scale.weight",
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "feed_forward.experts.w1.weight": "ffn_gate_exps.weight",
        "feed_forward.experts.w2.weight": "ffn_down_exps.weight",
        "feed_forward.experts.w3.weight": "ffn_up_exps.weight",
        f"{layer}.experts.gate_up_proj": "ffn_gate_up_exps.weight",
        f"{layer}.experts.down_proj": "ffn_down_exps.weight",
    }.items():
        if name.endswith(theirs):
            return f"blk.{layer}.{ours}"
    return None


def _apart(tensors: Tensors) -> Tensors:
    """The experts of gpt-oss: turned round, gate and up apart."""
    found: Tensors = {}
    for name, values in tensors.items():
        if name.endswith("sinks"):
            found[f"{name}.weight"] = values
        elif ".experts." not in name:
            found[name] = values
        else:
            stem, _, matrix = name.removesuffix("_bias").rpartition(".")
            suffix, turned = ("bias", values) if name.endswith("_bias") else ("weight", values.swapaxes(1, 2))
            parts = {"gate_proj": turned[:, ::2], "up_proj": turned[:, 1::2]}
            for part, own in (parts if matrix == "gate_up_proj" else {matrix: turned}).items():
                found[f"{stem}.{part}.{suffix}"] = own
    return found


def _converted(c: dict[str, Any], name: str, values: Any) -> Any:
    is_delta = "linear_num_value_heads" in c and "ssm_norm" not in name
    if (c["model_type"] in OFFSET_NORMS or is_delta) and name.endswith("norm.weight"):
        return values + 1
    if c["model_type"] in ("lfm2", "lfm2_moe") and "conv.conv" in name:
        return values[:, 0]
    if c["model_type"] == "gpt2" and values.ndim == 2 and ".c_" in name:
        return values.T
    if c["model_type"] in ("gpt_neox", "bloom") and "query_key_value" in name:
        heads = c.get("num_attention_heads") or c["n_head"]
        return values.reshape(heads, 3, -1, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)
    if c["model_type"] == "falcon" and "query_key_value" in name:
        groups, head_dim = c["num_kv_heads"], c["hidden_size"] // c["num_attention_heads"]
        grouped = values.reshape(groups, -1, head_dim, *values.shape[1:])
        parts = (grouped[:, :-2], grouped[:, -2], grouped[:, -1])
        return np.concatenate([part.reshape(-1, *values.shape[1:]) for part in parts])
    if "moe_statics" in name:
        return values[0]
    if name.endswith("shared_expert_gate.weight"):
        return values[0]
    if c["model_type"] in PERMUTED and ("q_proj" in name or "k_proj" in name):
        heads = c["num_attention_heads"] if "q_proj" in name else c["num_key_value_heads"]
        return unrotated(values[:, None], heads)[:, 0] if values.ndim == 1 else unrotated(values, heads)
    return values


def delta_net_tensors(c: dict[str, Any], tensors: Tensors) -> Tensors:
    """Linear attention as the converter has it: Q, K and V of all heads together; for Qwen3.5 the value heads that
    read the same key head are no neighbours."""
    key, value = c["linear_key_head_dim"], c["linear_value_head_dim"]
    key_heads, ratio = c["linear_num_key_heads"], c["linear_num_value_heads"] // c["linear_num_key_heads"]

    def tiled(values: Any, size: int) -> Any:
        if c["model_type"] == "qwen3_next":
            return values
        shape = values.shape
        return values.reshape(key_heads, ratio, size, *shape[1:]).swapaxes(0, 1).reshape(shape)

    def mixed(values: Any) -> Any:
        return np.concatenate([values[: 2 * key_heads * key], tiled(values[2 * key_heads * key :], value)])

    found: Tensors = {}
    for name, values in tensors.items():
        if ".linear_attn." not in name:
            found[name] = values
            continue
        number, part = name.split(".layers.")[1].split(".")[0], name.split(".linear_attn.")[1]
        stem = f"blk.{number}."
        if part == "in_proj_qkvz.weight":
            sizes = np.cumsum([key, key, ratio * value])
            parts = np.split(values.reshape(key_heads, -1, values.shape[1]), sizes, axis=1)
            q, k, v, z = (one.reshape(-1, values.shape[1]) for one in parts)
            found |= {f"{stem}attn_qkv.weight": np.concatenate([q, k, v]), f"{stem}attn_gate.weight": z}
        else:
            ours, change = {
                "in_proj_ba.weight": ("ssm_ba.weight", lambda x: x),
                "in_proj_qkv.weight": ("attn_qkv.weight", mixed),
                "in_proj_z.weight": ("attn_gate.weight", lambda x: tiled(x, value)),
                "in_proj_b.weight": ("ssm_beta.weight", lambda x: tiled(x, 1)),
                "in_proj_a.weight": ("ssm_alpha.weight", lambda x: tiled(x, 1)),
                "conv1d.weight": ("ssm_conv1d.weight", lambda x: mixed(x[:, 0])),
                "dt_bias": ("ssm_dt.bias", lambda x: tiled(x, 1)),
                "A_log": ("ssm_a", lambda x: tiled(-np.exp(x), 1)),
                "norm.weight": ("ssm_norm.weight", lambda x: x),
                "out_proj.weight": ("ssm_out.weight", lambda x: tiled(x.T, value).T),
            }[part]
            found[stem + ours] = change(values)
    return found


def _type_of(name: str, values: Any, type: TensorType) -> TensorType:
    exact = values.ndim == 1 or "ffn_gate_inp" in name or "conv" in name or name.endswith(".bias")
    return TensorType.F32 if exact or values.shape[-1] % type.block_values else type
