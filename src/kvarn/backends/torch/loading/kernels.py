"""Whose operations compute a model: a GPU's kernels, or plain ones where those cannot be had or built.

Knows no kernel; imports them only where there is a GPU.
"""

from __future__ import annotations

import importlib
import logging
from types import TracebackType
from typing import cast

import torch

from kvarn.backends.torch.device import Device, is_lost
from kvarn.backends.torch.layers import Ops
from kvarn.backends.torch.plain import PlainOps
from kvarn.errors import BackendError
from kvarn.models.spec import ModelSpec

log = logging.getLogger("kvarn.backends")

KERNELS = "kvarn.backends.torch.cuda"  # imports Triton
COMPILER = "triton"


def make_ops(spec: ModelSpec, device: Device) -> Ops:
    """The GPU's kernels where they are to be had, and plain operations everywhere else."""
    if device.kind != "cuda":
        return PlainOps()
    try:
        module = importlib.import_module(f"{KERNELS}.ops")
    except ImportError as error:
        tell_plain(error)
        return PlainOps()
    return cast(Ops, module.CudaOps(spec))


def needs_kernels(error: Exception) -> BackendError:
    """Why a model whose matrices are packed cannot go on with plain operations."""
    return BackendError(
        f"a kernel for quantised matrices cannot be built here ({_first_line(error)}); "
        'set gpu_weights="bf16", which plain operations can compute'
    )


def tell_plain(error: Exception) -> None:
    log.warning(
        "no Triton kernels for this GPU (%s): plain operations, slower, and bytes depend on the batch",
        _first_line(error),
    )


def is_build_failure(error: Exception) -> bool:
    """Whether a kernel could not be compiled or started: no C compiler, an old driver, more registers than there are.

    What fails for lack of memory, or because the device is lost, would fail with any operation.
    """
    if isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and is_lost(error)):
        return False
    return _passed_compiler(error.__traceback__)


def _passed_compiler(trace: TracebackType | None) -> bool:
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] == COMPILER:
            return True
        trace = trace.tb_next
    return False


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
