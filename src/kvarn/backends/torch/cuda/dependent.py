"""Dependent launches: a kernel's programs are set up while the kernel before it still runs, and wait for its results.

Every kernel of ours waits before it reads or writes memory, and only then lets the next one be set up: so whatever
lies further back has ended, too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

IS_ABLE = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
LINE_BYTES = 128
LAUNCH = {"DEPENDENT": IS_ABLE, "launch_pdl": IS_ABLE}  # what every launch passes on


@triton.jit
def prefetch_rows(matrix, rows, num_rows, stride, LINES: tl.constexpr):
    """Ask the cache for the first LINES lines of some rows; for what no kernel writes."""
    line: tl.constexpr = 128 // (matrix.dtype.element_ty.primitive_bitwidth // 8)
    at = matrix + tl.minimum(rows, num_rows - 1).to(tl.int64)[:, None] * stride + tl.arange(0, LINES)[None, :] * line
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def wait_for_inputs(DEPENDENT: tl.constexpr):
    """Wait for the kernel before this one."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
