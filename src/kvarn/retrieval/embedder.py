"""Texts to unit vectors, by a model that is loaded when first needed. Knows no index."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvarn.retrieval.types import Float32

if TYPE_CHECKING:
    from kvarn.llm import LLM

DEFAULT_EMBEDDER = "minilm"


class Embedder(Protocol):
    """What a collection needs from an embedding model."""

    @property
    def name(self) -> str: ...

    @property
    def max_tokens(self) -> int:
        """Tokens that a text may have, without the special tokens."""

    def count(self, text: str) -> int:
        """Tokens of a text, without the special tokens."""

    def embed(self, texts: Sequence[str]) -> Float32:
        """One unit vector per text, (n, dim); no text is longer than max_tokens."""

    def close(self) -> None: ...


class ModelEmbedder:
    """An encoder model such as minilm, loaded by name or passed by the caller."""

    def __init__(
        self, model: str | LLM = DEFAULT_EMBEDDER, find: Callable[[str], LLM] | None = None, *, priority: int = 0
    ) -> None:
        """find: called with the name whenever the model is needed, and owns it. priority: as of SamplingParams."""
        self._lock = threading.Lock()
        self._find = find
        self._priority = priority
        self._is_owned = isinstance(model, str)
        self._name = model if isinstance(model, str) else model.spec.name
        self._llm = None if isinstance(model, str) else model

    @property
    def name(self) -> str:
        return self._name

    @property
    def llm(self) -> LLM:
        """The model; loads it if that has not happened yet."""
        if self._find is not None:
            return self._find(self._name)
        with self._lock:
            if self._llm is None:
                self._llm = _load(self._name)
            return self._llm

    @property
    def max_tokens(self) -> int:
        prompt = self.llm.vectors.prompts.text(None)
        return self.llm.context - len(self.llm.tokenizer.encode(prompt, add_special=True))

    def count(self, text: str) -> int:
        return len(self.llm.tokenizer.encode(text, add_special=False)) if text else 0

    def embed(self, texts: Sequence[str]) -> Float32:
        if not texts:
            return np.empty((0, self.llm.vectors.width), np.float32)
        return self.llm.embed(list(texts), priority=self._priority)

    def at_priority(self, priority: int) -> ModelEmbedder:
        """The same model for texts of another priority; it stays this embedder's to load and to close."""
        return ModelEmbedder(self._name, find=lambda _: self.llm, priority=priority)

    def close(self) -> None:
        """Free the model if it was loaded here."""
        with self._lock:
            if self._is_owned and self._llm is not None:
                self._llm.close()
                self._llm = None


def _load(name: str) -> LLM:
    from kvarn.llm import LLM

    return LLM(name)
