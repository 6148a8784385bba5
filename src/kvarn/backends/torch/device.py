"""Which device torch computes on and in which type; what is missing is told together with what to install."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from importlib.metadata import version
from importlib.util import find_spec
from typing import ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvarn.backends.torch.cuda.quantized.pack import FLOAT8, PACKINGS
from kvarn.errors import BackendError, ConfigError, DeviceLost
from kvarn.formats.weights import TensorType
from kvarn.machine import MemoryAvailable, available_memory

MIN_VERSION = (2, 6)
LOST = ("CUDA error", "Triton Error [CUDA]", "cuBLAS error", "CUBLAS_STATUS_EXECUTION_FAILED")

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Device:
    """One device, and the type in which matrices and activations are held there."""

    torch_device: torch.device
    dtype: torch.dtype

    @property
    def kind(self) -> str:
        """cuda, mps or cpu."""
        return self.torch_device.type

    @property
    def value_bytes(self) -> int:
        return self.dtype.itemsize

    @property
    def packed_types(self) -> dict[TensorType, float]:
        """Types whose matrices stay quantised there, and bytes of a value: those that kernels read, which are
        Triton's."""
        has_kernels = self.kind == "cuda" and find_spec("triton")
        return {type: packing.value_bytes for type, packing in PACKINGS.items()} if has_kernels else {}

    @property
    def float8_bytes(self) -> float | None:
        """Bytes of a value of matrices that stay in FP8 there; None: they do not."""
        return FLOAT8.value_bytes if self.packed_types else None

    @property
    def title(self) -> str:
        """The device in words."""
        if self.kind == "cuda":
            return f"{torch.cuda.get_device_name(self.torch_device)}, CUDA {torch.version.cuda}"
        return {"mps": "Apple GPU", "cpu": "CPU"}[self.kind]

    def use(self) -> None:
        """Make it the device of this thread: kernels are launched there."""
        if self.kind == "cuda":
            torch.cuda.set_device(self.torch_device)

    def available_memory(self) -> MemoryAvailable:
        """Memory that is free there now."""
        if self.kind != "cuda":
            return available_memory()
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return MemoryAvailable(free, f"free on the GPU of {total / 2**30:,.1f} GiB", total)


def computing(function: Callable[P, T]) -> Callable[P, T]:
    """A function that computes: no gradients, and errors of the device in words."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            with torch.inference_mode():
                return function(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()  # what the allocator keeps in pieces that were too small
            raise BackendError(f"the device has no memory for this step: {_first_line(error)}") from error
        except RuntimeError as error:
            if not is_lost(error):
                raise
            raise DeviceLost(f"the device is lost: {_first_line(error)}; restart the process") from error

    return called


def is_lost(error: RuntimeError) -> bool:
    """Whether every later call would fail too: CUDA reports an error in a kernel so, from then on."""
    accelerator_error = getattr(torch, "AcceleratorError", ())  # since torch 2.8
    return isinstance(error, accelerator_error) or any(mark in str(error) for mark in LOST)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def on_device(values: npt.ArrayLike, device: torch.device) -> Tensor:
    """Host values as a tensor; never waits for what the device is computing, as a copy of ordinary memory would."""
    host = torch.from_numpy(np.asarray(values))
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


def torch_lines() -> Iterator[tuple[str, str]]:
    """What torch is here and where it would compute, for `kvarn doctor`."""
    yield "torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'not built in'}"
    yield "triton", version("triton") if find_spec("triton") else "not installed: no kernels for a GPU"
    try:
        device = choose_device("torch")
    except ConfigError as error:
        yield "device", str(error)
        return
    yield "device", f"{device.title}, {str(device.dtype).removeprefix('torch.')}"
    if device.kind == "cuda":
        yield "driver", f"knows CUDA {driver_version()}"
        memory = device.available_memory()
        yield "free memory", f"{memory.num_bytes / 2**30:,.1f} GiB {memory.reason}"
        has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
        yield "GPUs", f"{torch.cuda.device_count()}; {'NCCL' if has_nccl else 'no NCCL'} for tensor_parallel"


def driver_version() -> str:
    """The newest CUDA that the GPU's driver knows, such as 12.8."""
    number = ctypes.c_int(0)
    with suppress(OSError):  # no driver
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def num_gpus() -> int:
    """NVIDIA GPUs that torch sees."""
    return torch.cuda.device_count()


def choose_device(name: str, device: str | None = None) -> Device:
    """Choose the device for the backend's name: torch takes what is there, cuda and mps insist."""
    return choose_devices(name, device, 1)[0]


def choose_devices(name: str, device: str | None, count: int) -> list[Device]:
    """The devices of so many ranks: GPUs one after the other from the one named on; the CPU is shared."""
    first = _first_device(name, device)
    if first.kind == "mps" and count > 1:
        raise ConfigError(f"{count} devices are asked for, and an Apple GPU is one; use tensor_parallel=1")
    if first.kind != "cuda":
        return [first] * count
    start, seen = first.torch_device.index, torch.cuda.device_count()
    if start + count > max(1, seen):
        wanted = f"cuda:{start}" if count == 1 else f"cuda:{start} to cuda:{start + count - 1}"
        raise ConfigError(
            f"{count:,} GPUs from {wanted} are asked for (tensor_parallel x pipeline_parallel), torch sees {seen}; "
            "give fewer, or another device"
        )
    return [Device(torch.device("cuda", index), first.dtype) for index in range(start, start + count)]


def _first_device(name: str, device: str | None) -> Device:
    _check_version()
    if device is not None:
        name = _named_backend(name, device)
    if name == "cuda":
        _require_cuda('backend is "cuda"' if device is None else f'device is "{device}"')
    if name == "mps" and not torch.backends.mps.is_available():
        raise ConfigError('backend is "mps", but torch sees no Apple GPU; use backend="torch" or "native"')
    if name == "cuda" or (name == "torch" and torch.cuda.is_available()):
        return Device(torch.device("cuda", 0 if device is None else int(device.removeprefix("cuda:"))), torch.bfloat16)
    if name == "mps" or (name == "torch" and torch.backends.mps.is_available()):
        return Device(torch.device("mps"), torch.float32)
    return Device(torch.device("cpu"), torch.float32)


def _named_backend(name: str, device: str) -> str:
    """The backend that a device belongs to."""
    kind = device.partition(":")[0]
    if name not in ("torch", kind):
        raise ConfigError(f'device is "{device}" and backend "{name}"; name one of them, or use backend="torch"')
    return kind


def _check_version() -> None:
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if found is None or (int(found[1]), int(found[2])) < MIN_VERSION:
        wanted = ".".join(map(str, MIN_VERSION))
        raise ConfigError(
            f'torch is {torch.__version__}; the torch backend needs {wanted} or later: run `pip install "kvarn[torch]"`'
        )


def _require_cuda(asked: str) -> None:
    if torch.version.cuda is None:
        raise ConfigError(
            f"{asked}, but torch {torch.__version__} was built without CUDA; "
            'install a CUDA build of torch, or use backend="torch"'
        )
    if not torch.cuda.is_available():
        raise ConfigError(
            f"{asked}, but torch (CUDA {torch.version.cuda}) sees no GPU; "
            'look at the driver with nvidia-smi, or use backend="torch"'
        )
