"""Gluon (Triton with explicit layouts) where it is installed, placeholders where it is not.

    from fulgurite.kernels.common.gluon_import import gl, gluon, mbarrier, tma

In: nothing. Out: `gluon`, `gl` (its language), the Hopper modules `mbarrier` and `tma`, the
warpgroup MMA functions, and `GluonTensorDescriptor`. Names that changed after Triton 3.6 have one
name here: `thread_barrier` and `async_load`. See `triton_import.py` for the placeholders.
"""

from __future__ import annotations

from typing import Any

from fulgurite.kernels.common.triton_import import Placeholder, TritonPlaceholder

gluon: Any
gl: Any
tma: Any
mbarrier: Any
fence_async_shared: Any
warpgroup_mma: Any
warpgroup_mma_init: Any
warpgroup_mma_wait: Any
GluonTensorDescriptor: Any

try:
    from triton.experimental import gluon  # type: ignore[no-redef]
    from triton.experimental.gluon import language as gl  # type: ignore[no-redef]
    from triton.experimental.gluon.language.nvidia.hopper import (  # type: ignore[no-redef]
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_init,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import (  # type: ignore[no-redef]
        TensorDescriptor as GluonTensorDescriptor,
    )
except ImportError:
    gluon = gl = TritonPlaceholder()
    tma = mbarrier = Placeholder()
    fence_async_shared = warpgroup_mma = warpgroup_mma_init = warpgroup_mma_wait = Placeholder()
    GluonTensorDescriptor = Placeholder

thread_barrier: Any = getattr(gl, "thread_barrier", None) or gl.barrier
async_load: Any = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
