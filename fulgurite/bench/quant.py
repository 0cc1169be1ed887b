"""Linears with packed weights on the CPU, beside torch's and beside a plain read of memory.

In: nothing. Out: for each format and number of rows of x the time of a call, of torch's linear in
float32 and bfloat16 with the same shape, and the rate at which the weight's bytes are read over that
of a plain read of as many bytes. Each candidate has enough copies of its weight to be larger than any
cache, and takes them in turns, as the layers of a model do. The GPU's half is `quant_cuda.py`.
"""

from __future__ import annotations

import argparse
import itertools
import math
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
from fulgurite.kernels.cpu.layout import Panels, panels
from fulgurite.kernels.cpu.library import best_instructions, library
from fulgurite.kernels.cpu.linear import PreparedLinear
from fulgurite.quant import quantize

FORMATS = ("q4_0", "q4_1", "q4_k", "int4_g128", "nvfp4", "q6_k", "q8_0", "int8", "fp8_e4m3_row")
ROWS = (1, 4, 16, 256, 1024)
SHAPE = (4096, 2048)  # N, K
COLD_BYTES = 600 << 20  # of weights in turns: more than a server's last cache holds


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
        bar = progress.add_task("read", total=len(FORMATS) + 2)
        read = read_rate(threads)
        progress.advance(bar)
        dense = measure_dense(weight, rows)
        progress.advance(bar)
        for format in FORMATS:
            progress.update(bar, description=format)
            found += measure(format, weight, rows, dense, read, threads)
            progress.advance(bar)
    facts = f"{threads} threads, {best_instructions()}, plain read {read / 1e9:.1f} GB/s"
    print(f"[{SHAPE[0]}, {SHAPE[1]}] weight · {facts}")
    print(_table(found))
    print(f"written to {results.save('quant', options.device, found, options.output)}")


def read_rate(threads: int) -> float:
    """Bytes a second of a plain read that no cache holds."""
    memory = torch.zeros(COLD_BYTES // 8, dtype=torch.int64)
    run = library().plain_read
    call = partial(run, memory.data_ptr(), COLD_BYTES, threads)
    return COLD_BYTES / timing.compare({"read": call}, repeats=9, budget=1.0)["read"]


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


def measure_dense(weight: Tensor, rows: tuple[int, ...]) -> dict[tuple[str, int], float]:
    """Seconds of torch's linear by dtype and rows of x."""
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        many = [weight.to(dtype).clone() for _ in range(copies(weight.numel() * dtype.itemsize))]
        for count in rows:
            x = torch.randn(count, SHAPE[1], dtype=dtype)
            call = in_turns([partial(F.linear, x, w) for w in many])
            name = str(dtype).removeprefix("torch.")
            taken = timing.compare({name: call}, repeats=9, budget=0.6)
            seconds[name, count] = taken[name]
    return seconds


def measure(
    format: str,
    weight: Tensor,
    rows: tuple[int, ...],
    dense: dict[tuple[str, int], float],
    read: float,
    threads: int,
) -> list[dict[str, Any]]:
    """The rows of one format: x quantized on the fly where the format multiplies in integers."""
    piece = quantize(weight[: SHAPE[0] // 8], format)  # the K formats search: an eighth is enough
    first = panels(torch.cat([piece] * 8))
    many = [duplicate(first) for _ in range(copies(first.nbytes))]
    found = []
    for count in rows:
        x, out = torch.randn(count, SHAPE[1]), torch.empty(count, SHAPE[0])
        calls = [PreparedLinear(one, threads=threads).bind(x, out) for one in many]
        floats = [PreparedLinear(p, threads=threads, integer=False).bind(x, out) for p in many]
        seconds = timing.compare(
            {"packed": in_turns(list(calls)), "float": in_turns(list(floats))},
            repeats=9,
            budget=0.6,
        )
        best = min(dense["float32", count], dense["bfloat16", count])
        found.append(
            {
                "format": format,
                "rows": count,
                "integer": many[0].integer,
                "ms": 1e3 * seconds["packed"],
                "float_activations_ms": 1e3 * seconds["float"],
                "float32_ms": 1e3 * dense["float32", count],
                "bfloat16_ms": 1e3 * dense["bfloat16", count],
                "times_best_of_torch": best / seconds["packed"],
                "bytes": many[0].nbytes,
                "of_plain_read": many[0].nbytes / seconds["packed"] / read,
            }
        )
    return found


def _table(rows: list[dict[str, Any]]) -> str:
    head = ["format", "rows", "packed", "float x", "float32", "bfloat16", "× torch", "of read"]
    body = [
        [
            row["format"],
            str(row["rows"]),
            *(
                f"{row[key]:.2f} ms"
                for key in ("ms", "float_activations_ms", "float32_ms", "bfloat16_ms")
            ),
            f"{row['times_best_of_torch']:.1f}×",
            f"{100 * row['of_plain_read']:.0f}%" if row["rows"] == 1 else "",
        ]
        for row in rows
    ]
    return results.table([head, *body])
