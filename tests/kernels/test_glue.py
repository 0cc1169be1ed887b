"""Norms, rotations, gates and sums: native against plain torch in float64."""

from __future__ import annotations

import pytest
import torch

from fulgurite import native
from fulgurite.kernels.elementwise import ops

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="needs a C++ compiler")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 15, 16, 17, 63, 64, 65, 576]


def close(found, plain, *args):
    """Our error is at most twice that of plain torch, both seen from float64."""
    exact = plain(*(a.double() if isinstance(a, torch.Tensor) else a for a in args))
    eager = plain(*args)
    assert found.dtype == eager.dtype and found.shape == eager.shape
    ours, theirs = ((x.double() - exact).abs().max() for x in (found, eager))
    floor = torch.finfo(found.dtype).eps * exact.abs().max()
    assert ours <= 2 * theirs + floor, f"{ours} against {theirs}"


def exact_norm(x, weight, eps, offset):
    if x.dtype != torch.float64:
        return ops.plain_rms_norm(x, weight, eps, offset)
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (weight + offset)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(size, dtype, offset):
    x, weight = torch.randn(5, size).to(dtype), torch.randn(size)
    with torch.no_grad():
        close(ops.rms_norm(x, weight, 1e-5, offset), exact_norm, x, weight, 1e-5, offset)


def test_rms_norm_of_heads_and_strided_rows():
    x = torch.randn(3, 7, 40)
    with torch.no_grad():
        for part in (x, x[:, 2], x[:, :, :24], x[:, ::2], x[:, :5, 3:20]):
            weight = torch.randn(part.shape[-1]).bfloat16()
            close(ops.rms_norm(part, weight, 1e-6), exact_norm, part, weight, 1e-6, 0.0)


def exact_rotate(x, cos, sin, interleaved):
    if x.dtype != torch.float64:
        return ops.plain_rotate(x, cos, sin, interleaved)
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
def test_rotate(size, pairs, dtype, interleaved):
    x = torch.randn(4, 6, size).to(dtype)[:, ::2]
    cos, sin = torch.randn(2, 4, 1, pairs).unbind(0)
    with torch.no_grad():
        found = ops.rotate(x, cos, sin, interleaved)
        close(found, exact_rotate, x, cos, sin, interleaved)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", ["add", "silu", "gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("size", [1, 17, 192])
def test_gates_and_sums(how, size, dtype):
    both = torch.randn(5, 2 * size).mul(4).to(dtype)
    x, y = both.chunk(2, dim=-1)
    with torch.no_grad():
        found = ops.add(x, y) if how == "add" else ops.gate(x, y, how)
    close(found, ops.plain_combine, x, y, how)


@pytest.mark.parametrize("how", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_gates_at_the_ends(how):
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), -200.0, 200.0, -0.0, 1e-30])
    with torch.no_grad():
        found, plain = ops.gate(x, torch.ones(7), how), ops.ACTIVATIONS[how](x)
    same = (found == plain) | (found.isnan() & plain.isnan()) | ((found - plain).abs() < 1e-30)
    assert same[[0, 3, 4, 5, 6]].all()
    assert found[1] == x[1]  # torch's gelu says NaN here; and at -inf some of them do


def test_empty():
    with torch.no_grad():
        assert ops.add(torch.zeros(0, 5), torch.zeros(0, 5)).shape == (0, 5)
        assert ops.rms_norm(torch.zeros(0, 5), torch.ones(5), 1e-6).shape == (0, 5)


def test_what_kernels_dont_take_runs_in_torch():
    x = torch.randn(3, 4, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(ops.add(x, x), x + x)
        assert torch.equal(ops.add(x, torch.ones(4).double()), x + 1)


def test_shapes_that_dont_fit_are_refused_as_torch_refuses_them():
    with torch.no_grad(), pytest.raises(RuntimeError, match="normalized_shape"):
        ops.rms_norm(torch.randn(2, 64), torch.ones(16), 1e-6)
    with torch.no_grad(), pytest.raises(RuntimeError, match="must match"):
        ops.rotate(torch.randn(2, 3, 64), torch.ones(2, 1, 32), torch.ones(2, 1, 16), False)


def test_gradients_go_through_the_plain_formulas():
    x = torch.randn(2, 8, requires_grad=True)
    ops.rms_norm(ops.gate(x, x, "silu"), torch.ones(8), 1e-6).sum().backward()
    assert x.grad is not None
