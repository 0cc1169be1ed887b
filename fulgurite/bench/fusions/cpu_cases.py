"""Cases of `fulgurite bench fusions` on the CPU: pointwise ops, reductions and norms, forward and backward.

In: the side length of the large cases. Out: functions with their inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """A function and its inputs. Bytes are counted from inputs and outputs."""

    name: str
    function: Callable[..., Any]
    inputs: Callable[[], tuple[Tensor, ...]]


def _randn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Any:
    return lambda: tuple(torch.randn(shape).to(dtype) for shape in shapes)


def rope(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = q.shape[-1] // 2
    return q * cos + torch.cat([-q[..., half:], q[..., :half]], -1) * sin


def layer_norm_backward(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rstd = torch.rsqrt(x.var(-1, keepdim=True, correction=0) + 1e-5)
    normal = (x - x.mean(-1, keepdim=True)) * rstd
    gw = g * w
    row = gw - gw.mean(-1, keepdim=True) - normal * (gw * normal).mean(-1, keepdim=True)
    return rstd * row, (g * normal).sum(0), g.sum(0)


def rms_norm_backward(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    normal = x * rstd
    gw = g * w
    return rstd * (gw - normal * (gw * normal).mean(-1, keepdim=True)), (g * normal).sum(0)


def group_norm(x: Tensor, w: Tensor) -> Tensor:
    n, c, h, width = x.shape
    y = x.view(n, 8, c // 8, h * width)
    y = (y - y.mean((2, 3), True)) * torch.rsqrt(y.var((2, 3), correction=0, keepdim=True) + 1e-5)
    return y.view(n, c, h, width) * w.view(1, c, 1, 1)


def batch_norm(x: Tensor, w: Tensor) -> Tensor:
    var, mean = torch.var_mean(x, (0, 2, 3), correction=0, keepdim=True)
    return (x - mean) * torch.rsqrt(var + 1e-5) * w.view(1, -1, 1, 1)


def softmax_backward(g: Tensor, y: Tensor) -> Tensor:
    return y * (g - (g * y).sum(-1, keepdim=True))


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127
    return (x / scale).round().clamp(-127, 127).to(torch.int8), scale


def log_softmax_backward(g: Tensor, y: Tensor) -> Tensor:
    return g - y.exp() * g.sum(-1, keepdim=True)


def cross_entropy_backward(x: Tensor, t: Tensor) -> Tensor:
    rows = torch.arange(x.shape[1], device=x.device)
    return (torch.softmax(x, -1) - (rows == t[:, None]).float()) / x.shape[0]


def gelu_backward(g: Tensor, x: Tensor) -> Tensor:
    inner = 0.7978845608 * (x + 0.044715 * x**3)
    t = torch.tanh(inner)
    slope = 0.7978845608 * (1 + 3 * 0.044715 * x * x)
    return g * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * slope)


def silu_mul_backward(g: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid(a)
    return g * b * s * (1 + a * (1 - s)), g * a * s


def group_norm_backward(g: Tensor, x: Tensor) -> Tensor:
    return _norm_backward(g, x, (2, 3), (x.shape[0], 8, x.shape[1] // 8, -1))


def instance_norm(x: Tensor) -> Tensor:
    var, mean = torch.var_mean(x, (2, 3), correction=0, keepdim=True)
    return (x - mean) * torch.rsqrt(var + 1e-5)


def batch_norm_backward(g: Tensor, x: Tensor) -> Tensor:
    return _norm_backward(g, x, (0, 2), (x.shape[0], x.shape[1], -1))


def _norm_backward(g: Tensor, x: Tensor, dims: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    y, up = x.view(shape), g.view(shape)
    rstd = torch.rsqrt(y.var(dims, correction=0, keepdim=True) + 1e-5)
    normal = (y - y.mean(dims, keepdim=True)) * rstd
    down = rstd * (up - up.mean(dims, keepdim=True) - normal * (up * normal).mean(dims, True))
    return down.view(x.shape)


def norm_columns(x: Tensor) -> Tensor:
    var, mean = torch.var_mean(x, 0, correction=0, keepdim=True)
    return (x - mean) * torch.rsqrt(var + 1e-5)


def cross_entropy_inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(4096, 4096), torch.randint(0, 4096, (4096,))


def embedding_inputs() -> tuple[Tensor, Tensor]:
    return torch.randint(0, 32000, (4096,)), torch.randn(32000, 1024)


def make_cases(large: int) -> list[Case]:
    """All cases; `large` is the side length of the square ones."""
    n = large
    half = torch.bfloat16
    image = (16, 64, 112, 112)
    rms: Callable[..., Any] = lambda x, w: F.rms_norm(x, (x.shape[-1],), w, 1e-6)  # noqa: E731
    layer: Callable[..., Any] = lambda x, w: F.layer_norm(x, (x.shape[-1],), w, w)  # noqa: E731
    silu: Callable[..., Any] = lambda a, b: F.silu(a) * b  # noqa: E731
    gelu: Callable[..., Any] = lambda x, b: F.gelu(x + b, approximate="tanh")  # noqa: E731
    rows: Callable[..., Any] = lambda x: torch.softmax(x, -1)  # noqa: E731
    return [
        Case("rms_norm", rms, _randn((n, n), (n,))),
        Case("layer_norm", layer, _randn((n, n), (n,))),
        Case("softmax", rows, _randn((n, n))),
        Case("silu_mul", silu, _randn((n, n), (n, n))),
        Case("gelu_bias", gelu, _randn((n, n), (n,))),
        Case("rope", rope, _randn((8, 32, n // 4, 64), (n // 4, 64), (n // 4, 64))),
        Case("cross_entropy", F.cross_entropy, cross_entropy_inputs),
        Case("sum_columns", lambda x: (x * 2).sum(0), _randn((n, n))),
        Case("transpose", lambda x: (x.t() + 1).contiguous(), _randn((n, n))),
        Case("layer_norm_backward", layer_norm_backward, _randn((n, n), (n, n), (n,))),
        Case("rms_norm_backward", rms_norm_backward, _randn((n, n), (n, n), (n,))),
        Case("softmax_backward", softmax_backward, _randn((n, n), (n, n))),
        Case("softmax_columns", lambda x: torch.softmax(x, 0), _randn((n, n))),
        Case("log_softmax", lambda x: torch.log_softmax(x, -1), _randn((n, n))),
        Case("sum_rows", lambda x: (x * x).sum(1), _randn((n, n))),
        Case("sum_all", lambda x: (x * x).sum(), _randn((n, n))),
        Case("argmax", lambda x: x.argmax(-1), _randn((n, n))),
        Case("var_columns", lambda x: x.var(0), _randn((n, n))),
        Case("group_norm", group_norm, _randn(image, (64,))),
        Case("batch_norm", batch_norm, _randn(image, (64,))),
        Case("quantize_rows", quantize_rows, _randn((n, n))),
        Case("add_rms_norm", lambda x, y, w: rms(x + y, w), _randn((n, n), (n, n), (n,))),
        Case("embedding", lambda i, t: F.embedding(i, t) * 3, embedding_inputs),
        Case("log_softmax_backward", log_softmax_backward, _randn((n, n), (n, n))),
        Case("cross_entropy_backward", cross_entropy_backward, cross_entropy_inputs),
        Case("gelu_backward", gelu_backward, _randn((n, n), (n, n))),
        Case("silu_mul_backward", silu_mul_backward, _randn((n, n), (n, n), (n, n))),
        Case("group_norm_backward", group_norm_backward, _randn(image, image)),
        Case("batch_norm_backward", batch_norm_backward, _randn(image, image)),
        Case("instance_norm", instance_norm, _randn(image)),
        Case("norm_columns", norm_columns, _randn((n, n))),
        Case("sin_cos", lambda x: torch.sin(x) * torch.cos(x), _randn((n, n))),
        Case("rms_norm bf16", rms, _randn((n, n), (n,), dtype=half)),
        Case("silu_mul bf16", silu, _randn((n, n), (n, n), dtype=half)),
        Case("softmax bf16", rows, _randn((n, n), dtype=half)),
        Case("layer_norm bf16", layer, _randn((n, n), (n,), dtype=half)),
        Case("rms_norm odd", rms, _randn((n - 1, n + 3), (n + 3,))),
        Case("gelu_bias odd", gelu, _randn((n - 1, n + 3), (n + 3,))),
        Case("softmax odd", rows, _randn((n - 1, n + 3))),
        Case("rms_norm small", rms, _randn((64, 768), (768,))),
        Case("gelu_bias small", gelu, _randn((64, 768), (768,))),
        Case("softmax small", rows, _randn((64, 768))),
        Case("softmax one row", rows, _randn((1, 50257))),
        Case("layer_norm one row", layer, _randn((1, 4096), (4096,))),
    ]
