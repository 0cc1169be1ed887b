"""Fused elementwise operators: the C++ kernels against plain torch in float64."""

from __future__ import annotations

import pytest
import torch

from fulgurite import native
from fulgurite.kernels.elementwise import ops

pytestmark = pytest.mark.skipif(native.find_compiler() is None, reason="needs a C++ compiler")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 15, 16, 17, 63, 64, 65, 576]


def assert_close(out, reference, *args):
    """Our error is at most twice that of plain torch, both against float64."""
    exact = reference(*(a.double() if isinstance(a, torch.Tensor) else a for a in args))
    eager = reference(*args)
    assert out.dtype == eager.dtype and out.shape == eager.shape
    ours, theirs = ((x.double() - exact).abs().max() for x in (out, eager))
    floor = torch.finfo(out.dtype).eps * exact.abs().max()
    assert ours <= 2 * theirs + floor, f"{ours} against {theirs}"


def exact_norm(x, weight, eps, offset):
    if x.dtype != torch.float64:
        return ops.rms_norm_reference(x, weight, eps, offset)
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (weight + offset)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(size, dtype, offset):
    x, weight = torch.randn(5, size).to(dtype), torch.randn(size)
    with torch.no_grad():
        assert_close(ops.rms_norm(x, weight, 1e-5, offset), exact_norm, x, weight, 1e-5, offset)


def test_rms_norm_of_strided_rows():
    x = torch.randn(3, 7, 40)
    with torch.no_grad():
        for part in (x, x[:, 2], x[:, :, :24], x[:, ::2], x[:, :5, 3:20]):
            weight = torch.randn(part.shape[-1]).bfloat16()
            assert_close(ops.rms_norm(part, weight, 1e-6), exact_norm, part, weight, 1e-6, 0.0)


def exact_rope(x, cos, sin, interleaved):
    if x.dtype != torch.float64:
        return ops.apply_rope_reference(x, cos, sin, interleaved)
    pairs = cos.shape[-1]
    out = x.clone()
    for i in range(pairs):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + pairs)
        out[..., a] = x[..., a] * cos[..., i] - x[..., b] * sin[..., i]
        out[..., b] = x[..., b] * cos[..., i] + x[..., a] * sin[..., i]
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size, pairs", [(64, 32), (64, 20), (34, 17), (2, 1), (9, 3)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_apply_rope(size, pairs, dtype, interleaved):
    x = torch.randn(4, 6, size).to(dtype)[:, ::2]
    cos, sin = torch.randn(2, 4, 1, pairs).unbind(0)
    with torch.no_grad():
        out = ops.apply_rope(x, cos, sin, interleaved)
        assert_close(out, exact_rope, x, cos, sin, interleaved)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("operation", ["add", *ops.ACTIVATIONS])
@pytest.mark.parametrize("size", [1, 17, 192])
def test_binary(operation, size, dtype):
    both = torch.randn(5, 2 * size).mul(4).to(dtype)
    x, y = both.chunk(2, dim=-1)
    with torch.no_grad():
        out = ops.add(x, y) if operation == "add" else ops.activation_and_mul(x, y, operation)
    assert_close(out, ops.elementwise_binary_reference, x, y, operation)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_scaled(dtype):
    x, y = torch.randn(5, 17).to(dtype), torch.randn(5, 17).to(dtype)
    with torch.no_grad():
        out = ops.add(x, y, 0.22)
    assert_close(out, ops.elementwise_binary_reference, x, y, "add", 0.22)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [2, 17, 192])
def test_one_factor_a_row(size, dtype):
    x, y = torch.randn(5, 3).to(dtype)[:, :1], torch.randn(5, size).to(dtype)
    with torch.no_grad():
        out = ops.activation_and_mul(x, y, "sigmoid")
        alone = ops.activation_and_mul(x[2:3], y[2:3], "sigmoid")
    assert_close(out, ops.elementwise_binary_reference, x, y, "sigmoid")
    assert torch.equal(out[2:3], alone)


@pytest.mark.parametrize("operation", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_activations_of_extreme_values(operation):
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), -200.0, 200.0, -0.0, 1e-30])
    with torch.no_grad():
        out, reference = (
            ops.activation_and_mul(x, torch.ones(7), operation),
            ops.ACTIVATIONS[operation](x),
        )
    same = (
        (out == reference) | (out.isnan() & reference.isnan()) | ((out - reference).abs() < 1e-30)
    )
    assert same[[0, 3, 4, 5, 6]].all()
    assert out[1] == x[1]  # torch's gelu returns NaN here; at -inf some activations do


def test_empty():
    with torch.no_grad():
        assert ops.add(torch.zeros(0, 5), torch.zeros(0, 5)).shape == (0, 5)
        assert ops.rms_norm(torch.zeros(0, 5), torch.ones(5), 1e-6).shape == (0, 5)


def test_unsupported_dtypes_run_in_torch():
    x = torch.randn(3, 4, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(ops.add(x, x), x + x)
        assert torch.equal(ops.add(x, torch.ones(4).double()), x + 1)


def test_invalid_shapes_raise_torch_errors():
    with torch.no_grad(), pytest.raises(RuntimeError, match="normalized_shape"):
        ops.rms_norm(torch.randn(2, 64), torch.ones(16), 1e-6)
    with torch.no_grad(), pytest.raises(RuntimeError, match="must match"):
        ops.apply_rope(torch.randn(2, 3, 64), torch.ones(2, 1, 32), torch.ones(2, 1, 16), False)


def test_gradients_flow_through_torch_ops():
    x = torch.randn(2, 8, requires_grad=True)
    ops.rms_norm(ops.activation_and_mul(x, x, "silu"), torch.ones(8), 1e-6).sum().backward()
    assert x.grad is not None
