"""`kvarn keys`: make, list and revoke the API keys of a server. The file holds digests; a key is shown once."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvarn.cli.terminal.text import table_lines
from kvarn.errors import ConfigError

if TYPE_CHECKING:
    from kvarn.server.access.keyfile import KeyEntry

MAX_DAYS = 36_500

File = Annotated[Path, typer.Option("--keys", help="The file that `kvarn serve --keys` reads.")]
DEFAULT_FILE = Path("keys.toml")


def new_key(
    name: Annotated[str, typer.Argument(help="Unique; appears in logs.")],
    file: File = DEFAULT_FILE,
    tier: Annotated[str, typer.Option("--tier", help="free, pro, enterprise, or one of your configuration.")] = "free",
    group: Annotated[
        str | None, typer.Option("--group", help="Keys of one group share a prefix cache. [default: the name]")
    ] = None,
    days: Annotated[float | None, typer.Option("--days", help="Valid for so long. [default: for ever]")] = None,
) -> None:
    """Make a key and print it, once; a running server takes it at once."""
    from kvarn.server.access.keyfile import draw_key, editing

    key, entry = draw_key(name, tier, group, _expiry(days))
    with editing(file) as entries:
        if any(other.name == name for other in entries):
            raise ConfigError(f"there is a key {name!r:.80} already; choose another name")
        entries.append(entry)
    typer.echo(key)
    typer.echo(f"keep it: {file} has its digest only, and nobody can show it again", err=True)


def list_keys(
    file: File = DEFAULT_FILE,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> None:
    """List the keys by name, tier and first characters."""
    from kvarn.server.access.keyfile import read_keys

    rows = [_row(entry, datetime.now(UTC)) for entry in read_keys(file)]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    columns = ("name", "prefix", "tier", "group", "state", "expires")
    cells = [
        tuple(column.upper() for column in columns),
        *(tuple(row[column] or "-" for column in columns) for row in rows),
    ]
    for line in table_lines(cells):
        typer.echo(line)


def revoke_key(name: Annotated[str, typer.Argument(help="Of the key.")], file: File = DEFAULT_FILE) -> None:
    """Make a key invalid; a running server refuses it within a second."""
    from kvarn.server.access.keyfile import editing

    if not file.exists():
        raise ConfigError(f"there is no {file}; name the file with --keys")
    with editing(file) as entries:
        found = [index for index, entry in enumerate(entries) if entry.name == name]
        if not found:
            raise ConfigError(f"there is no key {name!r:.80}; `kvarn keys ls` lists them")
        entries[found[0]] = replace(entries[found[0]], revoked=datetime.now(UTC).replace(microsecond=0))
    typer.echo(f"revoked {name}")


def _expiry(days: float | None) -> datetime | None:
    if days is None:
        return None
    if not 0 < days <= MAX_DAYS:
        raise ConfigError(f"--days is {days:g}; give a number above 0, up to {MAX_DAYS:,}")
    return datetime.now(UTC).replace(microsecond=0) + timedelta(days=days)


def _row(entry: KeyEntry, now: datetime) -> dict[str, str | None]:
    state = "revoked" if entry.is_revoked else "expired" if entry.has_expired(now) else "valid"
    return {
        "name": entry.name,
        "prefix": entry.prefix,
        "tier": entry.tier,
        "group": entry.group,
        "state": state,
        "expires": entry.expires.isoformat() if entry.expires else None,
    }
