"""Fused linears (norm, gated activation, residual) against the formula in float64."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_support import DEVICE, INTERPRETED  # isort: skip

from fulgurite.kernels.elementwise.ops import ACTIVATIONS
from fulgurite.kernels.gemm.triton_fused_linear import fused_linear
from fulgurite.kernels.tuning.config import LaunchConfig
from fulgurite.kernels.tuning.fused_linear import FusedLinearHeuristics, small_m_rows

ROWS = (1, 3, 16, 17, 33) if INTERPRETED else (1, 2, 3, 4, 5, 16, 17, 33, 64, 65, 128)
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]


def build(m, n, k, dtype):
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
        y = ACTIVATIONS[activation](y) * torch.nn.functional.linear(x, up, up_bias)
    return y if residual is None else y + residual


def assert_close(inputs, **options):
    wide = {name: tensor.double() for name, tensor in inputs.items()}
    expected = formula(**wide, **options)
    out = fused_linear(**inputs, **options)
    assert out.dtype == inputs["x"].dtype and out.shape == expected.shape
    # sums of K terms; in 16 bits x * norm is rounded as well
    eps = torch.finfo(out.dtype).eps
    scale = expected.abs().max() * (2 if out.dtype == torch.float32 else 1)
    assert (out.double() - expected).abs().max() <= 8 * eps * scale


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", ROWS)
def test_bias_and_residual(m, dtype):
    inputs = build(m, 37, 130, dtype)
    assert_close({name: inputs[name] for name in ("x", "weight")})
    assert_close({name: inputs[name] for name in ("x", "weight", "bias", "residual")})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", ROWS)
def test_norm(m, dtype):
    inputs = build(m, 50, 192, dtype)
    assert_close({name: inputs[name] for name in ("x", "weight", "norm")}, eps=1e-5)
    assert_close(
        {name: inputs[name] for name in ("x", "weight", "norm", "bias")}, eps=1e-5, offset=1.0
    )


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("m", [1, 18])
def test_gate_up(m, activation):
    inputs = build(m, 40, 67, torch.float32)
    names = ("x", "weight", "up", "norm")
    assert_close({name: inputs[name] for name in names}, activation=activation, eps=1e-6)
    assert_close(
        {name: inputs[name] for name in (*names, "bias", "up_bias")}, activation=activation
    )


@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
@pytest.mark.parametrize("k", [128, 300, 1024])
def test_prefetched_blocks(k, prefetch, monkeypatch):
    """All of the weight is prefetched, its beginning, or nothing."""

    def gemv_config(*_):
        return LaunchConfig(1, 4, 128, num_stages=2, prefetch_blocks=prefetch)

    def small_m_config(self, m, *_):
        return LaunchConfig(small_m_rows(m), 8, 32, num_stages=2, prefetch_blocks=prefetch)

    monkeypatch.setattr(FusedLinearHeuristics, "fused_gemv_config", gemv_config)
    monkeypatch.setattr(FusedLinearHeuristics, "fused_small_m_config", small_m_config)
    for m in (1, 2):
        inputs = build(m, 11, k, torch.float32)
        names = ("x", "weight", "up", "norm", "bias", "up_bias", "residual")
        assert_close({name: inputs[name] for name in names}, activation="silu", eps=1e-6)
        assert_close({name: inputs[name] for name in ("x", "weight")})


@pytest.mark.parametrize("gated", [False, True])
def test_split_k(gated, monkeypatch):
    config = LaunchConfig(32, 64, 32, num_stages=2, split_k=3)
    monkeypatch.setattr(FusedLinearHeuristics, "fused_gemm_config", lambda *_: config)
    inputs = build(20, 70, 300, torch.float32)
    names = ("x", "weight", "residual", *(("up",) if gated else ()))
    assert_close({name: inputs[name] for name in names}, activation="silu" if gated else "")


def test_strided_rows_and_unsupported_calls():
    inputs = build(3, 16, 64, torch.float32)
    wide = torch.randn(3, 200, device=DEVICE)
    assert_close({**{name: inputs[name] for name in ("weight", "residual")}, "x": wide[:, 40:104]})
    x, weight = inputs["x"], inputs["weight"]
    assert fused_linear(x[:0], weight) is NotImplemented
    assert fused_linear(x.repeat(50, 1), weight) is NotImplemented
    assert fused_linear(x.double(), weight.double()) is NotImplemented


def test_float16_is_normed_before_the_gemm():
    """x * norm alone would overflow."""
    inputs = build(2, 16, 64, torch.float16)
    inputs = {"x": inputs["x"] * 1e4, "weight": inputs["weight"] / 8, "norm": inputs["norm"] + 40}
    assert_close(inputs, eps=1e-6)


def test_large_values_do_not_overflow_the_norm():
    """Sums of squares are in float32."""
    inputs = build(2, 16, 256, torch.float32)
    inputs = {"x": inputs["x"] * 1e15, "weight": inputs["weight"], "norm": inputs["norm"]}
    assert_close(inputs, eps=1e-6)
