"""The kernels for NVIDIA GPUs on the CPU: Triton's interpreter runs them over CPU tensors, small ones."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import pytest


def interpreted(module: str) -> Any:
    """Import a module of backends/torch/cuda so that its kernels are interpreted; skip where Triton is missing.

    Triton decides when a kernel is defined, so it must not have been imported for a GPU before.
    """
    name = f"kvarn.backends.torch.cuda.{module}"
    if "triton" in sys.modules and not sys.modules["triton"].knobs.runtime.interpret:
        pytest.skip("Triton is in use for a GPU", allow_module_level=True)
    os.environ["TRITON_INTERPRET"] = "1"
    pytest.importorskip("triton")
    _let_numpy_make_scalars()
    return importlib.import_module(name)


def _let_numpy_make_scalars() -> None:
    """Triton 3.6's interpreter turns arrays of one number into integers in a way that NumPy 2.4 refuses."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch
