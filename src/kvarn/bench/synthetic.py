"""Models of standard shapes with random weights, for benchmarks without the real weights: loadable by every engine.

Quantised weights are random bytes with scales that keep activations near unit size; rows repeat in large matrices.
Which tensor gets which type follows llama.cpp's quantiser, so that files have the size of the real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvarn.checks import check_setting
from kvarn.formats.gguf.writer import Stored, write_gguf
from kvarn.formats.quants import dequantize, quantize
from kvarn.formats.weights import TensorType
from kvarn.quantization.recipes import fitting_type, gets_more_bits

TILE_BYTES = 16 << 20  # random bytes of one matrix; larger matrices repeat them
SAMPLE_BLOCKS = 256
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K": 12}
FILE_TYPES |= {"Q4_K": 14, "Q4_K_M": 15, "Q5_K": 16, "Q5_K_M": 17, "Q6_K": 18, "IQ4_NL": 25, "BF16": 32}
MIXES = {"Q4_K_M": TensorType.Q4_K, "Q5_K_M": TensorType.Q5_K}

# float16 fields of a block: (byte of the scale, byte of the minimum or None, minimum / scale that centres the values)
SCALES: dict[TensorType, tuple[int, int | None, float]] = {
    TensorType.Q4_0: (0, None, 0),
    TensorType.Q4_1: (0, 2, -7.5),
    TensorType.Q5_0: (0, None, 0),
    TensorType.Q5_1: (0, 2, -15.5),
    TensorType.Q8_0: (0, None, 0),
    TensorType.IQ4_NL: (0, None, 0),
    TensorType.Q2_K: (80, 82, 1.5),
    TensorType.Q3_K: (108, None, 0),
    TensorType.Q4_K: (0, 2, 7.5),
    TensorType.Q5_K: (0, 2, 15.5),
    TensorType.Q6_K: (208, None, 0),
}
WIDE = (TensorType.F32, TensorType.F16, TensorType.BF16, TensorType.Q8_0)  # the head keeps these types


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The dimensions of one model."""

    architecture: str
    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    vocab: int
    context: int
    rope_base: float
    eps: float
    pre: str  # pre-tokeniser of the vocabulary
    tied: bool = True
    qkv_bias: bool = False
    mask_id: int | None = None  # of a diffusion model
    key_length: int | None = None  # of a head, where it is not width / heads
    qk_norm: bool = False

    @property
    def head_dim(self) -> int:
        return self.key_length or self.width // self.heads


SHAPES: dict[str, ModelShape] = {
    "smollm2-135m": ModelShape("llama", 30, 576, 1536, 9, 3, 49152, 8192, 1e5, 1e-5, "smollm"),
    "qwen2.5-0.5b": ModelShape("qwen2", 24, 896, 4864, 14, 2, 151936, 32768, 1e6, 1e-6, "qwen2", qkv_bias=True),
    "qwen2.5-1.5b": ModelShape("qwen2", 28, 1536, 8960, 12, 2, 151936, 32768, 1e6, 1e-6, "qwen2", qkv_bias=True),
    "qwen3-0.6b": ModelShape(
        "qwen3", 28, 1024, 3072, 16, 8, 151936, 40960, 1e6, 1e-6, "qwen2", key_length=128, qk_norm=True
    ),
    "llama-3.2-1b": ModelShape("llama", 16, 2048, 8192, 32, 8, 128256, 131072, 5e5, 1e-5, "llama-bpe"),
    "llama-3.1-8b": ModelShape("llama", 32, 4096, 14336, 32, 8, 128256, 131072, 5e5, 1e-5, "llama-bpe", tied=False),
    "llada-8b": ModelShape(
        "llada", 32, 4096, 12288, 32, 32, 126464, 4096, 5e5, 1e-5, "llama-bpe", tied=False, mask_id=126336
    ),
    # LLaDA-8B with a quarter of its width and FFN, half its layers, and all of its vocabulary
    "llada-small": ModelShape(
        "llada", 16, 1024, 3072, 8, 8, 126464, 4096, 5e5, 1e-5, "llama-bpe", tied=False, mask_id=126336
    ),
}


def write_model(path: Path, shape: str, type: str, progress: Callable[[int, int], None] | None = None) -> None:
    """Write a model; type is a tensor type or a mix."""
    check_setting.one_of("shape", shape, tuple(SHAPES))
    check_setting.one_of("type", type, tuple(FILE_TYPES))
    write_shape(path, SHAPES[shape], type, f"{shape} {type} with random weights", progress)


