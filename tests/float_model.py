"""A tiny random model with float weights and a byte tokeniser, to be quantised, and texts to measure it on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np

from kvarn.formats.gguf.writer import Stored, write_gguf
from kvarn.formats.weights import TensorType
from tests.chat_model import chat_metadata

LAYERS = 8
WORDS = [
    "the",
    "of",
    "and",
    "a",
    "to",
    "in",
    "is",
    "you",
    "that",
    "it",
    "he",
    "was",
    "for",
    "on",
    "are",
    "as",
    "with",
    "his",
    "they",
    "I",
    "at",
    "be",
    "this",
    "have",
    "from",
    "or",
    "one",
    "had",
    "by",
]


def write_float_model(
    path: Path,
    *,
    width: int = 256,
    hidden: int = 512,
    type: TensorType = TensorType.F16,
    seed: int = 3,
    num_experts: int = 0,
    **changes: Any,
) -> Path:
    """Write the model; changes replace metadata. num_experts: of a mixture, all used, so that none is chosen."""
    heads = width // 32
    metadata = chat_metadata() | {
        "llama.embedding_length": width,
        "llama.block_count": LAYERS,
        "llama.feed_forward_length": hidden,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": heads // 2,
        "llama.rope.dimension_count": 32,
        "general.file_type": 1,
    }
    if num_experts:
        metadata |= {"llama.expert_count": num_experts, "llama.expert_used_count": num_experts}
    write_gguf(path, metadata | changes, _tensors(width, hidden, type, seed, num_experts))
    return path


def write_text(path: Path, *, num_words: int = 1500, seed: int = 0) -> Path:
    """Write a text of random words."""
    rng = random.Random(seed)
    path.write_text(" ".join(rng.choice(WORDS) for _ in range(num_words)), encoding="utf-8")
    return path


def _tensors(width: int, hidden: int, type: TensorType, seed: int, num_experts: int) -> dict[str, Stored]:
    rng = np.random.default_rng(seed)
    vocab = len(chat_metadata()["tokenizer.ggml.tokens"])
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, width), "output_norm.weight": (width,)}
    block: dict[str, tuple[int, ...]] = {
        "attn_norm": (width,),
        "attn_q": (width, width),
        "attn_k": (width // 2, width),
        "attn_v": (width // 2, width),
        "attn_output": (width, width),
        "ffn_norm": (width,),
        "ffn_gate": (hidden, width),
        "ffn_up": (hidden, width),
        "ffn_down": (width, hidden),
    }
    if num_experts:
        stacks = {f"{name}_exps": (num_experts, *block.pop(name)) for name in ("ffn_gate", "ffn_up", "ffn_down")}
        block |= {"ffn_gate_inp": (num_experts, width)} | stacks
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in block.items()}
    routers = TensorType.F32  # as llama.cpp wants them
    return {name: _stored(rng, shape, routers if "ffn_gate_inp" in name else type) for name, shape in shapes.items()}


def _stored(rng: np.random.Generator, shape: tuple[int, ...], type: TensorType) -> Stored:
    if len(shape) == 1:
        return Stored.quantized(np.exp(0.5 * rng.standard_normal(shape)).astype(np.float32), TensorType.F32)
    values = rng.standard_normal(shape) * shape[-1] ** -0.5
    return Stored.quantized(values.astype(np.float32), type)
