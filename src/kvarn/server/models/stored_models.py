"""What lies on this machine as an admin sees it: the store, what is bundled, known aliases, the disk. Blocks."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvarn.hub import ALIASES, BUNDLED, locate, store
from kvarn.hub.aliases import Alias
from kvarn.hub.names import parse_remote


def stored_fields(ids: Mapping[Path, str], is_loaded: Callable[[str], bool]) -> dict[str, Any]:
    """ids: what the server offers, by the path of its files."""
    stored = store.list_models()
    rows = [_row(_shown(one.manifest.name), one.path, one.manifest.size, ids, is_loaded) for one in stored]
    for row, one in zip(rows, stored, strict=True):
        manifest = one.manifest
        row |= {"source": manifest.name, "version": manifest.version, "fetched_at": manifest.fetched_at}
    bundled = [_row(name, path, path.stat().st_size, ids, is_loaded) for name, path in BUNDLED.items()]
    known = {one.manifest.name for one in stored}
    return {
        "data": rows + bundled,
        "aliases": [_alias(one) for one in ALIASES.values() if str(one.source) not in known],
        "disk": {"free_bytes": _free_bytes()},
    }


def _row(
    name: str, path: Path, num_bytes: int, ids: Mapping[Path, str], is_loaded: Callable[[str], bool]
) -> dict[str, Any]:
    model_id = ids.get(path.resolve())
    loaded = model_id is not None and is_loaded(model_id)
    return {"name": name, "bytes": num_bytes, "id": model_id, "is_loaded": loaded}


def _alias(alias: Alias) -> dict[str, Any]:
    return {"name": alias.name, "bytes": alias.weights.size, "summary": alias.summary}


def _shown(name: str) -> str:
    remote = parse_remote(name)
    return name if remote is None else locate.shown_name(remote)


def _free_bytes() -> int:
    folder = store.models_folder()
    return shutil.disk_usage(next(parent for parent in (folder, *folder.parents) if parent.exists())).free
