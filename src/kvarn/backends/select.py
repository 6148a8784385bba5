"""Selects the backend that runs a model: by name, or the fastest that is installed."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from typing import Any, cast

from kvarn.backends.protocol import Backend
from kvarn.config import BACKENDS, TORCH_BACKENDS, EngineConfig
from kvarn.errors import ConfigError, UnsupportedModel
from kvarn.formats.recast_weights import DenseWeights
from kvarn.formats.weights import TensorType, WeightSource
from kvarn.machine import MemoryAvailable, available_memory
from kvarn.models.memory_plan import held_weights
from kvarn.models.spec import ModelSpec

log = logging.getLogger("kvarn.backends")

CPU_BLOCK_SIZE, GPU_BLOCK_SIZE = 16, 64
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
    if name in TORCH_BACKENDS:
        return _torch(name, threads)
    raise ConfigError(f"backend is {name!r:.60}; choose one of {', '.join(BACKENDS)}")


def has_native() -> bool:
    """Whether this installation has the compiled core."""
    return importlib.util.find_spec(NATIVE_EXTENSION) is not None


def device_memory(config: EngineConfig) -> MemoryAvailable:
    """Memory that is free where the backend keeps its weights and its cache."""
    if config.backend in TORCH_BACKENDS:
        return cast(MemoryAvailable, _torch_device(config.backend).available_memory())
    return available_memory()


def block_size(config: EngineConfig) -> int:
    """Tokens per KV block: what is asked for, else what the backend is fastest with."""
    if config.block_size is not None:
        return config.block_size
    is_gpu = config.backend in TORCH_BACKENDS and _torch_device(config.backend).kind == "cuda"
    return GPU_BLOCK_SIZE if is_gpu else CPU_BLOCK_SIZE


def device_weights(spec: ModelSpec, weights: WeightSource, config: EngineConfig) -> WeightSource:
    """Return the weights as the backend holds them."""
    if config.backend in TORCH_BACKENDS:
        is_half = _torch_device(config.backend).value_bytes == TensorType.BF16.block_bytes
        return DenseWeights(weights, TensorType.BF16 if is_half else TensorType.F32)
    return held_weights(spec, weights, config)


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


def _torch_device(name: str) -> Any:
    """The torch backend's device, a Device of its own."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(f'backend is "{name}", but torch is not installed; run `pip install "kvarn[torch]"`')
    return importlib.import_module("kvarn.backends.torch.device").choose_device(name)


def _torch(name: str, threads: int) -> Backend:
    device = _torch_device(name)
    module = importlib.import_module("kvarn.backends.torch.backend")
    return cast(Backend, module.TorchBackend(device, threads))


def _reference_with_warning() -> str:
    log.warning("the compiled core is not installed, so NumPy computes, many times slower; run `pip install .` again")
    return "reference"


def _reference() -> Backend:
    module = importlib.import_module("kvarn.backends.reference.backend")
    return cast(Backend, module.ReferenceBackend())
