# mypy: allow-untyped-defs, allow-incomplete-defs
"""Device functions of GEMM epilogues: scales, bias and the gated activation on float32 accumulators.
"""

from __future__ import annotations

from fulgurite.kernels.common.triton_dequantize import E4M3_SCALE_UNBIAS
from fulgurite.kernels.common.triton_import import tl, triton


@triton.jit
def apply_scales_and_bias(
    acc, s_ptr, z_ptr, bias_ptr, n_in, w_scale_n, factor,
    SCALING: tl.constexpr, TENSOR_SCALE: tl.constexpr, FACTORS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """What comes before the gate: scales, the row's factor, the bias."""
    if SCALING == "epilogue":
        acc *= tl.load(s_ptr + n_in * w_scale_n).to(tl.float32)[:, None]
    if TENSOR_SCALE:
        acc *= tl.load(z_ptr) * E4M3_SCALE_UNBIAS
    if FACTORS:
        acc *= factor[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + n_in).to(tl.float32)[:, None]
    return acc


@triton.jit
def apply_gate(left, right, alpha, limit, GATE: tl.constexpr):
    """activation(left) * right; 4 is gpt-oss's."""
    if GATE == 1:
        return left / (1 + tl.exp(-left)) * right
    elif GATE == 2:
        return 0.5 * left * (1 + tl.erf(left * 0.7071067811865476)) * right
    elif GATE == 3:  # 0.5 (1 + tanh(u)) = sigmoid(2u)
        u = 1.5957691216057308 * (left + 0.044715 * left * left * left)
        return left / (1 + tl.exp(-u)) * right
    else:
        left = tl.where(left > limit, limit, left)
        right = tl.where(right > limit, limit, tl.where(right < -limit, -limit, right))
        return (right + 1) * left / (1 + tl.exp(-alpha * left))
