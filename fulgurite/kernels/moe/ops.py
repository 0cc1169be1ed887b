"""A mixture of experts in four steps: hidden states in, the weighted sum of each token's experts out.

    routes = route_tokens(x, router, rule)                    which experts, with what weight
    order  = index(routes.experts_Tk, E)                      pairs of token and expert, by expert
    y_SD   = experts_forward((x, order), order.offsets_E, gate_up, down)
    y_TD   = combine(y_SD, order, routes.weights_Tk)          each token's k rows, in a fixed order

`fused_experts` is the last three together. Nothing waits for the device: sizes depend on shapes alone,
and where an expert's rows begin and end is only read by kernels. Each step is a custom operator with
a gradient, so the same code trains. Results are deterministic: pairs are sorted stably, and a token
sums its rows in the order of its experts.

Shapes: T tokens; k experts of a token; S = T k pairs; E experts; D hidden size; I inner size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fulgurite.errors import ArgumentError
from fulgurite.kernels import registry
from fulgurite.kernels.elementwise import ops
from fulgurite.kernels.elementwise.gated_activation import NO_GATE, GatedActivation
from fulgurite.kernels.gemm.reference import UNQUANTIZED
from fulgurite.kernels.grouped_gemm import triton_fp8
from fulgurite.kernels.grouped_gemm.ops import grouped_gemm
from fulgurite.kernels.grouped_gemm.reference import upcast
from fulgurite.kernels.moe import cpu, triton_moe, triton_small_batch
from fulgurite.kernels.moe.routing import (
    RmsNormArgs,
    RouterConfig,
    Routes,
    is_small_batch,
    route,
    route_tokens,
)
from fulgurite.op import op
from fulgurite.quant import QuantTensor

# device type -> function of the operator's arguments; it may return NotImplemented
SORT_IMPLEMENTATIONS: dict[str, registry.Kernel] = {
    "cpu": cpu.sort_by_expert,
    "cuda": triton_moe.sort_by_expert,
}
SMALL_BATCH_IMPLEMENTATIONS: dict[str, registry.Kernel] = {
    "cuda": triton_small_batch.run_experts
}
FP8_EXPERTS_IMPLEMENTATIONS: dict[str, registry.Kernel] = {
    "cuda": triton_fp8.run_experts_fp8,
}
GATHER_WEIGHTS_IMPLEMENTATIONS: dict[str, registry.Kernel] = {"cpu": cpu.gather_weights}
COMBINE_IMPLEMENTATIONS: dict[str, registry.Kernel] = {
    "cpu": cpu.combine,
    "cuda": triton_moe.combine,
}


class ExpertOrder(NamedTuple):
    """Pairs of token and expert, sorted by expert; the order of tokens stays within one. All int32.

    counts_E    pairs of each expert
    offsets_E   where each expert's pairs end
    token_S     the token of each sorted pair
    slot_S      which of its token's k experts it is
    place_Tk    where each pair went: the inverse
    """

    counts_E: Tensor
    offsets_E: Tensor
    token_S: Tensor
    slot_S: Tensor
    place_Tk: Tensor


def sort_by_expert(experts_Tk: Tensor, experts: int) -> ExpertOrder:
    """Sort the pairs of token and expert by expert.

    Numbers outside of 0 to experts - 1 belong to nobody: they come last, past `offsets_E[-1]`, where
    `experts_forward` gives zeros. A rank that has some of the experts asks for its own that way.
    """
    if experts_Tk.dim() != 2 or experts_Tk.dtype not in (torch.int64, torch.int32):
        raise ArgumentError(
            f"experts of tokens are int64 [T, k], and these {experts_Tk.dtype} "
            f"{list(experts_Tk.shape)}",
            next="pass Routes.experts_Tk",
        )
    if experts_Tk.numel() >= 2**31:
        raise ArgumentError(
            f"{experts_Tk.numel()} pairs of token and expert are more than int32 counts",
            next="run fewer tokens at once",
        )
    if registry.can_skip_dispatcher(experts_Tk):
        return ExpertOrder(*_sort_by_expert(experts_Tk, experts))
    return ExpertOrder(*sort_by_expert_op(experts_Tk, experts))


def experts_forward(
    x: Tensor | tuple[Tensor, ExpertOrder],
    offsets_E: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate: GatedActivation | None = None,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    factors_S: Tensor | None = None,
    activations: tuple[str, str] = (UNQUANTIZED, UNQUANTIZED),
) -> Tensor:
    """down(gate(x @ gate_up.T)) of each row by its expert: [S, D].

    x             rows sorted by expert [S, D], or tokens [T, D] and the order that sorts them
    gate_up       [E, 2I, D], gate above up; `down` [E, D, I]; dense or packed, each on its own
    factors_S     what each row is multiplied by on its way in (Llama 4)
    activations   "none", or formats that the rows are quantized to on the fly, for packed weights
    """
    rows, order = (x, None) if isinstance(x, Tensor) else x
    if isinstance(gate_up, QuantTensor) and isinstance(down, QuantTensor):
        index_S, biases = None if order is None else order.token_S, (gate_up_bias, down_bias)
        given = (
            rows,
            index_S,
            factors_S,
            offsets_E,
            gate_up,
            down,
            biases,
            gate or GatedActivation(),
        )
        out_SD = _run_fp8_experts(*given, activations)
        if out_SD is not None:
            return out_SD
    inner_SI = grouped_gemm(
        rows,
        offsets_E,
        gate_up,
        gate_up_bias,
        gate or GatedActivation(),
        rows_S=None if order is None else order.token_S,
        places=None if order is None else order.place_Tk,
        factors_S=factors_S,
        activations=activations[0],
    )
    return grouped_gemm(inner_SI, offsets_E, down, down_bias, activations=activations[1])


def _run_fp8_experts(
    rows: Tensor,
    index_S: Tensor | None,
    factors_S: Tensor | None,
    offsets_E: Tensor,
    gate_up: QuantTensor,
    down: QuantTensor,
    biases: tuple[Tensor | None, Tensor | None],
    gate: GatedActivation,
    activations: tuple[str, str],
) -> Tensor | None:
    """Both matmuls with the rows between them quantized by the first: the same numbers as one after
    the other. None where no kernel does it, and where a gradient or a capture looks on."""
    function = registry.find_kernel(FP8_EXPERTS_IMPLEMENTATIONS, rows.device)
    if function is None or UNQUANTIZED in activations:
        return None
    if not registry.can_skip_dispatcher(rows, factors_S, gate_up.packed, down.packed, *biases):
        return None
    out = function(rows, index_S, factors_S, offsets_E, gate_up, down, biases, gate, activations)
    return None if out is NotImplemented else out


def combine(y_SD: Tensor, order: ExpertOrder, weights_Tk: Tensor | None = None) -> Tensor:
    """Each token's rows times their weights (without: as they are), summed in float32 in order."""
    _check_weights(weights_Tk, order)
    arguments = (y_SD, order.place_Tk, order.token_S, order.slot_S, weights_Tk)
    if registry.can_skip_dispatcher(y_SD, weights_Tk):
        return _combine(*arguments)
    out: Tensor = combine_op(*arguments)
    return out


