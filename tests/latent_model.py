"""The tiny model that can be talked to, with latent attention: a MiniCPM3 of random weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvarn.formats.gguf.writer import Stored, write_gguf
from kvarn.formats.weights import TensorType
from tests.chat_model import CONTEXT, CONTROLS, chat_metadata

WIDTH, HIDDEN, LAYERS, HEADS = 64, 96, 2, 4
QUERY_RANK, RANK, NOPE, ROPE, VALUE = 32, 32, 16, 8, 16
SIZES = {
    "embedding_length": WIDTH,
    "block_count": LAYERS,
    "feed_forward_length": HIDDEN,
    "context_length": CONTEXT,
    "attention.head_count": HEADS,
    "attention.q_lora_rank": QUERY_RANK,
    "attention.kv_lora_rank": RANK,
    "attention.key_length": NOPE + ROPE,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.dimension_count": ROPE,
    "rope.freq_base": 10000.0,
}
SHAPES = {
    "attn_norm.weight": (WIDTH,),
    "attn_q_a.weight": (QUERY_RANK, WIDTH),
    "attn_q_a_norm.weight": (QUERY_RANK,),
    "attn_q_b.weight": (HEADS * (NOPE + ROPE), QUERY_RANK),
    "attn_kv_a_mqa.weight": (RANK + ROPE, WIDTH),
    "attn_kv_a_norm.weight": (RANK,),
    "attn_kv_b.weight": (HEADS * (NOPE + VALUE), RANK),
    "attn_output.weight": (WIDTH, HEADS * VALUE),
    "ffn_norm.weight": (WIDTH,),
    "ffn_gate.weight": (HIDDEN, WIDTH),
    "ffn_up.weight": (HIDDEN, WIDTH),
    "ffn_down.weight": (WIDTH, HIDDEN),
}


def write_latent_model(path: Path) -> Path:
    """Write the model."""
    rng = np.random.default_rng(3)
    vocabulary = 256 + len(CONTROLS)
    shapes = {"token_embd.weight": (vocabulary, WIDTH), "output_norm.weight": (WIDTH,)}
    shapes |= {f"blk.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in SHAPES.items()}
    tensors = {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape)
        values = 1.0 + 0.1 * values if len(shape) == 1 else values * 1.5 / np.sqrt(shape[-1])
        tensors[name] = Stored.quantized(values.astype(np.float32), TensorType.F32)
    head = rng.standard_normal((vocabulary, WIDTH)).astype(np.float32) / 24  # so that several tokens are probable
    tensors["output.weight"] = Stored.quantized(head, TensorType.F32)
    kept = {key: value for key, value in chat_metadata().items() if not key.startswith("llama.")}
    sizes = {f"minicpm3.{key}": value for key, value in SIZES.items()}
    write_gguf(path, kept | {"general.architecture": "minicpm3", "general.name": "tiny latent"} | sizes, tensors)
    return path
