"""The names Hugging Face gives to the tensors of encoders, translated to GGUF's: bert and roberta, distilbert,
modernbert, nomic_bert in transformers' layout and in its authors'. Used by hf_names.py."""

from __future__ import annotations

import re
from collections.abc import Collection

_BERT = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
    # Jina's: the first layout, then that of the model for code
    "mlp.gated_layers": "ffn_up",  # gate rows, then up rows
    "mlp.wo": "ffn_down",
    "mlp.layernorm": "layer_output_norm",
    "attention.self.layer_norm_q": "attn_q_norm",
    "attention.self.layer_norm_k": "attn_k_norm",
    "layer_norm_1": "attn_norm_2",
    "mlp.up_gated_layer": "ffn_up",  # up rows, then gate rows
    "mlp.down_layer": "ffn_down",
    "layer_norm_2": "layer_output_norm",
}
_DISTILBERT = {
    "attention.q_lin": "attn_q",
    "attention.k_lin": "attn_k",
    "attention.v_lin": "attn_v",
    "attention.out_lin": "attn_output",
    "sa_layer_norm": "attn_output_norm",
    "ffn.lin1": "ffn_up",
    "ffn.lin2": "ffn_down",
    "output_layer_norm": "layer_output_norm",
}
_MODERNBERT = {
    "attn.Wqkv": "attn_qkv",
    "attn.Wo": "attn_output",
    "attn_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
    "mlp.Wi": "ffn_up",  # gate rows, then up rows
    "mlp.Wo": "ffn_down",
}
_NOMIC = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "attn_output_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "post_mlp_layernorm": "layer_output_norm",
}
_NOMIC_AUTHORS = {
    "mixer.Wqkv": "attn_qkv",
    "mixer.out_proj": "attn_output",
    "mlp.fc1": "ffn_up",
    "mlp.router.layer": "ffn_gate_inp",
    "attn.Wqkv": "attn_qkv",
    "attn.out_proj": "attn_output",
    "norm1": "attn_output_norm",
    "mlp.fc11": "ffn_up",
    "mlp.fc12": "ffn_gate",
    "mlp.fc2": "ffn_down",
    "norm2": "layer_output_norm",
}
_LAYERS = {
    "encoder.layer.{}.": _BERT,
    "transformer.layer.{}.": _DISTILBERT,
    "layers.{}.": _MODERNBERT | _NOMIC,
    "encoder.layers.{}.": _NOMIC_AUTHORS,
}
ENCODER = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.tok_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "embeddings.norm": "token_embd_norm",
    "emb_ln": "token_embd_norm",
    "final_norm": "output_norm",
    "pooler.dense": "cls",
    "classifier.dense": "cls",
    "pre_classifier": "cls",
    "head.dense": "cls",
    "head.norm": "cls.norm",
    "classifier": "cls.output",
    "classifier.out_proj": "cls.output",
    **{stem + theirs: f"blk.{{}}.{ours}" for stem, names in _LAYERS.items() for theirs, ours in names.items()},
}
# Whole names, which do not end in weight or bias, or not in the one that is meant. w2 is (experts x hidden, width).
WHOLE_ENCODER = {
    "encoder.layers.{}.mlp.experts.mlp.w1": "blk.{}.ffn_up_exps.weight",
    "encoder.layers.{}.mlp.experts.mlp.w2": "blk.{}.ffn_down_exps.weight",
    "encoder.layers.{}.mlp.experts.bias": "blk.{}.ffn_exps.bias",
}
# Matrices with adapters beside them (torch's parametrize); the adapters are left out, which is told.
_ADAPTED = re.compile(r"\.parametrizations\.weight\.original$")
_ADAPTER = re.compile(r"\.parametrizations\.weight\.0\.lora_[AB]$")
# Layers of sentence-transformers, by the number of the step.
DENSE = {f"{number}_Dense.linear": f"dense_{number}" for number in range(2, 10)}
# Heads that were trained to guess masked words.
_MASK_HEADS = re.compile(r"^(?:lm_head|decoder|cls|vocab_[a-z_]+)\.")


def has_classifier(tensors: Collection[str]) -> bool:
    """Whether texts are scored: then the layers before the classifier are part of the model."""
    return "classifier.weight" in tensors or "classifier.out_proj.weight" in tensors


def without_adapters(local: str) -> str | None:
    """The name of a tensor as it would be without adapters beside it; None: it is one."""
    return None if _ADAPTER.search(local) else _ADAPTED.sub(".weight", local)


def is_head(local: str, canonical: str | None) -> bool:
    """Whether a tensor belongs to a head, which nothing reads where there is no classifier."""
    return _MASK_HEADS.match(local) is not None or (canonical or "").startswith("cls.")
