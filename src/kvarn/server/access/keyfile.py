"""The file of API keys: digests, never keys. Read by the server, written by `kvarn keys`.

[[keys]]
name = "alice"              # unique; appears in logs
sha256 = "9f86d0…"          # of the key
prefix = "sk-kvarn-Ab3d"    # to recognise it by
tier = "pro"
group = "team-a"            # keys of one group share a prefix cache; default: the name
expires = 2027-01-31T00:00:00Z      # optional
revoked = 2026-11-01T12:00:00Z      # optional
admin = true                # optional: may load and unload adapters

A table that is wrong is skipped, with the reason, and the others count; only what is no TOML is refused as a whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import stat
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Any

from kvarn.checks import why_unreadable
from kvarn.errors import ConfigError

KEY_PREFIX = "sk-kvarn-"
SHOWN_CHARACTERS = len(KEY_PREFIX) + 4
MAX_FILE_BYTES = 32 << 20
MAX_NAME = 128
DIGEST = re.compile(r"[0-9a-f]{64}")
BARE_NAME = re.compile(r"[A-Za-z0-9_-]+")
FIELDS = ("name", "sha256", "prefix", "tier", "group", "expires", "revoked", "admin")


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """One key as the file has it."""

    name: str
    digest: bytes
    prefix: str
    tier: str
    group: str
    expires: datetime | None = None
    revoked: datetime | None = None
    is_admin: bool = False  # may change what the server offers

    @property
    def is_revoked(self) -> bool:
        return self.revoked is not None

    def has_expired(self, now: datetime) -> bool:
        return self.expires is not None and self.expires <= now


@dataclass(frozen=True, slots=True)
class SkippedEntry:
    """A table of the file that is no key, kept as it is until somebody removes it."""

    name: str  # as far as it can be read; else its number, #3
    table: Mapping[str, Any]
    reason: str


AnyEntry = KeyEntry | SkippedEntry


def draw_key(
    name: str, tier: str, group: str | None = None, expires: datetime | None = None, *, is_admin: bool = False
) -> tuple[str, KeyEntry]:
    """Draw a key; the first of the two is for its owner and is stored nowhere."""
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    digest = hashlib.sha256(key.encode()).digest()
    shown = key[:SHOWN_CHARACTERS]
    return key, KeyEntry(name, digest, shown, tier, group if group is not None else name, expires, is_admin=is_admin)


def read_keys(path: Path) -> list[AnyEntry]:
    """The entries of a file, each checked; raises ConfigError where the file cannot be read at all."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with NUL
        raise ConfigError(f"the API keys {path} cannot be read: {why_unreadable(path, error)}") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"the API keys {path} have more than {MAX_FILE_BYTES:,} bytes; is it the right file?")
    try:
        return parse_keys(data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_keys(data: bytes) -> list[AnyEntry]:
    """The entries of a file's contents, each checked; raises ConfigError unless it consists of [[keys]] tables."""
    try:
        document = tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the file of API keys is not TOML: {_where(error)}") from error
    tables = document.pop("keys", [])
    if document or not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"the file of API keys has {next(iter(document), 'keys')!r:.60}; give [[keys]] tables only")
    return _without_doubles([_entry_or_reason(number, table) for number, table in enumerate(tables, 1)], tables)


def valid_keys(entries: Sequence[AnyEntry]) -> list[KeyEntry]:
    """Those that are keys."""
    return [entry for entry in entries if isinstance(entry, KeyEntry)]


def _entry_or_reason(number: int, table: dict[str, Any]) -> AnyEntry:
    try:
        return _entry(number, table)
    except ConfigError as error:
        return _skipped(number, table, str(error))
    except ValueError:  # Python shows no number of thousands of digits
        return _skipped(number, table, f"[[keys]] table {number} has a number of thousands of digits")


def _skipped(number: int, table: Mapping[str, Any], reason: str) -> SkippedEntry:
    name = table.get("name")
    is_name = isinstance(name, str) and 0 < len(name) <= MAX_NAME and name.isprintable()
    return SkippedEntry(str(name) if is_name else f"#{number}", table, reason)


def _without_doubles(entries: list[AnyEntry], tables: Sequence[Mapping[str, Any]]) -> list[AnyEntry]:
    """Of two with one name the later is skipped; of two with one digest both: which of them holds is not clear."""
    num_uses = Counter(entry.digest for entry in valid_keys(entries))
    names: set[str] = set()
    for index, entry in enumerate(entries):
        if isinstance(entry, KeyEntry):
            is_double = entry.name in names
            names.add(entry.name)
            if num_uses[entry.digest] > 1 or is_double:
                field = "name" if is_double and num_uses[entry.digest] == 1 else "sha256"
                reason = f"{field} of key {entry.name!r:.80} is there twice; every {field} must be unique"
                entries[index] = _skipped(index + 1, tables[index], reason)
    return entries


