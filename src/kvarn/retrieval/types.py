"""Documents, chunks, hits and search options: frozen, validated on construction. Knows no files and no models."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from kvarn.checks import check_parameter, cut, short
from kvarn.citations.types import pages_told
from kvarn.errors import InvalidParameter

Float32 = npt.NDArray[np.float32]
Scalar = str | int | float | bool
Mode = Literal["hybrid", "dense", "sparse"]
Fusion = Literal["rrf", "weighted"]
Kind = Literal["text", "markdown", "rst", "html", "pdf", "docx", "epub", "notebook", "csv", "code"]
Lines = tuple[int, int]  # the first and the last one, from 1

MAX_K = 10_000
MAX_ID_CHARS = 1024
MAX_QUERY_CHARS = 32_768
NAME_RULE = "leave out quotes, backslashes, control characters and a $ in front"  # and not empty
MAX_METADATA_BYTES = 65_536
MAX_DOCUMENT_CHARS = 64_000_000

check = replace(check_parameter, show=cut, integer_format=",")


@dataclass(frozen=True, slots=True)
class Document:
    """A text to be indexed. Without an id it is stored under its source, or under a hash of the text."""

    text: str
    id: str | None = None
    source: str = ""
    metadata: Mapping[str, Scalar] = field(default_factory=dict)
    kind: Kind = "text"  # how it is cut into chunks

    def __post_init__(self) -> None:
        check_text("text", self.text, MAX_DOCUMENT_CHARS)
        check_text("source", self.source, MAX_ID_CHARS)
        check.one_of("kind", self.kind, get_args(Kind))
        if self.id is not None:
            check_text("id", self.id, MAX_ID_CHARS)
            if not self.id:
                raise InvalidParameter("id is empty; give a name, or leave it out", field="id")
        object.__setattr__(self, "metadata", _checked_metadata(self.metadata))

    @property
    def key(self) -> str:
        """The id it is stored under."""
        return self.id or self.source or self.digest.hex()[:32]

    @property
    def digest(self) -> bytes:
        """A hash of the content: equal content need not be stored twice."""
        metadata = json.dumps(dict(self.metadata), sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(f"{self.kind}\0{metadata}\0{self.text}".encode()).digest()


@dataclass(frozen=True, slots=True)
class TextChunk:
    """A part of a document: text is exactly document.text[start:end]; heading is the path of headings above it."""

    text: str
    start: int
    end: int
    heading: str = ""
    lines: Lines | None = None  # where the document's text is that of its file
    page: int | None = None  # of a PDF, on which it begins, from 1

    @property
    def searchable(self) -> str:
        """The text that is embedded."""
        return f"{self.heading}\n{self.text}" if self.heading else self.text

    def named(self, source: str) -> str:
        """The text whose words are indexed: it begins with the name of the file, without its suffix."""
        name = PurePosixPath(source).stem
        return f"{name}\n{self.searchable}" if name else self.searchable


@dataclass(frozen=True, slots=True)
class EmbeddedDocument:
    """A document split into chunks, with one unit vector for each: (chunks, dim)."""

    id: str
    source: str
    digest: bytes
    metadata: Mapping[str, Scalar]
    chunks: Sequence[TextChunk]
    vectors: Float32


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk as it is stored: its key, and the document it belongs to."""

    key: int
    document: str
    ordinal: int
    chunk: TextChunk
    source: str
    metadata: Mapping[str, Scalar]

    @property
    def id(self) -> str:
        return f"{self.document}#{self.ordinal}"


Scored = tuple[int, float]  # key of a chunk, score: higher is better


@dataclass(frozen=True, slots=True)
class Hit:
    """A chunk that matches a query. span: characters of the document's text; highlights: of this text.

    lines: the first and the last one in the file, where it is text; page: of a PDF. Both from 1.
    """

    id: str
    text: str
    score: float
    source: str
    span: tuple[int, int]
    document: str
    heading: str = ""
    metadata: Mapping[str, Scalar] = field(default_factory=dict)
    highlights: tuple[tuple[int, int], ...] = ()
    lines: Lines | None = None
    page: int | None = None
    relevance: float | None = None  # how likely it answers the query, 0 to 1; None: found by words alone
    ordinal: int | None = None  # of the chunk in its document, from 0

    @property
    def place(self) -> str:
        """Where it is, as short as possible: source:first-last, source, page 3 or source:start-end in characters."""
        source = self.source or self.document
        if self.page is not None:
            return f"{source}, {pages_told(self.page, self.text)}"
        first, last = self.lines or self.span
        return f"{source}:{first}-{last}" if self.lines else f"{source}, characters {first}-{last}"


