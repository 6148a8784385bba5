"""The names that Hugging Face gives to tensors of state spaces, of GPT-2 and its kin, and of models that read text and
canvases with one stack, translated to GGUF's; parts of hf_names.py's table."""

from __future__ import annotations

from typing import Final

_PARTS: Final = {"in_proj": "ssm_in", "conv1d": "ssm_conv1d", "norm": "ssm_norm", "out_proj": "ssm_out"} | {
    "x_proj": "ssm_x",
    "dt_proj": "ssm_dt",
}
_WHOLE_PARTS: Final = {"dt_bias": "ssm_dt.bias", "A_log": "ssm_a_log", "D": "ssm_d"}
_PLACES: Final = ("mixer", "mamba")

STATE_NAMES: Final = {
    "self_conditioning.pre_norm": "self_cond_pre_norm",
    **{f"self_conditioning.{part}_proj": f"self_cond_{part}" for part in ("gate", "up", "down")},
    "embeddings": "token_embd",
    "embedding": "token_embd",
    "norm_f": "output_norm",
    "layers.{}.norm": "blk.{}.attn_norm",
    "layers.{}.pre_ff_layernorm": "blk.{}.ffn_norm",
    "layers.{}.shared_mlp.input_linear": "blk.{}.ffn_up_shexp",  # gate rows, then up rows
    "layers.{}.shared_mlp.output_linear": "blk.{}.ffn_down_shexp",
    "layers.{}.block_sparse_moe.router": "blk.{}.ffn_gate_inp",
    **{f"layers.{{}}.feed_forward.{part}_proj": f"blk.{{}}.ffn_{part}" for part in ("gate", "up", "down")},
    **{f"layers.{{}}.mixer.{part}_proj": f"blk.{{}}.attn_{part}" for part in "qkv"},
    "layers.{}.mixer.o_proj": "blk.{}.attn_output",
    "layers.{}.mixer.gate": "blk.{}.ffn_gate_inp",
    **{f"layers.{{}}.mixer.{part}_proj": f"blk.{{}}.ffn_{part}" for part in ("up", "down")},
    **{f"layers.{{}}.mixer.shared_experts.{part}_proj": f"blk.{{}}.ffn_{part}_shexp" for part in ("up", "down")},
    **{f"layers.{{}}.{place}.{theirs}": f"blk.{{}}.{ours}" for place in _PLACES for theirs, ours in _PARTS.items()},
}

_BLOCK: Final = {
    "self_attention.query_key_value": "attn_qkv",
    "self_attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "ln_attn": "attn_norm",
    "ln_mlp": "ffn_norm",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "mlp.fc_in": "ffn_up",
    "mlp.fc_out": "ffn_down",
    **{
        f"{attention}.{theirs}_proj": f"attn_{ours}"
        for attention in ("attn", "attn.attention")
        for theirs, ours in (("q", "q"), ("k", "k"), ("v", "v"), ("out", "output"))
    },
}
_AROUND: Final = {
    "word_embeddings": "token_embd",
    "word_embeddings_layernorm": "token_embd_norm",
    "wte": "token_embd",
    "wpe": "position_embd",
    "ln_f": "output_norm",
}
GPT_NAMES: Final = {
    "embed_in": "token_embd",
    "embed_out": "output",
    "layers.{}.attention.query_key_value": "blk.{}.attn_qkv",
    "layers.{}.attention.dense": "blk.{}.attn_output",
    "layers.{}.mlp.dense_h_to_4h": "blk.{}.ffn_up",
    "layers.{}.mlp.dense_4h_to_h": "blk.{}.ffn_down",
    **{f"{stem}{theirs}": ours for stem in ("", "transformer.") for theirs, ours in _AROUND.items()},
    **{
        f"{stem}h.{{}}.{theirs}": f"blk.{{}}.{ours}" for stem in ("", "transformer.") for theirs, ours in _BLOCK.items()
    },
    # OPT's
    **{
        f"decoder.{theirs}": ours
        for theirs, ours in {
            "embed_tokens": "token_embd",
            "embed_positions": "position_embd",
            "final_layer_norm": "output_norm",
            "layers.{}.self_attn_layer_norm": "blk.{}.attn_norm",
            "layers.{}.final_layer_norm": "blk.{}.ffn_norm",
            **{f"layers.{{}}.self_attn.{part}_proj": f"blk.{{}}.attn_{part}" for part in "qkv"},
            "layers.{}.self_attn.out_proj": "blk.{}.attn_output",
            "layers.{}.fc1": "blk.{}.ffn_up",
            "layers.{}.fc2": "blk.{}.ffn_down",
        }.items()
    },
}
WHOLE_STATE_NAMES: Final = {
    "encoder.language_model.layers.{}.layer_scalar": "blk.{}.enc_layer_output_scale.weight",
    **{f"layers.{{}}.mixer.experts.{part}_proj": f"blk.{{}}.ffn_{part}_exps.weight" for part in ("up", "down")},
    "layers.{}.mixer.gate.e_score_correction_bias": "blk.{}.exp_probs_b.bias",
} | {f"layers.{{}}.{place}.{theirs}": f"blk.{{}}.{ours}" for place in _PLACES for theirs, ours in _WHOLE_PARTS.items()}


def of_one_stack(name: str) -> str | None:
    """Of two names of a tensor, the decoder's; the encoder has a tensor of its own for each layer, and copies."""
    if name.startswith("encoder.language_model.") and not name.endswith(".layer_scalar"):
        return None
    return name.removeprefix("decoder.")
