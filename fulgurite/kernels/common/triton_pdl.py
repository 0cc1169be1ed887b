# mypy: allow-untyped-defs, allow-incomplete-defs
"""Programmatic dependent launch (PDL) in Triton: a kernel starts while the previous one drains.

    with pdl_region():                      kernels launched here use PDL (`pdl.py`)
    kernel[grid](…, **pdl_options(device))  PDL=True and Triton's `launch_pdl=True` inside a region
    launch_dependents()                     in a kernel: the next kernel may start, as room allows
    wait_for_dependencies()                 in a kernel: all previous kernels are done and visible

In: a device. Out: the launch options of a kernel. Before `wait_for_dependencies` a kernel reads
only what no kernel of the region writes, such as weights. Every program waits, even one without
work: so a finished kernel implies that all kernels before it are finished.

A kernel launched without these options waits for the whole previous kernel, so a region may contain
any kernels. A CUDA graph captures PDL as programmatic edges.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from fulgurite.kernels.common.pdl import in_pdl_region
from fulgurite.kernels.common.triton_import import INTERPRETED, tl, triton

HOPPER = (9, 0)  # first compute capability with PDL
CACHE_LINE_BYTES = tl.constexpr(128)  # of one prefetch instruction


@triton.jit
def launch_dependents():
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_dependencies():
    tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch_l2(row_ptrs, LINES: tl.constexpr):
    """Prefetch the first LINES * 128 bytes of each row into L2."""
    line_offsets = tl.arange(0, LINES) * CACHE_LINE_BYTES
    addresses = row_ptrs.to(tl.int64)[:, None] + line_offsets[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [addresses],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@functools.cache
def supports_pdl(device: torch.device) -> bool:
    """Whether the GPU and this Triton version have PDL."""
    if device.type != "cuda" or INTERPRETED:
        return False
    has_intrinsics = hasattr(tl.extra, "cuda") and hasattr(tl.extra.cuda, "gdc_wait")
    return has_intrinsics and torch.cuda.get_device_capability(device) >= HOPPER


def pdl_options(device: torch.device, enabled: bool | None = None) -> dict[str, Any]:
    """Launch options: PDL for the kernel, `launch_pdl` for the driver.

    enabled   None: inside a `pdl_region` only
    """
    if not (in_pdl_region() if enabled is None else enabled) or not supports_pdl(device):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}
