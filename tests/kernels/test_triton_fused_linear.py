"""Linears with a norm before, a gate between and a sum behind them, against the formula in float64."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_support import DEVICE, INTERPRETED  # isort: skip

from fulgurite.kernels.elementwise import ops
from fulgurite.kernels.gemm import triton_fused_linear, triton_gemv

ROWS = (1, 3, 16, 17, 33) if INTERPRETED else (1, 2, 3, 4, 5, 16, 17, 33, 64, 65, 128)
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]


def tensors(m, n, k, dtype):
    generator = torch.Generator().manual_seed(m * n + k)
    shapes = {"x": (m, k), "weight": (n, k), "up": (n, k), "bias": (n,), "up_bias": (n,),
              "norm": (k,), "residual": (m, n)}  # fmt: skip
    return {
        name: torch.randn(shape, generator=generator).to(dtype).to(DEVICE)
        for name, shape in shapes.items()
    }


def formula(x, weight, up=None, bias=None, up_bias=None, norm=None, residual=None, activation="",
            eps=0.0, offset=0.0):  # fmt: skip
    if norm is not None:
        x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (norm + offset)
    y = torch.nn.functional.linear(x, weight, bias)
    if up is not None:
        y = ops.ACTIVATIONS[activation](y) * torch.nn.functional.linear(x, up, up_bias)
    return y if residual is None else y + residual


def check(given, **options):
    wide = {name: tensor.double() for name, tensor in given.items()}
    wanted = formula(**wide, **options)
    got = triton_fused_linear.linear(**given, **options)
    assert got.dtype == given["x"].dtype and got.shape == wanted.shape
    # each product's sum of K terms; 16 bits: x * norm is rounded to them, too
    eps = torch.finfo(got.dtype).eps
    scale = wanted.abs().max() * (2 if got.dtype == torch.float32 else 1)
    assert (got.double() - wanted).abs().max() <= 8 * eps * scale


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", ROWS)
def test_plain_with_bias_and_residual(m, dtype):
    given = tensors(m, 37, 130, dtype)
    check({name: given[name] for name in ("x", "weight")})
    check({name: given[name] for name in ("x", "weight", "bias", "residual")})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", ROWS)
def test_norm(m, dtype):
    given = tensors(m, 50, 192, dtype)
    check({name: given[name] for name in ("x", "weight", "norm")}, eps=1e-5)
    check({name: given[name] for name in ("x", "weight", "norm", "bias")}, eps=1e-5, offset=1.0)


@pytest.mark.parametrize("activation", list(ops.ACTIVATIONS))
@pytest.mark.parametrize("m", [1, 18])
def test_gate(m, activation):
    given = tensors(m, 40, 67, torch.float32)
    names = ("x", "weight", "up", "norm")
    check({name: given[name] for name in names}, activation=activation, eps=1e-6)
    check({name: given[name] for name in (*names, "bias", "up_bias")}, activation=activation)


@pytest.mark.parametrize("held", [0, 1, 2, 3])
@pytest.mark.parametrize("k", [128, 300, 1024])
def test_steps_held_and_walked(k, held, monkeypatch):
    """All of the weight at once, its beginning only, or none of it before the walk."""
    monkeypatch.setattr(
        triton_fused_linear, "row_plan", lambda *_: triton_gemv.RowPlan(4, 128, 4, 2, held)
    )
    few = triton_fused_linear.FewPlan(8, 32, 4, 2, held)
    monkeypatch.setattr(triton_fused_linear, "few_plan", lambda *_: few)
    for m in (1, 2):
        given = tensors(m, 11, k, torch.float32)
        names = ("x", "weight", "up", "norm", "bias", "up_bias", "residual")
        check({name: given[name] for name in names}, activation="silu", eps=1e-6)
        check({name: given[name] for name in ("x", "weight")})


@pytest.mark.parametrize("gated", [False, True])
def test_programs_that_share_a_tile(gated, monkeypatch):
    monkeypatch.setattr(
        triton_fused_linear,
        "tile_plan",
        lambda *_: triton_fused_linear.TilePlan(32, 64, 32, 3, 4, 2),
    )
    given = tensors(20, 70, 300, torch.float32)
    names = ("x", "weight", "residual", *(("up",) if gated else ()))
    check({name: given[name] for name in names}, activation="silu" if gated else "")


def test_rows_apart_and_what_is_left_to_others():
    given = tensors(3, 16, 64, torch.float32)
    wide = torch.randn(3, 200, device=DEVICE)
    check({**{name: given[name] for name in ("weight", "residual")}, "x": wide[:, 40:104]})
    x, weight = given["x"], given["weight"]
    assert triton_fused_linear.linear(x[:0], weight) is NotImplemented
    assert triton_fused_linear.linear(x.repeat(50, 1), weight) is NotImplemented
    assert triton_fused_linear.linear(x.double(), weight.double()) is NotImplemented


def test_float16_is_normed_before_it_is_multiplied():
    """x * norm alone would be infinite."""
    given = tensors(2, 16, 64, torch.float16)
    given = {"x": given["x"] * 1e4, "weight": given["weight"] / 8, "norm": given["norm"] + 40}
    check(given, eps=1e-6)


def test_a_large_norm_is_not_cut_off():
    """Sums of squares are kept in float32 whatever the rows are."""
    given = tensors(2, 16, 256, torch.float32)
    given = {"x": given["x"] * 1e15, "weight": given["weight"], "norm": given["norm"]}
    check(given, eps=1e-6)
