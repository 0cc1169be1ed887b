"""The experts of small batches, against the definition in float64."""

from __future__ import annotations

import pytest
import torch

from fulgurite.kernels.elementwise.gated_activation import GatedActivation
from fulgurite.kernels.moe.router_config import RmsNormArgs, Routes
from fulgurite.kernels.moe.small_batch import SmallBatchArgs
from fulgurite.kernels.moe.triton_small_batch import run_experts
from fulgurite.kernels.tuning import heuristics_for
from fulgurite.quant import quantize
from tests.kernels.triton_support import DEVICE, INTERPRETED

SILU = GatedActivation("silu")
UNQUANTIZED = ("none", "none")
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]


def make_tensors(tokens, top_k, experts, hidden, intermediate, dtype):
    generator = torch.Generator().manual_seed(tokens + hidden)
    shapes = {"x": (tokens, hidden), "gate_up": (experts, 2 * intermediate, hidden),
              "down": (experts, hidden, intermediate), "residual": (tokens, hidden)}  # fmt: skip
    tensors = {
        name: torch.randn(shape, generator=generator).to(dtype).to(DEVICE)
        for name, shape in shapes.items()
    }
    tensors["selected"] = torch.stack(
        [torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)]
    ).to(DEVICE)
    tensors["weights"] = torch.rand(tokens, top_k, generator=generator).to(DEVICE)
    return tensors


def definition(x, selected, weights, gate_up, down, gate, norm, residual, dtype):
    """One pair after the other; h is rounded as in the kernels."""
    x = x.double()
    if norm is not None:
        scale, eps, offset = norm
        x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (scale.double() + offset)
    out = residual.double().clone() if residual is not None else torch.zeros_like(x)
    for token in range(len(x)):
        for expert, weight in zip(selected[token].tolist(), weights[token].tolist(), strict=True):
            if 0 <= expert < len(down):
                sums = gate_up[expert].double() @ x[token]
                h = gate(sums).to(dtype).double()
                out[token] += weight * (down[expert].double() @ h)
    return out


def run(tensors, gate=SILU, norm=None, activations=UNQUANTIZED):
    x, routes = tensors["x"], Routes(tensors["weights"], tensors["selected"])
    norm = None if norm is None else RmsNormArgs(*norm)
    weights = (tensors["gate_up"], tensors["down"])
    residual = tensors.get("residual")
    return run_experts(SmallBatchArgs(x, routes, *weights, gate, norm, residual, activations))


def check(tensors, gate=SILU, residual=True, norm=None):
    tensors = {**tensors, "residual": tensors["residual"] if residual else None}
    dtype = tensors["x"].dtype
    expected = definition(**tensors, gate=gate, norm=norm, dtype=dtype)
    actual = run(tensors, gate, norm)
    assert actual.dtype == dtype
    error = (actual.double() - expected).abs().max()
    assert error <= 16 * torch.finfo(dtype).eps * expected.abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens, top_k, experts", [(1, 8, 16), (1, 1, 1), (2, 3, 5), (2, 2, 2)])
def test_the_sum_of_their_experts(tokens, top_k, experts, dtype):
    check(make_tensors(tokens, top_k, experts, 512, 256, dtype))


@pytest.mark.parametrize("hidden, intermediate", [(1, 1), (67, 13), (130, 300)])
def test_odd_sizes(hidden, intermediate):
    check(make_tensors(2, 3, 4, hidden, intermediate, torch.float32))
    check(make_tensors(2, 3, 4, hidden, intermediate, torch.float32), residual=False)


@pytest.mark.parametrize("hidden", [67, 512])
def test_norm(hidden):
    tensors = make_tensors(2, 3, 4, hidden, 32, torch.float32)
    scale = torch.randn(hidden).to(DEVICE)
    check(tensors, norm=(scale, 1e-5, 0.0))
    check(tensors, norm=(scale, 1e-2, 1.0))


def test_gates():
    tensors = make_tensors(1, 2, 3, 64, 32, torch.float32)
    for gate in (
        GatedActivation("gelu"),
        GatedActivation("gelu_pytorch_tanh"),
        GatedActivation("clamped", 1.702, 0.7),
    ):
        check(tensors, gate)


def test_indices_without_an_expert_add_nothing():
    tensors = make_tensors(2, 4, 4, 32, 256, torch.float32)
    tensors["selected"][0, 1], tensors["selected"][1, 0] = -1, 4
    check(tensors)
    tensors["down"][:] = float("nan")
    tensors["selected"][:] = 99
    assert torch.equal(run(tensors), tensors["residual"])


def test_unsupported_calls():
    max_small_batch = heuristics_for(torch.device(DEVICE)).max_small_batch
    tensors = make_tensors(max_small_batch + 1, 2, 4, 32, 16, torch.float32)
    x, transposed = tensors["x"], tensors["gate_up"].mT.contiguous().mT
    assert run(tensors) is NotImplemented
    assert run({**tensors, "x": x[:0]}) is NotImplemented
    assert run({**tensors, "x": x[:1].double()}) is NotImplemented
    assert run({**tensors, "x": x[:1], "gate_up": transposed}) is NotImplemented


