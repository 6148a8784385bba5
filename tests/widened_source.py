"""A llama model whose residual stream has more channels, and the same predictions: rows that K-quants fit.

No small model with rows of whole super-blocks of 256 values lies in a package index. So three channels in four have the
source's, signs change by a fixed generator, and each 256 channels go through a Walsh-Hadamard transform, which spreads
them over all. What reads the stream goes through the same, after the norms' weights went into it. Sums and differences
alone, no library's products: the same bytes on every machine.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvarn.formats.gguf.reader import GGUFFile
from kvarn.formats.gguf.writer import Stored, write_gguf
from kvarn.formats.weights import TensorType

Float32 = npt.NDArray[np.float32]

BLOCK = 256
READERS = {"attn_norm": ("attn_q", "attn_k", "attn_v"), "ffn_norm": ("ffn_gate", "ffn_up")}
WRITERS = ("attn_output", "ffn_down")
ROWS = 4096  # at one time


def widen(source: Path, path: Path) -> Path:
    """Write a llama model of width w, a multiple of 192, with 4/3 w channels, F16, its head no longer tied."""
    file = GGUFFile(source)
    width = int(file.metadata["llama.embedding_length"])
    tensors = dict(_layers(file, int(file.metadata["llama.block_count"])))
    embedding = file.array("token_embd.weight")
    tensors["token_embd.weight"] = _stored(_spread(embedding))
    tensors["output_norm.weight"] = _ones(width)
    tensors["output.weight"] = _stored(_read(embedding, file.array("output_norm.weight")))
    epsilon = float(file.metadata["llama.attention.layer_norm_rms_epsilon"])
    changed = {
        "general.file_type": 1,
        "llama.embedding_length": width // 3 * 4,
        # Of 4/3 as many channels the mean of squares is 3/4 as large.
        "llama.attention.layer_norm_rms_epsilon": epsilon * 3 / 4,
        "llama.attention.key_length": width // int(file.metadata["llama.attention.head_count"]),
        "llama.attention.value_length": width // int(file.metadata["llama.attention.head_count"]),
    }
    write_gguf(path, {**file.stored_metadata(), **changed}, tensors)
    return path


def _layers(file: GGUFFile, count: int) -> list[tuple[str, Stored]]:
    found = []
    for prefix in (f"blk.{layer}." for layer in range(count)):
        for norm, readers in READERS.items():
            weight = file.array(f"{prefix}{norm}.weight")
            found.append((f"{prefix}{norm}.weight", _ones(len(weight))))
            for reader in readers:
                name = f"{prefix}{reader}.weight"
                found.append((name, _stored(_read(file.array(name), weight))))
        for writer in WRITERS:
            name = f"{prefix}{writer}.weight"
            found.append((name, _stored(np.ascontiguousarray(_spread(file.array(name).T).T))))
    return found


def _read(values: Float32, norm: Float32) -> Float32:
    """Rows that read the normed stream: with the norm's weight, and with what more channels divide less by."""
    return _spread(values * norm) * np.float32(np.sqrt(0.75))


def _spread(values: Float32) -> Float32:
    """Vectors of the stream, (..., w), among 4/3 w channels: an isometry."""
    signs = np.where(np.random.default_rng(0).random(values.shape[1] // 3 * 4) < 0.5, -1, 1).astype(np.float32)
    out = np.empty((len(values), len(signs)), np.float32)
    for begin in range(0, len(values), ROWS):
        some = values[begin : begin + ROWS]
        wide = np.zeros((len(some), some.shape[1] // 3, 4), np.float32)
        wide[:, :, :3] = some.reshape(len(some), -1, 3)
        out[begin : begin + ROWS] = _transformed(wide.reshape(len(some), -1) * signs)
    return out


def _transformed(values: Float32) -> Float32:
    """The Walsh-Hadamard transform of each 256 columns, over 16."""
    found, step = values.reshape(-1, BLOCK), 1
    while step < BLOCK:
        pairs = found.reshape(-1, BLOCK // (2 * step), 2, step)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        found = np.stack([first + second, first - second], axis=2).reshape(-1, BLOCK)
        step *= 2
    return (found / np.float32(16)).reshape(values.shape)


def _ones(width: int) -> Stored:
    return Stored.quantized(np.ones(width // 3 * 4, np.float32), TensorType.F32)


def _stored(values: Float32) -> Stored:
    return Stored.quantized(values, TensorType.F16)
