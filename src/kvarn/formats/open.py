"""Open a model's weights, whatever their format. The one place that knows formats which are not read."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from kvarn.errors import FormatError
from kvarn.formats.mapped_file import MappedFile
from kvarn.formats.weights import WeightSource

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")  # of pickles mostly, which are never read

_LLAMA2C = struct.Struct("<7i")  # dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, seq_len


def open_weights(path: str | Path) -> WeightSource:
    """Open a GGUF file, the first part of a split one, or a Hugging Face folder with safetensors."""
    name = os.fspath(path)
    if _is_folder(name):
        from kvarn.formats.safetensors import SafetensorsFolder

        return SafetensorsFolder(name)
    if name.endswith(".safetensors"):
        raise FormatError("give the folder, which also has config.json and the tokenizer, not the file", file=name)
    if name.endswith(PICKLE_SUFFIXES):
        _refuse_foreign(name)
    from kvarn.formats.gguf.scaled import with_scales
    from kvarn.formats.gguf.splits import open_gguf

    return with_scales(open_gguf(name))


def _is_folder(path: str) -> bool:
    try:
        return os.path.isdir(path)
    except ValueError:  # a NUL in the path; opening the file says so
        return False


def _refuse_foreign(path: str) -> None:
    """Refuse what is not a GGUF by another name."""
    file = MappedFile(path)
    try:
        head = file.buffer[:64]
    finally:
        file.close()
    if _is_llama2c(head):
        raise FormatError(
            "this is a file of llama2.c, which is not read; use the model's GGUF or safetensors", file=path
        )
    if not head.startswith(b"GGUF"):
        raise FormatError("pickle files are not read, because they can run code; use GGUF or safetensors", file=path)


def _is_llama2c(head: bytes) -> bool:
    if len(head) < _LLAMA2C.size:
        return False
    width, hidden, layers, heads, kv_heads, vocab, context = _LLAMA2C.unpack_from(head)
    counts = (width, hidden, layers, heads, kv_heads, abs(vocab), context)  # vocab < 0: the head is a matrix of its own
    return all(0 < count < 2**24 for count in counts) and layers <= 1024 and width % heads == 0
