"""The names that Hugging Face gives to tensors of state spaces, translated to GGUF's; a part of hf_names.py's table."""

from __future__ import annotations

from typing import Final

_PARTS: Final = {"in_proj": "ssm_in", "conv1d": "ssm_conv1d", "norm": "ssm_norm", "out_proj": "ssm_out"} | {
    "x_proj": "ssm_x",
    "dt_proj": "ssm_dt",
}
_WHOLE_PARTS: Final = {"dt_bias": "ssm_dt.bias", "A_log": "ssm_a_log", "D": "ssm_d"}
_PLACES: Final = ("mixer", "mamba")

STATE_NAMES: Final = {
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
WHOLE_STATE_NAMES: Final = {
    **{f"layers.{{}}.mixer.experts.{part}_proj": f"blk.{{}}.ffn_{part}_exps.weight" for part in ("up", "down")},
    "layers.{}.mixer.gate.e_score_correction_bias": "blk.{}.exp_probs_b.bias",
} | {f"layers.{{}}.{place}.{theirs}": f"blk.{{}}.{ours}" for place in _PLACES for theirs, ours in _WHOLE_PARTS.items()}
