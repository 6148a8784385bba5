"""The files of the page: which there are, what they are served as, and the policy the page runs under.

The list is fixed: it is also what may be fetched without a key, so a file that is not named here does not exist. Knows
files and headers; no model and no request.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

FOLDER = "/page/"  # of every file but the page itself
ROOT = "/"
LANGUAGES = ("bash", "cpp", "css", "javascript", "json", "python", "rust", "sql", "xml")
NAMES = (
    *("page.css", "markdown.css", "live.css", "models.css", "icon.svg"),
    *("app.js", "api.js", "state.js", "store.js", "conversations.js", "ask.js", "icons.js", "base.js"),
    *("sidebar.js", "chat.js", "message.js", "composer.js", "settings.js", "fields.js", "key.js", "markdown.js"),
    *("live.js", "tokens.js", "documents.js", "models.js", "panel.js", "fill.js", "rewrite.js"),
    *("presets.js", "transfer.js", "kept.js", "filekinds.js"),
    *(f"vendor/{name}.js" for name in ("preact", "hooks", "signals-core", "signals", "htm", "marked", "purify")),
    *(f"vendor/{name}.js" for name in ("temml", "highlight", *(f"highlight-{one}" for one in LANGUAGES))),
)
PAGE_PATHS = frozenset({ROOT, *(FOLDER + name for name in NAMES)})  # exact: nothing below them, no other spelling

# No inline code, no other origin, no <base>, no form that leaves; markup becomes a document through DOMPurify only.
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data: blob:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types dompurify",
    ]
)
HEADERS: Mapping[str, str] = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "x-dns-prefetch-control": "off",  # the name of a link's host is looked up when somebody follows it, not before
    "cache-control": "no-cache",
}
_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml", "html": "text/html"}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file, as it is and compressed."""

    content: bytes
    compressed: bytes
    media_type: str
    etag: str


@cache
def asset(name: str) -> Asset:
    """A file of the list by its name."""
    return _made(files(__package__).joinpath("static", name).read_bytes(), name)


@cache
def page(root_path: str) -> Asset:
    """The page itself; root_path: the prefix of a reverse proxy, under which the browser finds the other files."""
    text = files(__package__).joinpath("static", "index.html").read_text(encoding="utf-8")
    prefix = root_path + FOLDER if root_path else FOLDER.removeprefix(ROOT)
    return _made(text.replace('="page/', f'="{prefix}').encode(), "index.html")


def _made(content: bytes, name: str) -> Asset:
    etag = f'"{hashlib.sha256(content).hexdigest()[:24]}"'
    return Asset(content, gzip.compress(content, mtime=0), _TYPES[name.rpartition(".")[2]], etag)