def write_keys(path: Path, entries: Sequence[AnyEntry]) -> None:
    """Replace the file as a whole: a server that reads it meanwhile sees the old one or the new one."""
    data = _document(entries).encode("utf-8")
    for entry, again in zip(entries, parse_keys(data), strict=True):
        if isinstance(entry, KeyEntry) and isinstance(again, SkippedEntry):
            raise ConfigError(again.reason)  # what could not be read again is never written
    target = path.resolve()  # through a link, not over it
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            _keep_access(file.fileno(), target)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _keep_access(descriptor: int, old: Path) -> None:
    """Who may read the old file may read the new one: a server of another user goes on seeing what was revoked."""
    try:
        before = old.stat()
    except FileNotFoundError:
        return
    os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
    with suppress(PermissionError):  # one's own file, of a group one is not in
        os.fchown(descriptor, before.st_uid, before.st_gid)


@contextmanager
def editing(path: Path) -> Iterator[list[AnyEntry]]:
    """The entries, to be changed in place; written when the block ends well. One editor at a time."""
    from filelock import FileLock

    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock"), timeout=30):
        entries = read_keys(path) if path.exists() else []
        yield entries
        write_keys(path, entries)


def _document(entries: Sequence[AnyEntry]) -> str:
    parts = ["# API keys of a Kvarn server: digests only. Written by `kvarn keys`; comments are not kept.\n"]
    for entry in entries:
        parts += ["\n[[keys]]\n", *(f"{_name(field)} = {_toml(value)}\n" for field, value in _fields(entry))]
    return "".join(parts)


def _entry(number: int, table: dict[str, Any]) -> KeyEntry:
    where = f"[[keys]] table {number}"
    unknown = [field for field in table if field not in FIELDS]
    if unknown:
        raise ConfigError(f"{where} has {unknown[0]!r:.60}; choose from {', '.join(FIELDS)}")
    name = _text(where, table, "name")
    digest = table.get("sha256")
    if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
        # The value is not shown: it may be the key itself.
        raise ConfigError(f"sha256 of key {name!r} is not a digest; give 64 hexadecimal digits in lower case")
    return KeyEntry(
        name=name,
        digest=bytes.fromhex(digest),
        prefix=_text(where, table, "prefix", default=""),
        tier=_text(where, table, "tier"),
        group=_text(where, table, "group", default=name),
        expires=_moment(where, table, "expires"),
        revoked=_moment(where, table, "revoked"),
        is_admin=_flag(where, table, "admin"),
    )


def _text(where: str, table: dict[str, Any], field: str, default: str | None = None) -> str:
    value = table.get(field, default)
    if not isinstance(value, str) or len(value) > MAX_NAME or not value.isprintable() or (not value and default != ""):
        raise ConfigError(f"{field} of {where} is {value!r:.60}; give up to {MAX_NAME} printable characters")
    return value


def _flag(where: str, table: dict[str, Any], field: str) -> bool:
    value = table.get(field, False)
    if not isinstance(value, bool):
        raise ConfigError(f"{field} of {where} is {value!r:.60}; give true or false")
    return value


def _moment(where: str, table: dict[str, Any], field: str) -> datetime | None:
    value = table.get(field)
    if value is None:
        return None
    if not isinstance(value, datetime):
        raise ConfigError(f"{field} of {where} is {value!r:.60}; give a moment such as 2027-01-31T00:00:00Z")
    return value if value.tzinfo is not None else value.replace(tzinfo=UTC)


def _fields(entry: AnyEntry) -> Iterator[tuple[str, Any]]:
    if isinstance(entry, SkippedEntry):
        yield from entry.table.items()
        return
    moments, admin = (entry.expires, entry.revoked), entry.is_admin or None
    values = (entry.name, entry.digest.hex(), entry.prefix, entry.tier, entry.group, *moments, admin)
    for field, value in zip(FIELDS, values, strict=True):
        if value is not None:
            yield field, value


def _toml(value: object) -> str:
    """A value as TOML; of what skipped tables hold, too."""
    if isinstance(value, str):  # a JSON string is a TOML basic string, except that TOML also forbids DEL
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_name(field)} = {_toml(one)}" for field, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    is_long = isinstance(value, int) and value.bit_length() > 63
    return f"{value:#x}" if is_long else repr(value)  # inf and nan are TOML, too


def _name(field: str) -> str:
    return field if BARE_NAME.fullmatch(field) else _toml(field)


def _where(error: Exception) -> str:
    """What is wrong, without quoting the file."""
    if isinstance(error, tomllib.TOMLDecodeError):
        return re.sub(r"'[^']*'", "something", str(error))
    if isinstance(error, RecursionError):
        return "too deeply nested"
    return "bad bytes" if isinstance(error, UnicodeDecodeError) else "a number of thousands of digits"
