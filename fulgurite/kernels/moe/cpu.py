"""Routing, sorting and combining of experts in C++: one native call each.

In: the operators' arguments on the CPU. Out: new tensors, or `NotImplemented` for what the kernels
don't take (float64). All calls are `replay.NativeKernel`s, so a decode step with experts can be
recorded.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

from fulgurite import device, native, replay
from fulgurite.kernels.common.cpu_library import DTYPE_CODES
from fulgurite.kernels.gemm.cpu_dense import load_kernel, prepare_rows, supports_dtypes
from fulgurite.kernels.grouped_gemm.cpu import compute_router_logits
from fulgurite.kernels.moe import reference
from fulgurite.kernels.moe.router_config import RouterConfig

_pack_route = struct.Struct("13qd2q").pack
_pack_sort = struct.Struct("11q").pack
_pack_gather = struct.Struct("7q").pack
_pack_combine = struct.Struct("11q").pack


def route(logits: Tensor, correction_bias: Tensor | None, config: RouterConfig) -> Any:
    """`fulgurite::route`."""
    if not supports_dtypes(logits, correction_bias) or config.is_sparsemixer:
        return NotImplemented
    scratch = prepare_rows(logits, copy=True)
    return _select_topk(scratch, logits.shape[1], correction_bias, config)


def route_tokens(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    correction_bias: Tensor | None,
    config: RouterConfig,
) -> Any:
    """`route` of x @ weight.T + bias."""
    if not supports_dtypes(x, weight, bias, correction_bias) or weight.stride(1) != 1:
        return NotImplemented
    logits = compute_router_logits(x, weight, bias)
    if config.is_sparsemixer:
        return reference.route(logits, correction_bias, config)
    return _select_topk(logits, weight.shape[0], correction_bias, config)


def _select_topk(
    logits: Tensor, experts: int, correction_bias: Tensor | None, config: RouterConfig
) -> tuple[Tensor, Tensor]:
    """Weights and experts; `logits` in float32 are overwritten."""
    tokens = logits.shape[0]
    bias = None if correction_bias is None else prepare_rows(correction_bias[None])
    weights = replay.empty((tokens, config.top_k))
    selected = replay.empty((tokens, config.top_k), torch.int64)
    packed = _pack_route(
        logits.data_ptr(), 0 if bias is None else bias.data_ptr(), weights.data_ptr(),
        selected.data_ptr(), tokens, experts, config.top_k, config.is_sigmoid,
        config.topk_before_scoring, config.renormalize, config.num_groups, config.topk_groups,
        config.is_top2_sum, config.scaling_factor, device.num_cpu_threads(), logits.stride(0),
    )  # fmt: skip
    load_kernel("route")(packed, (logits, bias, weights, selected))
    return weights, selected


def sort_by_expert(experts_Tk: Tensor, experts: int) -> Any:
    """`fulgurite::moe_sort`."""
    if native.find_compiler() is None:
        return NotImplemented
    selected = experts_Tk if experts_Tk.is_contiguous() else experts_Tk.contiguous()
    tokens, top_k = selected.shape
    sizes = (experts, experts, tokens * top_k, tokens * top_k)
    counts, offsets, token_ids, slots = (replay.empty((size,), torch.int32) for size in sizes)
    positions = replay.empty((tokens, top_k), torch.int32)
    scratch = replay.empty((experts + 1,), torch.int32)
    fields = (counts, offsets, token_ids, slots, positions)
    packed = _pack_sort(
        selected.data_ptr(), selected.dtype == torch.int32, *(field.data_ptr() for field in fields),
        tokens, top_k, experts, scratch.data_ptr(),
    )  # fmt: skip
    load_kernel("moe_sort")(packed, (selected, scratch, *fields))
    return fields


def gather_weights(weights_Tk: Tensor, tokens: Tensor, slots: Tensor) -> Any:
    """`fulgurite::moe_gather_weights`."""
    if weights_Tk.dtype != torch.float32 or native.find_compiler() is None:
        return NotImplemented
    weights = weights_Tk if weights_Tk.is_contiguous() else weights_Tk.contiguous()
    out = replay.empty((tokens.shape[0],))
    packed = _pack_gather(
        weights.data_ptr(), tokens.data_ptr(), slots.data_ptr(), out.data_ptr(), tokens.shape[0],
        weights.shape[1], weights.shape[0],
    )  # fmt: skip
    load_kernel("moe_gather_weights")(packed, (weights, tokens, slots, out))
    return out


def combine(
    y: Tensor, positions: Tensor, tokens: Tensor, slots: Tensor, weights: Tensor | None
) -> Any:
    """`fulgurite::moe_combine`."""
    if not supports_dtypes(y) or (weights is not None and weights.dtype != torch.float32):
        return NotImplemented
    y = y if y.stride(1) == 1 or y.numel() == 0 else y.contiguous()
    weights = weights if weights is None or weights.is_contiguous() else weights.contiguous()
    out = replay.empty((positions.shape[0], y.shape[1]), y.dtype)
    packed = _pack_combine(
        y.data_ptr(), positions.data_ptr(), 0 if weights is None else weights.data_ptr(),
        out.data_ptr(), *positions.shape, y.shape[1], y.stride(0), DTYPE_CODES[y.dtype],
        device.num_cpu_threads(), y.shape[0],
    )  # fmt: skip
    load_kernel("moe_combine")(packed, (y, positions, weights, out))
    return out
