"""Queries and documents behind the prompts that an embedding model was trained with."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvarn.retrieval.collection import Collection
from kvarn.retrieval.embedder import Embedder, Role
from kvarn.retrieval.embedder_pool import EmbedderPool
from kvarn.server.collections.ingestion import WantedEmbedder
from tests.unit.retrieval.words import Float32, WordEmbedder


class RoleEmbedder(WordEmbedder):
    """Remembers as what each text was embedded."""

    def __init__(self) -> None:
        super().__init__()
        self.roles: dict[str, Role | None] = {}

    def embed(self, texts: Sequence[str]) -> Float32:
        self.roles.update(dict.fromkeys(texts))
        return super().embed(texts)

    def embed_as(self, texts: Sequence[str], role: Role) -> Float32:
        self.roles.update(dict.fromkeys(texts, role))
        return super().embed([f"{role}: {text}" for text in texts])


@pytest.mark.parametrize("kind", ["plain", "served", "pool"])
def test_queries_and_documents_are_embedded_as_what_they_are(tmp_path: Path, kind: str) -> None:
    inner = RoleEmbedder()
    embedder: Embedder = inner
    if kind != "plain":
        embedder = EmbedderPool(inner, [inner]) if kind == "pool" else WantedEmbedder(inner, threading.Event())
    with Collection("c", folder=tmp_path, model=embedder) as collection:
        collection.add(["mills grind grain"])
        (hit,) = collection.search("grain", 1, "dense")
    assert inner.roles["mills grind grain"] == "document"
    assert inner.roles["grain"] == "query"
    query, document = inner.embed_as(["grain"], "query")[0], inner.embed_as(["mills grind grain"], "document")[0]
    assert hit.score == pytest.approx(float(np.dot(query, document)), abs=1e-5)


def test_a_collection_made_before_roles_embeds_all_texts_alike(tmp_path: Path) -> None:
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        collection.add(["mills grind grain"])
    with sqlite3.connect(tmp_path / "c" / "truth.sqlite") as store:
        store.execute("DELETE FROM facts WHERE name = 'has_prompts'")
    embedder = RoleEmbedder()
    with Collection("c", folder=tmp_path, model=embedder) as collection:
        collection.add(["stars shine"])
        assert collection.search("mills grind grain", 1, "dense")[0].score == pytest.approx(1.0, abs=1e-5)
    assert set(embedder.roles.values()) == {None}


def test_an_embedder_without_roles_serves(tmp_path: Path) -> None:
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        collection.add(["mills grind grain"])
        assert collection.search("mills grind grain", 1, "dense")[0].score == pytest.approx(1.0, abs=1e-5)
