"""Suite `dispatch`: expert-parallel dispatch and combine, against a plain copy of the same bytes.

In: nothing. Out: rows and a table.

    cuda   kernels of the symmetric-memory dispatcher, in one process that holds the buffers of all ranks (ranks that
           share a GPU run in turns, so their own times mean nothing): the time of one rank's part, and the bytes that
           it must read and write over that time as percent of the copy bandwidth
    cpu    `AllToAllDispatcher` between two gloo processes, against one all-to-all of as many bytes
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fulgurite.bench import results
from fulgurite.bench.measure import measure_gpu_copy_bandwidth, time_in_cuda_graph
from fulgurite.errors import ArgumentError
from fulgurite.kernels.dispatch.buffers import DispatchConfig
from fulgurite.kernels.dispatch.layout import get_dispatch_layout
from fulgurite.kernels.dispatch.wire_format import WireFormat
from fulgurite.parallel import AllToAllDispatcher, Axis, Mesh, launch
from fulgurite.parallel.collectives import all_to_all_rows
from fulgurite.parallel.dispatcher_symmetric import SymmetricMemoryDispatcher
from fulgurite.parallel.symmetric_memory import allocate_local_buffers

Row = dict[str, Any]


@dataclass(frozen=True)
class LayerShape:
    name: str
    hidden: int
    per_token: int
    experts: int


SHAPES = (LayerShape("DeepSeek-V3", 7168, 8, 256), LayerShape("Qwen3-30B-A3B", 2048, 8, 128))
RANKS = 8
TOKENS = (1, 16, 128, 1024, 4096)
WIRE_FORMATS = ("bf16", "fp8", "nvfp4")
CPU_TOKENS = (1, 16, 128, 512)


def run_dispatch(options: argparse.Namespace) -> None:
    """Suite `dispatch`."""
    if options.device == "cpu":
        rows = launch(_measure_cpu, 2, bool(options.quick))[0]
        head = "2 ranks · gloo · one thread each · medians"
        print(f"{head}\n{format_cpu_table(rows)}")
    elif torch.cuda.is_available():
        copy = measure_gpu_copy_bandwidth()
        save = partial(results.save_results, "dispatch", options.device, output=options.output)
        rows = _measure_gpu(copy, bool(options.quick), save)
        head = (
            f"{torch.cuda.get_device_name()} · copy {copy / 1e9:.0f} GB/s · {RANKS} ranks' buffers"
        )
        print(f"{head}\n{format_gpu_table(rows)}")
    else:
        raise ArgumentError("no CUDA device is available", next="--device cpu")
    print(f"written to {results.save_results('dispatch', options.device, rows, options.output)}")


# ---- the kernels, one process ------------------------------------------------------------------------


def _measure_gpu(copy: float, quick: bool, save: Callable[[list[Row]], object]) -> list[Row]:
    rows: list[Row] = []
    cases = [(SHAPES[0], wire) for wire in WIRE_FORMATS]
    cases += [] if quick else [(shape, WIRE_FORMATS[0]) for shape in SHAPES[1:]]
    for shape, wire in cases:
        for tokens in TOKENS[1::2] if quick else TOKENS:
            rows.append(_measure_kernels(shape, wire, tokens, copy))
            save(rows)  # partial results survive an interrupt
            torch.cuda.empty_cache()  # the next case has buffers of other sizes
    return rows


def _measure_kernels(shape: LayerShape, wire: str, tokens: int, copy: float) -> Row:
    """Seconds of one rank's dispatch and combine, and percent of the copy bandwidth."""
    per_rank = shape.experts // RANKS
    config = DispatchConfig(tokens, shape.per_token, shape.hidden, per_rank, dispatch_format=wire)
    buffers = allocate_local_buffers(RANKS, config.num_bytes(RANKS), "cuda")
    axes = [Axis("expert", tuple(range(RANKS)), rank) for rank in range(RANKS)]
    dispatchers = [
        SymmetricMemoryDispatcher(axis, config, buffer)
        for axis, buffer in zip(axes, buffers, strict=True)
    ]
    inputs = [_random_inputs(shape, tokens, seed) for seed in range(RANKS)]

    def dispatch_all() -> list[Any]:
        calls = zip(dispatchers, inputs, strict=True)
        pending = [d.start_dispatch(x, slots, shape.experts, w) for d, (x, slots, w) in calls]
        return [d.finish_dispatch(one) for d, one in zip(dispatchers, pending, strict=True)]

    def combine_all(dispatched: list[Any]) -> None:
        for dispatcher, one in zip(dispatchers, dispatched, strict=True):
            dispatcher.start_combine(one.x_SD, one)
        for dispatcher, one in zip(dispatchers, dispatched, strict=True):
            dispatcher.finish_combine(one)

    def dispatch_and_combine_all() -> None:
        combine_all(dispatch_all())

    def dispatch_only() -> None:
        dispatch_all()
        for dispatcher in dispatchers:
            dispatcher.in_flight = 0  # nothing is combined

    with torch.no_grad():
        dispatch_seconds = time_in_cuda_graph([dispatch_only] * 4) / RANKS
        total_seconds = time_in_cuda_graph([dispatch_and_combine_all] * 4) / RANKS
    for dispatcher in dispatchers:
        dispatcher.check()
    pairs = tokens * shape.per_token
    ways = [
        get_dispatch_layout(chosen, shape.experts, RANKS).is_token_in_rank_TW
        for _, chosen, _ in inputs
    ]
    rows = int(sum(visited.sum() for visited in ways)) / RANKS  # a token is sent once to each rank
    row_bytes, value = (
        WireFormat(wire, shape.hidden).row_bytes + dispatchers[0].buffers.header_bytes,
        2 * shape.hidden,
    )
    # dispatch: read, written to a peer, read there, written once per expert; combine: the reverse
    moved = {
        "dispatch": rows * 3 * row_bytes + pairs * value,
        "combine": pairs * value + rows * 2 * value + tokens * value,
    }
    seconds = {"dispatch": dispatch_seconds, "combine": max(total_seconds - dispatch_seconds, 1e-9)}
    return {
        "shape": shape.name,
        "wire": wire,
        "tokens": tokens,
        **{f"{part}_seconds": seconds[part] for part in moved},
        **{f"{part}_of_copy": moved[part] / copy / seconds[part] for part in moved},
    }


