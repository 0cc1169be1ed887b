"""Grouped GEMM: rows sorted by expert, each times the weight of its expert, then gated.

    a[s] = x[row_indices[s]] @ weight[e].T                for offsets[e-1] <= s < offsets[e]
    y[s] = gate(a[s] * row_weights[s] + bias[e])          gate: activation(gate half) * up half

In: x [R, K]; `row_indices` int32 [S], the row of x of each sorted row (None: x is sorted itself);
`row_weights` float32 [S], for routers that weight the input of an expert; `offsets` int32 [E], the
ends of the experts' rows, read on the device only; weights [E, N, K], dense or quantized. Out: [S,
N], or [S, N / 2] with a gate. Sums are in float32 and rounded once, after the gate, to x's dtype
(training on a GPU rounds before the gate, too: backward reads these sums).
Rows at and past `offsets[-1]` are zero. On GPUs, from some rows an expert on, integers in groups
under 64 are rounded to x's dtype before they are multiplied.

`positions` [R, k] is the inverse of `row_indices`: where the k copies of each row of x are. Only
the gradient needs it: the copies are then summed in a fixed order, so training is deterministic.

Quantized weights have no gradient; x has one, through the dequantized weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulgurite.determinism import is_deterministic
from fulgurite.errors import ArgumentError
from fulgurite.kernels import registry
from fulgurite.kernels.common.launch_plan import planned
from fulgurite.kernels.elementwise.gated_activation import NO_GATE, UNGATED, GatedActivation
from fulgurite.kernels.gemm.quant_linear import check_bias
from fulgurite.kernels.gemm.reference import UNQUANTIZED, upcast
from fulgurite.kernels.grouped_gemm import cpu, reference, triton_grouped_gemm, triton_wgrad
from fulgurite.kernels.grouped_gemm.args import DENSE, GroupedGemmArgs
from fulgurite.op import op
from fulgurite.quant import QuantTensor, resolve_format

# device type -> kernel; it may return NotImplemented
GROUPED_GEMM_KERNELS = {
    "cpu": cpu.grouped_gemm,
    "cuda": triton_grouped_gemm.grouped_gemm,
}
GROUPED_WGRAD_KERNELS = {"cuda": triton_wgrad.grouped_wgrad}


@planned(GatedActivation)
def grouped_gemm(
    x: Tensor,
    offsets_E: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    gate: GatedActivation | None = None,
    *,
    row_indices_S: Tensor | None = None,
    positions: Tensor | None = None,
    row_weights_S: Tensor | None = None,
    activations: str = UNQUANTIZED,
) -> Tensor:
    """Each row times the weight of its expert; see the top of this file."""
    gate = gate or UNGATED
    _check(x, offsets_E, weight, gate)
    check_bias(bias, weight.shape[:2])
    _check_rows(x, row_indices_S, row_weights_S)
    data, scales, format = weight, [], DENSE
    if isinstance(weight, QuantTensor):
        data, scales, format = weight.packed, list(weight.scales.values()), weight.format.name
    if format == DENSE or activations == UNQUANTIZED:
        activations = UNQUANTIZED
    else:
        activations = resolve_format(activations).name
    if gate.is_gated and row_weights_S is None and _saves_sums(x, weight):
        sums = grouped_gemm(
            x, offsets_E, weight, bias, row_indices_S=row_indices_S, positions=positions
        )
        return gate(upcast(sums)).to(x.dtype)
    arguments = (
        x, row_indices_S, positions, row_weights_S, offsets_E, data, scales, format, bias,
        activations, gate.kind, gate.alpha, gate.limit,
    )  # fmt: skip
    if registry.can_skip_dispatcher(x, row_weights_S, data, bias):
        return _run(*arguments)
    out: Tensor = grouped_gemm_op(*arguments)
    return out


def _saves_sums(x: Tensor, weight: Tensor) -> bool:
    """Whether backward reads the sums before the gate from memory: on a GPU, in training.

    Elsewhere, and in deterministic mode, training rounds as inference does: once, after the gate.
    """
    has_gradient = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    is_dense = not isinstance(weight, QuantTensor)
    return has_gradient and x.is_cuda and is_dense and not is_deterministic()


def _check(x: Tensor, offsets: Tensor, weight: Tensor, gate: GatedActivation) -> None:
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2]:
        raise ArgumentError(
            f"rows {list(x.shape)} can't be multiplied by experts {list(weight.shape)}",
            next="rows are [R, K] and the weight [E, N, K], both with K last",
        )
    if offsets.dtype != torch.int32 or tuple(offsets.shape) != (weight.shape[0],):
        dtype = str(offsets.dtype).removeprefix("torch.")
        raise ArgumentError(
            f"offsets must be int32[{weight.shape[0]}], the end of each expert's rows, and is "
            f"{dtype}{list(offsets.shape)}",
            next="take them from fulgurite.kernels.moe.ops.sort_by_expert",
        )
    if gate.is_gated and weight.shape[1] % 2:
        raise ArgumentError(
            f"a gated weight has an even number of rows, and this one has {weight.shape[1]}",
            next="stack gate above up: [gate; up]",
        )


def _check_rows(x: Tensor, row_indices: Tensor | None, row_weights: Tensor | None) -> None:
    if row_indices is not None and (row_indices.dtype != torch.int32 or row_indices.dim() != 1):
        raise ArgumentError(
            f"row_indices must be int32 [S], and are {row_indices.dtype} {list(row_indices.shape)}",
            next="pass ExpertOrder.token_S of fulgurite.kernels.moe.ops.sort_by_expert",
        )
    rows = x.shape[0] if row_indices is None else row_indices.shape[0]
    if row_weights is not None and tuple(row_weights.shape) != (rows,):
        raise ArgumentError(
            f"row_weights {list(row_weights.shape)} for {rows} rows", next="one weight a row"
        )


@op("fulgurite::grouped_gemm")
def grouped_gemm_op(
    x: Tensor,
    row_indices: Tensor | None,
    positions: Tensor | None,
    row_weights: Tensor | None,
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
        x, row_indices, positions, row_weights, offsets, data, scales, format, bias, activations,
        gate, alpha, limit,
    )  # fmt: skip


def _run(*arguments: Any) -> Tensor:
    """Call the kernel with the operator's arguments; `positions` are for the gradient."""
    x, row_indices, _, row_weights, offsets, data, scales, format, bias, activations, *gate = (
        arguments
    )
    args = GroupedGemmArgs(
        x,
        None if row_indices is None else row_indices.contiguous(),
        None if row_weights is None else row_weights.contiguous(),
        offsets.contiguous(),
        data,
        scales,
        format,
        bias,
        activations,
        GatedActivation(*gate),
    )
    out: Tensor = registry.dispatch(GROUPED_GEMM_KERNELS, x.device, reference.grouped_gemm, args)
    return out


