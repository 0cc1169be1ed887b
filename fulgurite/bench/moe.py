"""A layer's experts: tokens and their routes in, the weighted sum out; beside torch and transformers.

In: nothing. Out: for each shape, kind of weight and number of tokens the time of our experts, of the
same in plain torch (a loop over experts; sort, grouped_mm, gate, grouped_mm, index_add) and of
transformers' implementations where it is installed, and the percent of the floor: the larger of

    the bytes of the experts that are asked for, over the bandwidth of a plain read (GPU: of a copy)
    the floating-point operations, over what torch's largest matmul reaches in the same run

Each call takes other routes than the one before, drawn at random, so that no cache holds the experts
it asks for; on a GPU a call is timed inside a CUDA graph, after threads have compiled the kernels of
all numbers of tokens at once. On a CPU the shapes are parts of the real ones: half of the experts, or
a quarter of their width. What is measured is saved after each layer.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor

from fulgurite import device, timing
from fulgurite.bench import results
from fulgurite.bench.quant_cuda import compile_at_once, copy_bandwidth, graph_seconds
from fulgurite.kernels.common.cpu_library import library
from fulgurite.kernels.moe.ops import Routes, moe_experts
from fulgurite.quant import QuantTensor, quantize

Call = Callable[[], Any]
ROUTES = 8  # routes that calls take in turns
MANY_ROUTES = 2  # of so many tokens that each call asks for all experts
LOOPED = 128  # tokens up to which the loop over experts is timed on a GPU: it waits for the host
PARTNERS = {"q8_0": "q8_0", "q4_0": "q8_0", "fp8_e4m3_128x128": "fp8_e4m3_1x128"}


@dataclass(frozen=True)
class Shape:
    """A layer: hidden size, inner size, experts, experts a token."""

    name: str
    hidden: int
    inner: int
    experts: int
    per_token: int


GPU_SHAPES: tuple[Shape, ...] = (
    Shape("Qwen3-30B-A3B", 2048, 768, 128, 8),
    Shape("DeepSeek-V3", 7168, 2048, 256, 8),
    Shape("Mixtral-8x7B", 4096, 14336, 8, 2),
)
CPU_SHAPES: tuple[Shape, ...] = (
    Shape("Qwen3-30B-A3B, 64 of 128 experts", 2048, 768, 64, 8),
    Shape("Mixtral-8x7B, a quarter as wide", 4096, 3584, 8, 2),
)
GPU_TOKENS: tuple[int, ...] = (1, 16, 128, 1024, 8192, 16384)
CPU_TOKENS: tuple[int, ...] = (1, 4, 16, 128, 512)
GPU_KINDS: tuple[str, ...] = ("bfloat16", "fp8_e4m3_128x128", "nvfp4", "mxfp4")
CPU_KINDS: tuple[str, ...] = ("float32", "bfloat16", "q8_0", "q4_0")


@dataclass(frozen=True)
class Machine:
    """What bounds a layer: bytes and operations a second."""

    bandwidth: float
    operations: float


def moe(options: argparse.Namespace) -> None:
    """Suite `moe`."""
    gpu = options.device.startswith("cuda")
    shapes = GPU_SHAPES if gpu else CPU_SHAPES
    tokens = GPU_TOKENS if gpu else CPU_TOKENS
    kinds = GPU_KINDS if gpu else CPU_KINDS
    if options.quick:
        shapes, tokens, kinds = shapes[:1], tokens[:3], kinds[:2]
    torch.manual_seed(0)

    def save(rows: list[dict[str, Any]]) -> Path:
        return results.save("moe", options.device, rows, options.output)

    found = run(shapes, tokens, kinds, options.device, save)
    print(_table(found))
    print(f"written to {save(found)}")


def run(
    shapes: tuple[Shape, ...],
    tokens: tuple[int, ...],
    kinds: tuple[str, ...],
    place: str,
    save: Callable[[list[dict[str, Any]]], object],
) -> list[dict[str, Any]]:
    """The rows of all layers."""
    gpu, found = place.startswith("cuda"), []
    with Progress(transient=True) as progress, torch.no_grad():
        bar = progress.add_task("machine", total=len(shapes) * len(kinds))
        machine = gpu_machine(place) if gpu else cpu_machine()
        for shape, kind in itertools.product(shapes, kinds):
            progress.update(bar, description=f"{shape.name} {kind}")
            layer = make_layer(shape, kind, place)
            cases = [make_case(shape, kind, layer, count, place) for count in tokens]
            if gpu:
                compile_at_once([case.ours[0] for case in cases])
            for case in cases:
                found.append(measure(shape, kind, layer, case, machine, place))
            save(found)
            progress.advance(bar)
            del layer, cases
    return found


# ---- the machine -----------------------------------------------------------------------------------


def cpu_machine(nbytes: int = 1 << 30, side: int = 2048) -> Machine:
    """A plain read of more than caches hold, and float32 matmuls."""
    memory, threads = torch.ones(nbytes // 8, dtype=torch.int64), device.cpu_threads()
    read = partial(library().plain_read, memory.data_ptr(), nbytes, threads)
    a = torch.randn(side, side)
    seconds = timing.compare({"read": read, "matmul": partial(torch.mm, a, a)}, budget=1.0)
    return Machine(nbytes / seconds["read"], 2 * side**3 / seconds["matmul"])


def gpu_machine(place: str, side: int = 8192) -> Machine:
    """A copy, and bfloat16 matmuls."""
    a = torch.randn(side, side, device=place, dtype=torch.bfloat16)
    return Machine(copy_bandwidth(), 2 * side**3 / graph_seconds([partial(torch.mm, a, a)] * 4))


# ---- a layer ---------------------------------------------------------------------------------------


def make_layer(shape: Shape, kind: str, place: str) -> tuple[Tensor, Tensor]:
    """gate_up and down: dense, or an eighth of the experts packed and repeated (packing is slow)."""
    packed = kind not in ("float32", "bfloat16")
    dtype = torch.bfloat16 if packed else getattr(torch, kind)
    many = max(1, shape.experts // 8) if packed else shape.experts

    def weight(rows: int, columns: int) -> Tensor:
        dense = torch.empty(many, rows, columns, dtype=dtype, device=place)
        for one in dense:
            one.normal_(std=1 / math.sqrt(columns))
        if not packed:
            return dense
        return repeated(quantize(dense.float(), kind, dtype=dtype), shape.experts)

    return weight(2 * shape.inner, shape.hidden), weight(shape.hidden, shape.inner)


def repeated(weight: QuantTensor, experts: int) -> QuantTensor:
    """The first experts over and over, each in memory of its own."""
    which = torch.arange(experts, device=weight.device) % weight.shape[0]
    return weight.map(lambda part: part[which])


def draw_routes(shape: Shape, tokens: int, place: str) -> list[Routes]:
    made = []
    for _ in range(ROUTES):
        chance = torch.rand(tokens, shape.experts, device=place)
        weights, experts = chance.topk(shape.per_token, dim=-1)
        made.append(Routes(weights / weights.sum(-1, keepdim=True), experts))
    return made


def floor_seconds(
    shape: Shape, layer: tuple[Tensor, Tensor], routes: list[Routes], machine: Machine
) -> float:
    """The larger of reading the experts that are asked for and of computing with them."""
    asked = statistics.mean(route.experts_Tk.unique().numel() for route in routes)
    nbytes = sum(weight.nbytes for weight in layer) / shape.experts * asked
    pairs = routes[0].experts_Tk.numel()
    operations = 6 * pairs * shape.hidden * shape.inner
    return max(nbytes / machine.bandwidth, operations / machine.operations)


@dataclass(frozen=True)
class Case:
    """A number of tokens, their routes and our calls, each with routes of its own."""

    x: Tensor
    routes: list[Routes]
    ours: list[Call]


def make_case(
    shape: Shape, kind: str, layer: tuple[Tensor, Tensor], tokens: int, place: str
) -> Case:
    dense, gpu = not isinstance(layer[0], QuantTensor), place.startswith("cuda")
    dtype = layer[0].dtype if dense else torch.bfloat16 if gpu else torch.float32
    x = torch.randn(tokens, shape.hidden, dtype=dtype, device=place)
    many = gpu and tokens * shape.per_token >= 8 * shape.experts
    routes = draw_routes(shape, tokens, place)[: MANY_ROUTES if many else ROUTES]
    activations = (PARTNERS.get(kind, "none"),) * 2
    ours: list[Call] = [partial(moe_experts, x, r, *layer, activations=activations) for r in routes]
    return Case(x, routes, ours)


def measure(
    shape: Shape,
    kind: str,
    layer: tuple[Tensor, Tensor],
    case: Case,
    machine: Machine,
    place: str,
) -> dict[str, Any]:
    """One line: milliseconds of each candidate, and ours in percent of the floor."""
    gpu, tokens = place.startswith("cuda"), case.x.shape[0]
    calls: dict[str, list[Call]] = {"ours": case.ours}
    if not isinstance(layer[0], QuantTensor):
        for name, function in candidates(shape, layer, tokens):
            if name != "loop" or not gpu or tokens <= LOOPED:
                calls[name] = [partial(function, case.x, r, *layer) for r in case.routes]
    repeats, budget = (3, 0.03) if gpu else (7, 0.3)
    turns = {name: in_turns(each) for name, each in calls.items()}
    seconds = timing.compare(turns, repeats=repeats, budget=budget, warmups=1)
    if gpu:  # without the host's part
        seconds |= {f"{name}_eager": taken for name, taken in seconds.items()}
        for name in set(calls) & {"ours", "grouped_mm"}:
            seconds[name] = graph_seconds(calls[name])
    floor = floor_seconds(shape, layer, case.routes, machine)
    others = [taken for name, taken in seconds.items() if not name.startswith("ours")]
    return {
        "shape": shape.name,
        "kind": kind,
        "tokens": tokens,
        "floor_ms": 1e3 * floor,
        **{f"{name}_ms": 1e3 * taken for name, taken in seconds.items()},
        "percent_of_floor": 100 * floor / seconds["ours"],
        "times_best_other": min(others) / seconds["ours"] if others else None,
        "bandwidth": machine.bandwidth,
        "operations": machine.operations,
    }


def in_turns(calls: list[Call]) -> Call:
    order = itertools.cycle(calls)
    return lambda: next(order)()


# ---- others ----------------------------------------------------------------------------------------


def candidates(
    shape: Shape, layer: tuple[Tensor, Tensor], tokens: int
) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    """What else runs such experts here."""
    yield "loop", loop
    yield "grouped_mm", grouped_mm
    if importlib.util.find_spec("transformers") is None:
        return
    if tokens * shape.per_token <= shape.experts:  # it copies a matrix for every pair
        yield "transformers_batched_mm", transformers_experts(shape, layer, "batched_mm")
    yield "transformers_grouped_mm", transformers_experts(shape, layer, "grouped_mm")


def loop(x: Tensor, routes: Routes, gate_up: Tensor, down: Tensor) -> Tensor:
    """One expert after the other, the usual eager implementation."""
    out = torch.zeros_like(x)
    for expert in routes.experts_Tk.unique().tolist():
        token, slot = torch.where(routes.experts_Tk == expert)
        gate, up = F.linear(x[token], gate_up[expert]).chunk(2, dim=-1)
        y = F.linear(F.silu(gate) * up, down[expert])
        out.index_add_(0, token, y * routes.weights_Tk[token, slot, None].to(y.dtype))
    return out


def grouped_mm(x: Tensor, routes: Routes, gate_up: Tensor, down: Tensor) -> Tensor:
    """torch's own best: sort, two grouped matmuls, index_add."""
    flat = routes.experts_Tk.flatten()
    order = flat.argsort()
    token = order // routes.experts_Tk.shape[1]
    counts = torch.zeros(gate_up.shape[0], dtype=torch.int64, device=x.device)
    ends = counts.scatter_add_(0, flat, torch.ones_like(flat)).cumsum(0).int()
    gate, up = F.grouped_mm(x[token], gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    y = F.grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)
    weights = routes.weights_Tk.flatten()[order, None].to(y.dtype)
    return torch.zeros_like(x).index_add_(0, token, y * weights)


