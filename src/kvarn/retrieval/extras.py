"""Imports of packages that only some installs have; a missing one is a sentence that names the extra."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kvarn.errors import ConfigError


def require(module: str, extra: str = "retrieval") -> Any:
    """Import a package of an extra, or say which extra to install."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ConfigError(
            f"this needs the package {package}, which is not installed; run pip install 'kvarn[{extra}]'"
        ) from error
