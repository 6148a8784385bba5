"""Tiny random models that denoise canvases of random tokens: of transformers, as folders, as GGUF files.

GGUF's names are those of the files in circulation (architecture `diffusion-gemma`); `gguf` has no table of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvarn.backends.batch import Batch, Canvases
from kvarn.formats.gguf.writer import Stored, write_gguf
from kvarn.formats.weights import TensorType
from tests.chat_model import chat_metadata
from tests.family_gguf import _proportional_factors as proportional_factors

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]

MODEL_TYPE = "diffusion_gemma_text"
VOCAB, CONTEXT = 150, 256
SLIDING, FULL = "sliding_attention", "full_attention"
# Heads, KV heads and their dimensions in windowed and in global layers differ; windows of 5, 9 and 3.
TEXT: tuple[dict[str, Any], ...] = (
    {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 64, "intermediate_size": 96}
    | {"global_head_dim": 32, "num_global_key_value_heads": 1, "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL]}
    | {"sliding_window": 5, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 32},
    {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 24, "hidden_size": 40, "intermediate_size": 56}
    | {"global_head_dim": 40, "num_global_key_value_heads": 3, "layer_types": [FULL, SLIDING, FULL]}
    | {"sliding_window": 9, "num_experts": 5, "top_k_experts": 3, "moe_intermediate_size": 24}
    | {"final_logit_softcapping": 12.0},
    {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 72, "intermediate_size": 88}
    | {"global_head_dim": 24, "layer_types": [SLIDING, SLIDING, SLIDING, FULL], "sliding_window": 3}
    | {"num_experts": 4, "top_k_experts": 1, "moe_intermediate_size": 40, "rms_norm_eps": 1e-5},
)
CANVASES = (8, 5, 11)
WIDE = len(TEXT)  # one more, whose columns fill whole blocks of every quantised type
WIDE_TEXT: dict[str, Any] = (
    {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 256, "intermediate_size": 256}
    | {"global_head_dim": 128, "num_global_key_value_heads": 2, "layer_types": [SLIDING, FULL], "sliding_window": 7}
    | {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 256}
)
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"num_key_value_heads": 2, "head_dim": 8}
NAMES = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "self_conditioning.pre_norm.weight": "self_cond_pre_norm.weight",
    **{f"self_conditioning.{part}_proj.weight": f"self_cond_{part}.weight" for part in ("gate", "up", "down")},
}
LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
    **{f"self_attn.{part}_norm.weight": f"attn_{part}_norm.weight" for part in "qk"},
    **{f"self_attn.{part}_proj.weight": f"attn_{part}.weight" for part in "qkv"},
    "self_attn.o_proj.weight": "attn_output.weight",
    **{f"mlp.{part}_proj.weight": f"ffn_{part}.weight" for part in ("gate", "up", "down")},
    "router.proj.weight": "ffn_gate_inp.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "layer_scalar": "layer_output_scale.weight",
}


def canvas_config(shape: int, vocab: int = VOCAB) -> dict[str, Any]:
    text = TEXT[shape] if shape < WIDE else WIDE_TEXT
    usual = {"vocab_size": vocab, "max_position_embeddings": CONTEXT, "num_hidden_layers": len(text["layer_types"])}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return {"text_config": usual | ids | text, "vision_config": VISION, "canvas_length": (*CANVASES, 16)[shape]}


def transformers_model(shape: int, scale: float = 1.0, vocab: int = VOCAB, gain: float = 0.7) -> Any:
    """The published class with values that show in the logits; scale: of the embedding, and with it of the logits.

    gain: of each product.
    """
    import torch
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

    config = DiffusionGemmaConfig(**canvas_config(shape, vocab))
    config._attn_implementation = "eager"
    model = DiffusionGemmaForBlockDiffusion(config).eval()
    rng = np.random.default_rng(shape)
    scalars = [(n, b) for n, b in model.named_buffers() if n.endswith("layer_scalar")]
    for name, values in [*model.named_parameters(), *scalars]:
        drawn = rng.standard_normal(tuple(values.shape))
        if values.ndim > 1:
            drawn *= 0.5 * scale if "embed_tokens" in name else gain / np.sqrt(values.shape[-1])
        else:
            drawn = 1 + 0.2 * drawn
        with torch.no_grad():
            values.copy_(torch.from_numpy(drawn.astype(np.float32)))
    return model


def canvas_folder(shape: int, folder: Path, scale: float = 1.0, gain: float = 0.7) -> tuple[Any, Path]:
    """The model and the folder it was saved to."""
    model, path = transformers_model(shape, scale, gain=gain), folder / f"canvas-{shape}-{scale:g}-{gain:g}"
    model.save_pretrained(path)
    return model, path


def canvas_gguf(shape: int, folder: Path, type: TensorType = TensorType.F32, scale: float = 1.0, **more: Any) -> Path:
    """The same model as a file; more: metadata."""
    model, path = transformers_model(shape, scale), folder / f"canvas-{shape}-{scale:g}-{type.name}.gguf"
    tensors = canvas_tensors(model)
    stored = {name: Stored.quantized(values, _type_of(name, values, type)) for name, values in tensors.items()}
    write_gguf(path, canvas_metadata(model) | more, stored)
    return path


def write_talking_canvases(path: Path, **more: Any) -> Path:
    """A file with a byte tokeniser and a chat template; more: metadata."""
    words = {key: value for key, value in chat_metadata().items() if key.startswith("tokenizer.")}
    model = transformers_model(0, 0.3, len(words["tokenizer.ggml.tokens"]))
    stored = {name: Stored.quantized(values, TensorType.F32) for name, values in canvas_tensors(model).items()}
    write_gguf(path, canvas_metadata(model) | words | more, stored)
    return path


def canvas_tensors(model: Any) -> dict[str, Float32]:
    found: dict[str, Float32] = {"rope_freqs.weight": proportional_factors(model.config.text_config.to_dict())}
    state = {name: values.numpy() for name, values in model.state_dict().items()}
    for name, values in state.items():
        local = name.removeprefix("model.decoder.")
        if name.startswith("model.encoder.language_model.layers.") and name.endswith("layer_scalar"):
            found[f"blk.{name.split('.')[4]}.enc_layer_output_scale.weight"] = values
        if local == name or local.endswith(("inv_freq", "embed_scale")):
            continue
        if local.startswith("layers."):
            _, layer, own = local.split(".", 2)
            if own in LAYER_NAMES:
                found[f"blk.{layer}.{LAYER_NAMES[own]}"] = values
        elif local in NAMES:
            found[NAMES[local]] = values
    return {name: np.ascontiguousarray(values, np.float32) for name, values in found.items()}


def canvas_metadata(model: Any) -> dict[str, Any]:
    c = model.config.text_config.to_dict()
    own, layers = c["per_layer_config"], range(c["num_hidden_layers"])
    full = next(iter(own.values()))["head_dim"]
    facts = {
        "block_count": len(layers),
        "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"],
        "feed_forward_length": c["intermediate_size"],
        "vocab_size": c["vocab_size"],
        "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": [
            own.get(layer, own.get(str(layer), {})).get("num_key_value_heads", c["num_key_value_heads"])
            for layer in layers
        ],
        "attention.layer_norm_rms_epsilon": c["rms_norm_eps"],
        "attention.sliding_window": c["sliding_window"],
        "attention.sliding_window_pattern": [kind == SLIDING for kind in c["layer_types"]],
        "attention.causal": False,
        **{f"attention.{part}_length_swa": c["head_dim"] for part in ("key", "value")},
        **{f"attention.{part}_length": full for part in ("key", "value")},
        "rope.dimension_count": full,
        "rope.dimension_count_swa": c["head_dim"],
        "rope.freq_base": c["rope_parameters"][FULL]["rope_theta"],
        "rope.freq_base_swa": c["rope_parameters"][SLIDING]["rope_theta"],
        "expert_count": c["num_experts"],
        "expert_used_count": c["top_k_experts"],
        "expert_feed_forward_length": c["moe_intermediate_size"],
        "final_logit_softcapping": model.config.text_config.final_logit_softcapping,
        "attention.shared_kv_layers": 0,
        "embedding_length_per_layer_input": 0,
    }
    ours = {"general.architecture": "diffusion-gemma", "diffusion.canvas_length": model.config.canvas_length}
    return ours | {f"diffusion-gemma.{key}": value for key, value in facts.items()}


def canvas_batch(
    text: list[int], canvas: list[int], table: Int32, *, first: int = 0, feedback: object | None = None
) -> Batch:
    """Text from position `first` on and a canvas behind it, as one sequence; the canvas rows are the outputs."""
    tokens, length = [*text[first:], *canvas], len(text) + len(canvas)
    ids, positions = np.array(tokens, np.int32), np.arange(first, length, dtype=np.int32)
    starts, outputs = np.array([0, len(ids)], np.int32), np.arange(len(text) - first, len(ids), dtype=np.int32)
    canvases = Canvases(np.array([len(text)], np.int32), (feedback,))
    return Batch(ids, positions, starts, np.array([length], np.int32), table, outputs, canvases=canvases)


def _type_of(name: str, values: Float32, type: TensorType) -> TensorType:
    exact = values.ndim == 1 or "ffn_gate_inp" in name or values.shape[-1] % type.block_values
    return TensorType.F32 if exact else type
