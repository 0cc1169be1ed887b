"""fulgurite.fuse compiles a whole function or raises; compile with the fuser fuses what it can."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fulgurite
from fulgurite.errors import FusionError
from fulgurite.executors.fuser import FUSER
from fulgurite.fuse import fuse

F = torch.nn.functional


def test_whole_function_becomes_one_kernel() -> None:
    fused = fuse(lambda x, w: F.rms_norm(x, (64,), w) * 2)
    x, w = torch.randn(8, 64), torch.randn(64)
    torch.testing.assert_close(fused(x, w), F.rms_norm(x, (64,), w) * 2)
    (kernel,) = fused.kernels
    assert "static void" in kernel.source
    assert kernel.bytes_moved == 2 * 8 * 64 * 4 + 64 * 4
    assert kernel.predicted_seconds > 0 and kernel.measure() > 0
    assert "its outputs leave the region" in str(kernel)


def test_error_names_the_unsupported_op() -> None:
    fused = fuse(lambda x: torch.mode(x * 2)[0] + 1)
    with pytest.raises(FusionError, match="mode can't be part of a generated kernel"):
        fused(torch.randn(8, 4))


class Block(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.first(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mask = torch.full((length, length), -1e9, dtype=x.dtype).triu(1)
        mixed = torch.softmax(q @ k.transpose(-1, -2) * 0.3 + mask, -1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformer_block_forward_and_backward(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Block().to(dtype)
    x = torch.randn(2, 9, 32).to(dtype)
    wide = Block().double()
    wide.load_state_dict(model.state_dict())
    compiled = fulgurite.compile(model, executors=[FUSER, "torch"])

    def gradients(run, module, x):
        module.zero_grad()
        x = x.clone().requires_grad_()
        out = run(x)
        out.square().mean().backward()
        return [out.detach(), x.grad, *(p.grad for p in module.parameters())]

    ours, eager = gradients(compiled, model, x), gradients(model, model, x)
    exact = gradients(wide, wide, x.double())
    for a, b, c in zip(ours, eager, exact, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        error, allowed = (a.double() - c).norm(), 2 * (b.double() - c).norm()
        assert error <= allowed + 8 * torch.finfo(dtype).eps * c.norm() + 1e-7


def test_dynamic_batch() -> None:
    compiled = fulgurite.compile(
        lambda x: torch.softmax(x * 2, -1).sum(0), executors=[FUSER, "torch"], dynamic=True
    )
    for rows in (3, 17, 260):
        x = torch.randn(rows, 24)
        torch.testing.assert_close(compiled(x), torch.softmax(x * 2, -1).sum(0))
