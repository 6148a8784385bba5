"""Tiny models that can be talked to, with recurrent layers and random weights: a Qwen3.5, half of it delta nets, and a
Mamba-2."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvarn.formats.gguf.writer import Stored, write_gguf
from kvarn.formats.weights import TensorType
from tests.chat_model import CONTEXT, CONTROLS, chat_metadata

WIDTH, HIDDEN, LAYERS, HEADS, HEAD_DIM = 64, 96, 4, 2, 32
KEY_HEADS, VALUE_HEADS, STATE_DIM, KERNEL = 2, 4, 16, 4
VALUES = VALUE_HEADS * STATE_DIM
CHANNELS = 2 * KEY_HEADS * STATE_DIM + VALUES
ATTENTION = {
    "attn_q.weight": (2 * HEADS * HEAD_DIM, WIDTH),  # with the gate
    "attn_k.weight": (HEAD_DIM, WIDTH),
    "attn_v.weight": (HEAD_DIM, WIDTH),
    "attn_output.weight": (WIDTH, HEADS * HEAD_DIM),
    "attn_q_norm.weight": (HEAD_DIM,),
    "attn_k_norm.weight": (HEAD_DIM,),
}
DELTA_NET = {
    "attn_qkv.weight": (CHANNELS, WIDTH),
    "attn_gate.weight": (VALUES, WIDTH),
    "ssm_beta.weight": (VALUE_HEADS, WIDTH),
    "ssm_alpha.weight": (VALUE_HEADS, WIDTH),
    "ssm_conv1d.weight": (CHANNELS, KERNEL),
    "ssm_dt.bias": (VALUE_HEADS,),
    "ssm_a": (VALUE_HEADS,),
    "ssm_norm.weight": (STATE_DIM,),
    "ssm_out.weight": (WIDTH, VALUES),
}
REST = {
    "attn_norm.weight": (WIDTH,),
    "post_attention_norm.weight": (WIDTH,),
    "ffn_gate.weight": (HIDDEN, WIDTH),
    "ffn_up.weight": (HIDDEN, WIDTH),
    "ffn_down.weight": (WIDTH, HIDDEN),
}
EMBEDDING: dict[str, tuple[int, ...]] = {
    "token_embd.weight": (256 + len(CONTROLS), WIDTH),
    "output_norm.weight": (WIDTH,),
}


def write_recurrent_model(path: Path) -> Path:
    """Write the model."""
    sizes = {
        "embedding_length": WIDTH,
        "block_count": LAYERS,
        "feed_forward_length": HIDDEN,
        "context_length": CONTEXT,
        "attention.head_count": HEADS,
        "attention.head_count_kv": 1,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": HEAD_DIM // 4,
        "rope.dimension_sections": [2, 1, 1, 0],
        "rope.freq_base": 10000.0,
        "full_attention_interval": 2,
        "ssm.conv_kernel": KERNEL,
        "ssm.state_size": STATE_DIM,
        "ssm.group_count": KEY_HEADS,
        "ssm.time_step_rank": VALUE_HEADS,
        "ssm.inner_size": VALUES,
    }
    kept = {key: value for key, value in chat_metadata().items() if not key.startswith("llama.")}
    metadata = kept | {"general.architecture": "qwen35", "general.name": "tiny recurrent"}
    write_gguf(path, metadata | {f"qwen35.{key}": value for key, value in sizes.items()}, _tensors())
    return path


def _tensors() -> dict[str, Stored]:
    shapes: dict[str, tuple[int, ...]] = dict(EMBEDDING)
    for layer in range(LAYERS):
        own = REST | (ATTENTION if layer % 2 else DELTA_NET)
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in own.items()}
    return _drawn(shapes)


def _drawn(shapes: dict[str, tuple[int, ...]]) -> dict[str, Stored]:
    rng, found = np.random.default_rng(11), {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape)
        if len(shape) == 1 or "ssm_norm" in name or name.endswith(("ssm_a", "ssm_d")):
            values = -np.exp(values) if name.endswith("ssm_a") else 1.0 + 0.1 * values
        elif "conv1d" not in name:
            values *= 1.5 / np.sqrt(shape[-1])
        found[name] = Stored.quantized(values.astype(np.float32), TensorType.F32)
    return found


def write_state_space_model(path: Path) -> Path:
    """Write a Mamba-2 that can be talked to: it has no attention, and nothing is cached for each token."""
    heads, groups = 4, 2
    values, channels = heads * STATE_DIM, heads * STATE_DIM + 2 * groups * STATE_DIM
    sizes = {
        "embedding_length": WIDTH,
        "block_count": LAYERS,
        "feed_forward_length": 0,
        "context_length": 2**20,
        "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "ssm.conv_kernel": KERNEL,
        "ssm.state_size": STATE_DIM,
        "ssm.group_count": groups,
        "ssm.time_step_rank": heads,
        "ssm.inner_size": values,
    }
    layer = {
        "attn_norm.weight": (WIDTH,),
        "ssm_in.weight": (values + channels + heads, WIDTH),
        "ssm_conv1d.weight": (channels, KERNEL),
        "ssm_conv1d.bias": (channels,),
        "ssm_dt.bias": (heads,),
        "ssm_a": (heads, 1),
        "ssm_d": (heads, 1),
        "ssm_norm.weight": (groups, values // groups),
        "ssm_out.weight": (WIDTH, values),
    }
    shapes = EMBEDDING | {f"blk.{number}.{name}": shape for number in range(LAYERS) for name, shape in layer.items()}
    kept = {key: value for key, value in chat_metadata().items() if not key.startswith("llama.")}
    metadata = kept | {"general.architecture": "mamba2", "general.name": "tiny state space"}
    write_gguf(path, metadata | {f"mamba2.{key}": value for key, value in sizes.items()}, _drawn(shapes))
    return path