def gather_weights(weights_Tk: Tensor, order: ExpertOrder) -> Tensor:
    """The weight of each sorted pair: [S]."""
    _check_weights(weights_Tk, order)
    arguments = (weights_Tk, order.token_S, order.slot_S, order.place_Tk)
    if registry.can_skip_dispatcher(weights_Tk):
        return _gather_weights(*arguments)
    out: Tensor = gather_weights_op(*arguments)
    return out


def _check_weights(weights_Tk: Tensor | None, order: ExpertOrder) -> None:
    if weights_Tk is not None and weights_Tk.shape != order.place_Tk.shape:
        raise ArgumentError(
            f"weights {list(weights_Tk.shape)} for pairs {list(order.place_Tk.shape)}",
            next="one weight a pair of token and expert: [T, k]",
        )


def fused_experts(
    x_TD: Tensor,
    routes: Routes,
    gate_up: Tensor,
    down: Tensor,
    gate: GatedActivation | None = None,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    activations: tuple[str, str] = (UNQUANTIZED, UNQUANTIZED),
    norm: RmsNormArgs | None = None,
    residual_TD: Tensor | None = None,
) -> Tensor:
    """The weighted sum of each token's experts, of norm(x) and added onto `residual_TD`: [T, D]."""
    if gate_up_bias is None and down_bias is None and not apply_router_weight_on_input:
        few = _run_small_batch(
            x_TD, routes, gate_up, down, gate or GatedActivation(), norm, residual_TD, activations
        )
        if few is not None:
            return few
    x_TD = x_TD if norm is None else ops.rms_norm(x_TD, *norm)
    order = sort_by_expert(routes.experts_Tk, gate_up.shape[0])
    factors_S = gather_weights(routes.weights_Tk, order) if apply_router_weight_on_input else None
    y_SD = experts_forward(
        (x_TD, order),
        order.offsets_E,
        gate_up,
        down,
        gate,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        factors_S=factors_S,
        activations=activations,
    )
    out_TD = combine(y_SD, order, None if apply_router_weight_on_input else routes.weights_Tk)
    return out_TD if residual_TD is None else ops.add(residual_TD, out_TD)


def _run_small_batch(
    x_TD: Tensor,
    routes: Routes,
    gate_up: Tensor,
    down: Tensor,
    gate: GatedActivation,
    norm: RmsNormArgs | None,
    residual_TD: Tensor | None,
    activations: tuple[str, str],
) -> Tensor | None:
    """Two kernels for few tokens, nothing sorted; None where there are none."""
    weights = (w.packed if isinstance(w, QuantTensor) else w for w in (gate_up, down))
    plain = registry.can_skip_dispatcher(x_TD, routes.weights_Tk, *weights, residual_TD)
    if not plain or not is_small_batch(x_TD):
        return None
    function = registry.find_kernel(SMALL_BATCH_IMPLEMENTATIONS, x_TD.device)
    if function is None or gate.kind == NO_GATE:
        return None
    given = (x_TD, routes.experts_Tk, routes.weights_Tk, gate_up, down)
    out = function(*given, gate.kind, gate.alpha, gate.limit, norm, residual_TD, activations)
    return None if out is NotImplemented else out


