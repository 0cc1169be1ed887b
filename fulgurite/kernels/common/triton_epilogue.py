# mypy: allow-untyped-defs, allow-incomplete-defs
"""Device functions: the epilogue of GEMM kernels whose accumulator is out.T, [BLOCK_N, BLOCK_M].

    out = gate(row_weight * (acc * scale * tensor_scale) + bias)

In: float32 accumulators. Out: the same, scaled, biased and gated.
"""

from __future__ import annotations

from fulgurite.kernels.common.triton_dequantize import E4M3_SCALE_UNBIAS
from fulgurite.kernels.common.triton_import import tl, triton


@triton.jit
def apply_scales_and_bias(
    acc, s_ptr, z_ptr, bias_ptr, n_in, w_scale_n, row_weight,
    SCALING: tl.constexpr, TENSOR_SCALE: tl.constexpr, ROW_WEIGHTS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Everything in front of the gate: scales, the weight of each row of x, the bias."""
    if SCALING == "epilogue":
        acc *= tl.load(s_ptr + n_in * w_scale_n).to(tl.float32)[:, None]
    if TENSOR_SCALE:
        acc *= tl.load(z_ptr) * E4M3_SCALE_UNBIAS
    if ROW_WEIGHTS:
        acc *= row_weight[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + n_in).to(tl.float32)[:, None]
    return acc


@triton.jit
def apply_gate(gate, up, alpha, limit, GATE: tl.constexpr):
    """activation(gate) * up; GATE is a number of `gated_activation.GATE_IDS`."""
    if GATE == 1:
        return gate / (1 + tl.exp(-gate)) * up
    elif GATE == 2:
        return 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476)) * up
    elif GATE == 3:  # 0.5 (1 + tanh(u)) = sigmoid(2u)
        u = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        return gate / (1 + tl.exp(-u)) * up
    else:  # gpt-oss
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        return (up + 1) * gate / (1 + tl.exp(-alpha * gate))
