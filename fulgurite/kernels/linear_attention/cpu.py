"""Linear attention in C++: one native call each, which a recorded decode step can replay.

In: the arguments of `linear_attention.ops`, on the CPU in float32, bfloat16 or float16. Out: the
result, with the states updated, or `NotImplemented` for anything else.
"""

from __future__ import annotations

import functools
import struct
from typing import Any

from torch import Tensor

from fulgurite import device, native, replay
from fulgurite.errors import ArgumentError
from fulgurite.kernels.common.cpu_library import DTYPE_CODES, build_translation_unit
from fulgurite.kernels.linear_attention.metadata import DeltaRuleInputs, SequenceLayout

ERRORS = (
    "query_start_loc must rise from 0 to at most the number of tokens, and seq_lens include them",
    "a slot lies past the last state",
)
MAX_KEY_DIM = 4096  # a query and a key on the stack
_pack_conv = struct.Struct("17q").pack
_pack_delta_rule = struct.Struct("31q").pack


def _layout_error(status: int) -> ArgumentError:
    return ArgumentError(ERRORS[status - 1], next="check query_start_loc, seq_lens and slots")


@functools.cache
def _load_kernel(name: str) -> replay.NativeKernel:
    source = build_translation_unit("vec16.h", "elementwise.h", "linear_attention.h")
    return replay.NativeKernel(native.load(source), name, make_error=_layout_error)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    layout: SequenceLayout,
    activation: str | None,
) -> Any:
    """`linear_attention.ops.causal_conv`."""
    parameters = [weight] if bias is None else [weight, bias]
    if native.find_compiler() is None or x.dtype not in DTYPE_CODES or state.dtype != x.dtype:
        return NotImplemented
    if any(p.dtype != x.dtype for p in parameters):
        return NotImplemented
    if not all(p.is_contiguous() for p in (*parameters, state)) or x.stride(-1) != 1:
        return NotImplemented
    out = replay.empty(x.shape, x.dtype)
    packed = _pack_conv(
        x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), state.data_ptr(),
        out.data_ptr(), *_layout_addresses(layout), *x.shape, weight.shape[0], x.stride(0),
        len(layout.slots_S), len(state), DTYPE_CODES[x.dtype], activation == "silu",
        device.num_cpu_threads(),
    )  # fmt: skip
    _load_kernel("causal_conv")(packed, (x, weight, bias, state, out, *layout[:3]))
    return out


def gated_delta_rule(inputs: DeltaRuleInputs, state: Tensor, layout: SequenceLayout) -> Any:
    """`linear_attention.ops.gated_delta_rule`."""
    q, k, v, a, b, a_log, dt_bias = inputs
    if native.find_compiler() is None or q.dtype not in DTYPE_CODES or q.shape[2] > MAX_KEY_DIM:
        return NotImplemented
    if any(x.dtype != q.dtype or x.stride(-1) != 1 for x in (q, k, v, a, b)):
        return NotImplemented
    if a_log.dtype not in DTYPE_CODES or dt_bias.dtype not in DTYPE_CODES:
        return NotImplemented
    if not state.is_contiguous() or not a_log.is_contiguous() or not dt_bias.is_contiguous():
        return NotImplemented
    out = replay.empty(v.shape, v.dtype)
    addresses = [x.data_ptr() for x in (*inputs, state, out)]
    packed = _pack_delta_rule(
        *addresses, *_layout_addresses(layout), *q.shape[:2], v.shape[1], q.shape[2], v.shape[2],
        len(layout.slots_S), *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], a.stride(0),
        b.stride(0), DTYPE_CODES[a_log.dtype], DTYPE_CODES[dt_bias.dtype], len(state),
        DTYPE_CODES[q.dtype], device.num_cpu_threads(),
    )  # fmt: skip
    _load_kernel("gated_delta_rule")(packed, (*inputs, state, out, *layout[:3]))
    return out


def _layout_addresses(layout: SequenceLayout) -> tuple[int, int, int]:
    return tuple(x.data_ptr() for x in layout[:3])  # type: ignore[return-value]