def _random_inputs(shape: LayerShape, tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    how: dict[str, Any] = {"generator": generator, "device": "cuda"}
    chosen = torch.rand(tokens, shape.experts, **how).topk(shape.per_token, dim=-1).indices
    x = torch.randn(tokens, shape.hidden, dtype=torch.bfloat16, **how)
    return x, chosen, torch.rand(tokens, shape.per_token, **how)


def format_gpu_table(rows: list[Row]) -> str:
    head = ["shape", "wire", "tokens", "dispatch", "of copy", "combine", "of copy"]
    lines = [
        [
            row["shape"],
            row["wire"],
            str(row["tokens"]),
            f"{row['dispatch_seconds'] * 1e6:.1f} µs",
            f"{row['dispatch_of_copy']:.0%}",
            f"{row['combine_seconds'] * 1e6:.1f} µs",
            f"{row['combine_of_copy']:.0%}",
        ]
        for row in rows
    ]
    return results.format_table([head, *lines])


# ---- all-to-all, two processes --------------------------------------------------------------------


def _measure_cpu(quick: bool) -> list[Row]:
    """Runs on each of two ranks; both make the same calls."""
    rows = []
    with Mesh(expert=2, timeout=60) as mesh, torch.no_grad():
        shape = SHAPES[1]
        for wire in ("bf16", "fp8", "nvfp4"):
            for tokens in CPU_TOKENS[1::2] if quick else CPU_TOKENS:
                rows.append(_measure_collective(mesh, shape, wire, tokens))
    return rows


def _measure_collective(mesh: Mesh, shape: LayerShape, wire: str, tokens: int) -> Row:
    generator = torch.Generator().manual_seed(mesh.rank)
    chosen = torch.rand(tokens, shape.experts, generator=generator).topk(shape.per_token).indices
    x = torch.randn(tokens, shape.hidden, generator=generator).bfloat16()
    weights = torch.rand(tokens, shape.per_token, generator=generator)
    dispatcher = AllToAllDispatcher(mesh.expert, dispatch_format=wire)

    def dispatch_and_combine() -> None:
        dispatched = dispatcher.start_dispatch(x, chosen, shape.experts, weights)
        dispatcher.combine(dispatched.x_SD, dispatched)

    half = tokens  # nearly every token goes to both ranks
    row_bytes, result_bytes = WireFormat(wire, shape.hidden).row_bytes, 2 * shape.hidden
    dispatch_bytes = torch.zeros(2 * half, row_bytes, dtype=torch.uint8)
    combine_bytes = torch.zeros(2 * half, result_bytes, dtype=torch.uint8)
    split = (half, half)

    def all_to_all() -> None:
        all_to_all_rows(dispatch_bytes, mesh.expert, split, split, "dispatch")
        all_to_all_rows(combine_bytes, mesh.expert, split, split, "combine")

    seconds = {
        name: _median(call)
        for name, call in (("ours", dispatch_and_combine), ("all_to_all", all_to_all))
    }
    moved = 2 * half * (row_bytes + result_bytes)
    return {"shape": shape.name, "wire": wire, "tokens": tokens, "bytes": moved, **seconds}


def _median(call: Any, rounds: int = 15) -> float:
    """The median of a fixed number of rounds: all ranks must call equally often."""
    call()
    readings = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        readings.append(time.perf_counter() - start)
    return sorted(readings)[rounds // 2]


def format_cpu_table(rows: list[Row]) -> str:
    head = ["shape", "wire", "tokens", "bytes", "dispatch + combine", "all-to-all alone"]
    lines = [
        [
            row["shape"],
            row["wire"],
            str(row["tokens"]),
            f"{row['bytes'] / 1e6:.2f} MB",
            f"{row['ours'] * 1e3:.2f} ms",
            f"{row['all_to_all'] * 1e3:.2f} ms",
        ]
        for row in rows
    ]
    return results.format_table([head, *lines])
