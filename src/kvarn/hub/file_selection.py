"""Which files of a listing make up one model. Pure: names in, names out; knows neither zips nor the network."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

from kvarn.errors import DownloadError, ModelNotFound
from kvarn.formats.open import PICKLE_SUFFIXES

PREFERRED_QUANT = "Q4_K_M"

_PART = re.compile(r"(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
# Projectors and importance matrices come as .gguf too, but are no language models.
_COMPANION = re.compile(r"mmproj|imatrix", re.IGNORECASE)
# Besides weights, a safetensors folder needs its configuration and tokeniser; never code, never pickles.
_FOLDER_FILES = re.compile(
    r"[^/]+\.json|(tokenizer|tiktoken)\.model|[^/]+\.tiktoken|vocab\.txt|merges\.txt|[^/]+\.jinja|1_Pooling/config\.json"
    r"|[0-9]{1,2}_Dense/(?:config\.json|model\.safetensors)"
)

_Parts = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SelectedFiles:
    """The files of one model: `folder + file` is a file's name in the source, `file` its name in our store."""

    folder: str  # "" or ending in a slash
    files: tuple[str, ...]
    entry: str  # the file to open; "" when the folder itself is opened


def select_files(names: Iterable[str], selector: str | None, origin: str) -> SelectedFiles:
    """Choose the files of one model.

    A selector is a file, a folder, a quantisation such as Q4_K_M, or the word `safetensors`.
    """
    listing = sorted(names)
    models = _gguf_models(listing)
    if selector is None:
        return _select_default(listing, models, origin)
    if selector == "safetensors":
        return _select_folder(listing, "", origin)
    named = [parts for parts in models if _is_named(parts, selector)]
    if len(named) == 1:
        return _select_gguf(named[0], origin)
    folder = selector.rstrip("/") + "/"
    if any(name.startswith(folder) and name.endswith(".safetensors") for name in listing):
        return _select_folder(listing, folder, origin)
    if selector.lower().endswith(".gguf"):
        raise ModelNotFound(f"{origin} has no file {selector!r}; it has {_shown(models)}")
    return _select_by_quant(models, selector, origin)


def _select_default(listing: list[str], models: list[_Parts], origin: str) -> SelectedFiles:
    candidates = [parts for parts in models if not _COMPANION.search(parts[0])]
    preferred = [parts for parts in candidates if _has_quant(parts[0], PREFERRED_QUANT)]
    for group in (candidates, preferred):
        if len(group) == 1:
            return _select_gguf(group[0], origin)
    if candidates:
        raise ModelNotFound(f"{origin} holds several models; add one of these after a colon: {_shown(candidates)}")
    return _select_default_folder(listing, origin)


def _select_default_folder(listing: list[str], origin: str) -> SelectedFiles:
    folders = {name[: name.rfind("/") + 1] for name in listing if name.endswith(".safetensors")}
    usable = sorted(folder for folder in folders if f"{folder}config.json" in listing)
    if not usable:
        raise ModelNotFound(_nothing_usable(listing, origin))
    if usable[0] == "" or len(usable) == 1:
        return _select_folder(listing, usable[0], origin)
    choices = ", ".join(folder.rstrip("/") for folder in usable)
    raise ModelNotFound(f"{origin} holds several model folders; add one of these after a colon: {choices}")


def _gguf_models(listing: list[str]) -> list[_Parts]:
    """Group the parts of split files; every other .gguf is a model of one part."""
    groups: dict[str, list[str]] = {}
    for name in listing:
        if name.lower().endswith(".gguf"):
            part = _PART.fullmatch(name)
            groups.setdefault(f"{part['stem']}-of-{part['count']}" if part else name, []).append(name)
    return [tuple(parts) for parts in groups.values()]


def _select_gguf(parts: _Parts, origin: str) -> SelectedFiles:
    part = _PART.fullmatch(parts[0])
    count = int(part["count"]) if part else 1
    present = {int(match["index"]) for name in parts if (match := _PART.fullmatch(name))} or {1}
    missing = sorted(set(range(1, count + 1)) - present)
    if missing:
        raise DownloadError(
            f"{origin} holds {len(present)} of the {count} parts of {parts[0]!r}; "
            f"part {missing[0]} is missing: choose another file"
        )
    folder = parts[0][: parts[0].rfind("/") + 1]
    files = tuple(name[len(folder) :] for name in parts)
    return SelectedFiles(folder, files, entry=files[0])


def _is_named(parts: _Parts, selector: str) -> bool:
    """A file may be named without its folder, and a split file by any of its parts or without part numbers."""
    part = _PART.fullmatch(parts[0])
    whole = (f"{part['stem']}.gguf",) if part else ()
    return any(selector in {name, PurePosixPath(name).name} for name in (*parts, *whole))


def _select_by_quant(models: list[_Parts], quant: str, origin: str) -> SelectedFiles:
    matching = [parts for parts in models if _has_quant(parts[0], quant) and not _COMPANION.search(parts[0])]
    if len(matching) == 1:
        return _select_gguf(matching[0], origin)
    if matching:
        raise ModelNotFound(f"{quant!r} fits several files of {origin}; name one of them: {_shown(matching)}")
    raise ModelNotFound(f"{origin} has nothing called {quant!r}; it has {_shown(models)}")


def _has_quant(name: str, quant: str) -> bool:
    """Q4_K must not match Q4_K_M, nor F16 match BF16."""
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(quant)}(?![A-Za-z0-9_])", name, re.IGNORECASE) is not None


def _select_folder(listing: list[str], folder: str, origin: str) -> SelectedFiles:
    inside = [name[len(folder) :] for name in listing if name.startswith(folder)]
    weights = [name for name in inside if name.endswith(".safetensors") and "/" not in name]
    # Some repositories carry the same weights twice (consolidated.safetensors beside model-*.safetensors).
    weights = [name for name in weights if name.startswith("model")] or weights
    if not weights or "config.json" not in inside:
        raise ModelNotFound(_nothing_usable(listing, origin))
    others = [name for name in inside if _FOLDER_FILES.fullmatch(name)]
    return SelectedFiles(folder, (*others, *weights), entry="")


def _nothing_usable(listing: list[str], origin: str) -> str:
    has_pickles = any(name.endswith(PICKLE_SUFFIXES) for name in listing)
    pickles = f" ({', '.join(PICKLE_SUFFIXES)} may be pickles, which Kvarn never loads)" if has_pickles else ""
    return f"{origin} holds neither a .gguf file nor config.json with .safetensors{pickles}; choose another source"


def _shown(models: list[_Parts], limit: int = 30) -> str:
    names = [parts[0] for parts in models] or ["no .gguf file"]
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
