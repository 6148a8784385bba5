"""Imports of optional packages; a missing one is a ConfigError that names the extra to install."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kvarn.errors import ConfigError


def require(module: str, extra: str = "retrieval") -> Any:
    """Import a module of an extra; ConfigError with the command that installs it if it is missing."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ConfigError(
            f"this needs the package {package}, which is not installed; run pip install 'kvarn[{extra}]'"
        ) from error
