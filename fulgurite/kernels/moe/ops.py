"""A mixture of experts in four steps: hidden states in, the weighted sum of each token's experts
out.

    routes = route_tokens(x, router, config)                  which experts, with what weight
    order  = sort_by_expert(routes.experts_Tk, E)             pairs of token and expert, by expert
    y_SD   = experts_forward((x, order), order.offsets_E, gate_up, down)
    y_TD   = combine(y_SD, order, routes.weights_Tk)          each token's k rows, in a fixed order

`fused_experts` is the last three together. Nothing waits for the device: sizes depend on shapes
alone, and only kernels read where an expert's rows begin and end. Each step is a custom operator
with a gradient, so the same code trains. Results are deterministic: the sort is stable, and a
token's rows are summed in the order of its experts.

Shapes: T tokens; k experts of a token; S = T k pairs; E experts; D hidden size; I intermediate
size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fulgurite.errors import ArgumentError
from fulgurite.kernels import registry
from fulgurite.kernels.common.launch_plan import planned
from fulgurite.kernels.elementwise.gated_activation import GatedActivation
from fulgurite.kernels.elementwise.ops import add, rms_norm
from fulgurite.kernels.gemm.reference import UNQUANTIZED, upcast
from fulgurite.kernels.grouped_gemm.ops import grouped_gemm
from fulgurite.kernels.grouped_gemm.triton_fp8 import run_experts_fp8
from fulgurite.kernels.moe import cpu, reference, triton_moe, triton_small_batch
from fulgurite.kernels.moe.router_config import RmsNormArgs, RouterConfig, Routes
from fulgurite.kernels.moe.routing import is_small_batch, route, route_tokens
from fulgurite.kernels.moe.small_batch import SmallBatchArgs
from fulgurite.op import op
from fulgurite.quant import QuantTensor

# device type -> kernel; it may return NotImplemented
SORT_KERNELS = {"cpu": cpu.sort_by_expert, "cuda": triton_moe.sort_by_expert}
SMALL_BATCH_KERNELS = {"cuda": triton_small_batch.run_experts}
FP8_EXPERTS_KERNELS = {"cuda": run_experts_fp8}
GATHER_WEIGHTS_KERNELS = {"cpu": cpu.gather_weights}
COMBINE_KERNELS = {"cpu": cpu.combine, "cuda": triton_moe.combine}


class ExpertOrder(NamedTuple):
    """Pairs of token and expert, sorted by expert and, within an expert, by token. All int32.

    counts_E     pairs of each expert
    offsets_E    the end of each expert's pairs
    token_S      the token of each sorted pair
    slot_S       which of its token's k experts it is
    position_Tk  the index of each pair after sorting: the inverse permutation
    """

    counts_E: Tensor
    offsets_E: Tensor
    token_S: Tensor
    slot_S: Tensor
    position_Tk: Tensor


@planned()
def sort_by_expert(experts_Tk: Tensor, experts: int) -> ExpertOrder:
    """Sort the pairs of token and expert by expert.

    Indices outside of 0 to experts - 1 are no experts: they come last, past `offsets_E[-1]`, where
    `experts_forward` returns zeros. A rank that holds some of the experts selects its own that way.
    """
    if experts_Tk.dim() != 2 or experts_Tk.dtype not in (torch.int64, torch.int32):
        raise ArgumentError(
            f"experts of tokens must be int64 [T, k], and are {experts_Tk.dtype} "
            f"{list(experts_Tk.shape)}",
            next="pass Routes.experts_Tk",
        )
    if experts_Tk.numel() >= 2**31:
        raise ArgumentError(
            f"{experts_Tk.numel()} pairs of token and expert don't fit in int32",
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
    row_weights_S: Tensor | None = None,
    activations: tuple[str, str] = (UNQUANTIZED, UNQUANTIZED),
) -> Tensor:
    """down(gate(x @ gate_up.T)) of each row by its expert: [S, D].

    x              rows sorted by expert [S, D], or tokens [T, D] and the order that sorts them;
                   dense, or in FP8 as another rank has sent them
    gate_up, down  [E, 2I, D], gate above up, and [E, D, I]; dense or quantized, each on its own
    row_weights_S  what each row is multiplied by on its way in (Llama 4)
    activations    "none", or formats that rows are quantized to on the fly, for quantized weights
    """
    rows, order = (x, None) if isinstance(x, Tensor) else x
    gate = gate or GatedActivation()
    if isinstance(gate_up, QuantTensor) and isinstance(down, QuantTensor):
        indices_S, biases = None if order is None else order.token_S, (gate_up_bias, down_bias)
        out_SD = _run_fp8_experts(
            rows, indices_S, row_weights_S, offsets_E, gate_up, down, biases, gate, activations
        )
        if out_SD is not None:
            return out_SD
    if isinstance(rows, QuantTensor):
        rows = rows.dequantize()  # once: the kernels below take rows in the model's dtype
    intermediate_SI = grouped_gemm(
        rows,
        offsets_E,
        gate_up,
        gate_up_bias,
        gate,
        row_indices_S=None if order is None else order.token_S,
        positions=None if order is None else order.position_Tk,
        row_weights_S=row_weights_S,
        activations=activations[0],
    )
    return grouped_gemm(intermediate_SI, offsets_E, down, down_bias, activations=activations[1])


def _run_fp8_experts(
    rows: Tensor,
    indices_S: Tensor | None,
    row_weights_S: Tensor | None,
    offsets_E: Tensor,
    gate_up: QuantTensor,
    down: QuantTensor,
    biases: tuple[Tensor | None, Tensor | None],
    gate: GatedActivation,
    activations: tuple[str, str],
) -> Tensor | None:
    """Both GEMMs, with the rows between them quantized by the first: the same values as one after
    the other. None without such a kernel, and under capture or autograd."""
    kernel = registry.find_kernel(FP8_EXPERTS_KERNELS, rows.device)
    if kernel is None or UNQUANTIZED in activations:
        return None
    data = rows.packed if isinstance(rows, QuantTensor) else rows
    tensors = (data, row_weights_S, gate_up.packed, down.packed, *biases)
    if not registry.can_skip_dispatcher(*tensors):
        return None
    out = kernel(
        rows, indices_S, row_weights_S, offsets_E, gate_up, down, biases, gate, activations
    )
    return None if out is NotImplemented else out


@planned()
def combine(y_SD: Tensor, order: ExpertOrder, weights_Tk: Tensor | None = None) -> Tensor:
    """The sum of each token's rows times their weights (None: 1), in float32 and in order."""
    _check_weights(weights_Tk, order)
    arguments = (y_SD, order.position_Tk, order.token_S, order.slot_S, weights_Tk)
    if registry.can_skip_dispatcher(y_SD, weights_Tk):
        return _combine(*arguments)
    out: Tensor = combine_op(*arguments)
    return out


