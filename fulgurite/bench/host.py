"""Suite `host`: what the host costs around kernels, in steps that are too short to hide it.

In: nothing. Out: for each case and candidate the wall time of one step and, on a GPU, the time of its kernels. The
difference is the host. Steps run one after the other without waiting for the device, as a training loop runs them.

    two ops            (x * 2).relu() on 2×2
    block              norm, matmul, gate, matmul, residual, 64×256 (CPU: 4×64); forward, and with backward
    rms_norm           16384×4096 (CPU: 16×256); forward, and with backward
    MoE layer          router and experts of `fulgurite.kernels` called eagerly, 16 tokens; torch's ops are eager's
    backward of one op on a GPU, in torch's thread of the GPU and in the calling thread: the difference is the cost of
                       two thread switches
    decode step        of the engine, four requests of a small model, on one rank and over two (`host_ranks`)

Candidates: eager, torch.compile, its reduce-overhead mode, Fulgurite without CUDA graphs, and with them.
`--quick` leaves out what takes long to compile or to start: rms_norm, reduce-overhead, several ranks.
`--only TEXT` runs the cases with this text in their names.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor, nn

import fulgurite
from fulgurite import timing
from fulgurite.bench import host_ranks, results
from fulgurite.bench.measure import Call
from fulgurite.bench.moe import torch_grouped_mm
from fulgurite.errors import ArgumentError
from fulgurite.host.timing import time_device
from fulgurite.kernels.moe.ops import fused_experts
from fulgurite.kernels.moe.router_config import RouterConfig, Routes
from fulgurite.kernels.moe.routing import route_tokens

Row = dict[str, Any]
Compile = Callable[[Any], Any]

EAGER, INDUCTOR, REDUCE_OVERHEAD = "eager", "torch.compile", "reduce-overhead"
OURS, OURS_WITH_GRAPHS = "fulgurite", "fulgurite, cudagraph"
CANDIDATES: dict[str, Compile] = {
    EAGER: lambda f: f,
    INDUCTOR: lambda f: torch.compile(f),
    REDUCE_OVERHEAD: lambda f: torch.compile(f, mode="reduce-overhead"),
    OURS: lambda f: fulgurite.compile(f, cudagraph=False),
    OURS_WITH_GRAPHS: lambda f: fulgurite.compile(f, cudagraph=True),
}
CUDA_GRAPH_CANDIDATES = (REDUCE_OVERHEAD, OURS_WITH_GRAPHS)  # only on GPUs
PROFILED_STEPS = 10
BACKWARD_OF_ONE_OP = "backward of one op"


@dataclass(frozen=True)
class Case:
    """A function to compile, and one step with what became of it."""

    name: str
    function: Callable[..., Any]
    make_step: Callable[[Callable[..., Any]], Call]
    eager_function: Callable[..., Any] | None = None  # the baseline, if it is another function
    is_compiled: bool = True  # False: ours is the function itself, called eagerly


# ---- the programs --------------------------------------------------------------------------------


def two_ops(x: Tensor) -> Tensor:
    return (x * 2).relu()


class Block(nn.Module):
    """norm, matmul, gate, matmul, residual."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(width))
        self.gate_up = nn.Parameter(torch.randn(width, 2 * inner) / width**0.5)
        self.down = nn.Parameter(torch.randn(inner, width) / inner**0.5)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = (F.rms_norm(x, x.shape[-1:], self.norm) @ self.gate_up).chunk(2, dim=-1)
        return x + (F.silu(gate) * up) @ self.down


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight)


@dataclass(frozen=True)
class MoeLayer:
    """A router and its experts."""

    router_ED: Tensor
    gate_up: Tensor
    down: Tensor
    config: RouterConfig

    def run_kernels(self, x: Tensor) -> Tensor:
        routes = route_tokens(x, self.router_ED, self.config)
        return fused_experts(x, routes, self.gate_up, self.down)

    def run_torch(self, x: Tensor) -> Tensor:
        scores = torch.softmax(F.linear(x, self.router_ED).float(), dim=-1)
        weights, experts = scores.topk(self.config.top_k, dim=-1)
        routes = Routes(weights / weights.sum(-1, keepdim=True), experts)
        return torch_grouped_mm(x, routes, self.gate_up, self.down)


