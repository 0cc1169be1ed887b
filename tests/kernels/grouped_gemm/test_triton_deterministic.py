"""Grouped GEMMs of deterministic mode: a row's bits depend neither on its expert's rows nor on others.

On a GPU, or in Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.triton_support import DEVICE, assert_same_bits  # isort: skip

from fulgurite.determinism import deterministic
from fulgurite.kernels.elementwise.gated_activation import GatedActivation
from fulgurite.kernels.grouped_gemm.args import DENSE, GroupedGemmArgs
from fulgurite.kernels.grouped_gemm.triton_grouped_gemm import grouped_gemm
from fulgurite.quant import quantize
from tests.kernels.grouped_gemm.cases import to_device, with_quantized_weight

ENDS = (300, 301, 430, 430)  # tiles of 128 rows; experts with many rows, one and none


@pytest.mark.parametrize("gate", ["none", "silu"])
@pytest.mark.parametrize(
    ("format", "activations"),
    [(DENSE, "none"), ("int4_g128", "none"), ("fp8_e4m3_row", "none"), ("int8", "int8")],
)
def test_rows(format: str, activations: str, gate: str) -> None:
    torch.manual_seed(3)
    size, columns = 256, 80
    x = torch.randn(ENDS[-1], size).bfloat16()
    dense = torch.randn(len(ENDS), columns, size) / 16
    offsets = torch.tensor(ENDS, dtype=torch.int32)
    args = GroupedGemmArgs(
        x, None, None, offsets, dense.bfloat16(), [], DENSE, None, activations,
        GatedActivation(gate, 1.7, 0.9),
    )  # fmt: skip
    if format != DENSE:
        args = with_quantized_weight(args, quantize(dense, format))
    args = to_device(args, DEVICE)
    with deterministic():
        whole = grouped_gemm(args)
        assert whole is not NotImplemented
        for start, count, expert in (
            (0, 1, 0),
            (250, 50, 0),
            (300, 1, 1),
            (301, 20, 2),
            (429, 1, 2),
        ):
            counts = [count if e == expert else 0 for e in range(len(ENDS))]
            ends = torch.tensor(counts, dtype=torch.int32).cumsum(0).int().to(args.x.device)
            part = replace(args, x=args.x[start : start + count].contiguous(), offsets=ends)
            message = f"{count} rows from {start} on"
            assert_same_bits(grouped_gemm(part), whole[start : start + count], message)
