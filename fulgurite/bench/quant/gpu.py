"""Suite `quant` on a GPU: GEMMs and casts of quantized formats, against torch and bfloat16.

In: nothing. Out: three tables.

    scaled_mm     both operands FP8, M from 1 to 8192, at the linear layers of Llama-8B and DeepSeek-V3;
                  against torch._scaled_mm with the same scales and a bfloat16 linear
    weight-only   quantized weights at M up to 16: speedup over bfloat16, and the bytes of the weight over
                  the time as percent of the copy bandwidth
    quantize      bytes that must move over the time, as percent of the copy bandwidth

A time is the median replay of a CUDA graph with one call for each of several weights, more than L2 holds: what the
layers of a model do, without the host. Kernels are compiled first, in threads. Results are saved after each shape.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor
from torch.nn.functional import ScalingType

from fulgurite.bench import results
from fulgurite.bench.measure import (
    Call,
    compile_in_parallel,
    measure_gpu_copy_bandwidth,
    time_in_cuda_graph,
)
from fulgurite.kernels.gemm.quant_linear import quant_linear_op
from fulgurite.kernels.gemm.scaled_mm import scaled_mm_op
from fulgurite.kernels.quantize.ops import quantize_op
from fulgurite.quant import QuantTensor, repack_gguf, resolve_format
from fulgurite.quant.repack import REPACKED_FORMAT

Row = dict[str, Any]
# N, K: Llama-8B's qkv, out and down, up; DeepSeek-V3's expert up and down, dense up and down
SHAPES = [(6144, 4096), (4096, 4096), (4096, 14336), (14336, 4096), (2048, 7168), (7168, 2048),
          (18432, 7168), (7168, 18432)]  # fmt: skip
M_SIZES = (1, 4, 16, 64, 128, 256, 512, 1024, 4096, 8192)
SMALL_M = (1, 4, 16)
SCALE_LAYOUTS = {
    "tensor": ("fp8_e4m3_tensor", "fp8_e4m3_tensor"),
    "row": ("fp8_e4m3_row", "fp8_e4m3_row"),
    "block": ("fp8_e4m3_1x128", "fp8_e4m3_128x128"),
}
WEIGHT_FORMATS = ("nvfp4", "mxfp4", "int4_g128", "int4_g32", "fp8_e4m3_row", "fp8_e4m3_128x128", "mxfp8_e4m3",
           "int8")  # fmt: skip
GGUF_FORMATS = (
    "q4_0",
    "q4_1",
    "q4_k",
    "q6_k",
    "q8_0",
)  # at one shape only: they quantize by search
GGUF_SHAPE = (4096, 4096)
CAST_SHAPE = (16384, 4096)
CAST_FORMATS = ("fp8_e4m3_tensor", "fp8_e4m3_row", "fp8_e4m3_1x128", "fp8_e4m3_128x128", "nvfp4", "mxfp4",
         "mxfp8_e4m3", "int8", "int4_g128")  # fmt: skip
TRANSPOSED_CASTS = ("fp8_e4m3_row", "fp8_e4m3_1x128", "fp8_e4m3_128x128")
# weights per graph: four times the L2 of an H200
BEYOND_CACHE_BYTES = 250e6


def run_quant_gpu(options: argparse.Namespace) -> None:
    """Suite `quant` on a GPU."""
    copy = measure_gpu_copy_bandwidth()
    shapes, rows = (SHAPES[:2], M_SIZES[::3]) if options.quick else (SHAPES, M_SIZES)
    found: list[Row] = [{"part": "copy", "bytes_a_second": copy}]
    with Progress(transient=True) as progress, torch.no_grad():
        bar = progress.add_task("quant", total=len(shapes) + 1)
        found += measure_casts(copy)
        for n, k in shapes:
            progress.update(bar, advance=1, description=f"{n}×{k}")
            found += measure_weight_only(n, k, copy)
            found += measure_scaled_mm(n, k, rows)
            written = results.save_results("quant", "cuda", found, options.output)
    print(f"{torch.cuda.get_device_name()} · copy {copy / 1e9:.0f} GB/s")
    print("\n\n".join(format_tables(found)))
    print(f"written to {written}")


# ---- measuring -----------------------------------------------------------------------------------


def copies_beyond_cache(nbytes: float) -> int:
    """How many weights of that size exceed L2."""
    return max(2, min(32, math.ceil(BEYOND_CACHE_BYTES / nbytes)))


def randn_bf16(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def make_weights(format: str, n: int, k: int) -> list[list[Tensor]]:
    """Copies of a quantized weight, enough to exceed L2.

    GGUF blocks are repacked as grouped integers, as the model loader does for GPUs.
    """
    count = copies_beyond_cache(n * k * resolve_format(format).bits_per_element / 8)
    parts = quantize_op(randn_bf16(n, k), format, None)
    if format in REPACKED_FORMAT:
        grouped = repack_gguf(QuantTensor(format, parts[0]))
        parts = [grouped.packed, *grouped.scales.values()]
    return [[part.clone() for part in parts] for _ in range(count)]


# ---- the three parts -----------------------------------------------------------------------------


def measure_weight_only(n: int, k: int, copy: float, rows: Sequence[int] = SMALL_M) -> list[Row]:
    """Small-M GEMMs: quantized weights, bfloat16 activations."""
    inputs = {m: randn_bf16(m, k) for m in rows}
    plain = [randn_bf16(n, k) for _ in range(copies_beyond_cache(n * k * 2))]
    base = {m: time_in_cuda_graph([partial(F.linear, inputs[m], w) for w in plain]) for m in rows}
    formats = WEIGHT_FORMATS + (GGUF_FORMATS if (n, k) == GGUF_SHAPE else ())
    packed = {format: make_weights(format, n, k) for format in formats}
    calls = {
        (format, m): [
            partial(
                quant_linear_op,
                x,
                w[0],
                w[1:],
                REPACKED_FORMAT.get(format, format),
                None,
                "none",
            )
            for w in packed[format]
        ]
        for format in formats
        for m, x in inputs.items()
    }
    compile_in_parallel(many[0] for many in calls.values())
    found: list[Row] = []
    for (format, m), many in calls.items():
        nbytes = sum(part.numel() * part.element_size() for part in packed[format][0])
        seconds = time_in_cuda_graph(many)
        row = {"part": "weight-only", "format": format, "m": m, "n": n, "k": k}
        row |= {"us": 1e6 * seconds, "bf16_us": 1e6 * base[m], "of_copy": nbytes / copy / seconds}
        found.append(row)
    return found


def measure_scaled_mm(n: int, k: int, rows: Sequence[int]) -> list[Row]:
    """FP8 GEMMs with every scale layout."""
    plain = [randn_bf16(n, k) for _ in range(copies_beyond_cache(n * k * 2))]
    packed = {name: make_weights(pair[1], n, k) for name, pair in SCALE_LAYOUTS.items()}
    inputs = {m: randn_bf16(m, k) for m in rows}
    left = {
        (name, m): quantize_op(x, pair[0], None)
        for m, x in inputs.items()
        for name, pair in SCALE_LAYOUTS.items()
    }
    calls = {
        (name, m): [
            partial(scaled_mm_op, a[0], a[1:], SCALE_LAYOUTS[name][0], w[0], w[1:],
                    SCALE_LAYOUTS[name][1], None, torch.bfloat16)
            for w in packed[name][: max_weights(m * n * k)]
        ]
        for (name, m), a in left.items()
    }  # fmt: skip
    compile_in_parallel(many[0] for many in calls.values())
    base = {
        m: time_in_cuda_graph([partial(F.linear, x, w) for w in plain[: max_weights(m * n * k)]])
        for m, x in inputs.items()
    }
    found: list[Row] = []
    for (name, m), many in calls.items():
        a, a_scale = left[name, m]
        theirs = time_torch_scaled_mm(name, a, a_scale, packed[name][: max_weights(m * n * k)])
        row = {"part": "scaled_mm", "scales": name, "m": m, "n": n, "k": k}
        row |= {"us": 1e6 * time_in_cuda_graph(many), "bf16_us": 1e6 * base[m]}
        row |= {"torch_us": None if theirs is None else 1e6 * theirs}
        found.append(row)
    return found


def max_weights(flops: int) -> int | None:
    """The number of weights per graph: two if a call takes long, otherwise all."""
    return 2 if flops > 2**36 else None


def time_torch_scaled_mm(
    name: str, a: Tensor, a_scale: Tensor, weights: list[list[Tensor]]
) -> float | None:
    """Seconds of torch's call; None where it refuses the shape (block scales at M = 1 in torch 2.11)."""
    calls = [torch_scaled_mm(name, a, a_scale, w[0], w[1]) for w in weights]
    try:
        calls[0]()
    except (RuntimeError, ValueError):
        return None
    return time_in_cuda_graph(calls)