# ---- FP8 rows times FP8 weights ------------------------------------------------------------------

ACTIVATION_FORMAT, WEIGHT_FORMAT = "fp8_e4m3_1x128", "fp8_e4m3_128x128"


def fake_quantize(x):
    return quantize(x.float(), ACTIVATION_FORMAT).dequantize(torch.float32).double()


def quantized_layer(experts, hidden, intermediate):
    """Quantized weights, the same dequantized, and a token of values of different magnitudes."""
    shapes = (experts, 2 * intermediate, hidden), (experts, hidden, intermediate)
    packed = [quantize(torch.randn(shape) / shape[2] ** 0.5, WEIGHT_FORMAT) for shape in shapes]
    x = torch.randn(1, hidden).bfloat16()
    x[:, : hidden // 2] *= 30
    return packed, [weight.dequantize(torch.float32).double() for weight in packed], x


@pytest.mark.parametrize("hidden, intermediate", [(128, 128), (384, 256), (200, 130)])
def test_rows_are_quantized_to_fp8(hidden, intermediate):
    packed, (up, down), x = quantized_layer(4, hidden, intermediate)
    check_quantization(packed, up, down, x, (ACTIVATION_FORMAT, "none"))


def test_rows_between_the_gemms_are_quantized_to_fp8():
    """x and the first weight are such that h is exact: the interpreter truncates."""
    _, (_, down), x = quantized_layer(4, 128, 256)
    up = torch.zeros(4, 512, 128)
    up[:, :256, 0], up[:, ::128, 1] = 0.25, 448.0  # the gate is 112 for all; blocks' scales are 1
    up[:, 256:, 0] = torch.randint(-8, 9, (4, 256))
    x = torch.zeros(1, 128).bfloat16()
    x[0, 0] = 448.0
    packed = [quantize(weight.float(), WEIGHT_FORMAT) for weight in (up, down)]
    up, down = (weight.dequantize(torch.float32).double() for weight in packed)
    check_quantization(packed, up, down, x, ("none", ACTIVATION_FORMAT))
    check_quantization(packed, up, down, x, (ACTIVATION_FORMAT, ACTIVATION_FORMAT))


def check_quantization(packed, up, down, x, activations):
    """Near the definition, and not near the definition without quantization."""
    selected, weights = torch.tensor([[2, 0, 7]]), torch.rand(1, 3)
    tensors = to_tensors(x, selected, weights, packed)

    def ours(*activations):
        return run(tensors, activations=activations)[0].double().cpu()

    def definition(of_x, of_h):
        h = of_h(SILU(up[selected[0, :2]] @ of_x(x)[0]).bfloat16())
        return (weights[0, :2, None] * (down[selected[0, :2]] @ h[:, :, None])[..., 0]).sum(0)

    def error(actual, expected):
        return ((actual - expected).norm() / expected.norm()).item()

    def rounding(format):
        return torch.Tensor.double if format == "none" else fake_quantize

    neither = definition(torch.Tensor.double, torch.Tensor.double)
    expected = definition(*map(rounding, activations))
    assert error(ours("none", "none"), neither) < 0.01
    assert error(ours(*activations), expected) < 0.01 < error(neither, expected)


def to_tensors(x, selected, weights, packed):
    names = ("x", "selected", "weights", "gate_up", "down")
    given = (x, selected, weights, *packed)
    return {name: tensor.to(DEVICE) for name, tensor in zip(names, given, strict=True)}


def test_rows_that_are_fp8_already_do_not_change():
    """Rows whose largest value is 448 are codes: the same bits with and without quantization."""
    packed, _, x = quantized_layer(4, 256, 128)
    x = (x.float().clamp(-2, 2).mul(4).round() * 8).bfloat16()
    x[:, ::128] = 448.0
    tensors = to_tensors(x, torch.tensor([[1, 3]]), torch.rand(1, 2), packed)
    assert torch.equal(fake_quantize(x), x.double())
    quantized = run(tensors, activations=(ACTIVATION_FORMAT, "none"))
    assert torch.equal(quantized, run(tensors))


def test_quantized_rows_need_weights_in_the_same_blocks():
    packed = [quantize(torch.randn(4, n, 128), "fp8_e4m3_row") for n in (256, 128)]
    x, selected = torch.randn(1, 128).bfloat16(), torch.zeros(1, 2, dtype=torch.int64)
    tensors = to_tensors(x, selected, torch.rand(1, 2), packed)
    formats = (ACTIVATION_FORMAT, ACTIVATION_FORMAT)
    assert run(tensors, activations=formats) is NotImplemented
    assert run(tensors) is not NotImplemented
