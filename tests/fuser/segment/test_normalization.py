"""Norms, softmax and losses, forward and backward: correct, and one kernel each."""

from __future__ import annotations

import pytest
import torch

from tests.fuser.support import check_fused

RUNS_ON_TRITON = True

F = torch.nn.functional
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 1), (3, 7), (5, 64), (2, 3, 129), (300, 257)]


def make_rows(shape, dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    x = torch.randn(shape).to(dtype)
    return x, torch.randn(shape[-1]).to(dtype), torch.randn(shape[-1]).to(dtype)


@pytest.mark.covering
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_forward(shape, dtype) -> None:
    def all_norms(x, w, b):
        n = (x.shape[-1],)
        return (
            F.layer_norm(x, n, w, b),
            F.rms_norm(x, n, w, 1e-6),
            torch.softmax(x, -1),
            torch.log_softmax(x, -1),
            torch.softmax(x, 0),
            F.normalize(x, dim=-1),
        )

    check_fused(all_norms, *make_rows(shape, dtype))


FORWARD = {
    "layer_norm": lambda x, w, b: F.layer_norm(x, (x.shape[-1],), w, b),
    "rms_norm": lambda x, w, b: F.rms_norm(x, (x.shape[-1],), w, 1e-6),
    "softmax": lambda x, w, b: torch.softmax(x, -1),
    "log_softmax": lambda x, w, b: torch.log_softmax(x, -1),
    "add_rms_norm": lambda x, w, b: F.rms_norm(x + b, (x.shape[-1],), w, 1e-6),
    "quantize_rows": lambda x, w, b: (
        x / (x.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448)
    ).clamp(-448, 448),
}


@pytest.mark.parametrize("name", FORWARD)
def test_forward_is_one_kernel(name: str) -> None:
    region = check_fused(FORWARD[name], *make_rows((64, 96), torch.float32))
    assert len(region.kernels) == 1, [str(k.schedule) for k in region.kernels]


def layer_norm_backward(g, x, w):
    mean = x.mean(-1, keepdim=True)
    rstd = torch.rsqrt(x.var(-1, keepdim=True, correction=0) + 1e-5)
    normal = (x - mean) * rstd
    gw = g * w
    dx = rstd * (gw - gw.mean(-1, keepdim=True) - normal * (gw * normal).mean(-1, keepdim=True))
    return dx, (g * normal).sum(0), g.sum(0)


def rms_norm_backward(g, x, w):
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    normal = x * rstd
    gw = g * w
    return rstd * (gw - normal * (gw * normal).mean(-1, keepdim=True)), (g * normal).sum(0)


def softmax_backward(g, y, w):
    return y * (g - (g * y).sum(-1, keepdim=True))


@pytest.mark.parametrize("backward", [layer_norm_backward, rms_norm_backward, softmax_backward])
@pytest.mark.parametrize("shape", [(4, 19), (130, 67), (513, 300)])
def test_backward_is_one_kernel(backward, shape) -> None:
    """The input's gradient and the weight's column sums are one kernel."""
    x, w, _ = make_rows(shape, torch.float32)
    region = check_fused(backward, torch.randn(shape), x, w)
    assert len(region.kernels) == 1


def test_aten_backward() -> None:
    torch.manual_seed(0)
    x, g, w = torch.randn(40, 96), torch.randn(40, 96), torch.randn(96)
    _, mean, rstd = torch.ops.aten.native_layer_norm(x, [96], w, w, 1e-5)

    def backward(g, x, mean, rstd, w):
        return torch.ops.aten.native_layer_norm_backward(
            g, x, [96], mean, rstd, w, w, [True, True, True]
        )

    assert len(check_fused(backward, g, x, mean, rstd, w).kernels) == 1


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_cross_entropy(reduction: str) -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(50, 131), torch.randint(0, 131, (50,))
    target[3] = -100
    region = check_fused(lambda x, t: F.cross_entropy(x, t, reduction=reduction), logits, target)
    assert len(region.kernels) == 1


def test_group_instance_and_batch_norm() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(4, 6, 5, 7), torch.randn(6)

    def group(x, w):
        y = x.view(4, 3, 2, 5, 7)
        mean, var = y.mean((2, 3, 4), True), y.var((2, 3, 4), correction=0, keepdim=True)
        y = (y - mean) * torch.rsqrt(var + 1e-5)
        return y.view(4, 6, 5, 7) * w.view(1, 6, 1, 1) + w.view(1, 6, 1, 1)

    def batch(x, w):
        var, mean = torch.var_mean(x, (0, 2, 3), correction=0, keepdim=True)
        return (x - mean) * torch.rsqrt(var + 1e-5) * w.view(1, 6, 1, 1), mean.view(6)

    def instance(x, w):
        var, mean = torch.var_mean(x, (2, 3), correction=0, keepdim=True)
        return (x - mean) * torch.rsqrt(var + 1e-5)

    for norm in (group, batch, instance):
        region = check_fused(norm, x, w)
        assert len(region.kernels) == 1, [str(k.schedule) for k in region.kernels]
        check_fused(norm, x.to(memory_format=torch.channels_last), w) if norm is not group else None


def test_norm_then_rope_is_one_kernel() -> None:
    """After its reduction, a row is read at shifted indices."""
    torch.manual_seed(0)
    q, w = torch.randn(2, 5, 4, 16), torch.randn(16)
    cos, sin = torch.randn(5, 1, 16), torch.randn(5, 1, 16)

    def norm_rope(q, w, cos, sin):
        q = F.rms_norm(q, (16,), w, 1e-6)
        return q * cos + torch.cat([-q[..., 8:], q[..., :8]], -1) * sin

    assert len(check_fused(norm_rope, q, w, cos, sin).kernels) == 1


def test_row_longer_than_the_cache_is_split() -> None:
    """A kernel makes no second pass over a row that exceeds the cache."""
    region = check_fused(lambda x: torch.softmax(x, -1), torch.randn(2, 1 << 20))
    assert len(region.kernels) > 1
    assert any("too long for the cache" in kernel.reason for kernel in region.kernels)


def test_full_reduction_after_a_row_reduction() -> None:
    """Full and column reductions of values that need their row's reductions."""
    torch.manual_seed(0)
    x, p = torch.randn(20, 33), torch.rand(20, 33)
    check_fused(lambda x, p: F.cross_entropy(x, p), x, p)
    check_fused(
        lambda x, p: ((torch.log_softmax(x, -1) * p).sum(), torch.softmax(x, -1).sum(0)), x, p
    )
    check_fused(lambda x, p: F.cross_entropy(x, p.argmax(1), label_smoothing=0.1), x, p)
