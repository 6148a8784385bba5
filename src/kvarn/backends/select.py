"""Selects the backend that runs a model: by name, or the fastest that is installed."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from typing import Any, cast

from kvarn.backends.protocol import Backend
from kvarn.checks import short
from kvarn.config import BACKENDS, CPU_KV_DTYPES, TORCH_BACKENDS, TORCH_KV_DTYPES, EngineConfig
from kvarn.errors import ConfigError, UnsupportedModel
from kvarn.formats.recast_weights import DenseWeights
from kvarn.formats.weights import TensorType, WeightSource
from kvarn.machine import MemoryAvailable, available_memory
from kvarn.models.memory_plan import held_weights
from kvarn.models.spec import ModelSpec

log = logging.getLogger("kvarn.backends")

CPU_BLOCK_SIZE, GPU_BLOCK_SIZE = 16, 64
NATIVE_EXTENSION = "kvarn.backends.native._native"
PARALLEL = "kvarn.backends.torch.parallel"


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
        return _torch(config, threads)
    raise ConfigError(f"backend is {short(name)}; choose one of {', '.join(BACKENDS)}")


def has_native() -> bool:
    """Whether this installation has the compiled core."""
    return importlib.util.find_spec(NATIVE_EXTENSION) is not None


def device_memory(config: EngineConfig) -> MemoryAvailable:
    """Memory that is free where the backend keeps its weights and its cache: for each device of several."""
    if config.backend in TORCH_BACKENDS:
        return _torch_memory(config)
    return available_memory()


def memory_remedies(config: EngineConfig) -> list[str]:
    """Options with which a device would hold a model that does not fit, the cheapest first."""
    if not is_gpu(config):
        return []
    remedies = ['set gpu_weights="packed"'] if config.gpu_weights == "bf16" else []
    if kv_dtype(config) != "fp8":
        remedies.append('set kv_dtype="fp8"')
    num_gpus = importlib.import_module("kvarn.backends.torch.device").num_gpus()
    here = f"{num_gpus} GPUs are here" if num_gpus > 1 else "one GPU is here"
    return [*remedies, f"set tensor_parallel={2 * config.tensor_parallel} ({here})"]


def block_size(config: EngineConfig) -> int:
    """Tokens per KV block: what is asked for, else what the backend is fastest with."""
    if config.block_size is not None:
        return config.block_size
    return GPU_BLOCK_SIZE if is_gpu(config) else CPU_BLOCK_SIZE


def kv_dtype(config: EngineConfig) -> str:
    """The type of cached keys and values: what is asked for, else what the backend is fastest with."""
    if config.kv_dtype is None:
        return "bf16" if is_gpu(config) else "f16"
    accepted = TORCH_KV_DTYPES if config.backend in TORCH_BACKENDS else CPU_KV_DTYPES
    if config.kv_dtype not in accepted:
        raise ConfigError(
            f"kv_dtype is {config.kv_dtype!r}, which the backend {config.backend!r} does not have; "
            f"choose one of {', '.join(accepted)}"
        )
    return config.kv_dtype


def window_step(config: EngineConfig) -> int | None:
    """Rows of a step, where the backend frees what lies before the windows of layers; None: it keeps all."""
    if config.backend in TORCH_BACKENDS and config.num_ranks > 1:
        return None
    return config.max_batch_tokens


def device_weights(spec: ModelSpec, weights: WeightSource, config: EngineConfig) -> WeightSource:
    """Return the weights as the backend holds them."""
    if config.backend in TORCH_BACKENDS:
        device = _torch_devices(config)[0]
        is_half = device.value_bytes == TensorType.BF16.block_bytes
        dense = DenseWeights(weights, TensorType.BF16 if is_half else TensorType.F32)
        if config.num_ranks > 1 or not device.packed_types or config.gpu_weights == "bf16":
            return dense
        return DenseWeights(weights, TensorType.BF16, device.packed_types, device.float8_bytes)
    return held_weights(spec, weights, config)


def device_share(spec: ModelSpec, weights: WeightSource, config: EngineConfig) -> tuple[ModelSpec, WeightSource]:
    """What one device holds of a model and its device_weights; of several devices, the one with most."""
    if config.num_ranks == 1:
        return spec, weights
    shards = importlib.import_module(f"{PARALLEL}.shards")
    shape = shards.ParallelShape(config.tensor_parallel, config.pipeline_parallel)
    shards.check_divides(spec, shape)
    places = [shape.place(stage * shape.tensor) for stage in range(shape.pipeline)]
    shares = [(shards.shard_spec(spec, place), shards.ShardWeights(weights, spec, place)) for place in places]
    return max(shares, key=lambda share: sum(info.num_bytes for info in share[1].tensors.values()))


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


def _torch_devices(config: EngineConfig) -> list[Any]:
    """The torch backend's devices, one for each rank; their class is torch's own."""
    name = config.backend
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(f'backend is "{name}", but torch is not installed; run `pip install "kvarn[torch]"`')
    module = importlib.import_module("kvarn.backends.torch.device")
    return cast(list[Any], module.choose_devices(name, config.device, config.num_ranks))


def is_gpu(config: EngineConfig) -> bool:
    """Whether the model computes on an NVIDIA GPU."""
    return config.backend in TORCH_BACKENDS and bool(_torch_devices(config)[0].kind == "cuda")


def worker_devices(config: EngineConfig, number: int) -> list[str] | None:
    """A GPU for each of several processes, the first where one has several; None: they share the CPU."""
    if config.backend not in TORCH_BACKENDS or config.device == "cpu" or not is_gpu(config):
        return None
    if config.device is not None:
        raise ConfigError(f'device is "{config.device}", which {number} workers cannot all have; leave it out')
    module = importlib.import_module("kvarn.backends.torch.device")
    devices = module.choose_devices(config.backend, None, number * config.num_ranks)
    return [f"cuda:{one.torch_device.index or 0}" for one in devices[:: config.num_ranks]]


def _torch_memory(config: EngineConfig) -> MemoryAvailable:
    devices = _torch_devices(config)
    found = min((device.available_memory() for device in devices), key=lambda memory: memory.num_bytes)
    if len(devices) == 1 or devices[0].kind == "cuda":
        return cast(MemoryAvailable, found)
    share = found.num_bytes // len(devices)  # ranks on the CPU share its memory
    return MemoryAvailable(share, f"{found.reason}, divided among {len(devices)} ranks", found.total_bytes)


def _torch(config: EngineConfig, threads: int) -> Backend:
    devices = _torch_devices(config)
    if len(devices) == 1:
        module = importlib.import_module("kvarn.backends.torch.backend")
        return cast(Backend, module.TorchBackend(devices[0], threads, config.max_batch_tokens))
    module = importlib.import_module(f"{PARALLEL}.backend")
    shape = module.ParallelShape(config.tensor_parallel, config.pipeline_parallel)
    return cast(Backend, module.start(shape, devices, threads, config.step_timeout_s))


def _reference_with_warning() -> str:
    log.warning("the compiled core is not installed, so NumPy computes, many times slower; run `pip install .` again")
    return "reference"


def _reference() -> Backend:
    module = importlib.import_module("kvarn.backends.reference.backend")
    return cast(Backend, module.ReferenceBackend())
