"""Suite `dispatch`: expert-parallel dispatch and combine, against a plain copy of the same bytes.

In: nothing. Out: rows and tables.

    cuda   kernels of the symmetric-memory dispatcher, in one process that holds the buffers of all ranks (ranks that
           share a GPU run in turns, so their own times mean nothing): the time of one rank's part, and the bytes that
           it must read and write over that time as percent of the copy bandwidth.
           Layers: dispatch, experts and combine of one rank in one CUDA graph, as percent of the floor: the same
           bytes, and the larger of reading the used experts and of computing with them
    cpu    `AllToAllDispatcher` between two gloo processes, against one all-to-all of as many bytes; then
           all-to-all against hierarchical on emulated nodes (dispatch_nodes.py)

Tokens choose experts uniformly, by Zipf's law, or as in a real model (expert_routing.py).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from fulgurite.bench import dispatch_nodes, results
from fulgurite.bench.expert_routing import ROUTINGS, Routing, make_routing, record_load
from fulgurite.bench.measure import measure_gpu_copy_bandwidth, time_in_cuda_graph
from fulgurite.bench.moe import (
    ACTIVATION_FORMATS,
    GPU_SHAPES,
    LayerShape,
    Roofline,
    make_expert_weights,
    measure_gpu_roofline,
)
from fulgurite.errors import ArgumentError
from fulgurite.kernels.dispatch.buffers import DispatchConfig
from fulgurite.kernels.dispatch.layout import get_dispatch_layout
from fulgurite.kernels.dispatch.wire_format import WireFormat
from fulgurite.kernels.moe.ops import fused_experts
from fulgurite.kernels.moe.router_config import Routes
from fulgurite.parallel import AllToAllDispatcher, Axis, Mesh, launch
from fulgurite.parallel.collectives import all_to_all_rows
from fulgurite.parallel.dispatch.dispatcher import DispatchedTokens
from fulgurite.parallel.dispatch.symmetric import SymmetricMemoryDispatcher
from fulgurite.parallel.symmetric.memory import allocate_local_buffers

Row = dict[str, Any]
QWEN, DEEPSEEK = GPU_SHAPES[:2]
RANKS = 8
TOKENS = (1, 16, 128, 1024, 4096)
LAYER_TOKENS = (16, 128, 1024)
WIRE_FORMATS = ("bf16", "fp8", "nvfp4")
LAYER_FORMATS = (  # wire format, weight format
    ("bf16", "bfloat16"),
    ("fp8", "bfloat16"),
    ("nvfp4", "bfloat16"),
    ("fp8", "fp8_e4m3_128x128"),
)
CPU_TOKENS = (1, 16, 128, 512)


def run_dispatch(options: argparse.Namespace) -> None:
    """Suite `dispatch`."""
    quick = bool(options.quick)
    if options.device == "cpu":
        rows = launch(_measure_cpu, 2, quick)[0] + dispatch_nodes.measure_nodes(quick)
        head = "2 ranks · gloo · one thread each · medians"
        print(f"{head}\n{format_cpu_table(rows)}")
    elif torch.cuda.is_available():
        copy = measure_gpu_copy_bandwidth()
        save = partial(results.save_results, "dispatch", options.device, output=options.output)
        rows = _measure_gpu(copy, quick, save)
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

    def add(row: Row) -> None:
        rows.append(row)
        save(rows)  # partial results survive an interrupt
        torch.cuda.empty_cache()  # the next case has buffers of other sizes

    cases = [(DEEPSEEK, wire, "uniform") for wire in WIRE_FORMATS]
    if not quick:
        cases += [(QWEN, "bf16", "uniform")]
        cases += [(DEEPSEEK, "bf16", routing) for routing in ROUTINGS[1:]]
    for shape, wire, routing in cases:
        for tokens in TOKENS[1::2] if quick else TOKENS:
            add(_measure_kernels(shape, wire, tokens, copy, routing))
    roofline = measure_gpu_roofline("cuda")
    formats = [(*format, "uniform") for format in (LAYER_FORMATS[:2] if quick else LAYER_FORMATS)]
    formats += [] if quick else [("bf16", "bfloat16", routing) for routing in ROUTINGS[1:]]
    for wire, weight_format, routing in formats:
        weights = _make_weights(DEEPSEEK, weight_format)
        for tokens in LAYER_TOKENS[:2] if quick else LAYER_TOKENS:
            add(_measure_layer(DEEPSEEK, wire, weight_format, weights, tokens, roofline, routing))
        del weights
    return rows


@cache
def _routing(name: str, experts: int) -> Routing:
    return make_routing(name, experts, _recorded_load() if name == "sand" else None)


@cache
def _recorded_load() -> Tensor:
    return record_load()


@dataclass(frozen=True, eq=False)
class LocalRanks:
    """The dispatchers of all ranks in this process, and the tokens of each."""

    shape: LayerShape
    dispatchers: list[SymmetricMemoryDispatcher]
    inputs: list[tuple[Tensor, Tensor, Tensor]]  # tokens, slots, router weights

    def dispatch_all(self) -> list[DispatchedTokens]:
        calls = zip(self.dispatchers, self.inputs, strict=True)
        experts = self.shape.experts
        pending = [d.start_dispatch(x, slots, experts, w) for d, (x, slots, w) in calls]
        return [d.finish_dispatch(one) for d, one in zip(self.dispatchers, pending, strict=True)]

    def combine_all(self, results: list[Tensor], dispatched: list[DispatchedTokens]) -> None:
        for dispatcher, y_SD, one in zip(self.dispatchers, results, dispatched, strict=True):
            dispatcher.start_combine(y_SD, one)
        for dispatcher, one in zip(self.dispatchers, dispatched, strict=True):
            dispatcher.finish_combine(one)

    def dispatch_only(self) -> None:
        self.dispatch_all()
        for dispatcher in self.dispatchers:
            dispatcher.in_flight = 0  # nothing is combined

    def dispatch_and_combine_all(self) -> None:
        dispatched = self.dispatch_all()
        self.combine_all([one.x_SD for one in dispatched], dispatched)

    def run_layer(self, weights: tuple[Tensor, Tensor], activations: tuple[str, str]) -> None:
        """All ranks have the same experts: they are far larger than a cache, and save memory."""
        dispatched = self.dispatch_all()
        results = [
            fused_experts(
                one.x_SD,
                Routes(one.weights_S[:, None], one.experts_S[:, None]),
                *weights,
                activations=activations,
            )
            for one in dispatched
        ]
        self.combine_all(results, dispatched)

    def check(self) -> None:
        for dispatcher in self.dispatchers:
            dispatcher.check()

    @property
    def rows_W(self) -> Tensor:
        """The rows that each rank receives: a token is sent once to each rank."""
        layouts = [
            get_dispatch_layout(slots, self.shape.experts, RANKS) for _, slots, _ in self.inputs
        ]
        return torch.stack([one.is_token_in_rank_TW.sum(0) for one in layouts]).sum(0)

    def moved_bytes(self) -> dict[str, float]:
        """What one rank must read and write, on average."""
        rows, pairs = float(self.rows_W.float().mean()), float(self.inputs[0][1].numel())
        first = self.dispatchers[0]
        row_bytes = first.dispatch_wire.row_bytes + first.buffers.header_bytes
        value = 2 * self.shape.hidden
        # dispatch: read, written to a peer, read there, written once per expert; combine: the reverse
        return {
            "dispatch": rows * 3 * row_bytes + pairs * value,
            "combine": pairs * value + rows * 2 * value + len(self.inputs[0][0]) * value,
        }


def _make_ranks(shape: LayerShape, wire: str, tokens: int, routing: str) -> LocalRanks:
    per_rank = shape.experts // RANKS
    config = DispatchConfig(tokens, shape.per_token, shape.hidden, per_rank, dispatch_format=wire)
    buffers = allocate_local_buffers(RANKS, config.num_bytes(RANKS), "cuda")
    axes = [Axis("expert", tuple(range(RANKS)), rank) for rank in range(RANKS)]
    dispatchers = [
        SymmetricMemoryDispatcher(axis, config, buffer)
        for axis, buffer in zip(axes, buffers, strict=True)
    ]
    inputs = [_random_inputs(shape, tokens, seed, routing) for seed in range(RANKS)]
    return LocalRanks(shape, dispatchers, inputs)


def _measure_kernels(
    shape: LayerShape, wire: str, tokens: int, copy: float, routing: str = "uniform"
) -> Row:
    """Seconds of one rank's dispatch and combine, and percent of the copy bandwidth."""
    ranks = _make_ranks(shape, wire, tokens, routing)
    with torch.no_grad():
        dispatch_seconds = time_in_cuda_graph([ranks.dispatch_only] * 4) / RANKS
        total_seconds = time_in_cuda_graph([ranks.dispatch_and_combine_all] * 4) / RANKS
    ranks.check()
    moved = ranks.moved_bytes()
    seconds = {"dispatch": dispatch_seconds, "combine": max(total_seconds - dispatch_seconds, 1e-9)}
    return {
        "shape": shape.name,
        "wire": wire,
        "routing": routing,
        "tokens": tokens,
        **{f"{part}_seconds": seconds[part] for part in moved},
        **{f"{part}_of_copy": moved[part] / copy / seconds[part] for part in moved},
    }


