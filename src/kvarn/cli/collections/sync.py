"""`kvarn index sync`: a collection that follows a folder, once or until it is interrupted. Knows the terminal."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvarn.cli.collections.options import Json, Model, Name, indexing_bar
from kvarn.cli.terminal.storage_options import StorageOptions
from kvarn.cli.terminal.text import printable_name
from kvarn.cli.terminal.worker_options import WorkerOptions
from kvarn.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from kvarn.retrieval.ingest.folder_sync import SyncReport

WATCH_S = 2.0  # between two looks at the folder ...
WATCH_SHARE = 0.1  # ... or so much of the time, if a look takes long


def index_sync(
    collection: Name,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Its files become the documents.")],
    *,
    model: Model = None,
    watch: Annotated[bool, typer.Option("--watch", help="Go on, and follow every change until interrupted.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also if most documents would be removed; with --watch, once.")
    ] = False,
    where: StorageOptions,
    who: WorkerOptions,
    as_json: Json = False,
) -> None:
    """Bring a collection in step with a folder: new, changed, moved and deleted files."""
    from kvarn.retrieval.ingest.folder_sync import folder_identity

    folder_identity(folder)  # before a collection is made for a name that was mistyped
    with where.storage().open(collection, model=who.embedder(model)) as opened:
        with indexing_bar(None) as on_added:
            report = opened.sync(folder, force=force, on_added=on_added)
        print_report(report, as_json)
        if watch:
            _watch(lambda: opened.sync(folder), report, as_json)
    if report.failed:
        raise typer.Exit(1)


def _watch(look: Callable[[], SyncReport], told: SyncReport, as_json: bool) -> None:
    """Follow the folder for ever; a look that fails, as on a disk that is not mounted, is told once and repeated."""
    problem = ""
    while True:
        started = time.monotonic()
        try:
            report = look()
        except (ConfigError, StorageError) as error:
            if str(error) != problem:
                typer.echo(f"kvarn: {printable_name(str(error))}", err=True)
            problem = str(error)
        else:
            if report.has_changes or _left_out(report) != _left_out(told):
                print_report(report, as_json, told)
            told, problem = report, ""
        time.sleep(max(WATCH_S, (time.monotonic() - started) / WATCH_SHARE))


def _left_out(report: SyncReport) -> tuple[Mapping[str, str], ...]:
    return report.failed, report.duplicates, report.skipped


def print_report(report: SyncReport, as_json: bool, told: SyncReport | None = None) -> None:
    """What has changed on stdout, what is left out on stderr; told: the report whose reasons were printed before."""
    if as_json:
        typer.echo(json.dumps(asdict(report)))
        return
    before = ({}, {}, {}) if told is None else _left_out(told)
    new = zip(_left_out(report), before, strict=True)
    failed, duplicates, skipped = ({id_: why for id_, why in now.items() if old.get(id_) != why} for now, old in new)
    for reason in failed.values():
        typer.echo(f"kvarn: {printable_name(reason)}", err=True)
    for id_, owner in duplicates.items():
        typer.echo(f"kvarn: {printable_name(id_)} equals {printable_name(owner)} and was left out", err=True)
    for reason, count in sorted(Counter(skipped.values()).items()):
        names = [name for name, why in skipped.items() if why == reason]
        shown = printable_name(", ".join(names[:3])) + (", ..." if count > 3 else "")
        typer.echo(f"kvarn: {count:,} left out, {printable_name(reason)}: {shown}", err=True)
    added = report.added
    typer.echo(
        f"{added.added:,} added, {added.updated:,} updated, {len(report.moved):,} moved, "
        f"{len(report.removed):,} removed, {added.chunks:,} chunks"
        + (f", {len(report.failed):,} could not be read" if report.failed else "")
    )
