"""Write what train.py left as a GGUF: architecture llada, Q4_0 matrices, Q8_0 embedding, the tokenizer inside.

python export.py --out tiny-out --teacher llama2.data --file tiny-diffusion.gguf
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from teacher import BOS, FIRST_BYTE_TOKEN, NUM_BYTE_TOKENS, Piece, Teacher

from kvarn.formats.gguf.writer import Stored, write_gguf
from kvarn.formats.weights import TensorType

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6  # GGUF's kinds of tokens
HEAD_DIM = 64
CONTEXT = 512
# The model continues text and answers nobody: a conversation is the text of its messages.
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
SQUARE = ("attn_q", "attn_k", "attn_v", "attn_output")


def main() -> None:
    """Read the arrays, write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("tiny-out"))
    parser.add_argument("--teacher", type=Path, default=Path("llama2.data"))
    parser.add_argument("--file", type=Path, default=Path("tiny-diffusion.gguf"))
    args = parser.parse_args()
    kept = np.load(args.out / "held_out.npz")["kept"]
    pieces = Teacher(args.teacher, "cpu", torch.float32).pieces
    tensors = read_tensors(args.out)
    num_layers = sum(name.endswith("attn_q.weight") for name in tensors)
    metadata = describe(tensors, num_layers) | tokenizer([pieces[index] for index in kept])
    write_gguf(args.file, metadata, tensors)
    print(f"{args.file}: {args.file.stat().st_size:,} bytes")


def read_tensors(folder: Path) -> dict[str, Any]:
    """Return the tensors by their GGUF names."""
    rest = np.load(folder / "rest.npz")
    norms = rest["norms"]
    tensors: dict[str, Any] = {
        "token_embd.weight": Stored.quantized(rest["embed"].astype(np.float32), TensorType.Q8_0),
        "output_norm.weight": norms[-1],
    }
    square, wide, down = (Blocks(folder / f"{name}.npz") for name in ("square", "wide", "down"))
    for layer in range(len(norms) // 2):
        prefix = f"blk.{layer}."
        tensors[prefix + "attn_norm.weight"] = norms[2 * layer]
        tensors[prefix + "ffn_norm.weight"] = norms[2 * layer + 1]
        for index, name in enumerate(SQUARE):
            tensors[f"{prefix}{name}.weight"] = square.stored(layer, index)
        tensors[prefix + "ffn_gate.weight"] = wide.stored(layer, 0)
        tensors[prefix + "ffn_up.weight"] = wide.stored(layer, 1)
        tensors[prefix + "ffn_down.weight"] = down.stored(layer)
    return tensors


class Blocks:
    """Q4_0 scales and integers of stacked matrices."""

    def __init__(self, path: Path) -> None:
        arrays = np.load(path)
        self.packed: NDArray[np.uint8] = arrays["packed"]  # (..., rows, blocks, 16)
        self.scales: NDArray[np.float16] = arrays["scales"]  # (..., rows, blocks)

    def stored(self, *index: int) -> Stored:
        """Return one matrix as GGUF stores it: in every block the scale, then the integers."""
        packed, scales = self.packed[index], self.scales[index]
        data = np.concatenate([np.ascontiguousarray(scales)[..., None].view(np.uint8), packed], axis=-1)
        rows, blocks = scales.shape
        return Stored(TensorType.Q4_0, (rows, blocks * 32), data.reshape(-1))


def describe(tensors: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """Return the sizes of the model."""
    vocab, width = tensors["token_embd.weight"].shape
    return {
        "general.architecture": "llada",
        "general.name": "Tiny Diffusion",
        "general.license": "mit",
        "llada.vocab_size": vocab,
        "llada.context_length": CONTEXT,
        "llada.embedding_length": width,
        "llada.block_count": num_layers,
        "llada.feed_forward_length": tensors["blk.0.ffn_gate.weight"].shape[0],
        "llada.attention.head_count": width // HEAD_DIM,
        "llada.attention.head_count_kv": width // HEAD_DIM,
        "llada.attention.layer_norm_rms_epsilon": 1e-5,
        "llada.attention.causal": False,
        "llada.rope.dimension_count": HEAD_DIM,
        "llada.rope.freq_base": 10000.0,
        "diffusion.shift_logits": False,
    }


def tokenizer(pieces: list[Piece]) -> dict[str, Any]:
    """Return a SentencePiece vocabulary: these pieces and the mask. A story ends with the token it begins with."""
    end_of_bytes = FIRST_BYTE_TOKEN + NUM_BYTE_TOKENS
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(NUM_BYTE_TOKENS))]
    tokens += [piece.text.replace(" ", "▁") for piece in pieces[end_of_bytes:]]
    kinds = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * NUM_BYTE_TOKENS + [NORMAL] * (len(pieces) - end_of_bytes)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*tokens, "<|mdm_mask|>"],
        "tokenizer.ggml.scores": np.array([*(piece.score for piece in pieces), 0.0], np.float32),
        "tokenizer.ggml.token_type": np.array([*kinds, CONTROL], np.int32),
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": BOS,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.mask_token_id": len(pieces),
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


if __name__ == "__main__":
    main()
