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

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fulgurite.errors import ArgumentError
from fulgurite.kernels import registry
from fulgurite.kernels.elementwise import ops
from fulgurite.kernels.gemm.quant_linear import PLAIN, check_bias, decode_parts, rounded_activations
from fulgurite.kernels.moe.routing import wide
from fulgurite.op import op
from fulgurite.quant import QuantTensor, resolve

# device type -> function of the operator's arguments; it may return NotImplemented
IMPLEMENTATIONS: dict[str, str] = {
    "cpu": "fulgurite.kernels.grouped_gemm.cpu:grouped_matmul",
    "cuda": "fulgurite.kernels.grouped_gemm.triton_grouped_gemm:grouped_matmul",
}
OUTER_IMPLEMENTATIONS: dict[str, str] = {
    "cuda": "fulgurite.kernels.grouped_gemm.triton_grouped_gemm:grouped_outer",
}

DENSE = "dense"  # the format of a weight that is not packed
NO_GATE = "none"
CLAMPED = "clamped"


@dataclass(frozen=True)
class Gate:
    """activation(left) * right, of the two halves of a [.., 2I] tensor.

    "clamped" is that of gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), with both clamped first.
    """

    kind: str = "silu"
    alpha: float = 1.702
    limit: float = 7.0

    def __post_init__(self) -> None:
        allowed = (NO_GATE, *ops.ACTIVATIONS, CLAMPED)
        if self.kind not in allowed:
            raise ArgumentError(
                f"there is no gate {self.kind!r}", next=f"one of {', '.join(allowed)}"
            )

    def __call__(self, gate_up: Tensor) -> Tensor:
        """In plain torch."""
        if self.kind == NO_GATE:
            return gate_up
        gate, up = gate_up.chunk(2, dim=-1)
        if self.kind != CLAMPED:
            return ops.ACTIVATIONS[self.kind](gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(self.alpha * gate)

    def gradient(self, gate_up: Tensor, of_result: Tensor) -> Tensor:
        """The gradient of `gate_up`."""
        if self.kind == NO_GATE:
            return of_result
        gate, up = gate_up.chunk(2, dim=-1)
        if self.kind == CLAMPED:
            return torch.cat(self._clamped_gradient(gate, up, of_result), dim=-1)
        of_activation = of_result * up
        if self.kind == "silu":
            of_gate = torch.ops.aten.silu_backward(of_activation, gate)
        else:
            how = "tanh" if self.kind == "gelu_pytorch_tanh" else "none"
            of_gate = torch.ops.aten.gelu_backward(of_activation, gate, approximate=how)
        return torch.cat((of_gate, of_result * ops.ACTIVATIONS[self.kind](gate)), dim=-1)

    def _clamped_gradient(
        self, gate: Tensor, up: Tensor, of_result: Tensor
    ) -> tuple[Tensor, Tensor]:
        low, high = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        chance = torch.sigmoid(self.alpha * low)
        slope = chance + self.alpha * low * chance * (1 - chance)
        of_gate = of_result * (high + 1) * slope * (gate <= self.limit)
        return of_gate, of_result * low * chance * (up.abs() <= self.limit)


def grouped_matmul(
    x: Tensor,
    offsets_E: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    gate: Gate | None = None,
    *,
    rows_S: Tensor | None = None,
    places: Tensor | None = None,
    factors_S: Tensor | None = None,
    activations: str = PLAIN,
) -> Tensor:
    """Each row times the matrix of its expert; see the top of this file."""
    _check(x, offsets_E, weight, gate)
    check_bias(bias, weight.shape[:2])
    _check_rows(x, rows_S, factors_S)
    if isinstance(weight, QuantTensor):
        data, scales, format = weight.packed, list(weight.scales.values()), weight.format.name
        activations = activations if activations == PLAIN else resolve(activations).name
    else:
        data, scales, format, activations = weight, [], DENSE, PLAIN
    shape = gate or Gate(NO_GATE)
    arguments = (
        x, rows_S, places, factors_S, offsets_E, data, scales, format, bias, activations,
        shape.kind, shape.alpha, shape.limit,
    )  # fmt: skip
    if registry.is_plain_call(x, factors_S, data, bias):
        return _run(*arguments)
    out: Tensor = grouped_matmul_parts(*arguments)
    return out


def _check(x: Tensor, offsets: Tensor, weight: Tensor, gate: Gate | None) -> None:
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
            next="take them from fulgurite.kernels.moe.ops.index",
        )
    if gate is not None and gate.kind != NO_GATE and weight.shape[1] % 2:
        raise ArgumentError(
            f"a gate has two halves, and the weight {weight.shape[1]} rows", next="[gate; up]"
        )


def _check_rows(x: Tensor, rows_S: Tensor | None, factors_S: Tensor | None) -> None:
    if rows_S is not None and (rows_S.dtype != torch.int32 or rows_S.dim() != 1):
        raise ArgumentError(
            f"rows must be int32 [S], and are {rows_S.dtype} {list(rows_S.shape)}",
            next="pass Order.token_S of fulgurite.kernels.moe.ops.index",
        )
    count = x.shape[0] if rows_S is None else rows_S.shape[0]
    if factors_S is not None and tuple(factors_S.shape) != (count,):
        raise ArgumentError(
            f"factors {list(factors_S.shape)} for {count} rows", next="one number a row"
        )


