"""NVFP4 training, emulated: operands are rounded to NVFP4 and multiplied in their own dtype.

    forward    y[m, n]  = q(x)[m, k] · q(w)[n, k]
    backward   gx[m, k] = q~(g)[m, n] · q(w)[n, k]
               gw[n, k] = q~(H g)[m, n]ᵀ · q(H x)[m, k]

    q    e2m1 elements; an e4m3 scale a block; a float32 scale a tensor. Blocks are 16 elements of the
         contracted dimension; of weights they are 16 x 16, so both of their uses round alike
    q~   the same with stochastic rounding: gradients stay unbiased
    H    a Hadamard transform of 16 rows with random signs: outliers of one row spread over 16

This is the published recipe (NVIDIA, "Pretraining Large Language Models with NVFP4", 2025). Experts
(`grouped`) use it for forward and gx; gw of experts stays in 16 bits, as with FP8: blocks of rows
would cross experts.

Random bits are a hash of an element's own bits and its place. So a restart repeats them and no state
is kept. Shapes: M rows (tokens); N outputs; K inputs; E experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fulgurite.kernels.grouped_gemm.ops import grouped_gemm, grouped_wgrad

BLOCK = 16
E2M1_MAX, E4M3_MAX, E4M3_SMALLEST = 6.0, 448.0, 2.0**-9
_SIGNS = 0b1011_0010_1101_0001  # of the Hadamard transform, one bit a row: drawn once


def round_nvfp4(x: Tensor, *, square: bool = False, stochastic: bool = False) -> Tensor:
    """x rounded to NVFP4 values, in float32; blocks along the last dimension, or 16 x 16.

    Sizes need not be multiples of 16. NaN and infinity stay, so that a faulty step is seen.
    """
    rows, columns = x.shape[-2:]
    padded = F.pad(x.float(), (0, -columns % BLOCK, 0, -rows % BLOCK if square else 0))
    blocks = padded.unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(-1, keepdim=True)
    if square:
        amax = amax.unflatten(-3, (-1, BLOCK)).amax(-3, keepdim=True)
        amax = amax.expand(*amax.shape[:-3], BLOCK, *amax.shape[-2:]).flatten(-4, -3)
    scale = _round_scale(amax, x, up=stochastic)
    scaled = blocks / scale
    codes = _round_stochastic(scaled) if stochastic else _round_nearest(scaled)
    return (codes * scale).flatten(-2)[..., :rows, :columns]


def _round_scale(amax: Tensor, x: Tensor, up: bool) -> Tensor:
    """The scale of each block: e4m3 times the scale of the tensor (one an expert, if 3-D).

    `up`: e4m3 is not below the exact scale. Then nothing saturates, which would bias gradients.
    """
    whole = x.float().abs().amax((-2, -1)) if x.numel() else x.new_zeros(x.shape[:-2])
    tensor_scale = torch.where(whole > 0, whole / (E4M3_MAX * E2M1_MAX), 1.0)
    tensor_scale = tensor_scale.float().reshape(*tensor_scale.shape, 1, 1, 1)
    block_scale = (amax / E2M1_MAX / tensor_scale).clamp(E4M3_SMALLEST, E4M3_MAX)
    block_scale = torch.where(amax > 0, block_scale, 1.0)
    rounded = block_scale.to(torch.float8_e4m3fn)
    if up:
        is_below = (rounded.float() < block_scale).to(torch.uint8)
        rounded = (rounded.view(torch.uint8) + is_below).view(torch.float8_e4m3fn)
    return rounded.float() * tensor_scale


def _step_size(magnitude: Tensor) -> Tensor:
    """The distance of e2m1 values: 0, 0.5, 1, 1.5, 2, 3, 4, 6."""
    return torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))


def _round_nearest(x: Tensor) -> Tensor:
    step = _step_size(x.abs())
    return _saturate((x / step).round() * step)


def _round_stochastic(x: Tensor) -> Tensor:
    """Up with the probability of the dropped part."""
    step = _step_size(x.abs())
    return _saturate((x / step + _uniform(x)).floor() * step)


def _saturate(x: Tensor) -> Tensor:
    return torch.where(x.isinf(), x, x.clamp(-E2M1_MAX, E2M1_MAX))


def _uniform(x: Tensor) -> Tensor:
    """Numbers in [0, 1) from the bits of x and the place of each element."""
    place = torch.arange(x.numel(), device=x.device, dtype=torch.int32).view(x.shape)
    bits = x.contiguous().view(torch.int32) + place * -0x61C88647
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * 0x7FEB352D
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * -0x7B935975
    bits = bits ^ ((bits >> 16) & 0xFFFF)
    return (bits & 0xFFFFFF).float() * 2.0**-24


# ---- random Hadamard transform -------------------------------------------------------------------


def rotate_rows(x_MK: Tensor) -> Tensor:
    """H x: each block of 16 rows times an orthogonal matrix; rows are padded with zeros.

    H = Hadamard(16) / 4 * diag(signs), as four stages of sums and differences.
    """
    padded = F.pad(x_MK.float(), (0, 0, 0, -x_MK.shape[0] % BLOCK))
    signs = 1 - 2 * ((_SIGNS >> torch.arange(BLOCK, device=x_MK.device)) & 1)
    blocks = padded.unflatten(0, (-1, BLOCK)) * signs[:, None]
    for stage in range(4):
        pairs = blocks.unflatten(1, (-1, 2, 2**stage))
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        blocks = torch.stack((low + high, low - high), 2).flatten(1, 3)
    return blocks.flatten(0, 1) / BLOCK**0.5


# ---- matmuls -------------------------------------------------------------------------------------


def nvfp4_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, forward and backward with operands of NVFP4."""
    out: Tensor = _NVFP4Linear.apply(x, weight, bias)
    return out


