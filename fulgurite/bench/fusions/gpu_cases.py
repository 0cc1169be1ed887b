"""Cases of the GPU fusion suite, forward and backward, in bfloat16.

In: nothing. Out: a name, a function, its inputs, and the bytes that must move: every needed input element is read
once and every output is written once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BF16 = torch.bfloat16
VOCABULARY = 128256


@dataclass(frozen=True)
class Case:
    name: str
    function: Callable[..., Any]
    inputs: Callable[[], tuple[Tensor, ...]]
    unread: int = 0  # input bytes that need not be read (most rows of an embedding table)
    eager: Callable[..., Any] | None = None  # eager's kernel, where it is another function
    compared: bool = True  # baselines are measured, too


def randn_inputs(
    *shapes: tuple[int, ...], dtype: torch.dtype = BF16
) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: tuple(torch.randn(s, device="cuda", dtype=dtype) for s in shapes)


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), w, 1e-6)


def add_rms_norm(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    total = x + y
    return total, rms_norm(total, w)


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), w, b)


def rope(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = q.shape[-1] // 2
    return q * cos + torch.cat([-q[..., half:], q[..., :half]], -1) * sin


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def quantize_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    blocks = x.float().view(x.shape[0], -1, 128)
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return (blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(x.shape), scale


def dropout_add_norm(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(F.dropout(x, 0.1, training=True) + y, (x.shape[-1],), w, b)


def embedding_inputs(rows: int, count: int, width: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (
        torch.randint(0, count, (rows,), device="cuda"),
        torch.randn(count, width, device="cuda", dtype=BF16),
    )


def logits_inputs(rows: int, vocabulary: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (
        torch.randn(rows, vocabulary, device="cuda", dtype=BF16),
        torch.randint(0, vocabulary, (rows,), device="cuda"),
    )


def forward_cases(n: int = 16384, d: int = 4096) -> list[Case]:
    rows, vector = (n, d), (d,)
    table = (VOCABULARY - n) * d * 2
    return [
        Case("rms_norm", rms_norm, randn_inputs(rows, vector)),
        Case("add_rms_norm", add_rms_norm, randn_inputs(rows, rows, vector)),
        Case("layer_norm", layer_norm, randn_inputs(rows, vector, vector)),
        Case("softmax", lambda x: torch.softmax(x, -1), randn_inputs(rows)),
        Case("silu_mul", lambda a, b: F.silu(a) * b, randn_inputs(rows, rows)),
        Case(
            "gelu_bias", lambda x, b: F.gelu(x + b, approximate="tanh"), randn_inputs(rows, vector)
        ),
        Case("rope", rope, randn_inputs((4, 32, 4096, 128), (4096, 128), (4096, 128))),
        Case(
            "cross_entropy", lambda x, t: F.cross_entropy(x, t), logits_inputs(n // 4, VOCABULARY)
        ),
        Case("sum_columns", lambda x: x.float().sum(0), randn_inputs(rows)),
        Case("transpose", lambda x: (x.t() + 1).contiguous(), randn_inputs(rows)),
        Case("quantize_rows", quantize_rows, randn_inputs(rows)),
        Case("quantize_blocks", quantize_blocks, randn_inputs(rows)),
        Case("dropout_add_norm", dropout_add_norm, randn_inputs(rows, rows, vector, vector)),
        Case(
            "embedding",
            lambda i, t: F.embedding(i, t) * 3,
            embedding_inputs(n, VOCABULARY, d),
            table,
        ),
        Case("cumsum", lambda x: x.float().cumsum(-1), randn_inputs(rows)),
    ]


def rms_norm_backward(g: Tensor, x: Tensor, rstd: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """From what forward saves: its input and the reciprocal RMS of each row."""
    gw, normed = g.float() * w.float(), x.float() * rstd
    dx = rstd * (gw - normed * (gw * normed).mean(-1, keepdim=True))
    return dx.to(x.dtype), (g.float() * normed).sum(0).to(w.dtype)


def rms_norm_backward_eager(g: Tensor, x: Tensor, rstd: Tensor, w: Tensor) -> Any:
    shape, both = [x.shape[-1]], [True, True]
    return torch.ops.aten._fused_rms_norm_backward(g, x, shape, rstd, w, both)


def layer_norm_backward(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor) -> Any:
    shape, all_three = [x.shape[-1]], [True, True, True]
    return torch.ops.aten.native_layer_norm_backward(g, x, shape, mean, rstd, w, w, all_three)


def rms_norm_backward_inputs(rows: tuple[int, int]) -> tuple[Tensor, ...]:
    g, x, w = randn_inputs(rows, rows, rows[-1:])()
    return g, x, torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6), w


def layer_norm_backward_inputs(rows: tuple[int, int]) -> tuple[Tensor, ...]:
    g, x, w = randn_inputs(rows, rows, rows[-1:])()
    var, mean = torch.var_mean(x.float(), -1, correction=0, keepdim=True)
    return g, x, mean, torch.rsqrt(var + 1e-5), w


def silu_mul_backward(g: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.aten.silu_backward(g * b, a), g * F.silu(a)


def softmax_backward(g: Tensor, y: Tensor) -> Tensor:
    return torch.ops.aten._softmax_backward_data(g, y, -1, BF16)


def rope_backward(g: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = g.shape[-1] // 2
    rotated = g * sin
    return g * cos + torch.cat([rotated[..., half:], -rotated[..., :half]], -1)


def cross_entropy_backward(x: Tensor, target: Tensor, total: Tensor, g: Tensor) -> Tensor:
    """From the logsumexp of each row, as forward saves it."""
    chance = torch.exp(x.float() - total)
    place = torch.arange(x.shape[1], device=x.device)
    return ((chance - (place == target[:, None]).float()) * (g / x.shape[0])).to(x.dtype)


def cross_entropy_inputs(rows: int, vocabulary: int) -> Callable[[], tuple[Tensor, ...]]:
    def make() -> tuple[Tensor, ...]:
        x, target = logits_inputs(rows, vocabulary)()
        return x, target, x.float().logsumexp(-1, keepdim=True), torch.ones((), device="cuda")

    return make


def backward_cases(n: int = 16384, d: int = 4096) -> list[Case]:
    rows = (n, d)
    return [
        Case(
            "rms_norm",
            rms_norm_backward,
            lambda: rms_norm_backward_inputs(rows),
            eager=rms_norm_backward_eager,
        ),
        Case("layer_norm", layer_norm_backward, lambda: layer_norm_backward_inputs(rows)),
        Case("silu_mul", silu_mul_backward, randn_inputs(rows, rows, rows)),
        Case("softmax", softmax_backward, randn_inputs(rows, rows)),
        Case("rope", rope_backward, randn_inputs((4, 32, 4096, 128), (4096, 128), (4096, 128))),
        Case("cross_entropy", cross_entropy_backward, cross_entropy_inputs(n // 4, VOCABULARY)),
    ]


WIDTHS = (768, 2048, 4096, 4098, 4100, 4104, 5120, 8192, 16384, 32768, 73728)


def size_cases() -> list[Case]:
    """A norm and a pointwise function over many sizes, some of them misaligned.

    Norms of 2048 rows are compared with others: every width, and minutes less than all of them.
    """
    found = []
    for dtype in (torch.float32, BF16):
        for rows in (16, 512, 2048, 8192, 16384):
            for width in WIDTHS:
                inputs = randn_inputs((rows, width), (width,), dtype=dtype)
                size = f"{str(dtype).removeprefix('torch.')} {rows}x{width}"
                if rows * width * dtype.itemsize <= 1 << 31:
                    compared = rows == 2048
                    found.append(Case(f"rms_norm {size}", rms_norm, inputs, compared=compared))
                    if rows == 2048:
                        found.append(Case(f"relu_bias {size}", relu_bias, inputs, compared=False))
    return found


def relu_bias(x: Tensor, b: Tensor) -> Tensor:
    return F.relu(x + b)
