"""Keeps `aten.upsample_*` whole while AOTAutograd traces.

In: nothing. Out: a context in which `F.interpolate` is one op in the functional graph, and its gradient
is one `aten.upsample_*_backward`. torch's Python dispatcher would otherwise replace each op by dozens of
gathers before autograd runs, and its gradient by one `index_put` per gather. The gradients get
shape functions here, because torch's own do not take symbolic sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._decomp.decompositions import upsample_compute_output_size
from torch._dynamo.convert_frame import compile_lock
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format

from fulgurite.transforms.decompose import NEAREST_UPSAMPLE_OPS, SMOOTH_UPSAMPLE_OPS

aten = torch.ops.aten
# Gradients that keep `channels_last`; the others are contiguous (torch 2.11 to 2.13).
CHANNELS_LAST_GRADIENTS = (
    aten.upsample_nearest2d_backward,
    aten._upsample_nearest_exact2d_backward,
    aten.upsample_bilinear2d_backward,
    aten.upsample_trilinear3d_backward,
)
ANTIALIASED_GRADIENTS = (
    aten._upsample_bilinear2d_aa_backward.default,
    aten._upsample_bicubic2d_aa_backward.default,
)
DECOMPOSING_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)


@contextmanager
def keep_upsampling_whole() -> Iterator[None]:
    """Within this context, tracing records upsampling ops instead of their decompositions.

    The overload `.vec` computes the output size, also a symbolic one, and calls the default overload.
    """
    saved: list[tuple[OpOverload, dict[Any, Any]]] = []
    with compile_lock:  # the tables belong to torch's operators: one capture at a time changes them
        try:
            for packet in (*NEAREST_UPSAMPLE_OPS, *SMOOTH_UPSAMPLE_OPS):
                for overload in (packet.default, packet.vec):
                    saved.append((overload, dict(overload.py_kernels)))
                    for key in DECOMPOSING_KEYS:
                        overload.py_kernels.pop(key, None)
                    overload._dispatch_cache.clear()
                call = _make_vec_kernel(packet.default, has_corners=packet in SMOOTH_UPSAMPLE_OPS)
                for key in DECOMPOSING_KEYS:
                    packet.vec.py_kernels[key] = call
                backward = getattr(aten, f"{packet.__name__}_backward")
                saved.append((backward.default, dict(backward.default.py_kernels)))
                keeps_format = backward in CHANNELS_LAST_GRADIENTS
                backward.default.py_kernels[DispatchKey.Meta] = _make_gradient_meta(keeps_format)
                backward.default._dispatch_cache.clear()
            for op in ANTIALIASED_GRADIENTS:
                saved.append((op, dict(op.py_kernels)))
                op.py_kernels[DispatchKey.Meta] = _make_gradient_meta(keeps_format=True)
                op._dispatch_cache.clear()
            yield
        finally:
            for overload, kernels in saved:
                overload.py_kernels.clear()
                overload.py_kernels.update(kernels)
                overload._dispatch_cache.clear()


def _make_vec_kernel(op: OpOverload, has_corners: bool) -> Callable[..., Tensor]:
    """The `.vec` overload in terms of the default one, `op`."""

    def call(
        x: Tensor, output_size: Sequence[Any] | None, scales: Sequence[float] | None
    ) -> tuple[Any, list[float | None]]:
        sizes = upsample_compute_output_size(x.size(), output_size, scales)
        return sizes, list(scales) if scales else [None] * (x.dim() - 2)

    def nearest(
        x: Tensor, output_size: Sequence[Any] | None, scale_factors: Sequence[float] | None
    ) -> Tensor:
        sizes, scales = call(x, output_size, scale_factors)
        return op(x, sizes, *scales)  # type: ignore[no-any-return]

    def smooth(
        x: Tensor,
        output_size: Sequence[Any] | None,
        align_corners: bool,
        scale_factors: Sequence[float] | None,
    ) -> Tensor:
        sizes, scales = call(x, output_size, scale_factors)
        return op(x, sizes, align_corners, *scales)  # type: ignore[no-any-return]

    return smooth if has_corners else nearest


def _make_gradient_meta(keeps_format: bool) -> Callable[..., Tensor]:
    """The shape function of a gradient."""

    def meta(
        grad_output: Tensor, output_size: Sequence[Any], input_size: Sequence[Any], *_: Any
    ) -> Tensor:
        layout = suggest_memory_format(grad_output) if keeps_format else torch.contiguous_format
        return grad_output.new_empty(input_size).to(memory_format=layout)

    return meta