@op("fulgurite::grouped_matmul")
def grouped_matmul_parts(
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
    out: Tensor = registry.run(IMPLEMENTATIONS, x.device, reference, *arguments)
    return out


def reference(
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
    """One expert after the other in float32, the ends read on the host."""
    given = x if rows is None else x[rows]
    given = wide(given) if activations == PLAIN else rounded_activations(given, activations)
    products = given.new_zeros(given.shape[0], data.shape[1])
    for expert, start, end in groups(offsets):
        product = F.linear(given[start:end], matrix(data, scales, format, expert))
        if factors is not None:
            product = product * factors[start:end, None]
        if bias is not None:
            product = product + bias[expert]
        products[start:end] = product
    return Gate(gate, alpha, limit)(products).to(x.dtype)


def groups(offsets: Tensor) -> list[tuple[int, int, int]]:
    """(expert, first row, last row + 1) of each expert that has rows, on the host."""
    spans = itertools.pairwise([0, *offsets.tolist()])
    return [(expert, start, end) for expert, (start, end) in enumerate(spans) if end > start]


def matrix(data: Tensor, scales: list[Tensor], format: str, expert: int) -> Tensor:
    """The matrix of one expert in float32 (or float64)."""
    if format == DENSE:
        return wide(data[expert])
    return decode_parts(data[expert], [scale[expert] for scale in scales], resolve(format))


@grouped_matmul_parts.fake
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


@grouped_matmul_parts.backward
def _(inputs: tuple, output: Tensor, of_result: Tensor) -> tuple:  # type: ignore[type-arg]
    (x, rows, places, factors, offsets, data, scales, format, bias, _, gate, alpha, limit) = inputs
    given = x if rows is None else x[rows]
    of_sums = wide(of_result)
    products = None
    if gate != NO_GATE or factors is not None:  # computed again: cheaper than to keep
        products = _plain(given, offsets, data, scales, format)
    if gate != NO_GATE:
        assert products is not None, "a gate needs what it was applied to"
        sums = products if factors is None else products * factors[:, None]
        if bias is not None:
            sums = sums + _of_rows(wide(bias), offsets, sums.shape[0])
        of_sums = Gate(gate, alpha, limit).gradient(sums, of_sums)
    of_bias = None
    if bias is not None:
        ones = torch.ones_like(of_sums[:, :1])
        of_bias = grouped_outer(of_sums, ones, offsets).squeeze(-1).to(bias.dtype)
    of_factors, of_products = None, of_sums
    if factors is not None:
        assert products is not None, "the gradient of a factor needs what it multiplied"
        of_factors = (of_sums * products).sum(dim=-1)
        of_products = of_sums * factors[:, None]
    of_products = of_products.to(x.dtype)
    of_x = _through_weight(of_products, offsets, data, scales, format)
    if rows is not None:
        assert places is not None, "the gradient of gathered rows needs places"
        of_x = wide(of_x)[places].sum(dim=1).to(x.dtype)
    of_data = grouped_outer(of_products, given, offsets).to(data.dtype) if format == DENSE else None
    nothing = [None] * len(scales)
    return of_x, None, None, of_factors, None, of_data, nothing, None, of_bias, *[None] * 4


def _plain(x: Tensor, offsets: Tensor, data: Tensor, scales: list[Tensor], format: str) -> Tensor:
    """x @ weight.T, neither gated nor biased."""
    out: Tensor = grouped_matmul_parts(
        x, None, None, None, offsets, data, scales, format, None, PLAIN, NO_GATE, 0.0, 0.0
    )
    return wide(out)


def _of_rows(values_EN: Tensor, offsets: Tensor, count: int) -> Tensor:
    """Each row's line of a table of experts; rows of no expert have the last one's."""
    position = torch.arange(count, device=offsets.device, dtype=torch.int32)
    expert = torch.searchsorted(offsets, position, right=True)
    return values_EN[expert.clamp(max=values_EN.shape[0] - 1)]


def _through_weight(
    gradient: Tensor, offsets: Tensor, data: Tensor, scales: list[Tensor], format: str
) -> Tensor:
    """gradient @ weight, the matrices turned over."""
    if format != DENSE:
        stack = [matrix(data, scales, format, expert) for expert in range(data.shape[0])]
        data = torch.stack(stack).to(gradient.dtype)
    out: Tensor = grouped_matmul_parts(
        gradient, None, None, None, offsets, data.transpose(1, 2), [], DENSE, None, PLAIN, NO_GATE,
        0.0, 0.0,
    )  # fmt: skip
    return out


@op("fulgurite::grouped_outer")
def grouped_outer(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """[E, N, K]: for each expert a.T @ b over its rows, in a's dtype; zeros where it has none."""
    out: Tensor = registry.run(OUTER_IMPLEMENTATIONS, a.device, outer_reference, a, b, offsets)
    return out


def outer_reference(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """One expert after the other in float32, the ends read on the host."""
    out = a.new_zeros(offsets.shape[0], a.shape[1], b.shape[1])
    for expert, start, end in groups(offsets):
        out[expert] = wide(a[start:end]).t() @ wide(b[start:end])
    return out


@grouped_outer.fake
def _(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    return a.new_empty(offsets.shape[0], a.shape[1], b.shape[1])
