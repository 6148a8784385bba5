"""Files to documents: which files a path names, and how each kind is read. What cannot be read is a DocumentError."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvarn.errors import ConfigError, DocumentError
from kvarn.retrieval.ingest.html import html_to_text
from kvarn.retrieval.ingest.pdf import pdf_to_text
from kvarn.retrieval.types import MAX_DOCUMENT_CHARS, Document, Kind

MAX_FILE_BYTES = 64_000_000
SKIPPED_FOLDERS = frozenset({"node_modules", "__pycache__", "build", "dist", "target", "venv"})
KINDS: dict[Kind, str] = {
    "markdown": "md markdown mdx",
    "html": "html htm xhtml",
    "pdf": "pdf",
    "text": "txt text rst adoc org tex log csv tsv json jsonl yaml yml toml ini cfg xml",
    "code": "py pyi js jsx ts tsx c h cc cpp hpp cu java kt go rs rb php cs swift scala lua r jl sh bash sql pl zig",
}
_BY_SUFFIX: dict[str, Kind] = {f".{suffix}": kind for kind, suffixes in KINDS.items() for suffix in suffixes.split()}


def list_files(paths: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The files that paths name: files as given, of folders all files of known kinds that are not hidden."""
    files: dict[Path, None] = {}
    for name in paths:
        path = Path(name)
        if path.is_dir():
            files.update(dict.fromkeys(_walk(path)))
        elif path.exists():
            files[path] = None
        else:
            raise ConfigError(f"{path} does not exist; give files or folders to index")
    return list(files)


def read_file(path: Path) -> Document:
    """One file as a document, named by its path."""
    source = path.as_posix()
    try:
        num_bytes = path.stat().st_size
        if num_bytes > MAX_FILE_BYTES:
            raise DocumentError(
                f"has {num_bytes:,} bytes, at most {MAX_FILE_BYTES:,} are read; split it", source=source
            )
        data = path.read_bytes()
    except OSError as error:
        raise DocumentError(f"cannot be read: {error.strerror}", source=source) from error
    return read_bytes(data, source)


def read_bytes(data: bytes, source: str, kind: Kind | None = None) -> Document:
    """The content of a file as a document; without a kind, the name's suffix decides."""
    chosen: Kind = kind or _BY_SUFFIX.get(Path(source).suffix.lower(), "text")
    if chosen == "pdf" or data.startswith(b"%PDF-"):
        chosen, text = "pdf", pdf_to_text(data, source)
    else:
        text = decode(data, source)
        text = html_to_text(text) if chosen == "html" else text
    if not text.strip():
        raise DocumentError("is empty: there is no text in it", source=source)
    if len(text) > MAX_DOCUMENT_CHARS:
        raise DocumentError(
            f"has {len(text):,} characters, at most {MAX_DOCUMENT_CHARS:,} are allowed; split it", source=source
        )
    return Document(text, source=source, kind=chosen)


def decode(data: bytes, source: str) -> str:
    """Text of a file: UTF-8, or UTF-16 and UTF-32 with a byte order mark; other encodings are refused, not guessed."""
    encoding = "utf-8-sig"
    for mark, name in (
        (b"\xff\xfe\0\0", "utf-32"),
        (b"\0\0\xfe\xff", "utf-32"),
        (b"\xff\xfe", "utf-16"),
        (b"\xfe\xff", "utf-16"),
    ):
        if data.startswith(mark):
            encoding = name
            break
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise DocumentError(
            f"is not {encoding.removesuffix('-sig').upper()} (byte {error.start:,}); convert it to UTF-8", source=source
        ) from None
    if "\0" in text:
        raise DocumentError("holds zero bytes, so it is no text; leave it out", source=source)
    return text.replace("\r\n", "\n")


def _walk(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in SKIPPED_FOLDERS)
        for name in sorted(names):
            if not name.startswith(".") and Path(name).suffix.lower() in _BY_SUFFIX:
                yield Path(parent, name)