@dataclass(frozen=True, slots=True)
class Tuning:
    """How a search fuses and orders its candidates."""

    fusion: Fusion = "weighted"  # of scores on scales of their own; rrf: of ranks alone
    weights: tuple[float, float] = (0.6, 0.4)  # dense, sparse; chosen on judged sets, see docs/retrieval.md
    rrf_k: float = 60.0  # Cormack, Clarke, Buettcher 2009
    candidates: int | None = None  # of each kind before fusion; None: 3 k, at least 300
    per_document: int | None = None  # most hits of one document, its best ones; None: as many as there are
    min_score: float | None = None  # hits below it are left out; of hybrid searches, 0 to 1
    mmr: float | None = None  # 1: relevance only, 0: diversity only; None: no re-ordering
    highlights: bool = False

    def __post_init__(self) -> None:
        check.one_of("fusion", self.fusion, get_args(Fusion))
        weights = self.weights
        if not isinstance(weights, Sequence) or len(weights) != 2:
            raise InvalidParameter(
                f"weights is {short(weights)}; give two numbers, for dense and sparse", field="weights"
            )
        for name, weight in zip(("dense", "sparse"), weights, strict=True):
            check.number(f"the {name} weight", weight, 0.0, 1e6)
        if not any(weights):
            raise InvalidParameter("both weights are 0; give at least one of them a positive number", field="weights")
        check.number("rrf_k", self.rrf_k, 0.0, 1e6)
        check.integer("candidates", self.candidates, 1, MAX_K, optional=True)
        check.integer("per_document", self.per_document, 1, MAX_K, optional=True)
        check.number("min_score", self.min_score, -1e6, 1e6, optional=True)
        check.number("mmr", self.mmr, 0.0, 1.0, optional=True)
        check.flag("highlights", self.highlights)
        object.__setattr__(self, "weights", tuple(weights))


@dataclass(frozen=True, slots=True)
class AddReport:
    """The result of one add: how many documents were added, updated, unchanged, duplicates or failed."""

    added: int = 0
    updated: int = 0
    unchanged: int = 0
    chunks: int = 0
    duplicates: Mapping[str, str] = field(default_factory=dict)  # id -> id of the equal document that is stored
    failed: Mapping[str, str] = field(default_factory=dict)  # source -> why it could not be read

    def __add__(self, other: AddReport) -> AddReport:
        return AddReport(
            self.added + other.added,
            self.updated + other.updated,
            self.unchanged + other.unchanged,
            self.chunks + other.chunks,
            {**self.duplicates, **other.duplicates},
            {**self.failed, **other.failed},
        )


def check_mode(mode: object) -> None:
    check.one_of("mode", mode, get_args(Mode))


def check_k(name: str, k: object) -> None:
    check.integer(name, k, 1, MAX_K)


def is_metadata_name(name: str) -> bool:
    """Whether filters can name the field; every index writes names into paths or expressions of its own."""
    return name.isprintable() and not name.startswith("$") and not set(name) & {'"', "\\"} and bool(name)


def check_text(name: str, text: object, max_chars: int, field: str | None = None) -> None:
    """Refuse what is no text or too long; field: the parameter it is a part of, unless that is its name."""
    if not isinstance(text, str):
        raise InvalidParameter(f"{name} is a {type(text).__name__}; give a string", field=field or name)
    if len(text) > max_chars:
        raise InvalidParameter(
            f"{name} has {len(text):,} characters, at most {max_chars:,} are allowed; split it", field=field or name
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidParameter(
            f"{name} has a lone surrogate at character {error.start}; give valid Unicode", field=field or name
        ) from None


def _checked_metadata(metadata: object) -> dict[str, Scalar]:
    if not isinstance(metadata, Mapping):
        raise InvalidParameter(
            f"metadata is {short(metadata)}; give a mapping of names to texts, numbers or booleans", field="metadata"
        )
    for name, value in metadata.items():
        check_text("a name in metadata", name, MAX_ID_CHARS, "metadata")
        if not is_metadata_name(name):
            raise InvalidParameter(
                f"metadata has the name {short(name)}; {NAME_RULE}, so that filters can ask for it", field="metadata"
            )
        if isinstance(value, str):
            check_text(f"metadata {short(name)}", value, MAX_METADATA_BYTES, "metadata")
        elif isinstance(value, int) and not isinstance(value, bool) and not -(2**63) <= value < 2**63:
            raise InvalidParameter(
                f"metadata {short(name)} is a number of more than 64 bits; give it as a text", field="metadata"
            )
        elif not isinstance(value, int | float) or not math.isfinite(value):
            raise InvalidParameter(
                f"metadata {short(name)} is {short(value)}; give a text, a finite number or a boolean", field="metadata"
            )
    if len(json.dumps(dict(metadata))) > MAX_METADATA_BYTES:
        raise InvalidParameter(
            f"metadata is larger than {MAX_METADATA_BYTES:,} bytes; put long texts into the text", field="metadata"
        )
    return dict(metadata)
