"""Routing, sorting and summing of experts in C++: one native call each.

In: the operators' arguments on the CPU. Out: new tensors, or `NotImplemented` for what the kernels
don't take (float64). All calls are `replay.Kernel`s, so a decode step with experts can be recorded.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

from fulgurite import device, native
from fulgurite.kernels.common.cpu_library import DTYPE_CODES
from fulgurite.kernels.grouped_gemm.cpu import (
    compute_router_logits,
    load_kernel,
    supports_dtypes,
    to_float_rows,
)

_pack_route = struct.Struct("13qd2q").pack
_pack_index = struct.Struct("11q").pack
_pack_pick = struct.Struct("7q").pack
_pack_combine = struct.Struct("11q").pack


def route(logits: Tensor, correction_bias: Tensor | None, *rule: Any) -> Any:
    """`fulgurite::route`."""
    if not supports_dtypes(logits, correction_bias):
        return NotImplemented
    return _select_topk(to_float_rows(logits, fresh=True), logits.shape[1], correction_bias, *rule)


def route_tokens(
    x: Tensor, weight: Tensor, bias: Tensor | None, correction_bias: Tensor | None, *rule: Any
) -> Any:
    """`route` of x @ weight.T + bias."""
    if not supports_dtypes(x, weight, bias, correction_bias) or weight.stride(1) != 1:
        return NotImplemented
    return _select_topk(compute_router_logits(x, weight, bias), weight.shape[0], correction_bias, *rule)


def _select_topk(
    logits: Tensor,
    experts: int,
    correction_bias: Tensor | None,
    per_token: int,
    score: str,
    topk_before_scoring: bool,
    renormalize: bool,
    scaling: float,
    groups: int,
    topk_groups: int,
    group_by: str,
) -> tuple[Tensor, Tensor]:
    """Logits in float32, which are overwritten."""
    tokens = logits.shape[0]
    bias = None if correction_bias is None else to_float_rows(correction_bias[None])
    weights = torch.empty(tokens, per_token)
    chosen = torch.empty(tokens, per_token, dtype=torch.int64)
    packed = _pack_route(
        logits.data_ptr(), 0 if bias is None else bias.data_ptr(), weights.data_ptr(),
        chosen.data_ptr(), tokens, experts, per_token, score == "sigmoid", topk_before_scoring, renormalize,
        groups, topk_groups, group_by == "two", scaling, device.num_cpu_threads(), logits.stride(0),
    )  # fmt: skip
    load_kernel("route")(packed, (logits, bias, weights, chosen))
    return weights, chosen


def sort_by_expert(experts_Tk: Tensor, experts: int) -> Any:
    """`fulgurite::moe_index`."""
    if native.find_compiler() is None:
        return NotImplemented
    chosen = experts_Tk if experts_Tk.is_contiguous() else experts_Tk.contiguous()
    tokens, per_token = chosen.shape
    sizes = (experts, experts, tokens * per_token, tokens * per_token)
    counts, offsets, of_token, slots = (torch.empty(size, dtype=torch.int32) for size in sizes)
    places = torch.empty(tokens, per_token, dtype=torch.int32)
    room = torch.empty(experts + 1, dtype=torch.int32)
    fields = (counts, offsets, of_token, slots, places)
    packed = _pack_index(
        chosen.data_ptr(), chosen.dtype == torch.int32, *(field.data_ptr() for field in fields),
        tokens, per_token, experts, room.data_ptr(),
    )  # fmt: skip
    load_kernel("moe_index")(packed, (chosen, room, *fields))
    return fields


def gather_weights(weights_Tk: Tensor, tokens: Tensor, slots: Tensor) -> Any:
    """`fulgurite::moe_pick`."""
    if weights_Tk.dtype != torch.float32 or native.find_compiler() is None:
        return NotImplemented
    weights = weights_Tk if weights_Tk.is_contiguous() else weights_Tk.contiguous()
    out = torch.empty(tokens.shape[0])
    packed = _pack_pick(
        weights.data_ptr(), tokens.data_ptr(), slots.data_ptr(), out.data_ptr(), tokens.shape[0],
        weights.shape[1], weights.shape[0],
    )  # fmt: skip
    load_kernel("moe_pick")(packed, (weights, tokens, slots, out))
    return out


def combine(
    y: Tensor, places: Tensor, tokens: Tensor, slots: Tensor, weights: Tensor | None
) -> Any:
    """`fulgurite::moe_combine`."""
    if not supports_dtypes(y) or (weights is not None and weights.dtype != torch.float32):
        return NotImplemented
    y = y if y.stride(1) == 1 or y.numel() == 0 else y.contiguous()
    weights = weights if weights is None or weights.is_contiguous() else weights.contiguous()
    out = torch.empty(places.shape[0], y.shape[1], dtype=y.dtype)
    packed = _pack_combine(
        y.data_ptr(), places.data_ptr(), 0 if weights is None else weights.data_ptr(),
        out.data_ptr(), *places.shape, y.shape[1], y.stride(0), DTYPE_CODES[y.dtype],
        device.num_cpu_threads(), y.shape[0],
    )  # fmt: skip
    load_kernel("moe_combine")(packed, (y, places, weights, out))
    return out
