"""Where settings come from: defaults < TOML file < environment (KVARN_SERVER_*) < flags; and which one won.

Relative paths in a file begin at the file's folder, all others at the working directory. Knows names, texts and tables;
what a value may be is decided in settings.py.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from kvarn.checks import why_unreadable
from kvarn.config import EngineConfig, prefix_folder, server_environment
from kvarn.errors import ConfigError
from kvarn.hub.locate import begun_at, model_begun_at
from kvarn.hub.names import split_id
from kvarn.server.process.settings import PATHS, ServerConfig, make_config, meant

MAX_FILE_BYTES = 1 << 20
TABLES = ("engine", "tiers")
PREFIX_FOLDER = "engine.prefix_cache_dir"  # a server has one unless it is told otherwise
# Kubernetes adds such variables to every pod when a Service is called kvarn-server.
_SERVICE_LINK = re.compile(r"service_host|service_port(_.*)?|port_\d+_.*")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class Setting:
    """One value and its source."""

    name: str  # `port`, `engine.threads`, `tiers.free.concurrency`
    value: object
    source: str


def load_config(
    path: Path | None = None, flags: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None
) -> ServerConfig:
    """Merge all sources and validate the result. Flags are named as in ServerConfig, or as `engine.threads`."""
    layers = _layers(path, flags or {}, server_environment() if environment is None else environment)
    return make_config(_merged([values for _, values in layers]))


def explain(
    path: Path | None = None, flags: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None
) -> list[Setting]:
    """Every setting with its value and its source, in the order of ServerConfig."""
    layers = _layers(path, flags or {}, server_environment() if environment is None else environment)
    config = make_config(_merged([values for _, values in layers]))
    sources = {name: source for source, values in layers for name in _flat(values)}
    return [Setting(name, value, sources.get(name, "default")) for name, value in _all_values(config)]


def _layers(
    path: Path | None, flags: Mapping[str, Any], environment: Mapping[str, str]
) -> list[tuple[str, dict[str, Any]]]:
    """(source, nested values), weakest first."""
    layers: list[tuple[str, dict[str, Any]]] = [("default", _nested({PREFIX_FOLDER: str(prefix_folder())}))]
    layers += [] if path is None else [(f"file {path}", file_settings(path))]
    for name, text in sorted(environment.items()):
        if _SERVICE_LINK.fullmatch(name) or text.startswith("tcp://"):
            continue
        layers.append((f"environment {variable(name)}", _nested({_dotted(name): _parsed(name, text)})))
    layers.append(("flag", _nested(flags)))
    return layers


def read_file(path: Path) -> dict[str, Any]:
    """The tables of a TOML file, as they are."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with NUL
        raise ConfigError(f"the configuration {path} cannot be read: {why_unreadable(path, error)}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"the configuration {path} has more than {MAX_FILE_BYTES:,} bytes; is it the right file?")
    try:
        tables = tomllib.loads(data.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"the configuration {path} is not TOML: {error}") from None
    except ValueError:  # Python's own limit
        raise ConfigError(f"the configuration {path} has a number of thousands of digits; give a smaller one") from None
    _require_numbers(path, tables)
    for name in TABLES:
        if not isinstance(tables.get(name, {}), dict):
            raise ConfigError(f"{name} is {tables[name]!r:.60} in {path}; write it as a table, [{name}]")
    return tables


def file_settings(path: Path) -> dict[str, Any]:
    """The tables of a TOML file; its relative paths, also those of models, begin at the file's folder."""
    tables = read_file(path)
    folder = path.absolute().parent
    placed: dict[str, Any] = {
        name: begun_at(folder, tables[name]) for name in PATHS if isinstance(tables.get(name), str)
    }
    if isinstance(loras := tables.get("loras"), list):
        placed["loras"] = [_lora_begun_at(folder, one) if isinstance(one, str) else one for one in loras]
    engine = tables.get("engine", {})
    if isinstance(prefixes := engine.get("prefix_cache_dir"), str):
        engine = placed["engine"] = engine | {"prefix_cache_dir": begun_at(folder, prefixes)}
    if isinstance(key := engine.get("cluster_key"), str):
        engine = placed["engine"] = engine | {"cluster_key": begun_at(folder, key)}
    if isinstance(draft := engine.get("draft_model"), str):
        placed["engine"] = engine | {"draft_model": model_begun_at(folder, draft)}
    models = tables.get("models")
    if isinstance(models, list):
        moved = {one: model_begun_at(folder, one) for one in models if isinstance(one, str)}
        for name in ("models", "pinned"):  # which has them as they are written among the models, or by id
            if isinstance(listed := tables.get(name), list):
                placed[name] = [moved.get(one, one) if isinstance(one, str) else one for one in listed]
    return tables | placed


def _lora_begun_at(folder: Path, given: str) -> str:
    name, path = split_id(given, folder)
    placed = begun_at(folder, path)
    return placed if name is None else f"{name}={placed}"


def _require_numbers(path: Path, value: object, name: str = "") -> None:
    """Refuse whole numbers beyond TOML's 64 bits: longer ones cannot even be shown."""
    if isinstance(value, dict):
        for key, one in value.items():
            _require_numbers(path, one, f"{name}.{key}".lstrip("."))
    elif isinstance(value, list):
        for one in value:
            _require_numbers(path, one, name)
    elif isinstance(value, int) and value.bit_length() > 63:
        raise ConfigError(f"{name:.60} is a number of more than 64 bits in {path}; give a smaller one")


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return "KVARN_SERVER_" + name.replace(".", "_").upper()


def _dotted(name: str) -> str:
    """`engine_threads` as `engine.threads`; names are those of variables, in lower case and without the prefix."""
    table, _, rest = name.partition("_")
    return f"{table}.{rest}" if table in TABLES and rest else name


def _parsed(name: str, text: str) -> Any:
    """A text from the environment as the type its setting has."""
    dotted = _dotted(name)
    hints = _hints()
    if dotted not in hints:
        instead = meant(variable(name), map(variable, hints))
        raise ConfigError(f"there is no setting for {variable(name)[:80]}; {instead}")
    accepted = get_args(hints[dotted]) or (hints[dotted],)
    if hints[dotted] == tuple[str, ...]:
        return tuple(one.strip() for one in text.split(",") if one.strip())
    for kind in accepted:
        if (value := _as(kind, text)) is not None:
            return value
    return text  # refused with the setting's own words, unless it is one that takes any text


def _as(kind: object, text: str) -> object | None:
    if kind is bool:
        word = text.strip().lower()
        return True if word in _TRUE else False if word in _FALSE else None
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            return None
    return None


def _hints() -> dict[str, Any]:
    """Dotted name -> type of all settings that one text can give."""
    own = {name: hint for name, hint in get_type_hints(ServerConfig).items() if name not in TABLES}
    engine = {f"engine.{name}": hint for name, hint in get_type_hints(EngineConfig).items() if name != "queue_limit"}
    return own | engine


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        table, _, rest = name.partition(".")
        if rest:
            nested.setdefault(table, {})[rest] = value
        else:
            nested[name] = value
    return nested


def _merged(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Later layers win, value by value inside tables."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            before = merged.get(name)
            is_table = isinstance(before, dict) and isinstance(value, dict)
            merged[name] = _merged([before, value]) if is_table else value  # type: ignore[list-item]
    return merged


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    names: list[str] = []
    for name, value in values.items():
        names += _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [prefix + name]
    return names


def _all_values(config: ServerConfig) -> list[tuple[str, object]]:
    plain = [(one.name, getattr(config, one.name)) for one in fields(config) if one.name not in TABLES]
    tiers = [
        (f"tiers.{name}.{one.name}", getattr(tier, one.name))
        for name, tier in config.tiers.items()
        for one in fields(tier)
        if one.name != "name"
    ]
    engine = [
        (f"engine.{one.name}", getattr(config.engine, one.name))
        for one in fields(config.engine)
        if one.name != "queue_limit"
    ]
    return plain + tiers + engine
