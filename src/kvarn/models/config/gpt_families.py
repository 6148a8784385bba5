"""The keys of config.json of GPT-2 and its kin, as families.py has them of the others."""

from __future__ import annotations

from typing import Any, Final

_GPT: Final[dict[str, Any]] = {
    "vocab_size": None,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
    "tie_word_embeddings": True,
}
_SHORT_NAMES: Final = dict.fromkeys(("n_embd", "n_layer", "n_head", "n_positions", "n_inner"))
GPT_FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "gpt2": _GPT
    | _SHORT_NAMES
    | {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "scale_attn_by_inverse_layer_idx": False},
    "gpt_bigcode": _GPT
    | _SHORT_NAMES
    | {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "multi_query": True}
    | {"num_key_value_heads": 1}
    | {"activation_function": "gelu_pytorch_tanh"},
    "gptj": _GPT
    | _SHORT_NAMES
    | {"n_embd": 4096, "n_layer": 28, "n_head": 16, "n_positions": 2048, "rotary_dim": 64}
    | {"tie_word_embeddings": False},
    "gpt_neo": _GPT
    | {"hidden_size": 2048, "num_layers": None, "num_hidden_layers": 24, "num_heads": None}
    | {"num_attention_heads": 16, "max_position_embeddings": 2048, "intermediate_size": None, "window_size": 256}
    | {"attention_types": [[["global", "local"], 12]], "attention_layers": None},
    "bloom": {key: _GPT[key] for key in ("vocab_size", "layer_norm_epsilon", "tie_word_embeddings")}
    | {"hidden_size": 64, "n_embed": None, "n_layer": None, "num_hidden_layers": 2, "n_head": None}
    | {
        "num_attention_heads": 8,
        "seq_length": None,
        "max_position_embeddings": 2048,
        "apply_residual_connection_post_layernorm": False,
    },
    "opt": {"vocab_size": None, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
    | {"ffn_dim": 3072, "max_position_embeddings": 2048, "activation_function": "relu", "tie_word_embeddings": True}
    | {"do_layer_norm_before": True, "_remove_final_layer_norm": False, "word_embed_proj_dim": None}
    | {"enable_bias": True, "layer_norm_elementwise_affine": True},
}
