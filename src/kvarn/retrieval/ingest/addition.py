"""Documents that are added together: embedded a few at a time, then stored all or none. Knows no models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from kvarn.retrieval.retriever import Retriever
from kvarn.retrieval.types import AddReport, Document, EmbeddedDocument

Embed = Callable[[Sequence["Digested"]], list[EmbeddedDocument]]


@dataclass(frozen=True, slots=True)
class Digested:
    """A document with the hash of its content and the id it is stored under, computed once."""

    document: Document
    digest: bytes
    key: str

    @staticmethod
    def of(document: Document) -> Digested:
        digest = document.digest
        return Digested(document, digest, document.id or document.source or digest.hex()[:32])


@dataclass(slots=True)
class _Sorted:
    """What is to become of documents."""

    unique: list[Digested] = field(default_factory=list)  # to be stored
    known: set[str] = field(default_factory=set)  # ids of those that are stored with other content
    num_unchanged: int = 0
    duplicates: dict[str, str] = field(default_factory=dict)


class Addition:
    """`embed` as often as there are groups, then `commit`. For one thread at a time."""

    def __init__(self, index: Retriever, embed: Embed, lock: AbstractContextManager[object]) -> None:
        """lock: held while the documents are compared with those stored, and stored."""
        self._index = index
        self._embed = embed
        self._lock = lock
        self._documents: list[Digested] = []
        self._embedded: dict[str, EmbeddedDocument] = {}

    def embed(self, documents: Sequence[Document]) -> None:
        """Embed the documents that are not stored yet."""
        digested = [Digested.of(document) for document in documents]
        self._documents += digested
        self._embed_missing(self._sorted(digested).unique)

    def commit(self) -> AddReport:
        """Store the new and changed documents, equal content once; all of them or none."""
        with self._lock, self._index.writing():
            found = self._sorted(self._documents)
            self._embed_missing(found.unique)  # one that was stored meanwhile may have been removed again
            ready = [self._embedded[one.key] for one in found.unique]
            if ready:
                self._index.put(ready)
        num_updated = sum(one.key in found.known for one in found.unique)
        return AddReport(
            added=len(ready) - num_updated,
            updated=num_updated,
            unchanged=found.num_unchanged,
            chunks=sum(len(one.chunks) for one in ready),
            duplicates=found.duplicates,
        )

    def _embed_missing(self, documents: Sequence[Digested]) -> None:
        missing = [one for one in documents if one.key not in self._embedded]
        if missing:
            self._embedded.update((one.id, one) for one in self._embed(missing))

    def _sorted(self, documents: Sequence[Digested]) -> _Sorted:
        store, result = self._index.store, _Sorted()
        known = store.digests([one.key for one in documents])
        fresh = [one for one in documents if known.get(one.key) != one.digest]
        owners = dict(store.owners([one.digest for one in fresh]))
        for one in fresh:
            owner = owners.setdefault(one.digest, one.key)
            if owner != one.key:
                result.duplicates[one.key] = owner
            else:
                result.unique.append(one)
        result.known = set(known)
        result.num_unchanged = len(documents) - len(fresh)
        return result
