"""Programs that host programs are compared on, with inputs: the same cases on CPUs and GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Case:
    function: Callable[..., Any]
    make_inputs: Callable[..., tuple[Any, ...]]  # of a device
    dynamic: bool | None = None


def _randn(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=device, dtype=dtype)


def block(x: Tensor, weight: Tensor, up: Tensor, down: Tensor) -> Tensor:
    gate, value = (F.rms_norm(x, x.shape[-1:], weight) @ up).chunk(2, dim=-1)
    return x + (F.silu(gate) * value) @ down


def attention(x: Tensor, qkv: Tensor, bias: Tensor) -> Tensor:
    b, t, c = x.shape
    q, k, v = (
        p.view(b, t, 4, -1).transpose(1, 2)
        for p in torch.addmm(bias, x.view(-1, c), qkv).view(b, t, -1).split(c, dim=-1)
    )
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed.transpose(1, 2).reshape(b, t, c)


def views(x: Tensor) -> tuple[Tensor, ...]:
    y = x @ x.t()
    parts = y.unsqueeze(0).expand(2, -1, -1).permute(1, 0, 2)
    return parts[1:, :, ::2].mT @ y[1:, None, :2].mT, y.t(), y.diagonal().clone()


def mixed_dtypes(x: Tensor) -> tuple[Tensor, ...]:
    y = x.double() @ x.double().t()
    return (
        y.float().sum(0),
        (y > 0),
        y.long().clamp(-3, 3),
        y.to(torch.bfloat16) @ y.to(torch.bfloat16),
    )


def mutated(x: Tensor, y: Tensor) -> Tensor:
    x.add_(y @ y)
    y[0] = 1.0
    return x.sum() + y @ x


def aliases(x: Tensor) -> tuple[Any, ...]:
    y = (x @ x).relu()
    return y, y.view(-1), x, y, None, 3, x.t()


def convolution(x: Tensor, weight: Tensor) -> Tensor:
    return F.max_pool2d(F.relu(F.conv2d(x, weight, padding=1)), 2)


def python_ops(x: Tensor) -> tuple[Tensor, ...]:
    values, order = torch.sort(x @ x, dim=0, descending=True)
    return torch.cumsum(values, 0), order, torch.linalg.det(x), torch.nonzero(order > 1)


def embedding(tokens: Tensor, table: Tensor) -> Tensor:
    return (F.embedding(tokens, table) @ table.t()).softmax(-1)


def sizes(x: Tensor, n: int) -> tuple[Any, ...]:
    y = x[:n].reshape(-1, x.shape[1]) @ x.t()
    return y * n, y.shape[0] + n, torch.zeros(x.shape[0] * 2, n, device=x.device) + x.shape[1]


def empty_rows(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    z = (x * 2) @ y
    return z, z.sum(0), torch.cat([z, z + 1])


def dropout(x: Tensor) -> Tensor:
    return F.dropout(x @ x, 0.5, True) * 2


def integers(x: Tensor) -> tuple[Tensor, ...]:
    y = x @ x
    return torch.addmm(y, x, x), torch.add(y.t(), x, alpha=2), y**2, y.cumsum(0) // 3


CASES: dict[str, Case] = {
    "block": Case(
        block,
        lambda device: (
            _randn(4, 64, device=device),
            _randn(64, device=device),
            _randn(64, 256, device=device),
            _randn(128, 64, device=device),
        ),
    ),
    "block_dynamic": Case(
        block,
        lambda device: (
            _randn(5, 64, device=device),
            _randn(64, device=device),
            _randn(64, 256, device=device),
            _randn(128, 64, device=device),
        ),
        dynamic=True,
    ),
    "attention": Case(
        attention,
        lambda device: (
            _randn(2, 7, 64, device=device),
            _randn(64, 192, device=device),
            _randn(192, device=device),
        ),
    ),
    "attention_half": Case(
        attention,
        lambda device: (
            _randn(2, 7, 64, device=device, dtype=torch.bfloat16),
            _randn(64, 192, device=device, dtype=torch.bfloat16),
            _randn(192, device=device, dtype=torch.bfloat16),
        ),
    ),
    "views": Case(views, lambda device: (_randn(5, 6, device=device),)),
    "views_dynamic": Case(views, lambda device: (_randn(5, 6, device=device),), dynamic=True),
    "mixed_dtypes": Case(mixed_dtypes, lambda device: (_randn(5, 6, device=device),)),
    "mutated": Case(
        mutated, lambda device: (_randn(6, 6, device=device), _randn(6, 6, device=device))
    ),
    "aliases": Case(aliases, lambda device: (_randn(4, 4, device=device),)),
    "convolution": Case(
        convolution,
        lambda device: (_randn(2, 3, 9, 9, device=device), _randn(4, 3, 3, 3, device=device)),
    ),
    "python_ops": Case(python_ops, lambda device: (_randn(6, 6, device=device),)),
    "embedding": Case(
        embedding,
        lambda device: (torch.arange(6, device=device).view(2, 3), _randn(11, 16, device=device)),
    ),
    "sizes": Case(sizes, lambda device: (_randn(7, 5, device=device), 4), dynamic=True),
    "empty_rows": Case(
        empty_rows, lambda device: (_randn(0, 4, device=device), _randn(4, 3, device=device))
    ),
    "one_element": Case(
        empty_rows, lambda device: (_randn(1, 1, device=device), _randn(1, 1, device=device))
    ),
    "strided": Case(
        empty_rows,
        lambda device: (_randn(4, 10, device=device).t()[::2], _randn(6, 4, device=device).t()),
    ),
    "misaligned": Case(
        block,
        lambda device: (
            _randn(4 * 64 + 1, device=device)[1:].view(4, 64),
            _randn(65, device=device)[1:],
            _randn(64, 256, device=device),
            _randn(128, 64, device=device),
        ),
    ),
    "integers": Case(integers, lambda device: (torch.arange(16, device=device).view(4, 4),)),
    "dropout": Case(dropout, lambda device: (_randn(6, 6, device=device),)),
}
