"""Selects the backend that runs a model: by name, or the fastest that is installed."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from typing import cast

from kvarn.backends.protocol import Backend
from kvarn.config import BACKENDS, EngineConfig
from kvarn.errors import ConfigError, UnsupportedModel
from kvarn.models.spec import ModelSpec

log = logging.getLogger("kvarn.backends")

NATIVE_EXTENSION = "kvarn.backends.native._native"


def make_backend(config: EngineConfig, threads: int) -> Backend:
    """Make the backend that config names; auto prefers the native one."""
    name = config.backend
    if name == "auto":
        name = "native" if has_native() else _reference_with_warning()
    if name == "native":
        return _native(threads, config.isa)
    if name == "reference":
        return _reference()
    raise ConfigError(f"backend is {name!r:.60}; choose one of {', '.join(BACKENDS)}")


def has_native() -> bool:
    """Whether this installation has the compiled core."""
    return importlib.util.find_spec(NATIVE_EXTENSION) is not None


def require_support(backend: Backend, spec: ModelSpec) -> None:
    """Refuse a model the backend cannot run, naming the fields."""
    fields = tuple(backend.unsupported(spec))
    if fields:
        raise UnsupportedModel(
            f"the {backend.name} backend cannot run {spec.name!r} ({spec.architecture}): {', '.join(fields)}; "
            "use another model or backend=",
            fields=fields,
        )


def _native(threads: int, isa: str | None) -> Backend:
    if not has_native():
        raise ConfigError('backend is "native", but the compiled core is not installed; run `pip install .` again')
    module = importlib.import_module("kvarn.backends.native.backend")
    return cast(Backend, module.NativeBackend(threads, isa))


def _reference_with_warning() -> str:
    log.warning("the compiled core is not installed, so NumPy computes, many times slower; run `pip install .` again")
    return "reference"


def _reference() -> Backend:
    module = importlib.import_module("kvarn.backends.reference.backend")
    return cast(Backend, module.ReferenceBackend())