def write_shape(
    path: Path, shape: ModelShape, type: str, name: str, progress: Callable[[int, int], None] | None = None
) -> None:
    """Write a model of any shape."""
    rng = np.random.default_rng(0)
    types = tensor_types(shape, type)
    tensors = {tensor: _random(rng, size, types[tensor]) for tensor, size in shapes_of(shape).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_gguf(path, _metadata(shape, type, name), tensors, progress=progress)


def shapes_of(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor."""
    width, hidden, q, kv = shape.width, shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    block: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (width,),
        "attn_q.weight": (q, width),
        "attn_k.weight": (kv, width),
        "attn_v.weight": (kv, width),
        "attn_output.weight": (width, q),
        "ffn_norm.weight": (width,),
        "ffn_gate.weight": (hidden, width),
        "ffn_up.weight": (hidden, width),
        "ffn_down.weight": (width, hidden),
    }
    if shape.qkv_bias:
        block |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
    if shape.qk_norm:
        block |= {"attn_q_norm.weight": (shape.head_dim,), "attn_k_norm.weight": (shape.head_dim,)}
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (shape.vocab, width), "output_norm.weight": (width,)}
    if not shape.tied:
        found["output.weight"] = (shape.vocab, width)
    for layer in range(shape.layers):
        found |= {f"blk.{layer}.{name}": size for name, size in block.items()}
    return found


def tensor_types(shape: ModelShape, type: str) -> dict[str, TensorType]:
    """The type of every tensor: vectors F32, the head at least Q6_K, in a mix also some of the middle."""
    base = MIXES.get(type) or TensorType[type]
    head = "token_embd.weight" if shape.tied else "output.weight"
    types = {}
    for name, size in shapes_of(shape).items():
        chosen = base
        if name == head:
            chosen = base if base in WIDE else TensorType.Q6_K
        elif type in MIXES and name.endswith(("attn_v.weight", "ffn_down.weight")):
            chosen = TensorType.Q6_K if gets_more_bits(int(name.split(".")[1]), shape.layers) else base
        types[name] = TensorType.F32 if len(size) == 1 else fitting_type(chosen, size[-1])
    return types


def _random(rng: np.random.Generator, size: tuple[int, ...], type: TensorType) -> Stored:
    if len(size) == 1:  # norms and biases
        return Stored(type, size, quantize(np.ones(size, np.float32), type))
    rows, columns = size
    tile_rows = _largest_divisor(rows, max(1, TILE_BYTES // type.num_bytes(columns)))
    tile = _random_blocks(rng, type, tile_rows * columns, columns**-0.5)
    # A view that repeats the tile: memory for the whole matrix is needed only while it is written.
    return Stored(type, size, np.broadcast_to(tile, (rows // tile_rows, tile.size)))


def _largest_divisor(number: int, limit: int) -> int:
    return next(divisor for divisor in range(min(number, limit), 0, -1) if number % divisor == 0)


def _random_blocks(rng: np.random.Generator, type: TensorType, count: int, deviation: float) -> npt.NDArray[np.uint8]:
    if type not in SCALES:
        return quantize(deviation * rng.standard_normal(count, np.float32), type)
    blocks = np.frombuffer(rng.bytes(type.num_bytes(count)), np.uint8).reshape(-1, type.block_bytes).copy()
    sample = _scaled(blocks[:SAMPLE_BLOCKS], type, 1.0)
    unit = dequantize(sample.reshape(-1), type, (sample.shape[0], type.block_values)).std()
    return _scaled(blocks, type, deviation / float(unit)).reshape(-1)


def _scaled(blocks: npt.NDArray[np.uint8], type: TensorType, scale: float) -> npt.NDArray[np.uint8]:
    scale_at, min_at, ratio = SCALES[type]
    scaled = blocks.copy()
    scaled[:, scale_at : scale_at + 2] = np.array([scale], "<f2").view(np.uint8)
    if min_at is not None:
        scaled[:, min_at : min_at + 2] = np.array([scale * ratio], "<f2").view(np.uint8)
    return scaled


def _metadata(shape: ModelShape, type: str, name: str) -> dict[str, Any]:
    arch = shape.architecture
    types = np.array([1] * (shape.vocab - 1) + [3], np.int32)
    tokens = _tokens(shape.vocab)
    more: dict[str, Any] = {}
    if shape.mask_id is not None:
        types[shape.mask_id], tokens[shape.mask_id] = 3, "<|mdm_mask|>"
        more = {
            f"{arch}.attention.causal": False,
            "diffusion.shift_logits": False,
            "tokenizer.ggml.mask_token_id": shape.mask_id,
        }
    return more | {
        "general.architecture": arch,
        "general.name": name,
        "general.file_type": FILE_TYPES[type],
        "general.quantization_version": 2,
        f"{arch}.block_count": shape.layers,
        f"{arch}.context_length": shape.context,
        f"{arch}.embedding_length": shape.width,
        f"{arch}.feed_forward_length": shape.hidden,
        f"{arch}.attention.head_count": shape.heads,
        f"{arch}.attention.head_count_kv": shape.kv_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": shape.eps,
        f"{arch}.attention.key_length": shape.head_dim,
        f"{arch}.attention.value_length": shape.head_dim,
        f"{arch}.rope.dimension_count": shape.head_dim,
        f"{arch}.rope.freq_base": shape.rope_base,
        f"{arch}.vocab_size": shape.vocab,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": shape.pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": shape.vocab - 1,
        "tokenizer.ggml.eos_token_id": shape.vocab - 1,
        "tokenizer.ggml.add_bos_token": False,
    }


def _tokens(vocab: int) -> list[str]:
    """GPT-2's letters for the 256 bytes, one merge, numbered words, and an end."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in kept]
    letters = [chr(byte) if byte in kept else chr(256 + moved.index(byte)) for byte in range(256)]
    return [*letters, "ab", *(f"w{number}" for number in range(vocab - 258)), "<|end|>"]
