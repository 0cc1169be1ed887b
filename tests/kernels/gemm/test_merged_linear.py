"""Merged linears: the same results as the linears themselves, and only where they may merge."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fulgurite.determinism import deterministic
from fulgurite.kernels.gemm.fused_projections import fused_gate_up, fused_linears
from fulgurite.kernels.gemm.merged_linear import find_merged_linear, merge_quant_storage
from fulgurite.kernels.gemm.modules import QuantLinear
from fulgurite.quant import quantize

COLUMNS = 256
MERGEABLE = [
    "fp8_e4m3_row",
    "fp8_e4m3_128x128",
    "int8",
    "int4_g128",
    "mxfp8",
    "mxfp4",
    "nf4",
    "q4_0",
]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_linears(format: str, rows: tuple[int, ...], bias: bool = False) -> list[QuantLinear]:
    return [
        QuantLinear(
            quantize(random(n, COLUMNS, seed=n), format), random(n, seed=n + 1) if bias else None
        )
        for n in rows
    ]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("format", MERGEABLE)
def test_results_and_storage(format: str, bias: bool) -> None:
    linears = make_linears(format, (384, 128, 128), bias)
    x = random(5, COLUMNS)
    with torch.no_grad():
        expected = [linear(x) for linear in linears]
        weights = [linear.weight.dequantize() for linear in linears]
        merge_quant_storage(linears)
        merged = find_merged_linear(x, linears)
        assert merged is not None and merged.out_features == 640
        actual = fused_linears(x, linears)
        for linear, weight, result, alone in zip(linears, weights, actual, expected, strict=True):
            assert torch.equal(linear.weight.dequantize(), weight)
            torch.testing.assert_close(result, alone, rtol=1e-5, atol=1e-4)
            torch.testing.assert_close(linear(x), alone, rtol=0, atol=0)
    storage = merged.weight.packed.untyped_storage().data_ptr()
    assert all(m.weight.packed.untyped_storage().data_ptr() == storage for m in linears)


def test_gate_and_up() -> None:
    gate, up = make_linears("fp8_e4m3_row", (192, 192))
    x = random(3, COLUMNS)
    with torch.no_grad():
        expected = torch.nn.functional.silu(gate(x)) * up(x)
        merge_quant_storage((gate, up))
        assert find_merged_linear(x, (gate, up)) is not None
        torch.testing.assert_close(fused_gate_up(x, gate, up, "silu"), expected)


@pytest.mark.parametrize("format", ["nvfp4", "fp8_e4m3_tensor"])
def test_scales_of_whole_tensors_must_be_equal(format: str) -> None:
    linears = make_linears(format, (128, 128))  # the same data: the same scale
    merge_quant_storage(linears)
    assert find_merged_linear(random(1, COLUMNS), linears) is None  # gradients are enabled
    with torch.no_grad():
        assert find_merged_linear(random(1, COLUMNS), linears) is not None
        others = make_linears(format, (128, 256))
        merge_quant_storage(others)
        assert find_merged_linear(random(1, COLUMNS), others) is None


@torch.no_grad()
def test_what_does_not_merge() -> None:
    x = random(1, COLUMNS)
    first, second = make_linears("int8", (64, 64))
    other = make_linears("int4_g128", (64,))[0]
    quantized = QuantLinear(second.weight.data, None, "q8_0")
    static = QuantLinear(second.weight.data, None, None, torch.tensor(0.5))
    static.uses_static_scale = True
    biased = make_linears("int8", (64,), bias=True)[0]
    dense = torch.nn.Linear(COLUMNS, 64)
    odd = make_linears("fp8_e4m3_128x128", (100, 128))  # the first ends within a block
    for pair in ((first, other), (first, static), (first, biased), (first, dense), odd, (first,)):
        merge_quant_storage(pair)
        assert find_merged_linear(x, pair) is None
    first.activations = "none"
    merge_quant_storage((first, quantized))
    assert find_merged_linear(x, (first, quantized)) is None


@torch.no_grad()
def test_a_merged_linear_ends_with_its_weights() -> None:
    x = random(1, COLUMNS)
    linears = make_linears("int8", (64, 64))
    merge_quant_storage(linears)
    assert find_merged_linear(x, linears) is not None
    assert find_merged_linear(x, linears[:1]) is None
    with deterministic():  # rows of a weight don't depend on each other
        assert find_merged_linear(x, linears) is not None
    handle = linears[1].register_forward_hook(lambda *_: None)
    assert find_merged_linear(x, linears) is None
    handle.remove()
    linears[1].weight = torch.nn.Parameter(quantize(random(64, COLUMNS), "int8"), False)
    assert find_merged_linear(x, linears) is None
    assert torch.equal(fused_linears(x, linears)[1], linears[1](x))


@torch.no_grad()
def test_the_last_may_end_within_a_block_of_scales() -> None:
    """DeepSeek-V3: q_a_proj has 12 blocks of 128 rows, kv_a_proj 4 and a half."""
    linears = make_linears("fp8_e4m3_128x128", (384, 256, 192))
    x = random(3, COLUMNS)
    expected = [(linear.weight.dequantize(), linear(x)) for linear in linears]
    merge_quant_storage(linears)
    merged = find_merged_linear(x, linears)
    assert merged is not None and merged.weight.scale.shape[0] == 3 + 2 + 2
    for linear, out, (weight, alone) in zip(
        linears, fused_linears(x, linears), expected, strict=True
    ):
        assert torch.equal(linear.weight.dequantize(), weight)
        torch.testing.assert_close(out, alone, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(linear(x), alone, rtol=0, atol=0)


def test_scalar_input_scales() -> None:
    """Static FP8 checkpoints have one input scale a linear, as a scalar."""
    for input_scales, merges in (((0.5, 0.5), True), ((0.5, 0.25), False)):
        linears = make_linears("fp8_e4m3_row", (128, 128))
        for linear, scale in zip(linears, input_scales, strict=True):
            linear.input_scale = torch.tensor(scale)
            linear.uses_static_scale = True
        merge_quant_storage(linears)
        with torch.no_grad():
            assert (find_merged_linear(random(3, COLUMNS), linears) is not None) == merges