def gather_weights(weights_Tk: Tensor, order: ExpertOrder) -> Tensor:
    """The weight of each sorted pair: [S]."""
    _check_weights(weights_Tk, order)
    arguments = (weights_Tk, order.token_S, order.slot_S, order.position_Tk)
    if registry.can_skip_dispatcher(weights_Tk):
        return _gather_weights(*arguments)
    out: Tensor = gather_weights_op(*arguments)
    return out


def _check_weights(weights_Tk: Tensor | None, order: ExpertOrder) -> None:
    if weights_Tk is not None and weights_Tk.shape != order.position_Tk.shape:
        raise ArgumentError(
            f"weights {list(weights_Tk.shape)} for pairs {list(order.position_Tk.shape)}",
            next="one weight for each pair of token and expert: [T, k]",
        )


@planned(GatedActivation)
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
    """The weighted sum of each token's experts, of norm(x) and plus the residual: [T, D]."""
    gate = gate or GatedActivation()
    if gate_up_bias is None and down_bias is None and not apply_router_weight_on_input:
        args = SmallBatchArgs(x_TD, routes, gate_up, down, gate, norm, residual_TD, activations)
        small_batch = _run_small_batch(args)
        if small_batch is not None:
            return small_batch
    x_TD = x_TD if norm is None else rms_norm(x_TD, *norm)
    out_TD = run_sorted_rows(
        x_TD,
        routes,
        gate_up,
        down,
        gate,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        apply_router_weight_on_input=apply_router_weight_on_input,
        activations=activations,
    )
    return out_TD if residual_TD is None else add(residual_TD, out_TD)