# ---- operators -------------------------------------------------------------------------------------


@op("fulgurite::moe_index")
def sort_by_expert_op(
    experts_Tk: Tensor, experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of `ExpertOrder`."""
    return _sort_by_expert(experts_Tk, experts)


def _sort_by_expert(
    experts_Tk: Tensor, experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    found: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = registry.dispatch(
        SORT_IMPLEMENTATIONS, experts_Tk.device, sort_by_expert_reference, experts_Tk, experts
    )
    return found


def sort_by_expert_reference(
    experts_Tk: Tensor, experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A stable sort in plain torch, without reading anything on the host."""
    tokens, per_token = experts_Tk.shape
    expert_S = experts_Tk.flatten().long()
    expert_S = expert_S.masked_fill((expert_S < 0) | (expert_S >= experts), experts)
    pair_S = expert_S.argsort(stable=True)
    position = torch.arange(tokens * per_token, device=experts_Tk.device)
    place_Tk = torch.empty_like(pair_S).scatter(0, pair_S, position).view(tokens, per_token)
    ones = torch.ones_like(expert_S)
    counts_E = ones.new_zeros(experts + 1).scatter_add(0, expert_S, ones)[:experts]
    fields = (counts_E, counts_E.cumsum(0), pair_S // max(per_token, 1), pair_S % max(per_token, 1))
    return tuple(field.int() for field in (*fields, place_Tk))  # type: ignore[return-value]


@sort_by_expert_op.fake
def _(experts_Tk: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    def room(*shape: int) -> Tensor:
        return experts_Tk.new_empty(shape, dtype=torch.int32)

    tokens, per_token = experts_Tk.shape
    pairs = tokens * per_token
    return room(experts), room(experts), room(pairs), room(pairs), room(tokens, per_token)


@op("fulgurite::moe_pick")
def gather_weights_op(weights: Tensor, tokens: Tensor, slots: Tensor, places: Tensor) -> Tensor:
    """The operator; `places` is for the gradient."""
    return _gather_weights(weights, tokens, slots, places)


def _gather_weights(weights: Tensor, tokens: Tensor, slots: Tensor, places: Tensor) -> Tensor:
    out: Tensor = registry.dispatch(
        GATHER_WEIGHTS_IMPLEMENTATIONS,
        weights.device,
        gather_weights_reference,
        weights,
        tokens,
        slots,
    )
    return out


def gather_weights_reference(weights: Tensor, tokens: Tensor, slots: Tensor) -> Tensor:
    return weights[tokens, slots]


@gather_weights_op.fake
def _(weights: Tensor, tokens: Tensor, slots: Tensor, places: Tensor) -> Tensor:
    return weights.new_empty(tokens.shape)


@gather_weights_op.backward
def _(inputs: tuple, output: Tensor, of_result: Tensor) -> tuple:  # type: ignore[type-arg]
    return of_result[inputs[3]], None, None, None


@op("fulgurite::moe_combine")
def combine_op(
    y: Tensor, places: Tensor, tokens: Tensor, slots: Tensor, weights: Tensor | None
) -> Tensor:
    """The operator; `tokens` and `slots` are for the gradient."""
    return _combine(y, places, tokens, slots, weights)


def _combine(
    y: Tensor, places: Tensor, tokens: Tensor, slots: Tensor, weights: Tensor | None
) -> Tensor:
    out: Tensor = registry.dispatch(
        COMBINE_IMPLEMENTATIONS, y.device, combine_reference, y, places, tokens, slots, weights
    )
    return out


def combine_reference(
    y: Tensor, places: Tensor, tokens: Tensor, slots: Tensor, weights: Tensor | None
) -> Tensor:
    """One slot after the other."""
    total = upcast(y).new_zeros(places.shape[0], y.shape[1])
    for slot in range(places.shape[1]):
        rows = upcast(y[places[:, slot]])
        total = total + (rows if weights is None else rows * weights[:, slot, None])
    return total.to(y.dtype)


@combine_op.fake
def _(y: Tensor, places: Tensor, tokens: Tensor, slots: Tensor, weights: Tensor | None) -> Tensor:
    return y.new_empty(places.shape[0], y.shape[1])


@combine_op.backward
def _(inputs: tuple, output: Tensor, of_result: Tensor) -> tuple:  # type: ignore[type-arg]
    y, places, tokens, slots, weights = inputs
    of_y = upcast(of_result)[tokens]
    of_weights = None
    if weights is not None:
        of_rows = (of_y * upcast(y)).sum(dim=-1)
        of_weights = of_rows[places].to(weights.dtype)
        of_y = of_y * weights[tokens, slots][:, None]
    return of_y.to(y.dtype), None, None, None, of_weights


__all__ = [
    "ExpertOrder",
    "GatedActivation",
    "RouterConfig",
    "Routes",
    "combine",
    "experts_forward",
    "fused_experts",
    "gather_weights",
    "grouped_gemm",
    "route",
    "route_tokens",
    "sort_by_expert",
]
