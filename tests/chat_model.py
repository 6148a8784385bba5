"""A tiny random model that can be talked to: a GGUF file with a byte tokeniser and a chat template.

Its answers are noise, but everything around them is real: file, tokeniser, template, cache, kernels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from kvarn.formats.gguf.writer import Stored, write_gguf
from kvarn.formats.weights import TensorType

WIDTH, HIDDEN, HEADS, LAYERS, CONTEXT = 64, 128, 2, 2, 2048
CONTROLS = ["<|fin|>", "<|user|>", "<|assistant|>", "<|system|>"]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|fin|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_chat_model(path: Path, **changes: Any) -> Path:
    """Write the model; changes replace metadata, None removes an entry."""
    metadata = chat_metadata() | changes
    write_gguf(path, {key: value for key, value in metadata.items() if value is not None}, _tensors())
    return path


def write_pruned_model(path: Path, **changes: Any) -> Path:
    """The same model without its last layer, as a draft model for it."""
    metadata = chat_metadata() | {"llama.block_count": LAYERS - 1} | changes
    tensors = {name: one for name, one in _tensors().items() if not name.startswith(f"blk.{LAYERS - 1}.")}
    write_gguf(path, metadata, tensors)
    return path


def write_draft_layer_model(path: Path, *, is_near: bool) -> Path:
    """A model with a layer behind its last that guesses further tokens (GLM-4.5's, all layers dense).

    is_near: the layer is the model's only one again, and reads little but the tokens, so that many guesses are right.
    """
    num_layers = 1 if is_near else LAYERS
    tensors = {
        name.replace("ffn_norm", "post_attention_norm"): one
        for name, one in _tensors().items()
        if not is_near or not name.startswith("blk.1.")
    }
    rng, stem = np.random.default_rng(3), f"blk.{num_layers}."
    for name in [name for name in tensors if name.startswith("blk.0.")]:
        values = tensors[name] if is_near else _tensor(rng, tensors[name].shape)
        tensors[stem + name.removeprefix("blk.0.")] = values
    if is_near:
        embedding = rng.choice([-1.0, 1.0], (256 + len(CONTROLS), WIDTH)).astype(np.float32)  # rows of one length
        tensors["token_embd.weight"] = Stored.quantized(embedding, TensorType.F32)
    joined = rng.normal(0, 0.05, (WIDTH, 2 * WIDTH)) + (np.eye(WIDTH, 2 * WIDTH) if is_near else 0.0)
    tensors[f"{stem}nextn.eh_proj.weight"] = Stored.quantized(joined.astype(np.float32), TensorType.F32)
    for name in ("enorm", "hnorm", "shared_head_norm"):
        tensors[f"{stem}nextn.{name}.weight"] = Stored.quantized(np.ones(WIDTH, np.float32), TensorType.F32)
    metadata = {key.replace("llama.", "glm4moe."): value for key, value in chat_metadata().items()}
    counts = {"block_count": num_layers + 1, "nextn_predict_layers": 1, "leading_dense_block_count": num_layers}
    metadata |= {"general.architecture": "glm4moe"} | {f"glm4moe.{key}": value for key, value in counts.items()}
    write_gguf(path, metadata, tensors)
    return path


def chat_metadata() -> dict[str, Any]:
    """What the file says about itself."""
    tokens = [*_byte_letters(), *CONTROLS]
    return {
        "general.architecture": "llama",
        "general.name": "tiny chat",
        "llama.embedding_length": WIDTH,
        "llama.block_count": LAYERS,
        "llama.feed_forward_length": HIDDEN,
        "llama.context_length": CONTEXT,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": WIDTH // HEADS,
        "llama.rope.freq_base": 10000.0,
        "llama.vocab_size": len(tokens),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [3] * len(CONTROLS),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": 256,
        "tokenizer.chat_template": TEMPLATE,
    }


def _byte_letters() -> list[str]:
    """GPT-2's letters for the 256 bytes: printable ones stand for themselves, the others move up to 256 and on."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in kept]
    return [chr(byte) if byte in kept else chr(256 + moved.index(byte)) for byte in range(256)]


def _tensors() -> dict[str, Any]:
    rng = np.random.default_rng(7)
    vocab = 256 + len(CONTROLS)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, WIDTH), "output_norm.weight": (WIDTH,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.{name}.weight": shape
            for name, shape in {
                "attn_norm": (WIDTH,),
                "attn_q": (WIDTH, WIDTH),
                "attn_k": (WIDTH, WIDTH),
                "attn_v": (WIDTH, WIDTH),
                "attn_output": (WIDTH, WIDTH),
                "ffn_norm": (WIDTH,),
                "ffn_gate": (HIDDEN, WIDTH),
                "ffn_up": (HIDDEN, WIDTH),
                "ffn_down": (WIDTH, HIDDEN),
            }.items()
        }
    return {name: _tensor(rng, shape) for name, shape in shapes.items()}


def _tensor(rng: np.random.Generator, shape: tuple[int, ...]) -> Stored:
    if len(shape) == 1:
        return Stored.quantized(np.ones(shape, np.float32), TensorType.F32)
    return Stored.quantized(rng.normal(0, shape[-1] ** -0.5, shape).astype(np.float32), TensorType.Q8_0)