def transformers_experts(
    shape: Shape, layer: tuple[Tensor, Tensor], how: str
) -> Callable[..., Tensor]:
    """Qwen3-MoE's experts module of transformers, around our weights."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.inner,
        num_experts=shape.experts,
        num_experts_per_tok=shape.per_token,
    )
    config._experts_implementation = how
    with torch.device("meta"):
        module = Qwen3MoeExperts(config)
    module.gate_up_proj, module.down_proj = (torch.nn.Parameter(w, False) for w in layer)

    def call(x: Tensor, routes: Routes, gate_up: Tensor, down: Tensor) -> Tensor:
        out: Tensor = module(x, routes.experts_Tk, routes.weights_Tk.to(x.dtype))
        return out

    return call


def _table(rows: list[dict[str, Any]]) -> str:
    names = ["loop", "grouped_mm", "transformers_batched_mm", "transformers_grouped_mm"]
    head = ["shape", "weights", "tokens", "ours", "floor", "of floor", *names, "× best other"]

    def milliseconds(value: float | None) -> str:
        return "" if value is None else f"{value:.2f} ms"

    body = [
        [
            row["shape"],
            row["kind"],
            str(row["tokens"]),
            milliseconds(row["ours_ms"]),
            milliseconds(row["floor_ms"]),
            f"{row['percent_of_floor']:.0f}%",
            *(milliseconds(row.get(f"{name}_ms")) for name in names),
            f"{row['times_best_other']:.2f}×" if row["times_best_other"] else "",
        ]
        for row in rows
    ]
    return results.table([head, *body])
