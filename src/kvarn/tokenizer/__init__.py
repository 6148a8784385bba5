"""Text to token ids and back; chat templates. Knows vocabularies, never tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvarn.errors import FormatError

if TYPE_CHECKING:
    from kvarn.formats.weights import WeightSource
    from kvarn.tokenizer.tokenizer import Tokenizer

__all__ = ["load_tokenizer"]


def load_tokenizer(source: WeightSource) -> Tokenizer:
    """Return the tokenizer of a model: from GGUF metadata, or from the tokenizer.json of a folder."""
    try:
        tokenizer = _read_tokenizer(source)
    except FormatError as error:
        if error.file is not None:
            raise
        raise FormatError(str(error), file=source.path) from error
    tokenizer.prepare_chat()
    return tokenizer


def _read_tokenizer(source: WeightSource) -> Tokenizer:
    embedding = source.tensors.get("token_embd.weight")
    num_rows = embedding.shape[0] if embedding is not None and embedding.shape else None
    if "hf" in source.metadata or "hf_folder" in source.metadata:
        from kvarn.tokenizer.from_folder import tokenizer_from_folder

        return tokenizer_from_folder(source.metadata.get("hf_folder", source.path), num_rows=num_rows)
    from kvarn.tokenizer.from_gguf import tokenizer_from_gguf

    return tokenizer_from_gguf(source.metadata, num_rows=num_rows)
