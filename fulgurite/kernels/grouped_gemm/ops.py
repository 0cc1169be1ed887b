"""Grouped matmul: rows sorted by expert, each times the matrix of its expert; then gated, if asked.

    a[s] = x[rows[s]] @ weight[e].T            for offsets[e-1] <= s < offsets[e]
    y[s] = gate(a[s] * factors[s] + bias[e])   gate: of the two halves of a row, activation(left) * right

In: x [R, K]; `rows` int32 [S], which row of x each sorted row is (None: x is sorted itself);
`factors` float32 [S], for routers that weigh the input of an expert; `offsets` int32 [E], the ends of
the experts' rows, read on the device only; weights [E, N, K], dense or packed. Out: [S, N], or
[S, N / 2] with a gate. Sums are taken in float32 and rounded once, after the gate, to x's dtype. Rows
at and past `offsets[-1]` are zero. On a GPU, from some rows an expert on, integers in groups under 64 are
rounded to x's dtype on their way in.

`places` [R, k] is the inverse of `rows`: where the k copies of each row of x went. Only the gradient
needs it: with it the copies are summed in a fixed order, so training is deterministic.

Packed weights have no gradient; x has, through the dequantized weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulgurite.errors import ArgumentError
from fulgurite.kernels import registry
from fulgurite.kernels.elementwise.gated_activation import NO_GATE, GatedActivation
from fulgurite.kernels.gemm.reference import (
    UNQUANTIZED,
    check_bias,
)
from fulgurite.kernels.grouped_gemm import cpu, triton_grouped_gemm
from fulgurite.kernels.grouped_gemm.reference import (
    DENSE,
    dequantize_expert,
    reference,
    upcast,
    wgrad_reference,
)
from fulgurite.op import op
from fulgurite.quant import QuantTensor, resolve_format

# device type -> function of the operator's arguments; it may return NotImplemented
IMPLEMENTATIONS: dict[str, registry.Kernel] = {
    "cpu": cpu.grouped_gemm,
    "cuda": triton_grouped_gemm.grouped_gemm,
}
WGRAD_IMPLEMENTATIONS: dict[str, registry.Kernel] = {
    "cuda": triton_grouped_gemm.grouped_wgrad,
}


def grouped_gemm(
    x: Tensor,
    offsets_E: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    gate: GatedActivation | None = None,
    *,
    rows_S: Tensor | None = None,
    places: Tensor | None = None,
    factors_S: Tensor | None = None,
    activations: str = UNQUANTIZED,
) -> Tensor:
    """Each row times the matrix of its expert; see the top of this file."""
    _check(x, offsets_E, weight, gate)
    check_bias(bias, weight.shape[:2])
    _check_rows(x, rows_S, factors_S)
    if isinstance(weight, QuantTensor):
        data, scales, format = weight.packed, list(weight.scales.values()), weight.format.name
        activations = (
            activations if activations == UNQUANTIZED else resolve_format(activations).name
        )
    else:
        data, scales, format, activations = weight, [], DENSE, UNQUANTIZED
    shape = gate or GatedActivation(NO_GATE)
    arguments = (
        x, rows_S, places, factors_S, offsets_E, data, scales, format, bias, activations,
        shape.kind, shape.alpha, shape.limit,
    )  # fmt: skip
    if registry.can_skip_dispatcher(x, factors_S, data, bias):
        return _run(*arguments)
    out: Tensor = grouped_gemm_op(*arguments)
    return out


def _check(x: Tensor, offsets: Tensor, weight: Tensor, gate: GatedActivation | None) -> None:
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2]:
        raise ArgumentError(
            f"rows {list(x.shape)} can't be multiplied by experts {list(weight.shape)}",
            next="rows are [R, K] and the weight [E, N, K], both with K last",
        )
    if offsets.dtype != torch.int32 or tuple(offsets.shape) != (weight.shape[0],):
        kind = str(offsets.dtype).removeprefix("torch.")
        raise ArgumentError(
            f"offsets must be int32[{weight.shape[0]}], the end of each expert's rows, and is "
            f"{kind}{list(offsets.shape)}",
            next="take them from fulgurite.kernels.moe.ops.sort_by_expert",
        )
    if gate is not None and gate.kind != NO_GATE and weight.shape[1] % 2:
        raise ArgumentError(
            f"a gate has two halves, and the weight {weight.shape[1]} rows", next="[gate; up]"
        )


def _check_rows(x: Tensor, rows_S: Tensor | None, factors_S: Tensor | None) -> None:
    if rows_S is not None and (rows_S.dtype != torch.int32 or rows_S.dim() != 1):
        raise ArgumentError(
            f"rows must be int32 [S], and are {rows_S.dtype} {list(rows_S.shape)}",
            next="pass Order.token_S of fulgurite.kernels.moe.ops.sort_by_expert",
        )
    count = x.shape[0] if rows_S is None else rows_S.shape[0]
    if factors_S is not None and tuple(factors_S.shape) != (count,):
        raise ArgumentError(
            f"factors {list(factors_S.shape)} for {count} rows", next="one number a row"
        )


@op("fulgurite::grouped_matmul")
def grouped_gemm_op(
    x: Tensor,
    rows: Tensor | None,
    places: Tensor | None,
    factors: Tensor | None,
    offsets: Tensor,
    data: Tensor,
    scales: list[Tensor],
    format: str,
    bias: Tensor | None,
    activations: str,
    gate: str,
    alpha: float,
    limit: float,
) -> Tensor:
    """The operator: the weight as packed data and its scales, or ("dense") as it is and none."""
    return _run(
        x, rows, places, factors, offsets, data, scales, format, bias, activations, gate, alpha,
        limit,
    )  # fmt: skip


def _run(
    x: Tensor,
    rows: Tensor | None,
    places: Tensor | None,
    factors: Tensor | None,
    offsets: Tensor,
    *weight: Any,
) -> Tensor:
    given = (None if each is None else each.contiguous() for each in (rows, places, factors))
    arguments = (x, *given, offsets.contiguous(), *weight)
    out: Tensor = registry.dispatch(IMPLEMENTATIONS, x.device, reference, *arguments)
    return out


@grouped_gemm_op.fake
def _(
    x: Tensor,
    rows: Tensor | None,
    places: Tensor | None,
    factors: Tensor | None,
    offsets: Tensor,
    data: Tensor,
    scales: list[Tensor],
    format: str,
    bias: Tensor | None,
    activations: str,
    gate: str,
    alpha: float,
    limit: float,
) -> Tensor:
    count = x.shape[0] if rows is None else rows.shape[0]
    return x.new_empty(count, data.shape[1] // (1 if gate == NO_GATE else 2))


# ---- gradients -------------------------------------------------------------------------------------


@grouped_gemm_op.backward
def _(inputs: tuple, output: Tensor, of_result: Tensor) -> tuple:  # type: ignore[type-arg]
    (x, rows, places, factors, offsets, data, scales, format, bias, _, gate, alpha, limit) = inputs
    given = x if rows is None else x[rows]
    of_sums = upcast(of_result)
    products = None
    if gate != NO_GATE or factors is not None:  # computed again: cheaper than to keep
        products = _gemm_without_epilogue(given, offsets, data, scales, format)
    if gate != NO_GATE:
        assert products is not None, "a gate needs what it was applied to"
        sums = products if factors is None else products * factors[:, None]
        if bias is not None:
            sums = sums + _gather_by_expert(upcast(bias), offsets, sums.shape[0])
        of_sums = GatedActivation(gate, alpha, limit).gradient(sums, of_sums)
    of_bias = None
    if bias is not None:
        ones = torch.ones_like(of_sums[:, :1])
        of_bias = grouped_wgrad(of_sums, ones, offsets).squeeze(-1).to(bias.dtype)
    of_factors, of_products = None, of_sums
    if factors is not None:
        assert products is not None, "the gradient of a factor needs what it multiplied"
        of_factors = (of_sums * products).sum(dim=-1)
        of_products = of_sums * factors[:, None]
    of_products = of_products.to(x.dtype)
    of_x = _grouped_dgrad(of_products, offsets, data, scales, format)
    if rows is not None:
        assert places is not None, "the gradient of gathered rows needs places"
        of_x = upcast(of_x)[places].sum(dim=1).to(x.dtype)
    of_data = grouped_wgrad(of_products, given, offsets).to(data.dtype) if format == DENSE else None
    nothing = [None] * len(scales)
    return of_x, None, None, of_factors, None, of_data, nothing, None, of_bias, *[None] * 4


def _gemm_without_epilogue(
    x: Tensor, offsets: Tensor, data: Tensor, scales: list[Tensor], format: str
) -> Tensor:
    """x @ weight.T, neither gated nor biased."""
    out: Tensor = grouped_gemm_op(
        x, None, None, None, offsets, data, scales, format, None, UNQUANTIZED, NO_GATE, 0.0, 0.0
    )
    return upcast(out)


def _gather_by_expert(values_EN: Tensor, offsets: Tensor, count: int) -> Tensor:
    """Each row's line of a table of experts; rows of no expert have the last one's."""
    position = torch.arange(count, device=offsets.device, dtype=torch.int32)
    expert = torch.searchsorted(offsets, position, right=True)
    return values_EN[expert.clamp(max=values_EN.shape[0] - 1)]


def _grouped_dgrad(
    gradient: Tensor, offsets: Tensor, data: Tensor, scales: list[Tensor], format: str
) -> Tensor:
    """gradient @ weight, the matrices turned over."""
    if format != DENSE:
        stack = [dequantize_expert(data, scales, format, expert) for expert in range(data.shape[0])]
        data = torch.stack(stack).to(gradient.dtype)
    out: Tensor = grouped_gemm_op(
        gradient, None, None, None, offsets, data.transpose(1, 2), [], DENSE, None, UNQUANTIZED, NO_GATE,
        0.0, 0.0,
    )  # fmt: skip
    return out


@op("fulgurite::grouped_outer")
def grouped_wgrad(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """[E, N, K]: for each expert a.T @ b over its rows, in a's dtype; zeros where it has none."""
    out: Tensor = registry.dispatch(WGRAD_IMPLEMENTATIONS, a.device, wgrad_reference, a, b, offsets)
    return out


@grouped_wgrad.fake
def _(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    return a.new_empty(offsets.shape[0], a.shape[1], b.shape[1])