# ---- the steps -----------------------------------------------------------------------------------


def make_cases(device: str) -> list[Case]:
    """The cases with inputs on the device: bfloat16 on a GPU, float32 on a CPU."""
    is_gpu = device.startswith("cuda")
    dtype = torch.bfloat16 if is_gpu else torch.float32
    how: dict[str, Any] = {"device": device, "dtype": dtype}
    small = torch.randn(2, 2, **how)
    rows, width = (64, 256) if is_gpu else (4, 64)  # a CPU computes the larger one for 0.6 ms
    block, x = Block(width, 2 * width).to(**how), torch.randn(rows, width, **how)
    normed = torch.randn(*((16384, 4096) if is_gpu else (16, 256)), **how).requires_grad_()
    weight = torch.ones(normed.shape[1], **how).requires_grad_()
    low: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}  # torch compiles no other
    moe, tokens = _make_moe_layer(**low), torch.randn(16, 256, **low)
    return [
        Case("two ops on 2x2", two_ops, partial(_forward_step, inputs=(small,))),
        Case("block forward", block, partial(_forward_step, inputs=(x,))),
        Case(
            "block forward + backward",
            block,
            partial(_train_step, inputs=(x,), wanted=tuple(block.parameters())),
        ),
        Case("rms_norm forward", rms_norm, partial(_forward_step, inputs=(normed, weight))),
        Case(
            "rms_norm forward + backward",
            rms_norm,
            partial(_train_step, inputs=(normed, weight), wanted=(normed, weight)),
        ),
        Case(
            "MoE layer",
            moe.run_kernels,
            partial(_forward_step, inputs=(tokens,)),
            eager_function=moe.run_torch,
            is_compiled=False,
        ),
    ]


def _make_moe_layer(**how: Any) -> MoeLayer:
    experts, hidden, inner = 16, 256, 128
    return MoeLayer(
        torch.randn(experts, hidden, **how) / hidden**0.5,
        torch.randn(experts, 2 * inner, hidden, **how) / hidden**0.5,
        torch.randn(experts, hidden, inner, **how) / inner**0.5,
        RouterConfig(top_k=4, renormalize=True),
    )