def _make_weights(shape: LayerShape, format: str) -> tuple[Tensor, Tensor]:
    """The experts of one rank."""
    local = LayerShape(
        shape.name, shape.hidden, shape.inner, shape.experts // RANKS, shape.per_token
    )
    return make_expert_weights(local, format, "cuda")


def _measure_layer(
    shape: LayerShape,
    wire: str,
    weight_format: str,
    weights: tuple[Tensor, Tensor],
    tokens: int,
    roofline: Roofline,
    routing: str,
) -> Row:
    """Seconds of dispatch, experts and combine of one rank, and percent of the floor."""
    ranks = _make_ranks(shape, wire, tokens, routing)
    activations = (ACTIVATION_FORMATS.get(weight_format, "none"),) * 2
    run_layer = partial(ranks.run_layer, weights, activations)
    with torch.no_grad():
        seconds = time_in_cuda_graph([run_layer] * 2) / RANKS
    ranks.check()
    used = torch.cat([slots.flatten() for _, slots, _ in ranks.inputs]).unique().numel() / RANKS
    weight_bytes = sum(weight.nbytes for weight in weights) * RANKS / shape.experts * used
    flops = 6 * tokens * shape.per_token * shape.hidden * shape.inner
    moved = sum(ranks.moved_bytes().values())
    experts_floor = max(weight_bytes / roofline.bandwidth, flops / roofline.flops)
    floor = moved / roofline.bandwidth + experts_floor
    rows_W = ranks.rows_W.float()
    return {
        "part": "layer",
        "shape": shape.name,
        "wire": wire,
        "weights": weight_format,
        "routing": routing,
        "tokens": tokens,
        "layer_seconds": seconds,
        "floor_seconds": floor,
        "percent_of_floor": 100 * floor / seconds,
        "busiest_rank": float(rows_W.max() / rows_W.mean()),
    }


