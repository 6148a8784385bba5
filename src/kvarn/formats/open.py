"""Open a model's weights, whatever their format."""

from __future__ import annotations

import os
from pathlib import Path

from kvarn.errors import FormatError
from kvarn.formats.weights import WeightSource

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def open_weights(path: str | Path) -> WeightSource:
    """Open a GGUF file, the first part of a split one, or a Hugging Face folder with safetensors."""
    name = os.fspath(path)
    if _is_folder(name):
        from kvarn.formats.safetensors import SafetensorsFolder

        return SafetensorsFolder(name)
    if name.endswith(".safetensors"):
        raise FormatError("give the folder, which also has config.json and the tokenizer, not the file", file=name)
    if name.endswith(_PICKLES):
        raise FormatError("pickle files are not read, because they can run code; use GGUF or safetensors", file=name)
    from kvarn.formats.gguf.splits import open_gguf

    return open_gguf(name)


def _is_folder(path: str) -> bool:
    try:
        return os.path.isdir(path)
    except ValueError:  # a NUL in the path; opening the file says so
        return False
