"""An embedder without a model, where a text is the sum of its words' random vectors; and vectors to search."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvarn.retrieval.types import EmbeddedDocument, TextChunk

Float32 = npt.NDArray[np.float32]


class WordEmbedder:
    """Texts that share words are close."""

    def __init__(self, dim: int = 32, salt: str = "") -> None:
        self.dim = dim
        self.salt = salt
        self.num_embedded = 0

    @property
    def name(self) -> str:
        return f"words-{self.dim}{self.salt}"

    @property
    def max_tokens(self) -> int:
        return 256

    def count(self, text: str) -> int:
        return len(text.split())

    def embed(self, texts: Sequence[str]) -> Float32:
        self.num_embedded += len(texts)
        return unit(np.array([self._one(text) for text in texts], np.float32).reshape(len(texts), self.dim))

    def close(self) -> None:
        """There is nothing to free."""

    def _one(self, text: str) -> Float32:
        return np.sum([self._word(word) for word in text.lower().split()] or [np.zeros(self.dim)], axis=0)

    def _word(self, word: str) -> npt.NDArray[np.float64]:
        seed = int.from_bytes(hashlib.sha256(f"{self.salt}{word}".encode()).digest()[:8], "little")
        return np.random.default_rng(seed).standard_normal(self.dim)


def unit(vectors: npt.NDArray[np.floating]) -> Float32:
    """Vectors of length 1."""
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12), np.float32)


def clustered(num: int, dim: int = 384, seed: int = 0) -> Float32:
    """Unit vectors of intrinsic dimension 24: 300 centres with noise in R^24, mapped to R^dim, noise again."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((300, 24))
    inner = centres[rng.integers(0, 300, num)] + 0.5 * rng.standard_normal((num, 24))
    return unit(inner @ rng.standard_normal((24, dim)) + 0.3 * rng.standard_normal((num, dim)))


def entry(number: int, vector: Float32, text: str = "", **metadata: str | int | float | bool) -> EmbeddedDocument:
    """A document of one chunk."""
    words = text or f"text number {number}"
    digest = hashlib.sha256(f"{number}\0{words}".encode()).digest()
    return EmbeddedDocument(
        f"d{number}", f"folder/{number}.txt", digest, metadata, [TextChunk(words, 0, len(words))], vector[None]
    )
