"""The suite `dispatch`: tokens to other ranks and back, beside moving the same bytes by a plain copy.

In: nothing. Out: rows of figures and a table.

    cuda   the kernels of the symmetric transport, in one process that holds the buffers of all ranks
           (ranks that share a GPU take turns, so their own times mean nothing): what one rank's part takes,
           and the bytes that it must read and write over that time, in percent of the copy bandwidth
    cpu    the collective transport between two processes by gloo, beside one all-to-all of as many bytes
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fulgurite.bench import results
from fulgurite.bench.quant_cuda import copy_bandwidth, graph_seconds
from fulgurite.errors import ArgumentError
from fulgurite.kernels.dispatch.wire_format import Wire, visits
from fulgurite.parallel import Axis, Collective, Mesh, launch
from fulgurite.parallel.collectives import exchange_rows

Row = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    name: str
    hidden: int
    per_token: int
    experts: int


SHAPES = (Shape("DeepSeek-V3", 7168, 8, 256), Shape("Qwen3-30B-A3B", 2048, 8, 128))
RANKS = 8
TOKENS = (1, 16, 128, 1024, 4096)
WIRES = ("bf16", "fp8", "nvfp4")
CPU_TOKENS = (1, 16, 128, 512)


def dispatch(options: argparse.Namespace) -> None:
    """Suite `dispatch`."""
    if options.device == "cpu":
        rows = launch(_on_cpu, 2, bool(options.quick))[0]
        head = "2 ranks · gloo · one thread each · medians"
        print(f"{head}\n{_cpu_table(rows)}")
    elif torch.cuda.is_available():
        copy = copy_bandwidth()
        save = partial(results.save, "dispatch", options.device, output=options.output)
        rows = _on_cuda(copy, bool(options.quick), save)
        head = (
            f"{torch.cuda.get_device_name()} · copy {copy / 1e9:.0f} GB/s · {RANKS} ranks' buffers"
        )
        print(f"{head}\n{_cuda_table(rows)}")
    else:
        raise ArgumentError("there is no GPU here", next="--device cpu")
    print(f"written to {results.save('dispatch', options.device, rows, options.output)}")


# ---- the kernels, one process ------------------------------------------------------------------------


def _on_cuda(copy: float, quick: bool, save: Callable[[list[Row]], object]) -> list[Row]:
    rows: list[Row] = []
    cases = [(SHAPES[0], wire) for wire in WIRES]
    cases += [] if quick else [(shape, WIRES[0]) for shape in SHAPES[1:]]
    for shape, wire in cases:
        for tokens in TOKENS[1::2] if quick else TOKENS:
            rows.append(_kernels(shape, wire, tokens, copy))
            save(rows)  # as far as it is
            torch.cuda.empty_cache()  # the next ones' buffers have other sizes
    return rows


def _kernels(shape: Shape, wire: str, tokens: int, copy: float) -> Row:
    """Seconds of one rank's part of a dispatch and a combine, and of its share of the floor."""
    symmetric = importlib.import_module("fulgurite.parallel.transport_symmetric")
    per_rank = shape.experts // RANKS
    plan = symmetric.Plan(tokens, shape.per_token, shape.hidden, per_rank, wire=wire)
    memory = symmetric.local_memory(RANKS, plan, "cuda")
    axes = [Axis("expert", tuple(range(RANKS)), rank) for rank in range(RANKS)]
    running = [symmetric.Symmetric(a, plan, m) for a, m in zip(axes, memory, strict=True)]
    inputs = [_inputs(shape, tokens, seed) for seed in range(RANKS)]

    def there() -> list[Any]:
        calls = zip(running, inputs, strict=True)
        sent = [t.send(x, chosen, shape.experts, w) for t, (x, chosen, w) in calls]
        return [t.receive(one) for t, one in zip(running, sent, strict=True)]

    def back(arrived: list[Any]) -> None:
        for transport, one in zip(running, arrived, strict=True):
            transport.send_back(one.x_SD, one)
        for transport, one in zip(running, arrived, strict=True):
            transport.sum_up(one)

    def both() -> None:
        back(there())

    def only_there() -> None:
        there()
        for transport in running:
            transport.under_way = 0  # results are not asked for

    with torch.no_grad():
        one_way = graph_seconds([only_there] * 4) / RANKS
        all_ways = graph_seconds([both] * 4) / RANKS
    for transport in running:
        transport.check()
    pairs = tokens * shape.per_token
    ways = [visits(chosen, shape.experts, RANKS).visited_TW for _, chosen, _ in inputs]
    rows = int(sum(visited.sum() for visited in ways)) / RANKS  # a token goes once to each rank
    row_bytes, value = (
        Wire(wire, shape.hidden).row_bytes + running[0].sizes.header,
        2 * shape.hidden,
    )
    # rows: read, written to a peer, read there, written as values for each visit; then the other way
    moved = {
        "dispatch": rows * 3 * row_bytes + pairs * value,
        "combine": pairs * value + rows * 2 * value + tokens * value,
    }
    seconds = {"dispatch": one_way, "combine": max(all_ways - one_way, 1e-9)}
    return {
        "shape": shape.name,
        "wire": wire,
        "tokens": tokens,
        **{f"{part}_seconds": seconds[part] for part in moved},
        **{f"{part}_of_copy": moved[part] / copy / seconds[part] for part in moved},
    }


