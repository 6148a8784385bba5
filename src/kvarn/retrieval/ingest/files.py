"""Files to documents: which files a path names, and how each kind is read. What cannot be read is a DocumentError."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from kvarn.errors import ConfigError, DocumentError
from kvarn.retrieval.ingest.readers.docx import docx_to_text
from kvarn.retrieval.ingest.readers.epub import epub_to_text
from kvarn.retrieval.ingest.readers.html import charset_of, html_to_text
from kvarn.retrieval.ingest.readers.notebook import notebook_to_text
from kvarn.retrieval.ingest.readers.pdf import pdf_to_text
from kvarn.retrieval.types import MAX_DOCUMENT_CHARS, MAX_ID_CHARS, Document, Kind

MAX_FILE_BYTES = 64_000_000
SKIPPED_FOLDERS = frozenset({"node_modules", "__pycache__", "build", "dist", "target", "venv"})
KINDS: dict[Kind, str] = {
    "markdown": "md markdown mdx",
    "html": "html htm xhtml",
    "pdf": "pdf",
    "docx": "docx",
    "epub": "epub",
    "notebook": "ipynb",
    "rst": "rst",
    "csv": "csv tsv",
    "text": "txt text adoc org tex log json jsonl yaml yml toml ini cfg xml conf properties bib",
    "code": "py pyi js mjs cjs jsx ts mts tsx vue svelte c h cc cxx cpp hh hpp hxx inl cu cuh m mm java kt kts groovy "
    "gradle go rs rb php cs fs vb swift scala clj ex exs erl hs ml mli lua r jl sh bash zsh fish ps1 bat sql pl pm zig "
    "nim d dart v sv vhd f90 f95 asm s proto thrift graphql tf cmake mk mako jinja j2 css scss less",
}
NAMES: dict[str, Kind] = {  # of files without a suffix, in lower case
    **dict.fromkeys(
        ("makefile", "dockerfile", "containerfile", "jenkinsfile", "rakefile", "gemfile", "justfile"), "code"
    ),
    **dict.fromkeys(
        ("readme", "license", "copying", "authors", "changelog", "changes", "news", "notice", "todo"), "text"
    ),
}
GENERATED = (".min.js", ".min.css", "package-lock.json", "composer.lock", "pnpm-lock.yaml")  # nobody reads these
LOCK = "~$"  # of the file that Word keeps beside an open document
_READERS: Mapping[Kind, Callable[[bytes, str], str]] = {
    "pdf": pdf_to_text,
    "docx": docx_to_text,
    "epub": epub_to_text,
    "notebook": notebook_to_text,
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
    return read_bytes(load_file(path), path.as_posix())


def load_file(path: Path) -> bytes:
    """What a file holds; DocumentError if it is too large or cannot be read. No pipe is waited for, nothing endless."""
    source = path.as_posix()
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise DocumentError("is a pipe, a socket or a device; give files and folders", source=source)
            is_small = status.st_size <= MAX_FILE_BYTES
            data = file.read(MAX_FILE_BYTES + 1) or b"" if is_small else b""  # it may grow; None: nothing there yet
    except OSError as error:
        raise DocumentError(f"cannot be read: {error.strerror}", source=source) from error
    if not is_small or len(data) > MAX_FILE_BYTES:
        num_bytes = max(status.st_size, len(data))
        raise DocumentError(f"has {num_bytes:,} bytes, at most {MAX_FILE_BYTES:,} are read; split it", source=source)
    return data


def read_bytes(data: bytes, source: str, kind: Kind | None = None) -> Document:
    """The content of a file as a document; without a kind, the name's suffix decides."""
    if not _is_unicode(source):
        shown = source.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        raise DocumentError("has a name that is not Unicode; rename it", source=shown)
    if len(source) > MAX_ID_CHARS:
        reason = f"has a path of {len(source):,} characters, at most {MAX_ID_CHARS:,} are stored; move it"
        raise DocumentError(reason, source=source)
    chosen: Kind = "pdf" if data.startswith(b"%PDF-") else kind or kind_of(source) or "text"
    if chosen in _READERS:
        text = _READERS[chosen](data, source)
    else:
        text = decode(data, source, charset_of(data) if chosen == "html" else None)
        text = html_to_text(text) if chosen == "html" else text
    if not text.strip():
        raise DocumentError("is empty: there is no text in it", source=source)
    if len(text) > MAX_DOCUMENT_CHARS:
        raise DocumentError(
            f"has {len(text):,} characters, at most {MAX_DOCUMENT_CHARS:,} are allowed; split it", source=source
        )
    return Document(text, source=source, kind=chosen)


def decode(data: bytes, source: str, told: str | None = None) -> str:
    """Text of a file: UTF-8, UTF-16 and UTF-32 with a byte order mark, else what it has told; nothing is guessed."""
    encoding = "utf-8-sig" if told is None or _is_utf8(data) else told
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


def _is_utf8(data: bytes) -> bool:
    """A page that was converted may still tell its old encoding."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def is_known_kind(name: str) -> bool:
    """Whether files of this name are read when a folder is."""
    return kind_of(name) is not None and not name.startswith(LOCK) and not name.lower().endswith(GENERATED)


def kind_of(name: str) -> Kind | None:
    """How a file of this name is read; None if files of that kind are not."""
    path = Path(name.lower())
    return _BY_SUFFIX.get(path.suffix) or NAMES.get(path.name)


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without waiting for one that writes into it."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _is_unicode(name: str) -> bool:
    """Whether a file's name can be stored and shown; its bytes may be anything."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _walk(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in SKIPPED_FOLDERS)
        for name in sorted(names):
            path = Path(parent, name)
            if not name.startswith(".") and is_known_kind(name) and (path.is_file() or not path.exists()):
                yield path  # no pipe, which would be waited for; of a broken link is told that it cannot be read