def _random_inputs(
    shape: LayerShape, tokens: int, seed: int, routing: str
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    how: dict[str, Any] = {"generator": generator, "device": "cuda"}
    chosen = _routing(routing, shape.experts).draw(tokens, shape.per_token, seed, "cuda")
    x = torch.randn(tokens, shape.hidden, dtype=torch.bfloat16, **how)
    return x, chosen, torch.rand(tokens, shape.per_token, **how)


def format_gpu_table(rows: list[Row]) -> str:
    head = ["shape", "wire", "routing", "tokens", "dispatch", "of copy", "combine", "of copy"]
    lines = [
        [
            row["shape"],
            row["wire"],
            row.get("routing", "uniform"),
            str(row["tokens"]),
            f"{row['dispatch_seconds'] * 1e6:.1f} µs",
            f"{row['dispatch_of_copy']:.0%}",
            f"{row['combine_seconds'] * 1e6:.1f} µs",
            f"{row['combine_of_copy']:.0%}",
        ]
        for row in rows
        if row.get("part") != "layer"
    ]
    layers = [row for row in rows if row.get("part") == "layer"]
    table = results.format_table([head, *lines])
    return f"{table}\n\n{format_layer_table(layers)}" if layers else table


def format_layer_table(rows: list[Row]) -> str:
    """Dispatch, experts and combine as one step."""
    head = ["layer", "wire", "weights", "routing", "busiest rank", "tokens", "time", "of floor"]
    lines = [
        [
            row["shape"],
            row["wire"],
            row["weights"],
            row["routing"],
            f"{row['busiest_rank']:.2f}x",
            str(row["tokens"]),
            f"{row['layer_seconds'] * 1e6:.0f} µs",
            f"{row['percent_of_floor']:.0f}%",
        ]
        for row in rows
    ]
    return results.format_table([head, *lines])


# ---- all-to-all, two processes --------------------------------------------------------------------


def _measure_cpu(quick: bool) -> list[Row]:
    """Runs on each of two ranks; both make the same calls."""
    rows = []
    with Mesh(expert=2, timeout=60) as mesh, torch.no_grad():
        shape = QWEN
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
        pending = dispatcher.start_dispatch(x, chosen, shape.experts, weights)
        dispatched = dispatcher.finish_dispatch(pending)
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
        if row.get("part") != "nodes"
    ]
    nodes = [row for row in rows if row.get("part") == "nodes"]
    table = results.format_table([head, *lines])
    return f"{table}\n\n{dispatch_nodes.format_table(nodes)}" if nodes else table
