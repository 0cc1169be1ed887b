"""Sizes, strides and dtypes of grouped matmuls, for tracing.

In: FakeTensors. Out: a FakeTensor like the op's result. torch's rule of `_grouped_mm` takes bfloat16
only, where the op takes float16 and float32 as well, and without CUDA it ignores that rows are padded
to 16 bytes. `_scaled_grouped_mm_v2` (`F.scaled_grouped_mm`) has no rule. With these both are captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch._subclasses.fake_impls import register_op_impl
from torch._subclasses.fake_tensor import FakeTensorMode

GROUPED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROW_BYTES = 16  # rows of operands and results start at multiples of it


def install() -> None:
    """Let FakeTensors have the results of the rules in this file."""
    _register(torch.ops.aten._grouped_mm.default, grouped_mm_rule)
    scaled = torch.ops.aten._scaled_grouped_mm_v2.default
    if DispatchKey.Meta not in scaled.py_kernels:
        _register(scaled, scaled_grouped_mm_rule)
    # before torch 2.13, TorchDynamo does not know the function and breaks the graph
    torch._dynamo.allow_in_graph(torch._scaled_grouped_mm_v2)


def _register(op: OpOverload, rule: Callable[..., Tensor]) -> None:
    def run(mode: FakeTensorMode, op: OpOverload, *args: Any, **kwargs: Any) -> Tensor:
        with mode:
            return rule(*args, **kwargs)

    register_op_impl(op)(run)


def grouped_mm_rule(
    self: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The rule of `_grouped_mm`."""
    torch._check(
        self.dtype == mat2.dtype and self.dtype in GROUPED_DTYPES,
        lambda: f"grouped_mm takes bfloat16, float16 or float32, got {self.dtype} and {mat2.dtype}",
    )
    torch._check(bias is None, lambda: "Bias not supported yet")
    torch._check(
        out_dtype in (None, self.dtype),
        lambda: "Grouped gemm output dtype must match `mat_a` dtype",
    )
    _check_shapes(self, mat2, offs)
    for matrix in (self, mat2):
        _check_strides(matrix)
    return make_grouped_result(self, mat2, offs, self.dtype)


def scaled_grouped_mm_rule(
    self: Tensor,
    mat2: Tensor,
    scale_a: Sequence[Tensor],
    recipe_a: Sequence[int],
    swizzle_a: Sequence[int],
    scale_b: Sequence[Tensor],
    recipe_b: Sequence[int],
    swizzle_b: Sequence[int],
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> Tensor:
    """The rule of `_scaled_grouped_mm_v2`; scales are checked by the kernel that reads them."""
    _check_shapes(self, mat2, offs)
    torch._check(not contraction_dim, lambda: "contraction_dim is not supported here")
    return make_grouped_result(self, mat2, offs, out_dtype or torch.bfloat16)


def _check_shapes(a: Tensor, b: Tensor, offs: Tensor | None) -> None:
    torch._check(
        a.dim() in (2, 3) and b.dim() in (2, 3), lambda: "grouped_mm takes 2-D and 3-D matrices"
    )
    torch._check(a.shape[-1] == b.shape[-2], lambda: "contraction dimension has to match")
    if a.dim() == b.dim() == 3:
        torch._check(offs is None, lambda: "Have to provide offsets only for 2-D matrices")
        torch._check(a.shape[0] == b.shape[0], lambda: "batched dimension has to match")
        return
    torch._check(
        offs is not None and offs.dim() == 1 and offs.dtype == torch.int32,
        lambda: "Offsets have to be int32, one end a group",
    )
    assert offs is not None, "checked above"
    for matrix in (a, b):
        if matrix.dim() == 3:
            torch._check(
                matrix.shape[0] == offs.shape[0], lambda: "matrix batch sizes have to match"
            )


def _check_strides(matrix: Tensor) -> None:
    """Rows or columns are contiguous, and start at multiples of 16 bytes."""
    rows, columns = matrix.stride()[-2:]
    outer = columns if rows == 1 and columns >= max(1, matrix.shape[-2]) else rows
    torch._check(
        (rows == 1 or columns == 1) and outer * matrix.element_size() % ROW_BYTES == 0,
        lambda: "strides should be multiple of 16 bytes",
    )


def make_grouped_result(a: Tensor, b: Tensor, offs: Tensor | None, dtype: torch.dtype) -> Tensor:
    """An empty result; its rows are padded to 16 bytes, except on ROCm."""
    if a.dim() == b.dim():
        batch = a.shape[0] if offs is None else offs.shape[0]
        shape = [batch, a.shape[-2], b.shape[-1]]
    else:
        shape = [a.shape[-2], b.shape[-1]]
    if torch.version.hip:
        return a.new_empty(shape, dtype=dtype)
    alignment = ROW_BYTES // dtype.itemsize
    row = (shape[-1] + alignment - 1) // alignment * alignment
    strides = [row, 1] if len(shape) == 2 else [shape[1] * row, row, 1]
    return torch.empty_strided(shape, strides, dtype=dtype, device=a.device)
