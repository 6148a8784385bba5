"""`kvarn keys`: make, list, revoke and remove the API keys of a server. The file holds digests; a key is shown once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvarn.cli.terminal.text import table_lines
from kvarn.errors import ConfigError

if TYPE_CHECKING:
    from kvarn.server.access.keyfile import AnyEntry

MAX_DAYS = 36_500
COLUMNS = ("name", "prefix", "tier", "group", "state", "expires")

File = Annotated[
    Path | None,
    typer.Option(
        "--keys",
        readable=False,
        help="The file that `kvarn serve --keys` reads. [default: the one of --config, else keys.toml]",
    ),
]
Config = Annotated[
    Path | None, typer.Option("--config", readable=False, help="The server's TOML file, for its keys and [tiers].")
]
DEFAULT_FILE = Path("keys.toml")


def new_key(
    name: Annotated[str, typer.Argument(help="Unique; appears in logs.")],
    *,
    keys: File = None,
    tier: Annotated[str, typer.Option("--tier", help="free, pro, enterprise, or one of --config.")] = "free",
    group: Annotated[
        str | None, typer.Option("--group", help="Keys of one group share a prefix cache. [default: the name]")
    ] = None,
    admin: Annotated[bool, typer.Option("--admin", help="May load and unload adapters.")] = False,
    days: Annotated[float | None, typer.Option("--days", help="Valid for so long. [default: for ever]")] = None,
    config: Config = None,
) -> None:
    """Make a key and print it, once; a running server takes it at once."""
    from kvarn.server.access.keyfile import draw_key, editing

    _require_tier(tier, config)
    file = _key_file(keys, config)
    key, entry = draw_key(name, tier, group, _expiry(days), is_admin=admin)
    with editing(file) as entries:
        if any(other.name == name for other in entries):
            raise ConfigError(f"there is a key {name!r:.80} already; choose another name")
        entries.append(entry)
    typer.echo(key)
    typer.echo(f"keep it: {file} has its digest only, and nobody can show it again", err=True)


def list_keys(
    keys: File = None,
    config: Config = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> None:
    """List the keys by name, tier and first characters."""
    from kvarn.server.access.keyfile import SkippedEntry, read_keys

    entries = read_keys(_existing(keys, config))
    rows = [_row(entry, datetime.now(UTC)) for entry in entries]
    for entry in entries:
        if isinstance(entry, SkippedEntry):
            typer.echo(f"{entry.name} opens nothing: {entry.reason}", err=True)
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    cells = [
        tuple(column.upper() for column in COLUMNS),
        *(tuple(row[column] or "-" for column in COLUMNS) for row in rows),
    ]
    for line in table_lines(cells):
        typer.echo(line)


def revoke_key(
    name: Annotated[str, typer.Argument(help="Of the key.")], keys: File = None, config: Config = None
) -> None:
    """Make a key invalid; a running server refuses it within a second."""
    from kvarn.server.access.keyfile import SkippedEntry

    with _editing_named(_existing(keys, config), name) as (entries, index):
        entry = entries[index]
        if isinstance(entry, SkippedEntry):
            raise ConfigError(f"{name} opens nothing already: {entry.reason}; `kvarn keys rm` removes it")
        entries[index] = replace(entry, revoked=datetime.now(UTC).replace(microsecond=0))
    typer.echo(f"revoked {name}")


def remove_key(
    name: Annotated[str, typer.Argument(help="Of the key, as `kvarn keys ls` shows it.")],
    keys: File = None,
    config: Config = None,
) -> None:
    """Remove a key from the file, also an entry that cannot be read; a running server refuses it within a second."""
    with _editing_named(_existing(keys, config), name) as (entries, _):
        entries[:] = [entry for entry in entries if entry.name != name]
    typer.echo(f"removed {name}")


@contextmanager
def _editing_named(file: Path, name: str) -> Iterator[tuple[list[AnyEntry], int]]:
    """The entries of a file, to be changed in place, and the index of the first with a name."""
    from kvarn.server.access.keyfile import editing

    with editing(file) as entries:
        found = [index for index, entry in enumerate(entries) if entry.name == name]
        if not found:
            raise ConfigError(f"there is no key {name!r:.80}; `kvarn keys ls` lists them")
        yield entries, found[0]


def _key_file(keys: Path | None, config: Path | None) -> Path:
    """The file that is named, else the one that the configuration names."""
    from kvarn.server.process.setting_sources import file_settings

    named = keys if keys is not None or config is None else file_settings(config).get("keys")
    if named is None:
        return DEFAULT_FILE
    if not isinstance(named, str | Path):
        raise ConfigError(f"keys is {named!r:.60} in {config}; give the path of a TOML file")
    return Path(named)


def _existing(keys: Path | None, config: Path | None) -> Path:
    file = _key_file(keys, config)
    if not file.exists():
        raise ConfigError(f"there is no {file}; name the file with --keys, or the configuration that has it")
    return file


def _require_tier(tier: str, config: Path | None) -> None:
    from kvarn.server.access.tiers import read_tiers, unknown_tier
    from kvarn.server.process.setting_sources import read_file

    tiers = read_tiers({} if config is None else read_file(config).get("tiers", {}))
    if tier not in tiers:
        raise ConfigError(f"{unknown_tier(tier, tiers)}, or name the configuration that has it with --config")


def _expiry(days: float | None) -> datetime | None:
    if days is None:
        return None
    if not 0 < days <= MAX_DAYS:
        raise ConfigError(f"--days is {days:g}; give a number above 0, up to {MAX_DAYS:,}")
    return datetime.now(UTC).replace(microsecond=0) + timedelta(days=days)


def _row(entry: AnyEntry, now: datetime) -> dict[str, str | None]:
    from kvarn.server.access.keyfile import SkippedEntry

    if isinstance(entry, SkippedEntry):
        return {**dict.fromkeys(COLUMNS), "name": entry.name, "state": "skipped"}
    state = "revoked" if entry.is_revoked else "expired" if entry.has_expired(now) else "valid"
    return {
        "name": entry.name,
        "prefix": entry.prefix,
        "tier": entry.tier,
        "group": entry.group,
        "state": state,
        "expires": entry.expires.isoformat() if entry.expires else None,
    }