def run_sorted_rows(
    x_TD: Tensor,
    routes: Routes,
    gate_up: Tensor,
    down: Tensor,
    gate: GatedActivation,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    activations: tuple[str, str] = (UNQUANTIZED, UNQUANTIZED),
) -> Tensor:
    """`fused_experts` by sorting rows by expert. Rows in FP8 (a `QuantTensor`) stay so if the kernel
    for these weights takes them."""
    order = sort_by_expert(routes.experts_Tk, gate_up.shape[0])
    weights_Tk, row_weights_S = routes.weights_Tk, None
    if apply_router_weight_on_input:
        row_weights_S = gather_weights(weights_Tk, order)
    y_SD = experts_forward(
        (x_TD, order),
        order.offsets_E,
        gate_up,
        down,
        gate,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        row_weights_S=row_weights_S,
        activations=activations,
    )
    return combine(y_SD, order, None if apply_router_weight_on_input else weights_Tk)


def _run_small_batch(args: SmallBatchArgs) -> Tensor | None:
    """Two kernels for few tokens, nothing sorted; None without such a kernel."""
    weights = (w.packed if isinstance(w, QuantTensor) else w for w in (args.gate_up, args.down))
    tensors = (args.x_TD, args.routes.weights_Tk, *weights, args.residual_TD)
    if not registry.can_skip_dispatcher(*tensors) or not is_small_batch(args.x_TD):
        return None
    kernel = registry.find_kernel(SMALL_BATCH_KERNELS, args.x_TD.device)
    if kernel is None or not args.gate.is_gated:
        return None
    out = kernel(args)
    return None if out is NotImplemented else out


# ---- operators -------------------------------------------------------------------------------------


@op("fulgurite::moe_sort")
def sort_by_expert_op(
    experts_Tk: Tensor, experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of `ExpertOrder`."""
    return _sort_by_expert(experts_Tk, experts)


def _sort_by_expert(
    experts_Tk: Tensor, experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    fields: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = registry.dispatch(
        SORT_KERNELS, experts_Tk.device, reference.sort_by_expert, experts_Tk, experts
    )
    return fields


@sort_by_expert_op.fake
def _(experts_Tk: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    def empty(*shape: int) -> Tensor:
        return experts_Tk.new_empty(shape, dtype=torch.int32)

    tokens, top_k = experts_Tk.shape
    pairs = tokens * top_k
    return empty(experts), empty(experts), empty(pairs), empty(pairs), empty(tokens, top_k)


@op("fulgurite::moe_gather_weights")
def gather_weights_op(weights: Tensor, tokens: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
    """The operator; `positions` are for the gradient."""
    return _gather_weights(weights, tokens, slots, positions)


def _gather_weights(weights: Tensor, tokens: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
    arguments = (weights, tokens, slots)
    out: Tensor = registry.dispatch(
        GATHER_WEIGHTS_KERNELS, weights.device, reference.gather_weights, *arguments
    )
    return out


@gather_weights_op.fake
def _(weights: Tensor, tokens: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
    return weights.new_empty(tokens.shape)


@gather_weights_op.backward
def _(inputs: tuple, output: Tensor, grad_out: Tensor) -> tuple:  # type: ignore[type-arg]
    return grad_out[inputs[3]], None, None, None


@op("fulgurite::moe_combine")
def combine_op(
    y: Tensor, positions: Tensor, tokens: Tensor, slots: Tensor, weights: Tensor | None
) -> Tensor:
    """The operator; `tokens` and `slots` are for the gradient."""
    return _combine(y, positions, tokens, slots, weights)


def _combine(
    y: Tensor, positions: Tensor, tokens: Tensor, slots: Tensor, weights: Tensor | None
) -> Tensor:
    arguments = (y, positions, tokens, slots, weights)
    out: Tensor = registry.dispatch(COMBINE_KERNELS, y.device, reference.combine, *arguments)
    return out


@combine_op.fake
def _(
    y: Tensor, positions: Tensor, tokens: Tensor, slots: Tensor, weights: Tensor | None
) -> Tensor:
    return y.new_empty(positions.shape[0], y.shape[1])


@combine_op.backward
def _(inputs: tuple, output: Tensor, grad_out: Tensor) -> tuple:  # type: ignore[type-arg]
    y, positions, tokens, slots, weights = inputs
    grad_y = upcast(grad_out)[tokens]
    grad_weights = None
    if weights is not None:
        grad_rows = (grad_y * upcast(y)).sum(dim=-1)
        grad_weights = grad_rows[positions].to(weights.dtype)
        grad_y = grad_y * weights[tokens, slots][:, None]
    return grad_y.to(y.dtype), None, None, None, grad_weights


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
    "run_sorted_rows",
    "sort_by_expert",
]