def _inputs(shape: Shape, tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    how: dict[str, Any] = {"generator": generator, "device": "cuda"}
    chosen = torch.rand(tokens, shape.experts, **how).topk(shape.per_token, dim=-1).indices
    x = torch.randn(tokens, shape.hidden, dtype=torch.bfloat16, **how)
    return x, chosen, torch.rand(tokens, shape.per_token, **how)


def _cuda_table(rows: list[Row]) -> str:
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
    return results.table([head, *lines])


# ---- the collective transport, two processes -----------------------------------------------------------


def _on_cpu(quick: bool) -> list[Row]:
    """What each of two ranks measures; both come to the same calls."""
    rows = []
    with Mesh(expert=2, timeout=60) as mesh, torch.no_grad():
        shape = SHAPES[1]
        for wire in ("bf16", "fp8", "nvfp4"):
            for tokens in CPU_TOKENS[1::2] if quick else CPU_TOKENS:
                rows.append(_collective(mesh, shape, wire, tokens))
    return rows


def _collective(mesh: Mesh, shape: Shape, wire: str, tokens: int) -> Row:
    generator = torch.Generator().manual_seed(mesh.rank)
    chosen = torch.rand(tokens, shape.experts, generator=generator).topk(shape.per_token).indices
    x = torch.randn(tokens, shape.hidden, generator=generator).bfloat16()
    weights = torch.rand(tokens, shape.per_token, generator=generator)
    transport = Collective(mesh.expert, wire=wire)

    def there_and_back() -> None:
        arrived = transport.send(x, chosen, shape.experts, weights)
        transport.combine(arrived.x_SD, arrived)

    half = tokens  # of two ranks, nearly every token visits both
    row_bytes, result_bytes = Wire(wire, shape.hidden).row_bytes, 2 * shape.hidden
    bytes_there = torch.zeros(2 * half, row_bytes, dtype=torch.uint8)
    bytes_back = torch.zeros(2 * half, result_bytes, dtype=torch.uint8)
    split = (half, half)

    def plain() -> None:
        exchange_rows(bytes_there, mesh.expert, split, split, "there")
        exchange_rows(bytes_back, mesh.expert, split, split, "back")

    seconds = {name: _median(call) for name, call in (("ours", there_and_back), ("plain", plain))}
    moved = 2 * half * (row_bytes + result_bytes)
    return {"shape": shape.name, "wire": wire, "tokens": tokens, "bytes": moved, **seconds}


def _median(call: Any, rounds: int = 15) -> float:
    """All ranks must call equally often, so rounds are counted, not timed."""
    call()
    readings = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        readings.append(time.perf_counter() - start)
    return sorted(readings)[rounds // 2]


def _cpu_table(rows: list[Row]) -> str:
    head = ["shape", "wire", "tokens", "bytes", "there and back", "all-to-all alone"]
    lines = [
        [
            row["shape"],
            row["wire"],
            str(row["tokens"]),
            f"{row['bytes'] / 1e6:.2f} MB",
            f"{row['ours'] * 1e3:.2f} ms",
            f"{row['plain'] * 1e3:.2f} ms",
        ]
        for row in rows
    ]
    return results.table([head, *lines])
