"""The suite `quant` on a GPU: matmuls and casts of small numbers beside torch's own and bfloat16.

In: nothing. Out: rows of figures, three tables.

    scaled_mm     both operands FP8, M from 1 to 8192, at the linear layers of Llama-8B and DeepSeek-V3;
                  beside torch's _scaled_mm with the same scales and a bfloat16 linear
    weight-only   packed weights at M up to 16: how much faster than bfloat16, and the bytes of the
                  weight over the time, in percent of the copy bandwidth
    quantize      bytes that must move over the time, in percent of the copy bandwidth

A time is the median of replays of a CUDA graph that holds one call for each of several weights, too
many for the cache to keep: what a model's decoding does, without the host's part in it. Kernels are
compiled first, by threads; what is measured is saved after each shape.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor
from torch.nn.functional import ScalingType

from fulgurite.bench import results
from fulgurite.kernels.gemm.quant_linear import quant_linear_parts
from fulgurite.kernels.gemm.scaled_mm import scaled_mm_parts
from fulgurite.kernels.quantize.ops import quantize_parts
from fulgurite.quant import QuantTensor, regroup, resolve
from fulgurite.quant.regroup import GROUPED

Call = Callable[[], Any]
Row = dict[str, Any]
# N, K: Llama-8B's qkv, out and down, up; DeepSeek-V3's expert up and down, dense up and down
SHAPES = [(6144, 4096), (4096, 4096), (4096, 14336), (14336, 4096), (2048, 7168), (7168, 2048),
          (18432, 7168), (7168, 18432)]  # fmt: skip
ROWS = (1, 4, 16, 64, 128, 256, 512, 1024, 4096, 8192)
FEW_ROWS = (1, 4, 16)
SCALINGS = {
    "tensor": ("fp8_e4m3_tensor", "fp8_e4m3_tensor"),
    "row": ("fp8_e4m3_row", "fp8_e4m3_row"),
    "block": ("fp8_e4m3_1x128", "fp8_e4m3_128x128"),
}
WEIGHTS = ("nvfp4", "mxfp4", "int4_g128", "int4_g32", "fp8_e4m3_row", "fp8_e4m3_128x128", "mxfp8_e4m3",
           "int8")  # fmt: skip
GGUF = ("q4_0", "q4_1", "q4_k", "q6_k", "q8_0")  # at one shape: their quantizers search
GGUF_SHAPE = (4096, 4096)
COMPILERS = 8  # threads
CAST_SHAPE = (16384, 4096)
CASTS = ("fp8_e4m3_tensor", "fp8_e4m3_row", "fp8_e4m3_1x128", "fp8_e4m3_128x128", "nvfp4", "mxfp4",
         "mxfp8_e4m3", "int8", "int4_g128")  # fmt: skip
TURNED = ("fp8_e4m3_row", "fp8_e4m3_1x128", "fp8_e4m3_128x128")
# bytes of weights a graph goes through: four times an H200's second-level cache
OUT_OF_CACHE = 250e6


def quant_cuda(options: argparse.Namespace) -> None:
    """Suite `quant` where the device is a GPU."""
    copy = copy_bandwidth()
    shapes, rows = (SHAPES[:2], ROWS[::3]) if options.quick else (SHAPES, ROWS)
    found: list[Row] = [{"part": "copy", "bytes_a_second": copy}]
    with Progress(transient=True) as progress, torch.no_grad():
        bar = progress.add_task("quant", total=len(shapes) + 1)
        found += casts(copy)
        for n, k in shapes:
            progress.update(bar, advance=1, description=f"{n}×{k}")
            found += weight_only(n, k, copy)
            found += scaled(n, k, rows)
            written = results.save("quant", "cuda", found, options.output)
    print(f"{torch.cuda.get_device_name()} · copy {copy / 1e9:.0f} GB/s")
    print("\n\n".join(tables(found)))
    print(f"written to {written}")


# ---- measuring -----------------------------------------------------------------------------------


def graph_seconds(calls: Sequence[Call], replays: int = 5) -> float:
    """Seconds of a call: the median replay of a graph of all of them."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = _recorded(calls)
    graph.replay()
    readings = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        readings.append(start.elapsed_time(end) * 1e-3 / len(calls))
    return statistics.median(readings)


