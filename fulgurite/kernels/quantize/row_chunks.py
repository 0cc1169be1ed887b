"""Quantize a weight a few rows at a time, so that little memory is needed besides weight and
result.

In: a weight [N, K] or a stack [E, N, K] of experts, and a format. Out: the same `QuantTensor` as
`quantize` returns, and its signal-to-quantization-noise ratio (SQNR) in decibels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fulgurite.kernels.quantize.ops import quantize_op
from fulgurite.quant import QuantTensor
from fulgurite.quant.codecs.blocks import block_amax, compute_scale
from fulgurite.quant.format import E2M1, E4M3, WHOLE_DIM, Format
from fulgurite.quant.shapes import check_shape, data_shape, scale_shape

CHUNK_ELEMENTS = 4 << 20  # elements of a chunk
MAX_SCALE_ROWS = 128  # the largest number of rows that share a scale


def quantize_in_row_chunks(weight: Tensor, format: Format) -> QuantTensor:
    """`quantize`, a few rows at a time."""
    check_shape(format, weight.shape)
    data = weight.new_empty(data_shape(format, weight.shape), dtype=format.data_dtype)
    scales = {
        scale.name: weight.new_empty(scale_shape(scale, weight.shape), dtype=scale.dtype)
        for scale in format.separate_scales
    }
    if weight.dim() == 2:
        _quantize_matrix_into(weight, format, data, scales)
    else:
        for expert in range(weight.shape[0]):
            levels = {name: values[expert] for name, values in scales.items()}
            _quantize_matrix_into(weight[expert], format, data[expert], levels)
    return QuantTensor(format, data, scales, weight.dtype)


def _quantize_matrix_into(
    weight: Tensor, format: Format, data: Tensor, scales: dict[str, Tensor]
) -> None:
    static = _compute_tensor_scale(weight, format)
    for start, chunk in _iterate_row_chunks(weight):
        codes, *levels = quantize_op(chunk, format.name, static)
        data[start : start + chunk.shape[0]] = codes
        for scale, values in zip(format.separate_scales, levels, strict=True):
            first = start // scale.block[0] if scale.block[0] != WHOLE_DIM else 0
            scales[scale.name][first : first + values.shape[0]] = values


def _compute_tensor_scale(weight: Tensor, format: Format) -> Tensor | None:
    """The scale that all chunks share, if the format has one and there are several chunks."""
    per_tensor = [scale for scale in format.scales if scale.block == (WHOLE_DIM, WHOLE_DIM)]
    chunks = [chunk for _, chunk in _iterate_row_chunks(weight)] if per_tensor else []
    if len(chunks) < 2:
        return None
    amax = [block_amax(chunk.float(), per_tensor[0], keep_nan=False) for chunk in chunks]
    return compute_scale(torch.stack(amax).amax(0), tensor_scale_target(format))


def tensor_scale_target(format: Format) -> float:
    """The value that a per-tensor scale maps the largest element to."""
    if format.family == "nvfp4":
        return E4M3.max_value * E2M1.max_value
    return format.element.max_value


def _iterate_row_chunks(weight: Tensor) -> Iterator[tuple[int, Tensor]]:
    rows, columns = weight.shape
    scale_rows = CHUNK_ELEMENTS // max(1, columns) // MAX_SCALE_ROWS
    step = max(1, scale_rows) * MAX_SCALE_ROWS
    for start in range(0, rows, step):
        yield start, weight[start : start + step]


def compute_sqnr_in_row_chunks(weight: Tensor, packed: QuantTensor) -> float:
    """`compute_sqnr`, a few rows at a time."""
    signal = noise = 0.0
    experts = range(weight.shape[0]) if weight.dim() == 3 else ()
    pairs = [(weight[e], packed[e]) for e in experts] or [(weight, packed)]
    for dense, quantized in pairs:
        for start, chunk in _iterate_row_chunks(dense):
            original = chunk.double()
            dequantized = quantized[start : start + chunk.shape[0]].dequantize(torch.float32)
            signal += original.square().sum().item()
            noise += (original - dequantized).square().sum().item()
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf
