"""The fuser: a region of a trace in, a few generated kernels out.

    frontend/   fx graph → IR                       ir/        statements, expressions, affine indices
    segment/    which statements share a kernel     schedule/  loops, blocks and vector widths
    codegen/    scheduled kernel → C++ or Triton    runtime/   compile, load, launch, memory pool
    gemm/       matmuls with their epilogues        lowering.py, pipeline.py   all of it, in order

`can_fuse(node)` says whether a node can be part of a generated kernel. `lower_region(module)` turns a region
of such nodes into a callable. The IR knows no threads and no target languages; schedules decide loops; code
generators print them. `ir/interpreter.py` runs the IR in plain torch: the reference.
"""

from __future__ import annotations

from fulgurite.fuser.lowering import lower_cpu
from fulgurite.fuser.pipeline import (
    can_fuse,
    lower_region,
    start_compile_workers,
    unsupported_reason,
)
from fulgurite.fuser.runtime.cpu_region import FusedRegion
from fulgurite.fuser.runtime.kernel import Kernel

__all__ = [
    "FusedRegion",
    "Kernel",
    "can_fuse",
    "lower_cpu",
    "lower_region",
    "start_compile_workers",
    "unsupported_reason",
]
