"""Suite `quant` on the CPU: linears with quantized weights, against torch and a plain read of the weight.

In: nothing. Out, for each format and number of rows of x: time per call, and, interleaved with it, of torch's linear in
float32 and bfloat16 and of a plain read of the same bytes. Every candidate rotates over enough copies of its weight to
exceed all caches, as the layers of a model do. Then casts (`cpu_quantize.py`). The GPU part is in `gpu.py`.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor

from fulgurite import device, timing
from fulgurite.bench import results
from fulgurite.bench.measure import round_robin
from fulgurite.bench.quant.cpu_quantize import format_cast_table, measure_casts
from fulgurite.bench.quant.gpu import run_quant_gpu
from fulgurite.kernels.common.cpu_library import best_instruction_set, load_library
from fulgurite.kernels.gemm.cpu_layout import PackedPanels, pack_panels
from fulgurite.kernels.gemm.cpu_linear import LinearCall
from fulgurite.quant import quantize

FORMATS = (
    "q4_0", "q4_1", "q4_k", "int4_g128", "int4_g32_asym", "nvfp4", "mxfp4", "q6_k", "q8_0", "int8",
    "fp8_e4m3_row", "fp8_e4m3_128x128", "fp8_e5m2_row", "mxfp8_e4m3",
)  # fmt: skip
M_SIZES = (1, 4, 16, 256, 1024)
SHAPE = (4096, 2048)  # N, K
BEYOND_CACHE_BYTES = 1 << 30  # several times the last-level cache of a server


def run_quant(options: argparse.Namespace) -> None:
    """Suite `quant`."""
    if options.device.startswith("cuda"):
        run_quant_gpu(options)
        return
    torch.manual_seed(0)
    rows = (1, 16) if options.quick else M_SIZES
    threads = device.num_cpu_threads()
    weight = torch.randn(SHAPE)
    found: list[dict[str, Any]] = []
    with Progress(transient=True) as progress, torch.no_grad():
        bar = progress.add_task("torch", total=len(FORMATS) + 1)
        dense = copy_dense_weights(weight)
        progress.advance(bar)
        for format in FORMATS:
            progress.update(bar, description=format)
            found += measure_format(format, weight, rows, dense, threads)
            progress.advance(bar)
    read = statistics.median(row["read_bytes_per_second"] for row in found if row["rows"] == 1)
    facts = f"{threads} threads, {best_instruction_set()}, plain read {read / 1e9:.1f} GB/s"
    print(f"[{SHAPE[0]}, {SHAPE[1]}] weight · {facts}")
    print(format_table(found))
    casts = measure_casts(options.quick)
    print(format_cast_table(casts))
    found += casts
    print(f"written to {results.save_results('quant', options.device, found, options.output)}")


def make_plain_read(nbytes: int, threads: int) -> Callable[[], Any]:
    """A plain read of `nbytes`, from other memory each time."""
    memory = [
        torch.ones(nbytes // 8, dtype=torch.int64) for _ in range(copies_beyond_cache(nbytes))
    ]
    read = load_library().read_memory

    def reader(part: Tensor) -> Callable[[], Any]:
        return lambda: read(part.data_ptr(), nbytes, threads)

    return round_robin([reader(part) for part in memory])


def copies_beyond_cache(nbytes: int) -> int:
    return max(1, math.ceil(BEYOND_CACHE_BYTES / nbytes))


def clone_panels(weight: PackedPanels) -> PackedPanels:
    """A copy of the weight."""

    def copied(part: Tensor | None) -> Tensor | None:
        return None if part is None else part.clone()

    return replace(
        weight,
        codes=weight.codes.clone(),
        scales=copied(weight.scales),
        minimums=copied(weight.minimums),
        row_scales=copied(weight.row_scales),
        super_scales=copied(weight.super_scales),
        super_minimums=copied(weight.super_minimums),
    )


DenseWeights = dict[str, list[Tensor]]


def copy_dense_weights(weight: Tensor) -> DenseWeights:
    """Dense weights by dtype, enough copies of each to exceed all caches."""
    return {
        str(dtype).removeprefix("torch."): [
            weight.to(dtype).clone()
            for _ in range(copies_beyond_cache(weight.numel() * dtype.itemsize))
        ]
        for dtype in (torch.float32, torch.bfloat16)
    }


def bind_dense_calls(dense: DenseWeights, x: Tensor) -> dict[str, Callable[[], Any]]:
    """torch's linear by dtype; calls rotate over the copies."""
    return {
        name: round_robin([partial(F.linear, x.to(many[0].dtype), w) for w in many])
        for name, many in dense.items()
    }


def measure_format(
    format: str,
    weight: Tensor,
    rows: tuple[int, ...],
    dense: DenseWeights,
    threads: int,
) -> list[dict[str, Any]]:
    """The rows of one format. x is quantized on the fly where the format has an integer GEMM."""
    piece = quantize(
        weight[: SHAPE[0] // 8], format
    )  # K formats quantize by search: an eighth is enough
    whole = torch.cat([piece] * 8)
    first = pack_panels(whole)
    many = [clone_panels(first) for _ in range(copies_beyond_cache(first.nbytes))]
    read = make_plain_read(first.nbytes, threads)
    unpacked = timing.median_times({"all": whole.dequantize}, repeats=3, budget=0.2)["all"]
    found = []
    for count in rows:
        x, out = torch.randn(count, SHAPE[1]), torch.empty(count, SHAPE[0])
        calls = [LinearCall(one, threads=threads).bind(x, out) for one in many]
        floats = [LinearCall(p, threads=threads, integer=False).bind(x, out) for p in many]
        seconds = timing.median_times(
            {
                "packed": round_robin(list(calls)),
                "float": round_robin(list(floats)),
                "read": read,
                **bind_dense_calls(dense, x),
            },
            repeats=15,
            budget=0.3,
        )
        best = min(seconds["float32"], seconds["bfloat16"])
        found.append(
            {
                "format": format,
                "rows": count,
                "integer": many[0].integer,
                "ms": 1e3 * seconds["packed"],
                "float_activations_ms": 1e3 * seconds["float"],
                "float32_ms": 1e3 * seconds["float32"],
                "bfloat16_ms": 1e3 * seconds["bfloat16"],
                "times_best_of_torch": best / seconds["packed"],
                "dequantize_ms": 1e3 * unpacked,
                "times_dequantized": (unpacked + best) / seconds["packed"],
                "bytes": many[0].nbytes,
                "of_plain_read": seconds["read"] / seconds["packed"],
                "read_bytes_per_second": many[0].nbytes / seconds["read"],
            }
        )
    return found


def format_table(rows: list[dict[str, Any]]) -> str:
    head = [
        "format",
        "rows",
        "packed",
        "float x",
        "float32",
        "bfloat16",
        "× torch",
        "× dequantize first",
    ]
    head += ["of read"]
    body = [
        [
            row["format"],
            str(row["rows"]),
            *(
                f"{row[key]:.2f} ms"
                for key in ("ms", "float_activations_ms", "float32_ms", "bfloat16_ms")
            ),
            f"{row['times_best_of_torch']:.1f}×",
            f"{row['times_dequantized']:.1f}×",
            f"{100 * row['of_plain_read']:.0f}%" if row["rows"] == 1 else "",
        ]
        for row in rows
    ]
    return results.format_table([head, *body])