def _recorded(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """All calls as one graph. `torch.cuda.graph` would first give all cached memory back, 0.2 s each time."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            for call in calls:
                call()
        finally:
            graph.capture_end()
    return graph


def compile_at_once(calls: Iterable[Call]) -> None:
    """Each call once, by threads: their kernels are compiled at the same time."""

    def run_one(call: Call) -> None:
        with torch.no_grad():  # a thread has a mode of its own
            call()

    with ThreadPoolExecutor(COMPILERS) as pool:
        for _ in pool.map(run_one, calls):
            pass
    torch.cuda.synchronize()


def copy_bandwidth() -> float:
    """Bytes read plus written a second by torch's copy."""
    sources = [torch.randn(1 << 26, device="cuda") for _ in range(3)]
    target = torch.empty_like(sources[0])
    seconds = graph_seconds([partial(target.copy_, x) for x in sources])
    return 2 * target.numel() * target.element_size() / seconds


def copies(nbytes: float) -> int:
    """How many weights of that size the cache can't keep."""
    return max(2, min(32, math.ceil(OUT_OF_CACHE / nbytes)))


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def weights_in(format: str, n: int, k: int) -> list[list[Tensor]]:
    """A packed weight in memory of its own several times: enough for the cache to forget them.

    GGUF's blocks become groups of integers, as a model's do on their way to a GPU.
    """
    count = copies(n * k * resolve(format).bits_per_element / 8)
    parts = quantize_parts(normal(n, k), format, None)
    if format in GROUPED:
        grouped = regroup(QuantTensor(format, parts[0]))
        parts = [grouped.packed, *grouped.scales.values()]
    return [[part.clone() for part in parts] for _ in range(count)]


# ---- the three parts -----------------------------------------------------------------------------


def weight_only(n: int, k: int, copy: float, rows: Sequence[int] = FEW_ROWS) -> list[Row]:
    """Packed weights times a few rows of bfloat16."""
    inputs = {m: normal(m, k) for m in rows}
    plain = [normal(n, k) for _ in range(copies(n * k * 2))]
    base = {m: graph_seconds([partial(F.linear, inputs[m], w) for w in plain]) for m in rows}
    formats = WEIGHTS + (GGUF if (n, k) == GGUF_SHAPE else ())
    packed = {format: weights_in(format, n, k) for format in formats}
    calls = {
        (format, m): [
            partial(quant_linear_parts, x, w[0], w[1:], GROUPED.get(format, format), None, "none")
            for w in packed[format]
        ]
        for format in formats
        for m, x in inputs.items()
    }
    compile_at_once(many[0] for many in calls.values())
    found: list[Row] = []
    for (format, m), many in calls.items():
        nbytes = sum(part.numel() * part.element_size() for part in packed[format][0])
        seconds = graph_seconds(many)
        row = {"part": "weight-only", "format": format, "m": m, "n": n, "k": k}
        row |= {"us": 1e6 * seconds, "bf16_us": 1e6 * base[m], "of_copy": nbytes / copy / seconds}
        found.append(row)
    return found


def scaled(n: int, k: int, rows: Sequence[int]) -> list[Row]:
    """FP8 times FP8 by every layout of scales."""
    plain = [normal(n, k) for _ in range(copies(n * k * 2))]
    packed = {name: weights_in(pair[1], n, k) for name, pair in SCALINGS.items()}
    inputs = {m: normal(m, k) for m in rows}
    left = {
        (name, m): quantize_parts(x, pair[0], None)
        for m, x in inputs.items()
        for name, pair in SCALINGS.items()
    }
    calls = {
        (name, m): [
            partial(scaled_mm_parts, a[0], a[1:], SCALINGS[name][0], w[0], w[1:],
                    SCALINGS[name][1], None, torch.bfloat16)
            for w in packed[name][: enough(m * n * k)]
        ]
        for (name, m), a in left.items()
    }  # fmt: skip
    compile_at_once(many[0] for many in calls.values())
    base = {
        m: graph_seconds([partial(F.linear, x, w) for w in plain[: enough(m * n * k)]])
        for m, x in inputs.items()
    }
    found: list[Row] = []
    for (name, m), many in calls.items():
        a, a_scale = left[name, m]
        theirs = library_seconds(name, a, a_scale, packed[name][: enough(m * n * k)])
        row = {"part": "scaled_mm", "scales": name, "m": m, "n": n, "k": k}
        row |= {"us": 1e6 * graph_seconds(many), "bf16_us": 1e6 * base[m]}
        row |= {"torch_us": None if theirs is None else 1e6 * theirs}
        found.append(row)
    return found


def enough(products: int) -> int | None:
    """How many weights a graph goes through: all, but two where a call takes long."""
    return 2 if products > 2**36 else None


def library_seconds(
    name: str, a: Tensor, a_scale: Tensor, weights: list[list[Tensor]]
) -> float | None:
    """torch's time, None where it refuses the shape (blocks at M = 1 in torch 2.11)."""
    calls = [library(name, a, a_scale, w[0], w[1]) for w in weights]
    try:
        calls[0]()
    except (RuntimeError, ValueError):
        return None
    return graph_seconds(calls)


def library(name: str, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Call:
    """torch's call with scales laid out as it wants them, before the clock runs."""
    if name == "tensor":
        return lambda: torch._scaled_mm(
            a, b.t(), a_scale.reshape(1), b_scale.reshape(1), out_dtype=torch.bfloat16
        )
    if name == "row":
        return lambda: torch._scaled_mm(a, b.t(), a_scale, b_scale.t(), out_dtype=torch.bfloat16)
    down, across = b_scale.shape
    padded = b_scale.new_zeros(down, -(-across // 4) * 4)
    padded[:, :across] = b_scale
    turned = a_scale.new_empty(a_scale.shape[::-1]).copy_(a_scale.t()).t()
    recipes = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    return lambda: F.scaled_mm(a, b.t(), turned, recipes[0], padded.t(), recipes[1])


def casts(copy: float) -> list[Row]:
    """Quantizing activations as they lie, and transposed as backward wants them."""
    inputs = [normal(*CAST_SHAPE) for _ in range(3)]
    calls = {
        (format, turned): [
            partial(quantize_parts, x.t() if turned else x, format, None) for x in inputs
        ]
        for turned, formats in ((False, CASTS), (True, TURNED))
        for format in formats
    }
    compile_at_once(many[0] for many in calls.values())
    found: list[Row] = []
    for (format, turned), many in calls.items():
        once_more = format in ("nvfp4", "fp8_e4m3_tensor") or (turned and format.endswith("row"))
        read = inputs[0].numel() * inputs[0].element_size() * (2 if once_more else 1)
        moved = read + sum(part.numel() * part.element_size() for part in many[0]())
        seconds = graph_seconds(many)
        row = {"part": "quantize", "format": format + (" transposed" if turned else "")}
        found.append(row | {"us": 1e6 * seconds, "of_copy": moved / copy / seconds})
    return found


# ---- tables --------------------------------------------------------------------------------------


def tables(rows: list[Row]) -> list[str]:
    """The figures as text, one table a part."""
    matmuls = [["scales, N×K, M", "ours", "torch", "bf16", "best / ours"]]
    for row in (r for r in rows if r["part"] == "scaled_mm"):
        best = min(row["torch_us"] or math.inf, row["bf16_us"])
        matmuls.append(
            [f"{row['scales']} {row['n']}×{row['k']} {row['m']}", f"{row['us']:.1f} µs",
             f"{row['torch_us'] or math.nan:.1f}", f"{row['bf16_us']:.1f}", f"{best / row['us']:.2f}×"]
        )  # fmt: skip
    linears = [["weight, N×K, M", "ours", "bf16", "× bf16", "of copy"]]
    for row in (r for r in rows if r["part"] == "weight-only"):
        linears.append(
            [f"{row['format']} {row['n']}×{row['k']} {row['m']}", f"{row['us']:.1f} µs",
             f"{row['bf16_us']:.1f}", f"{row['bf16_us'] / row['us']:.2f}×",
             f"{100 * row['of_copy']:.0f}%"]
        )  # fmt: skip
    quantized = [[f"cast of {CAST_SHAPE[0]}×{CAST_SHAPE[1]} bf16", "time", "of copy"]]
    for row in (r for r in rows if r["part"] == "quantize"):
        quantized.append([row["format"], f"{row['us']:.1f} µs", f"{100 * row['of_copy']:.0f}%"])
    return [results.table(part) for part in (matmuls, linears, quantized)]
