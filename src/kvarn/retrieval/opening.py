"""What a collection is opened with: its index in a folder, and the model that embeds for it, its own by default."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, cast

from kvarn.checks import short
from kvarn.errors import InvalidParameter, StorageError
from kvarn.hub.aliases import ALIASES
from kvarn.retrieval.embedder import DEFAULT_EMBEDDER, Embedder, ModelEmbedder
from kvarn.retrieval.storage.paths import collection_folder, existing_folder
from kvarn.retrieval.types import check

if TYPE_CHECKING:
    from kvarn.llm import LLM
    from kvarn.retrieval.retriever import Retriever


def writable_index(name: str, parent: str | os.PathLike[str] | None) -> Retriever:
    """The index of a collection that may be changed; made if it is not there."""
    from kvarn.retrieval.storage.embedded_index import EmbeddedIndex

    return EmbeddedIndex(collection_folder(name, _path(parent)))


def searchable_index(name: str, parent: str | os.PathLike[str] | None) -> Retriever:
    """The index of a collection that is there, for searching only."""
    from kvarn.retrieval.storage.embedded_index import EmbeddedIndex

    folder = existing_folder(name, _path(parent))
    try:
        return EmbeddedIndex(folder, read_only=True)
    except StorageError:  # damaged: repair it as a writer, unless another process is one or the folder is read-only
        return EmbeddedIndex(folder)


def own_embedder(index: Retriever) -> Embedder:
    """The model that an index was made with; the default one for a new index."""
    return ModelEmbedder(str(index.store.meta("model", DEFAULT_EMBEDDER)))


def as_embedder(model: object) -> Embedder:
    """What embeds: a model by name, a loaded one, or another embedder."""
    if isinstance(model, str):  # a path is stored with the collection, and found from other folders too
        return ModelEmbedder(os.path.abspath(model) if model not in ALIASES and os.path.exists(model) else model)
    if isinstance(model, llm_class()):
        return ModelEmbedder(cast("LLM", model))
    if isinstance(model, type) or not all(callable(getattr(model, name, None)) for name in ("count", "embed")):
        raise InvalidParameter(
            f"model is {short(model)}; give the name of an encoder such as minilm, or a kvarn.LLM", field="model"
        )
    return cast("Embedder", model)


def llm_class() -> type:
    """Imported when it is needed: a search without a model does without it."""
    from kvarn.llm import LLM

    return LLM


def _path(folder: str | os.PathLike[str] | None) -> Path | None:
    return None if folder is None else Path(check.path("folder", folder))
