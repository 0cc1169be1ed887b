"""Linears with packed weights on the CPU, beside torch's and beside a plain read of memory.

In: nothing. Out: for each format and number of rows of x the time of a call, and, measured in turns with
it, of torch's linear in float32 and bfloat16 and of a plain read of as many bytes. Each candidate has enough copies of its weight (the read too) to be larger than any cache, and
takes them in turns, as the layers of a model do. Casts come after that (`quantize_cpu.py`); the GPU's half
is `quant_cuda.py`.
"""

from __future__ import annotations

import argparse
import itertools
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
from fulgurite.bench.quant_cuda import quant_cuda
from fulgurite.bench.quantize_cpu import cast_table, measure_casts
from fulgurite.kernels.common.cpu_library import best_instructions, library
from fulgurite.kernels.gemm.cpu_layout import Panels, panels
from fulgurite.kernels.gemm.cpu_linear import PreparedLinear
from fulgurite.quant import quantize

FORMATS = (
    "q4_0", "q4_1", "q4_k", "int4_g128", "int4_g32_asym", "nvfp4", "mxfp4", "q6_k", "q8_0", "int8",
    "fp8_e4m3_row", "fp8_e4m3_128x128", "fp8_e5m2_row", "mxfp8_e4m3",
)  # fmt: skip
ROWS = (1, 4, 16, 256, 1024)
SHAPE = (4096, 2048)  # N, K
COLD_BYTES = 1 << 30  # of weights in turns: several times what a server's last cache holds


def quant(options: argparse.Namespace) -> None:
    """Suite `quant`."""
    if options.device.startswith("cuda"):
        quant_cuda(options)
        return
    torch.manual_seed(0)
    rows = (1, 16) if options.quick else ROWS
    threads = device.cpu_threads()
    weight = torch.randn(SHAPE)
    found: list[dict[str, Any]] = []
    with Progress(transient=True) as progress, torch.no_grad():
        bar = progress.add_task("torch", total=len(FORMATS) + 1)
        dense = dense_copies(weight)
        progress.advance(bar)
        for format in FORMATS:
            progress.update(bar, description=format)
            found += measure(format, weight, rows, dense, threads)
            progress.advance(bar)
    read = statistics.median(row["read_bytes_per_second"] for row in found if row["rows"] == 1)
    facts = f"{threads} threads, {best_instructions()}, plain read {read / 1e9:.1f} GB/s"
    print(f"[{SHAPE[0]}, {SHAPE[1]}] weight · {facts}")
    print(_table(found))
    casts = measure_casts(options.quick)
    print(cast_table(casts))
    found += casts
    print(f"written to {results.save('quant', options.device, found, options.output)}")


def plain_reads(nbytes: int, threads: int) -> Callable[[], Any]:
    """A plain read of `nbytes`, of other memory each time."""
    memory = [torch.ones(nbytes // 8, dtype=torch.int64) for _ in range(copies(nbytes))]
    read = library().plain_read

    def reader(part: Tensor) -> Callable[[], Any]:
        return lambda: read(part.data_ptr(), nbytes, threads)

    return in_turns([reader(part) for part in memory])


def in_turns(calls: list[Callable[[], Any]]) -> Callable[[], Any]:
    """One call after the other, a different one each time."""
    order = itertools.cycle(calls)
    return lambda: next(order)()


def copies(nbytes: int) -> int:
    return max(1, math.ceil(COLD_BYTES / nbytes))


def duplicate(weight: Panels) -> Panels:
    """The same weight in memory of its own."""

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


Dense = dict[str, list[Tensor]]


def dense_copies(weight: Tensor) -> Dense:
    """torch's own weights by dtype, as many of each as no cache holds."""
    return {
        str(dtype).removeprefix("torch."): [
            weight.to(dtype).clone() for _ in range(copies(weight.numel() * dtype.itemsize))
        ]
        for dtype in (torch.float32, torch.bfloat16)
    }


def dense_calls(dense: Dense, x: Tensor) -> dict[str, Callable[[], Any]]:
    """torch's linear of x by dtype, each call with another copy."""
    return {
        name: in_turns([partial(F.linear, x.to(many[0].dtype), w) for w in many])
        for name, many in dense.items()
    }


def measure(
    format: str,
    weight: Tensor,
    rows: tuple[int, ...],
    dense: Dense,
    threads: int,
) -> list[dict[str, Any]]:
    """The rows of one format: x quantized on the fly where the format multiplies in integers."""
    piece = quantize(weight[: SHAPE[0] // 8], format)  # the K formats search: an eighth is enough
    whole = torch.cat([piece] * 8)
    first = panels(whole)
    many = [duplicate(first) for _ in range(copies(first.nbytes))]
    read = plain_reads(first.nbytes, threads)
    unpacked = timing.compare({"all": whole.dequantize}, repeats=3, budget=0.2)["all"]
    found = []
    for count in rows:
        x, out = torch.randn(count, SHAPE[1]), torch.empty(count, SHAPE[0])
        calls = [PreparedLinear(one, threads=threads).bind(x, out) for one in many]
        floats = [PreparedLinear(p, threads=threads, integer=False).bind(x, out) for p in many]
        seconds = timing.compare(
            {
                "packed": in_turns(list(calls)),
                "float": in_turns(list(floats)),
                "read": read,
                **dense_calls(dense, x),
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


def _table(rows: list[dict[str, Any]]) -> str:
    head = [
        "format",
        "rows",
        "packed",
        "float x",
        "float32",
        "bfloat16",
        "× torch",
        "× unpacked first",
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
    return results.table([head, *body])
