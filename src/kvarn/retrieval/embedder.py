"""Texts to unit vectors, by a model that is loaded when first needed. Knows no index."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from kvarn.retrieval.types import Float32

if TYPE_CHECKING:
    from kvarn.llm import LLM

DEFAULT_EMBEDDER = "minilm"
Role = Literal["query", "document"]  # what a text is: many models were trained with a prompt before each
PROMPT_NAMES: dict[Role, tuple[str, ...]] = {
    "query": ("query", "search_query", "Retrieval-query"),
    "document": ("document", "passage", "search_document", "Retrieval-document"),
}


class Embeds(Protocol):
    """What computes vectors; it may have a method embed_as(texts, role) too."""

    def embed(self, texts: Sequence[str]) -> Float32: ...


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


def embed_as(embedder: Embeds, texts: Sequence[str], role: Role | None) -> Float32:
    """Unit vectors of queries or of documents; an embedder that knows no such difference has one way only."""
    prompted = getattr(embedder, "embed_as", None)
    if role is None or prompted is None:
        return embedder.embed(texts)
    vectors: Float32 = prompted(texts, role)
    return vectors


if TYPE_CHECKING:
    Model = str | LLM | Embedder | None  # by name, or loaded; None: the collection's own


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
        prompts = self.llm.vectors.prompts
        asked = {prompts.text(self._prompt_name(role)) for role in PROMPT_NAMES} | {prompts.text(None)}
        return self.llm.context - max(len(self.llm.tokenizer.encode(one, add_special=True)) for one in asked)

    def count(self, text: str) -> int:
        return len(self.llm.tokenizer.encode(text, add_special=False)) if text else 0

    def embed(self, texts: Sequence[str]) -> Float32:
        return self._embed(texts, None)

    def embed_as(self, texts: Sequence[str], role: Role) -> Float32:
        """Behind the prompt that the model has for such texts; its default one where it has none."""
        return self._embed(texts, self._prompt_name(role))

    def _embed(self, texts: Sequence[str], prompt_name: str | None) -> Float32:
        if not texts:
            return np.empty((0, self.llm.vectors.width), np.float32)
        return self.llm.embed(list(texts), prompt_name=prompt_name, priority=self._priority)

    def _prompt_name(self, role: Role) -> str | None:
        known = self.llm.vectors.prompts.by_name
        return next((name for name in PROMPT_NAMES[role] if name in known), None)

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