class _NVFP4Linear(torch.autograd.Function):
    """The formulas of the module's docstring. AOTAutograd traces through both methods."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        rows = round_nvfp4(x.reshape(-1, x.shape[-1])).to(x.dtype)
        y = F.linear(rows, round_nvfp4(weight, square=True).to(x.dtype), None)
        y = y if bias is None else y + bias.to(y.dtype)
        return y.reshape(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad_y = gradients[0].reshape(-1, gradients[0].shape[-1])
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            rounded = round_nvfp4(weight, square=True).to(grad_y.dtype)
            grad_x = round_nvfp4(grad_y, stochastic=True).to(grad_y.dtype) @ rounded
            grad_x = grad_x.reshape(x.shape).to(x.dtype)
        if ctx.needs_input_grad[1]:
            rows = x.reshape(-1, x.shape[-1])
            left = round_nvfp4(rotate_rows(grad_y).t(), stochastic=True).to(x.dtype)
            right = round_nvfp4(rotate_rows(rows).t()).to(x.dtype)
            grad_weight = (left @ right.t()).to(weight.dtype)
        if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
            grad_bias = grad_y.float().sum(0).to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias


def nvfp4_grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Each row times the weight [E, N, K] of its expert, forward and gradient of x in NVFP4."""
    out: Tensor = _NVFP4GroupedMM.apply(x, weight, offsets)
    return out


class _NVFP4GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, offsets)
        rounded = round_nvfp4(weight, square=True).to(x.dtype)
        return grouped_gemm(round_nvfp4(x).to(x.dtype), offsets, rounded)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, offsets = ctx.saved_tensors
        grad_y = gradients[0].contiguous()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            rounded = round_nvfp4(weight, square=True).to(grad_y.dtype).transpose(1, 2).contiguous()
            rows = round_nvfp4(grad_y, stochastic=True).to(grad_y.dtype)
            grad_x = grouped_gemm(rows, offsets, rounded)
        if ctx.needs_input_grad[1]:
            grad_weight = grouped_wgrad(grad_y, x, offsets).to(weight.dtype)
        return grad_x, grad_weight, None
