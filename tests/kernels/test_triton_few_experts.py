"""The experts of a few tokens, against the definition in float64."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_support import DEVICE, INTERPRETED  # isort: skip

from fulgurite.kernels.moe import triton_small_batch
from fulgurite.kernels.moe.ops import GatedActivation
from fulgurite.kernels.tuning.moe import MAX_SMALL_BATCH
from fulgurite.quant import quantize

SILU = GatedActivation("silu")
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]


def tensors(tokens, per_token, experts, hidden, inner, dtype):
    generator = torch.Generator().manual_seed(tokens + hidden)
    shapes = {"x": (tokens, hidden), "gate_up": (experts, 2 * inner, hidden),
              "down": (experts, hidden, inner), "residual": (tokens, hidden)}  # fmt: skip
    made = {
        name: torch.randn(shape, generator=generator).to(dtype).to(DEVICE)
        for name, shape in shapes.items()
    }
    made["chosen"] = torch.stack(
        [torch.randperm(experts, generator=generator)[:per_token] for _ in range(tokens)]
    ).to(DEVICE)
    made["weights"] = torch.rand(tokens, per_token, generator=generator).to(DEVICE)
    return made


def definition(x, chosen, weights, gate_up, down, gate, norm, residual, dtype):
    """One pair after the other; h is rounded as the kernels round it."""
    x = x.double()
    if norm is not None:
        scale, eps, offset = norm
        x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (scale.double() + offset)
    out = residual.double().clone() if residual is not None else torch.zeros_like(x)
    for token in range(len(x)):
        for expert, weight in zip(chosen[token].tolist(), weights[token].tolist(), strict=True):
            if 0 <= expert < len(down):
                sums = gate_up[expert].double() @ x[token]
                h = gate(sums).to(dtype).double()
                out[token] += weight * (down[expert].double() @ h)
    return out


def check(given, gate=SILU, residual=True, norm=None):
    given = {**given, "residual": given["residual"] if residual else None}
    dtype = given["x"].dtype
    wanted = definition(**given, gate=gate, norm=norm, dtype=dtype)
    got = triton_small_batch.run_experts(
        given["x"], given["chosen"], given["weights"], given["gate_up"], given["down"],
        gate.kind, gate.alpha, gate.limit, norm, given["residual"],
    )  # fmt: skip
    assert got.dtype == dtype
    error = (got.double() - wanted).abs().max()
    assert error <= 16 * torch.finfo(dtype).eps * wanted.abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "tokens, per_token, experts", [(1, 8, 16), (1, 1, 1), (2, 3, 5), (2, 2, 2)]
)
def test_the_sum_of_their_experts(tokens, per_token, experts, dtype):
    check(tensors(tokens, per_token, experts, 512, 256, dtype))


@pytest.mark.parametrize("hidden, inner", [(1, 1), (67, 13), (130, 300)])
def test_odd_sizes(hidden, inner):
    check(tensors(2, 3, 4, hidden, inner, torch.float32))
    check(tensors(2, 3, 4, hidden, inner, torch.float32), residual=False)


@pytest.mark.parametrize("hidden", [67, 512])
def test_norm(hidden):
    given = tensors(2, 3, 4, hidden, 32, torch.float32)
    scale = torch.randn(hidden).to(DEVICE)
    check(given, norm=(scale, 1e-5, 0.0))
    check(given, norm=(scale, 1e-2, 1.0))


def test_gates():
    given = tensors(1, 2, 3, 64, 32, torch.float32)
    for gate in (
        GatedActivation("gelu"),
        GatedActivation("gelu_pytorch_tanh"),
        GatedActivation("clamped", 1.702, 0.7),
    ):
        check(given, gate)


def test_numbers_of_no_expert_add_nothing():
    given = tensors(2, 4, 4, 32, 256, torch.float32)
    given["chosen"][0, 1], given["chosen"][1, 0] = -1, 4
    check(given)
    given["down"][:] = float("nan")
    given["chosen"][:] = 99
    got = triton_small_batch.run_experts(
        given["x"], given["chosen"], given["weights"], given["gate_up"], given["down"],
        "silu", 0.0, 0.0, None, given["residual"],
    )  # fmt: skip
    assert torch.equal(got, given["residual"])


def test_what_is_left_to_others():
    given = tensors(MAX_SMALL_BATCH + 1, 2, 4, 32, 16, torch.float32)
    rest = (given["gate_up"], given["down"], "silu", 0.0, 0.0, None, None)
    routes = (given["chosen"], given["weights"])
    assert triton_small_batch.run_experts(given["x"], *routes, *rest) is NotImplemented
    assert triton_small_batch.run_experts(given["x"][:0], *routes, *rest) is NotImplemented
    assert triton_small_batch.run_experts(given["x"][:1].double(), *routes, *rest) is NotImplemented
    turned = (given["gate_up"].mT.contiguous().mT, *rest[1:])
    assert triton_small_batch.run_experts(given["x"][:1], *routes, *turned) is NotImplemented


# ---- FP8 rows times FP8 weights ------------------------------------------------------------------

ROWS, TILES = "fp8_e4m3_1x128", "fp8_e4m3_128x128"
PLAIN = ("none", "none")


def in_blocks(x):
    return quantize(x.float(), ROWS).dequantize(torch.float32).double()


def packed_layer(experts, hidden, inner):
    """Weights packed, the same decoded, and a token of numbers that differ much."""
    shapes = (experts, 2 * inner, hidden), (experts, hidden, inner)
    packed = [quantize(torch.randn(shape) / shape[2] ** 0.5, TILES) for shape in shapes]
    x = torch.randn(1, hidden).bfloat16()
    x[:, : hidden // 2] *= 30
    return packed, [weight.dequantize(torch.float32).double() for weight in packed], x


@pytest.mark.parametrize("hidden, inner", [(128, 128), (384, 256), (200, 130)])
def test_rows_are_rounded_to_fp8(hidden, inner):
    packed, (up, down), x = packed_layer(4, hidden, inner)
    check_rounding(packed, up, down, x, (ROWS, "none"))


def test_what_is_between_the_matmuls_is_rounded_to_fp8():
    """x and the first weight are such that it is exact before: the interpreter cuts bits off."""
    _, (_, down), x = packed_layer(4, 128, 256)
    up = torch.zeros(4, 512, 128)
    up[:, :256, 0], up[:, ::128, 1] = 0.25, 448.0  # the gate is 112 for all; blocks' scales are 1
    up[:, 256:, 0] = torch.randint(-8, 9, (4, 256))
    x = torch.zeros(1, 128).bfloat16()
    x[0, 0] = 448.0
    packed = [quantize(weight.float(), TILES) for weight in (up, down)]
    up, down = (weight.dequantize(torch.float32).double() for weight in packed)
    check_rounding(packed, up, down, x, ("none", ROWS))
    check_rounding(packed, up, down, x, (ROWS, ROWS))


def check_rounding(packed, up, down, x, activations):
    """Near the definition, and not near what it is without rounding."""
    chosen, weights = torch.tensor([[2, 0, 7]]), torch.rand(1, 3)
    given = [t.to(DEVICE) for t in (x, chosen, weights, *packed)]

    def ours(*activations):
        out = triton_small_batch.run_experts(*given, "silu", 0.0, 0.0, None, None, activations)
        return out[0].double().cpu()

    def definition(of_x, of_h):
        h = of_h(SILU(up[chosen[0, :2]] @ of_x(x)[0]).bfloat16())
        return (weights[0, :2, None] * (down[chosen[0, :2]] @ h[:, :, None])[..., 0]).sum(0)

    def error(found, wanted):
        return ((found - wanted).norm() / wanted.norm()).item()

    def rounding(format):
        return torch.Tensor.double if format == "none" else in_blocks

    neither = definition(torch.Tensor.double, torch.Tensor.double)
    wanted = definition(*map(rounding, activations))
    assert error(ours("none", "none"), neither) < 0.01
    assert error(ours(*activations), wanted) < 0.01 < error(neither, wanted)


def test_scales_of_powers_of_two_change_nothing():
    """Rows whose largest number is 448 are codes already: the same bits with and without rounding."""
    packed, _, x = packed_layer(4, 256, 128)
    x = (x.float().clamp(-2, 2).mul(4).round() * 8).bfloat16()
    x[:, ::128] = 448.0
    given = [t.to(DEVICE) for t in (x, torch.tensor([[1, 3]]), torch.rand(1, 2), *packed)]
    rest = ("silu", 0.0, 0.0, None, None)
    assert torch.equal(in_blocks(x), x.double())
    rounded = triton_small_batch.run_experts(*given, *rest, (ROWS, "none"))
    assert torch.equal(rounded, triton_small_batch.run_experts(*given, *rest, PLAIN))


def test_rounding_asks_for_weights_in_the_same_blocks():
    packed = [quantize(torch.randn(4, n, 128), "fp8_e4m3_row").to(DEVICE) for n in (256, 128)]
    x, chosen = torch.randn(1, 128).bfloat16().to(DEVICE), torch.zeros(1, 2, dtype=torch.int64)
    given = (
        x,
        chosen.to(DEVICE),
        torch.rand(1, 2).to(DEVICE),
        *packed,
        "silu",
        0.0,
        0.0,
        None,
        None,
    )
    assert triton_small_batch.run_experts(*given, (ROWS, ROWS)) is NotImplemented
    assert triton_small_batch.run_experts(*given, PLAIN) is not NotImplemented
