# mypy: allow-untyped-defs, allow-incomplete-defs
"""Kernels that start while the one in front of them drains (programmatic dependent launch).

    with chain():                           kernels launched here may start early (`kernels/chains.py`)
    launch(**early(device))                 this kernel may start before the one in front is done
    let_next_start()                        in a kernel: the next one may start now, as far as there is room
    wait_for_inputs()                       in a kernel: everything before it is done and can be read

In: a device. Out: the launch options of a kernel, in a chain or outside of one. What lies before `wait_for_inputs` may
read what no kernel of the chain writes: weights. Everything else comes after it, and every program waits,
also one that has nothing to do: so a kernel that is done says that all before it are.

A kernel that is launched without these options waits for all of the one in front, as ever; so chains may
be broken anywhere. In a CUDA graph they are edges of their own kind.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from fulgurite.kernels.common.pdl_region import in_chain

HOPPER = (9, 0)
LINE = tl.constexpr(128)  # bytes that one prefetch brings


@triton.jit
def let_next_start():
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_inputs():
    tl.extra.cuda.gdc_wait()


@triton.jit
def fetch_ahead(row_ptrs, LINES: tl.constexpr):
    """The first LINES * 128 bytes of rows into the GPU's second-level cache."""
    line = tl.arange(0, LINES) * LINE
    at = row_ptrs.to(tl.int64)[:, None] + line[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [at],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@functools.cache
def can_start_early(device: torch.device) -> bool:
    """Whether the GPU and this Triton have programmatic dependent launch."""
    if device.type != "cuda" or triton.knobs.runtime.interpret:
        return False
    known = hasattr(tl.extra, "cuda") and hasattr(tl.extra.cuda, "gdc_wait")
    return known and torch.cuda.get_device_capability(device) >= HOPPER


def early(device: torch.device, chained: bool | None = None) -> dict[str, Any]:
    """Launch options: EARLY for the kernel, and what tells the driver; in a chain, or as it is said."""
    if not (in_chain() if chained is None else chained) or not can_start_early(device):
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}
