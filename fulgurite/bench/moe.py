"""Suite `moe`: the experts of one layer, against torch and transformers.

In: nothing. Out, for each layer shape, weight format and number of tokens: the time of our experts; of the same in torch
(a loop over experts; sort, grouped_mm, activation, grouped_mm, index_add); of transformers if it is installed; and the
percentage of the floor, which is the larger of

    bytes of the experts that are used, over the bandwidth of a plain read (GPU: of a copy)
    FLOPs, over the throughput of a large GEMM in the same run

Every call has other random routes than the one before, so that no cache holds its experts. On a GPU a call is timed
inside a CUDA graph, after the kernels for all numbers of tokens were compiled in threads. On a CPU the shapes are
reduced: half of the experts, or a quarter of their width. Results are saved after each layer.
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

from fulgurite import timing
from fulgurite.bench import results
from fulgurite.bench.measure import (
    Call,
    compile_in_parallel,
    measure_gpu_copy_bandwidth,
    round_robin,
    time_in_cuda_graph,
)
from fulgurite.device import num_cpu_threads
from fulgurite.kernels.common.cpu_library import load_library
from fulgurite.kernels.moe.ops import fused_experts
from fulgurite.kernels.moe.router_config import Routes
from fulgurite.quant import QuantTensor, quantize

ROUTE_SETS = 8  # calls rotate over them
LARGE_BATCH_ROUTE_SETS = 2  # with so many tokens every call uses all experts
MAX_LOOP_TOKENS = (
    128  # the loop over experts synchronizes with the host: on a GPU only small batches are timed
)
ACTIVATION_FORMATS = {"q8_0": "q8_0", "q4_0": "q8_0", "fp8_e4m3_128x128": "fp8_e4m3_1x128"}


@dataclass(frozen=True)
class LayerShape:
    """A layer: hidden size, intermediate size, number of experts, experts per token."""

    name: str
    hidden: int
    inner: int
    experts: int
    per_token: int


GPU_SHAPES: tuple[LayerShape, ...] = (
    LayerShape("Qwen3-30B-A3B", 2048, 768, 128, 8),
    LayerShape("DeepSeek-V3", 7168, 2048, 256, 8),
    LayerShape("Mixtral-8x7B", 4096, 14336, 8, 2),
)
CPU_SHAPES: tuple[LayerShape, ...] = (
    LayerShape("Qwen3-30B-A3B, 64 of 128 experts", 2048, 768, 64, 8),
    LayerShape("Mixtral-8x7B, a quarter as wide", 4096, 3584, 8, 2),
)
GPU_TOKENS: tuple[int, ...] = (1, 16, 128, 1024, 8192, 16384)
CPU_TOKENS: tuple[int, ...] = (1, 4, 16, 128, 512)
GPU_WEIGHT_FORMATS: tuple[str, ...] = ("bfloat16", "fp8_e4m3_128x128", "nvfp4", "mxfp4")
CPU_WEIGHT_FORMATS: tuple[str, ...] = ("float32", "bfloat16", "q8_0", "q4_0")


@dataclass(frozen=True)
class Roofline:
    """Measured limits of the hardware: bytes per second and FLOP/s."""

    bandwidth: float
    flops: float


def run_moe(options: argparse.Namespace) -> None:
    """Suite `moe`."""
    gpu = options.device.startswith("cuda")
    shapes = GPU_SHAPES if gpu else CPU_SHAPES
    tokens = GPU_TOKENS if gpu else CPU_TOKENS
    formats = GPU_WEIGHT_FORMATS if gpu else CPU_WEIGHT_FORMATS
    if options.quick:
        shapes, tokens, formats = shapes[:1], tokens[:3], formats[:2]
    torch.manual_seed(0)

    def save(rows: list[dict[str, Any]]) -> Path:
        return results.save_results("moe", options.device, rows, options.output)

    found = measure_layers(shapes, tokens, formats, options.device, save)
    print(format_table(found))
    print(f"written to {save(found)}")


def measure_layers(
    shapes: tuple[LayerShape, ...],
    tokens: tuple[int, ...],
    formats: tuple[str, ...],
    device: str,
    save: Callable[[list[dict[str, Any]]], object],
) -> list[dict[str, Any]]:
    """Measure all layers."""
    gpu, found = device.startswith("cuda"), []
    with Progress(transient=True) as progress, torch.no_grad():
        bar = progress.add_task("roofline", total=len(shapes) * len(formats))
        roofline = measure_gpu_roofline(device) if gpu else measure_cpu_roofline()
        for shape, format in itertools.product(shapes, formats):
            progress.update(bar, description=f"{shape.name} {format}")
            layer = make_expert_weights(shape, format, device)
            cases = [make_case(shape, format, layer, count, device) for count in tokens]
            if gpu:
                compile_in_parallel([case.ours[0] for case in cases])
            for case in cases:
                found.append(measure_case(shape, format, layer, case, roofline, device))
            save(found)
            progress.advance(bar)
            del layer, cases
    return found


# ---- the hardware -----------------------------------------------------------------------------------


def measure_cpu_roofline(nbytes: int = 1 << 30, side: int = 2048) -> Roofline:
    """A plain read beyond the caches, and a float32 GEMM."""
    memory, threads = torch.ones(nbytes // 8, dtype=torch.int64), num_cpu_threads()
    read = partial(load_library().read_memory, memory.data_ptr(), nbytes, threads)
    a = torch.randn(side, side)
    seconds = timing.median_times({"read": read, "matmul": partial(torch.mm, a, a)}, budget=1.0)
    return Roofline(nbytes / seconds["read"], 2 * side**3 / seconds["matmul"])


def measure_gpu_roofline(device: str, side: int = 8192) -> Roofline:
    """A copy, and a bfloat16 GEMM."""
    a = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    return Roofline(
        measure_gpu_copy_bandwidth(),
        2 * side**3 / time_in_cuda_graph([partial(torch.mm, a, a)] * 4),
    )


# ---- a layer ---------------------------------------------------------------------------------------


def make_expert_weights(shape: LayerShape, format: str, device: str) -> tuple[Tensor, Tensor]:
    """gate_up and down weights: dense, or an eighth of the experts quantized and repeated."""
    is_quantized = format not in ("float32", "bfloat16")
    dtype = torch.bfloat16 if is_quantized else getattr(torch, format)
    many = max(1, shape.experts // 8) if is_quantized else shape.experts

    def weight(rows: int, columns: int) -> Tensor:
        dense = torch.empty(many, rows, columns, dtype=dtype, device=device)
        for one in dense:
            one.normal_(std=1 / math.sqrt(columns))
        if not is_quantized:
            return dense
        return repeat_experts(quantize(dense.float(), format, dtype=dtype), shape.experts)

    return weight(2 * shape.inner, shape.hidden), weight(shape.hidden, shape.inner)


def repeat_experts(weight: QuantTensor, experts: int) -> QuantTensor:
    """Repeat the first experts; each copy has its own memory."""
    which = torch.arange(experts, device=weight.device) % weight.shape[0]
    return weight.map(lambda part: part[which])


def random_routes(shape: LayerShape, tokens: int, device: str) -> list[Routes]:
    made = []
    for _ in range(ROUTE_SETS):
        scores = torch.rand(tokens, shape.experts, device=device)
        weights, experts = scores.topk(shape.per_token, dim=-1)
        made.append(Routes(weights / weights.sum(-1, keepdim=True), experts))
    return made


def roofline_seconds(
    shape: LayerShape, layer: tuple[Tensor, Tensor], routes: list[Routes], roofline: Roofline
) -> float:
    """The larger of reading the used experts and of computing with them."""
    asked = statistics.mean(route.experts_Tk.unique().numel() for route in routes)
    nbytes = sum(weight.nbytes for weight in layer) / shape.experts * asked
    pairs = routes[0].experts_Tk.numel()
    operations = 6 * pairs * shape.hidden * shape.inner
    return max(nbytes / roofline.bandwidth, operations / roofline.flops)


@dataclass(frozen=True)
class Case:
    """Tokens, sets of routes, and our calls, one per set."""

    x: Tensor
    routes: list[Routes]
    ours: list[Call]


def make_case(
    shape: LayerShape, format: str, layer: tuple[Tensor, Tensor], tokens: int, device: str
) -> Case:
    dense, gpu = not isinstance(layer[0], QuantTensor), device.startswith("cuda")
    dtype = layer[0].dtype if dense else torch.bfloat16 if gpu else torch.float32
    x = torch.randn(tokens, shape.hidden, dtype=dtype, device=device)
    many = gpu and tokens * shape.per_token >= 8 * shape.experts
    routes = random_routes(shape, tokens, device)[: LARGE_BATCH_ROUTE_SETS if many else ROUTE_SETS]
    activations = (ACTIVATION_FORMATS.get(format, "none"),) * 2
    ours: list[Call] = [
        partial(fused_experts, x, r, *layer, activations=activations) for r in routes
    ]
    return Case(x, routes, ours)


def measure_case(
    shape: LayerShape,
    format: str,
    layer: tuple[Tensor, Tensor],
    case: Case,
    roofline: Roofline,
    device: str,
) -> dict[str, Any]:
    """One row: milliseconds of each candidate, and ours as percent of the floor."""
    gpu, tokens = device.startswith("cuda"), case.x.shape[0]
    calls: dict[str, list[Call]] = {"ours": case.ours}
    if not isinstance(layer[0], QuantTensor):
        for name, function in find_baselines(shape, layer, tokens):
            if name != "loop" or not gpu or tokens <= MAX_LOOP_TOKENS:
                calls[name] = [partial(function, case.x, r, *layer) for r in case.routes]
    repeats, budget = (3, 0.03) if gpu else (7, 0.3)
    turns = {name: round_robin(each) for name, each in calls.items()}
    seconds = timing.median_times(turns, repeats=repeats, budget=budget, warmups=1)
    if gpu:  # device time: the host is not counted
        seconds |= {f"{name}_eager": taken for name, taken in seconds.items()}
        for name in set(calls) & {"ours", "grouped_mm"}:
            seconds[name] = time_in_cuda_graph(calls[name])
    floor = roofline_seconds(shape, layer, case.routes, roofline)
    others = [taken for name, taken in seconds.items() if not name.startswith("ours")]
    return {
        "shape": shape.name,
        "kind": format,
        "tokens": tokens,
        "floor_ms": 1e3 * floor,
        **{f"{name}_ms": 1e3 * taken for name, taken in seconds.items()},
        "percent_of_floor": 100 * floor / seconds["ours"],
        "times_best_other": min(others) / seconds["ours"] if others else None,
        "bandwidth": roofline.bandwidth,
        "operations": roofline.flops,
    }


# ---- baselines ----------------------------------------------------------------------------------------


def find_baselines(
    shape: LayerShape, layer: tuple[Tensor, Tensor], tokens: int
) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    """The baselines that can run here."""
    yield "loop", experts_loop
    yield "grouped_mm", torch_grouped_mm
    if importlib.util.find_spec("transformers") is None:
        return
    if (
        tokens * shape.per_token <= shape.experts
    ):  # batched_mm copies one weight per (token, expert) pair
        yield "transformers_batched_mm", transformers_experts(shape, layer, "batched_mm")
    yield "transformers_grouped_mm", transformers_experts(shape, layer, "grouped_mm")


def experts_loop(x: Tensor, routes: Routes, gate_up: Tensor, down: Tensor) -> Tensor:
    """A loop over experts: the usual eager implementation."""
    out = torch.zeros_like(x)
    for expert in routes.experts_Tk.unique().tolist():
        token, slot = torch.where(routes.experts_Tk == expert)
        gate, up = F.linear(x[token], gate_up[expert]).chunk(2, dim=-1)
        y = F.linear(F.silu(gate) * up, down[expert])
        out.index_add_(0, token, y * routes.weights_Tk[token, slot, None].to(y.dtype))
    return out


def torch_grouped_mm(x: Tensor, routes: Routes, gate_up: Tensor, down: Tensor) -> Tensor:
    """The best of torch: sort, two grouped_mm, index_add."""
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
    shape: LayerShape, layer: tuple[Tensor, Tensor], how: str
) -> Callable[..., Tensor]:
    """The experts module of Qwen3-MoE in transformers, with our weights."""
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


def format_table(rows: list[dict[str, Any]]) -> str:
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
    return results.format_table([head, *body])
