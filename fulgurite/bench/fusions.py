"""How fast fused kernels are, beside eager and torch.compile in the same run.

In: nothing. Out: for each case the time of a call, what part of the copy bandwidth that is (bytes that must move
over the time), the time of the first call, and the geometric mean of the speed over torch.compile's. Results of
a call are dropped before the next, as in a training loop; candidates take turns.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor

from fulgurite import device, timing
from fulgurite.bench import results
from fulgurite.fuse import fuse


@dataclass(frozen=True)
class Case:
    """A function, its inputs, and nothing else: bytes are counted from inputs and results."""

    name: str
    function: Callable[..., Any]
    inputs: Callable[[], tuple[Tensor, ...]]


def _normal(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Any:
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


def cross_entropy_inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(4096, 4096), torch.randint(0, 4096, (4096,))


def embedding_inputs() -> tuple[Tensor, Tensor]:
    return torch.randint(0, 32000, (4096,)), torch.randn(32000, 1024)


def cases(large: int) -> list[Case]:
    """The table; `large` is the side of the square cases."""
    n = large
    half = torch.bfloat16
    rms: Callable[..., Any] = lambda x, w: F.rms_norm(x, (x.shape[-1],), w, 1e-6)  # noqa: E731
    layer: Callable[..., Any] = lambda x, w: F.layer_norm(x, (x.shape[-1],), w, w)  # noqa: E731
    silu: Callable[..., Any] = lambda a, b: F.silu(a) * b  # noqa: E731
    gelu: Callable[..., Any] = lambda x, b: F.gelu(x + b, approximate="tanh")  # noqa: E731
    rows: Callable[..., Any] = lambda x: torch.softmax(x, -1)  # noqa: E731
    return [
        Case("rms_norm", rms, _normal((n, n), (n,))),
        Case("layer_norm", layer, _normal((n, n), (n,))),
        Case("softmax", rows, _normal((n, n))),
        Case("silu_mul", silu, _normal((n, n), (n, n))),
        Case("gelu_bias", gelu, _normal((n, n), (n,))),
        Case("rope", rope, _normal((8, 32, n // 4, 64), (n // 4, 64), (n // 4, 64))),
        Case("cross_entropy", F.cross_entropy, cross_entropy_inputs),
        Case("sum_columns", lambda x: (x * 2).sum(0), _normal((n, n))),
        Case("transpose", lambda x: (x.t() + 1).contiguous(), _normal((n, n))),
        Case("layer_norm_backward", layer_norm_backward, _normal((n, n), (n, n), (n,))),
        Case("rms_norm_backward", rms_norm_backward, _normal((n, n), (n, n), (n,))),
        Case("softmax_backward", softmax_backward, _normal((n, n), (n, n))),
        Case("softmax_columns", lambda x: torch.softmax(x, 0), _normal((n, n))),
        Case("log_softmax", lambda x: torch.log_softmax(x, -1), _normal((n, n))),
        Case("sum_rows", lambda x: (x * x).sum(1), _normal((n, n))),
        Case("sum_all", lambda x: (x * x).sum(), _normal((n, n))),
        Case("argmax", lambda x: x.argmax(-1), _normal((n, n))),
        Case("var_columns", lambda x: x.var(0), _normal((n, n))),
        Case("group_norm", group_norm, _normal((16, 64, 112, 112), (64,))),
        Case("batch_norm", batch_norm, _normal((16, 64, 112, 112), (64,))),
        Case("quantize_rows", quantize_rows, _normal((n, n))),
        Case("add_rms_norm", lambda x, y, w: rms(x + y, w), _normal((n, n), (n, n), (n,))),
        Case("embedding", lambda i, t: F.embedding(i, t) * 3, embedding_inputs),
        Case("rms_norm bf16", rms, _normal((n, n), (n,), dtype=half)),
        Case("silu_mul bf16", silu, _normal((n, n), (n, n), dtype=half)),
        Case("softmax bf16", rows, _normal((n, n), dtype=half)),
        Case("rms_norm odd", rms, _normal((n - 1, n + 3), (n + 3,))),
        Case("gelu_bias odd", gelu, _normal((n - 1, n + 3), (n + 3,))),
        Case("rms_norm small", rms, _normal((64, 768), (768,))),
        Case("gelu_bias small", gelu, _normal((64, 768), (768,))),
        Case("softmax one row", rows, _normal((1, 50257))),
        Case("layer_norm one row", layer, _normal((1, 4096), (4096,))),
    ]


def fusions(options: argparse.Namespace) -> None:
    """Suite `fusions`."""
    os.environ.update(results.fresh_caches())
    wanted = cases(1024 if options.quick else 4096)
    copy = device.measure_copy_bandwidth(torch.get_num_threads())
    found: list[dict[str, Any]] = []
    with Progress(transient=True) as progress, torch.no_grad():
        bar = progress.add_task("fusions", total=len(wanted))
        for case in wanted:
            progress.update(bar, description=case.name)
            found.append(measure(case, copy))
            progress.advance(bar)
    print(f"float32 · {torch.get_num_threads()} threads · copy {copy / 1e9:.1f} GB/s")
    print(_table(found))
    print(f"written to {results.save('fusions', options.device, found, options.output)}")


def measure(case: Case, copy: float) -> dict[str, Any]:
    """One row."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    inputs = case.inputs()
    compiled, compile_seconds = _first_call(lambda f: torch.compile(f), case.function, inputs)
    ours, our_seconds = _first_call(fuse, case.function, inputs)
    seconds = timing.compare(
        {
            "eager": lambda: case.function(*inputs),
            "torch.compile": lambda: compiled(*inputs),
            "fulgurite": lambda: ours(*inputs),
        },
        repeats=9,
        budget=0.7,
    )
    moved = sum(kernel.bytes for kernel in ours.kernels)
    return {
        "case": case.name,
        "eager_ms": 1e3 * seconds["eager"],
        "torch_compile_ms": 1e3 * seconds["torch.compile"],
        "fulgurite_ms": 1e3 * seconds["fulgurite"],
        "of_copy": moved / copy / seconds["fulgurite"],
        "times_torch_compile": seconds["torch.compile"] / seconds["fulgurite"],
        "times_eager": seconds["eager"] / seconds["fulgurite"],
        "compile_s": our_seconds,
        "torch_compile_s": compile_seconds,
        "kernels": [str(kernel.schedule) for kernel in ours.kernels],
    }


def _first_call(
    compile_: Callable[..., Any], function: Callable[..., Any], inputs: tuple[Tensor, ...]
) -> tuple[Any, float]:
    compiled = compile_(function)
    start = time.perf_counter()
    compiled(*inputs)
    return compiled, time.perf_counter() - start


def _mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _table(rows: list[dict[str, Any]]) -> str:
    head = ["case", "eager", "torch.compile", "fulgurite", "of copy", "× torch.compile", "compile"]
    body = [
        [
            row["case"],
            f"{row['eager_ms']:.2f} ms",
            f"{row['torch_compile_ms']:.2f} ms",
            f"{row['fulgurite_ms']:.2f} ms",
            f"{100 * row['of_copy']:.0f}%",
            f"{row['times_torch_compile']:.2f}×",
            f"{row['compile_s']:.2f} s",
        ]
        for row in rows
    ]
    mean = _mean([row["times_torch_compile"] for row in rows])
    cold = _mean([row["torch_compile_s"] / row["compile_s"] for row in rows])
    last = ["geomean", "", "", "", "", f"{mean:.2f}×", f"{cold:.1f}× faster"]
    return results.table([head, *body, last])
