"""`kvarn cache ls`, `verify` and `clear`: the prefixes that servers keep on this machine's disk."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvarn.cli.terminal.text import table_lines
from kvarn.config import prefix_folder
from kvarn.errors import ConfigError

Folder = Annotated[
    Path | None,
    typer.Option("--prefix-cache-dir", metavar="DIR", help="As given to `kvarn serve`. [default: in KVARN_HOME]"),
]


def list_cache(
    prefix_cache_dir: Folder = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> None:
    """List the prefixes on disk: blocks and bytes by model and tenant.

    Tenants are shown as the keyed hashes they have on disk; nothing there tells a name or a text.
    """
    _print(prefix_cache_dir, as_json=as_json, verify=False)


def verify_cache(
    prefix_cache_dir: Folder = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> None:
    """Read every block on disk and compare its MAC; exit code 1 if one is not as it was written.

    A damaged block is never used, whether or not this was run: the server computes it again.
    """
    if not _print(prefix_cache_dir, as_json=as_json, verify=True):
        raise typer.Exit(1)


def clear_cache(
    prefix_cache_dir: Folder = None,
    tenant: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only the prefixes of this tenant: the group of its API keys.")
    ] = None,
) -> None:
    """Delete the prefixes on disk, all or those of one tenant. A server that runs goes on without them.

    What it holds in memory it may write again when it is used again; stop it first to leave nothing behind.
    """
    from kvarn.hub.preflight import size_text
    from kvarn.prefix_store.maintenance import clear

    typer.echo(f"cleared, {size_text(clear(_existing(prefix_cache_dir), tenant))} freed")


def _print(folder: Path | None, *, as_json: bool, verify: bool) -> bool:
    """Print what there is; whether all of it is sound."""
    from kvarn.hub.preflight import size_text
    from kvarn.prefix_store.maintenance import survey

    path = _existing(folder)
    found = list(survey(path, verify=verify))
    if as_json:
        typer.echo(json.dumps([asdict(one) for one in found], indent=2))
    elif not found:
        typer.echo(f"no prefixes in {path}")
    else:
        state = ("DAMAGED",) if verify else ()
        rows = [("MODEL", "TENANT", "BLOCKS", "SIZE", *state)]
        for one in found:
            damaged = (str(one.num_damaged + len(one.problems)),) if verify else ()
            rows.append((one.model, one.tenant[:12], f"{one.num_blocks:,}", size_text(one.num_bytes), *damaged))
        for line in table_lines(rows):
            typer.echo(line)
    for problem in (problem for one in found for problem in one.problems):
        typer.echo(f"left out: {problem}", err=True)
    return not any(one.num_damaged or one.problems for one in found)


def _existing(folder: Path | None) -> Path:
    path = prefix_folder() if folder is None else folder.expanduser()
    if not path.is_dir():
        raise ConfigError(f"there is no prefix cache in {path}; give its folder with --prefix-cache-dir")
    return path