def torch_scaled_mm(name: str, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Call:
    """torch's call; scales are converted to its layout before timing."""
    if name == "tensor":
        return lambda: torch._scaled_mm(
            a, b.t(), a_scale.reshape(1), b_scale.reshape(1), out_dtype=torch.bfloat16
        )
    if name == "row":
        return lambda: torch._scaled_mm(a, b.t(), a_scale, b_scale.t(), out_dtype=torch.bfloat16)
    down, across = b_scale.shape
    padded = b_scale.new_zeros(down, -(-across // 4) * 4)
    padded[:, :across] = b_scale
    transposed = a_scale.new_empty(a_scale.shape[::-1]).copy_(a_scale.t()).t()
    recipes = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    return lambda: F.scaled_mm(a, b.t(), transposed, recipes[0], padded.t(), recipes[1])


def measure_casts(copy: float) -> list[Row]:
    """Quantize activations, and their transposes as backward needs them."""
    inputs = [randn_bf16(*CAST_SHAPE) for _ in range(3)]
    calls = {
        (format, transposed): [
            partial(quantize_op, x.t() if transposed else x, format, None) for x in inputs
        ]
        for transposed, formats in ((False, CAST_FORMATS), (True, TRANSPOSED_CASTS))
        for format in formats
    }
    compile_in_parallel(many[0] for many in calls.values())
    found: list[Row] = []
    for (format, transposed), many in calls.items():
        reads_twice = format in ("nvfp4", "fp8_e4m3_tensor") or (
            transposed and format.endswith("row")
        )
        read = inputs[0].numel() * inputs[0].element_size() * (2 if reads_twice else 1)
        moved = read + sum(part.numel() * part.element_size() for part in many[0]())
        seconds = time_in_cuda_graph(many)
        row = {"part": "quantize", "format": format + (" transposed" if transposed else "")}
        found.append(row | {"us": 1e6 * seconds, "of_copy": moved / copy / seconds})
    return found


# ---- tables --------------------------------------------------------------------------------------


def format_tables(rows: list[Row]) -> list[str]:
    """One text table per part."""
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
    return [results.format_table(part) for part in (matmuls, linears, quantized)]