def _forward_step(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Call:
    def step() -> Any:
        with torch.no_grad():
            return function(*inputs)

    return step


def _train_step(
    function: Callable[..., Any], inputs: tuple[Tensor, ...], wanted: tuple[Tensor, ...]
) -> Call:
    gradient = torch.ones_like(inputs[0])
    return lambda: torch.autograd.grad(function(*inputs), wanted, gradient)


# ---- the suite -----------------------------------------------------------------------------------


def make_steps(case: Case, device: str, quick: bool = False) -> Iterator[tuple[str, Call]]:
    """The candidates of a case."""
    for name, compile_ in CANDIDATES.items():
        if name in CUDA_GRAPH_CANDIDATES and not device.startswith("cuda"):
            continue
        if quick and name == REDUCE_OVERHEAD:
            continue
        is_baseline = name in (EAGER, INDUCTOR, REDUCE_OVERHEAD)
        function = (is_baseline and case.eager_function) or case.function
        if name == OURS and not case.is_compiled:
            compile_ = CANDIDATES[EAGER]
        step = case.make_step(compile_(function))
        yield name, _mark_step_begin(step) if name == REDUCE_OVERHEAD else step


def _mark_step_begin(step: Call) -> Call:
    """torch's CUDA graphs need to know where an iteration begins, to reuse its memory."""

    def marked() -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return step()

    return marked


def measure_case(case: Case, device: str, quick: bool = False) -> list[Row]:
    """One row for each candidate: microseconds of wall and, on a GPU, of kernels."""
    torch._dynamo.reset()
    steps = dict(make_steps(case, device, quick))
    wall = timing.median_times(steps, budget=0.1 if quick else 0.5, warmups=6)
    rows = []
    for name, step in steps.items():
        row = {"case": case.name, "candidate": name, "wall_us": 1e6 * wall[name]}
        if device.startswith("cuda"):
            row["device_us"] = 1e6 * time_device(step, PROFILED_STEPS)
        rows.append(row)
    return rows


def measure_backward_threads(device: str, budget: float) -> list[Row]:
    """The backward pass of one op, in torch's thread of the GPU and in the calling thread."""
    x = torch.ones(2, 2, device=device, requires_grad=True)
    y, gradient = x * 2, torch.ones(2, 2, device=device)

    def step(uses_device_thread: bool) -> Any:
        torch._C._set_multithreading_enabled(uses_device_thread)
        return torch.autograd.grad(y, x, gradient, retain_graph=True)

    names = {
        f"{BACKWARD_OF_ONE_OP}, thread of the GPU": partial(step, True),
        f"{BACKWARD_OF_ONE_OP}, calling thread": partial(step, False),
    }
    with torch.autograd.set_multithreading_enabled(True):
        wall = timing.median_times(names, budget=budget, warmups=6)
    return [
        {"case": name, "candidate": EAGER, "wall_us": 1e6 * seconds}
        for name, seconds in wall.items()
    ]


def measure_mesh(mesh: host_ranks.MeshCase, device: str, steps: int) -> list[Row]:
    """A decode step of the engine, without CUDA graphs, and with them if it can."""
    return [
        {
            "case": mesh.name,
            "candidate": OURS_WITH_GRAPHS if step.is_captured else OURS,
            "wall_us": 1e6 * step.wall,
            "host_us": 1e6 * step.host,
        }
        for step in host_ranks.measure_mesh(mesh, device, steps)
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", metavar="NAME", help="cases with this text in their name")


def run_host(options: argparse.Namespace) -> None:
    """Suite `host`."""
    torch.manual_seed(0)
    rows: list[Row] = []

    def save() -> Path:
        return results.save_results("host", options.device, rows, options.output)

    def is_wanted(name: str) -> bool:
        return options.only is None or options.only.lower() in name.lower()

    quick, cases = options.quick, make_cases(options.device)
    if quick:
        cases = [case for case in cases if case.function is not rms_norm]
    cases = [case for case in cases if is_wanted(case.name)]
    meshes = [mesh for mesh in host_ranks.CASES[: 1 if quick else None] if is_wanted(mesh.name)]
    threads = options.device.startswith("cuda") and is_wanted(BACKWARD_OF_ONE_OP)
    if not (cases or meshes or threads):
        names = [case.name for case in make_cases(options.device)]
        names += [mesh.name for mesh in host_ranks.CASES]
        raise ArgumentError(
            f"no case of the suite has {options.only!r} in its name",
            next=f"the names are: {'; '.join(names)}",
        )
    with Progress(transient=True) as progress:
        bar = progress.add_task("host", total=len(cases) + len(meshes))
        for case in cases:
            progress.update(bar, description=case.name)
            rows += measure_case(case, options.device, quick)
            save()  # partial results survive an interrupt
            progress.advance(bar)
        if threads:
            rows += measure_backward_threads(options.device, 0.1)
        for mesh in meshes:
            progress.update(bar, description=mesh.name)
            rows += measure_mesh(mesh, options.device, 16 if quick else 64)
            save()
            progress.advance(bar)
    print(format_table(rows))
    print(f"written to {save()}")


def format_table(rows: list[Row]) -> str:
    """A line a case, a column a candidate: wall, and kernels or the host in brackets; microseconds."""
    found = {(row["case"], row["candidate"]): row for row in rows}
    cases = list(dict.fromkeys(row["case"] for row in rows))
    names = [name for name in CANDIDATES if any(row["candidate"] == name for row in rows)]
    lines = [["µs: wall (kernels; decode steps: host)", *names]]
    for case in cases:
        lines.append([case, *(_format_cell(found.get((case, name))) for name in names)])
    return results.format_table(lines)


def _format_cell(row: Row | None) -> str:
    if row is None:
        return ""
    wall, part = f"{row['wall_us']:.1f}", row.get("device_us", row.get("host_us"))
    return wall if part is None else f"{wall} ({part:.1f})"