@grouped_gemm_op.fake
def _(
    x: Tensor,
    row_indices: Tensor | None,
    positions: Tensor | None,
    row_weights: Tensor | None,
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
    rows = x.shape[0] if row_indices is None else row_indices.shape[0]
    return x.new_empty(rows, data.shape[1] // (1 if gate == NO_GATE else 2))


# ---- gradients -------------------------------------------------------------------------------------


@grouped_gemm_op.backward
def _(inputs: tuple, output: Tensor, grad_out: Tensor) -> tuple:  # type: ignore[type-arg]
    (x, row_indices, positions, row_weights, offsets, data, scales, format, bias, _, *gate) = inputs
    activation = GatedActivation(*gate)
    rows = x if row_indices is None else x[row_indices]
    grad_sums = upcast(grad_out)
    products = None
    if activation.is_gated or row_weights is not None:  # recomputed: cheaper than saving them
        products = _gemm_without_epilogue(rows, offsets, data, scales, format)
    if activation.is_gated:
        assert products is not None, "the gradient of a gate needs its input"
        sums = products if row_weights is None else products * row_weights[:, None]
        if bias is not None:
            sums = sums + _gather_by_expert(upcast(bias), offsets, sums.shape[0])
        grad_sums = activation.gradient(sums, grad_sums)
    grad_bias = None
    if bias is not None:
        ones = torch.ones_like(grad_sums[:, :1])
        grad_bias = grouped_wgrad(grad_sums, ones, offsets).squeeze(-1).to(bias.dtype)
    grad_weights, grad_products = None, grad_sums
    if row_weights is not None:
        assert products is not None, "the gradient of row weights needs the unweighted rows"
        grad_weights = (grad_sums * products).sum(dim=-1)
        grad_products = grad_sums * row_weights[:, None]
    grad_products = grad_products.to(x.dtype)
    grad_x = _grouped_dgrad(grad_products, offsets, data, scales, format)
    if row_indices is not None:
        assert positions is not None, "the gradient of gathered rows needs positions"
        grad_x = upcast(grad_x)[positions].sum(dim=1).to(x.dtype)
    grad_data = None
    if format == DENSE:
        grad_data = grouped_wgrad(grad_products, rows, offsets).to(data.dtype)
    no_grads = [None] * len(scales)
    return grad_x, None, None, grad_weights, None, grad_data, no_grads, None, grad_bias, *[None] * 4


def _gemm_without_epilogue(
    x: Tensor, offsets: Tensor, data: Tensor, scales: list[Tensor], format: str
) -> Tensor:
    """x @ weight.T, neither gated nor biased."""
    out: Tensor = grouped_gemm_op(
        x, None, None, None, offsets, data, scales, format, None, UNQUANTIZED, NO_GATE, 0.0, 0.0
    )
    return upcast(out)


def _gather_by_expert(values_EN: Tensor, offsets: Tensor, rows: int) -> Tensor:
    """The values of each row's expert; rows without an expert have the last expert's."""
    position = torch.arange(rows, device=offsets.device, dtype=torch.int32)
    expert = torch.searchsorted(offsets, position, right=True)
    return values_EN[expert.clamp(max=values_EN.shape[0] - 1)]


def _grouped_dgrad(
    gradient: Tensor, offsets: Tensor, data: Tensor, scales: list[Tensor], format: str
) -> Tensor:
    """gradient @ weight."""
    if format != DENSE:
        experts = range(data.shape[0])
        stack = [reference.dequantize_expert(data, scales, format, e) for e in experts]
        data = torch.stack(stack).to(gradient.dtype)
    out: Tensor = grouped_gemm_op(
        gradient, None, None, None, offsets, data.transpose(1, 2), [], DENSE, None, UNQUANTIZED,
        NO_GATE, 0.0, 0.0,
    )  # fmt: skip
    return out


@op("fulgurite::grouped_wgrad")
def grouped_wgrad(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """[E, N, K]: for each expert a.T @ b over its rows, in a's dtype; zeros if it has none."""
    out: Tensor = registry.dispatch(
        GROUPED_WGRAD_KERNELS, a.device, reference.grouped_wgrad, a, b, offsets
    )
    return out


@grouped_wgrad.fake
def _(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    return a.new_empty(offsets.shape[0], a.shape[1], b.shape[1])
