"""Matrix products with epilogues on a GPU: one kernel, the library's call and a kernel, eager, torch.compile.

In: nothing. Out: for each epilogue and inner size the microseconds of each, by CUDA graphs over inputs that take
turns, and how far the results of one kernel (with the tile that `tune=True` finds) are from those of the library's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fulgurite import fuser
from fulgurite.bench import results
from fulgurite.bench.fusion_cases import HALF, quantize_blocks
from fulgurite.bench.quant_cuda import graph_seconds
from fulgurite.compile import compile
from fulgurite.fuser.gemm.library_fallback import LibraryRegion

SETS = 3  # of inputs, which calls take turns on
ROWS, COLUMNS = 8192, 4096
DEPTHS = (512, 1024, 2048, 4096, 8192)
FEW_DEPTHS = (1024, 4096)  # where time is short: with --quick, and for tuning by others


def bias_gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(x @ w + b, approximate="tanh")


def residual(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return x @ w + r


def gated(x: Tensor, w: Tensor) -> Tensor:
    gate, up = (x @ w).chunk(2, -1)
    return F.silu(gate) * up


def quantized(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return quantize_blocks(x @ w)


@dataclass(frozen=True)
class Case:
    name: str
    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]


def cases(depths: Sequence[int] = DEPTHS) -> list[Case]:
    found = []
    for depth in depths:
        x, w = (ROWS, depth), (depth, COLUMNS)
        found += [
            Case(f"bias gelu, K {depth}", bias_gelu, (x, w, (COLUMNS,))),
            Case(f"residual, K {depth}", residual, (x, w, (ROWS, COLUMNS))),
            Case(f"silu·mul, K {depth}", gated, (x, (depth, 2 * COLUMNS))),
            Case(f"quantize, K {depth}", quantized, (x, w)),
        ]
    return found


def measure(case: Case) -> dict[str, Any]:
    """One row: microseconds of each way, and how many times as fast one kernel is."""
    sets = [inputs(case) for _ in range(SETS)]
    graph = make_fx(case.function, tracing_mode="fake")(*sets[0])
    torch._dynamo.reset()
    ways = {
        "eager": case.function,
        "torch.compile": torch.compile(case.function),
        "library and kernel": LibraryRegion(graph, fuser.lower),
        "one kernel": fuser.lower(graph, tune=True),
        "fulgurite": compile(case.function),
    }
    row: dict[str, Any] = {"group": "matmul", "case": case.name}
    for name, function in ways.items():
        row[f"{name}_us"] = 1e6 * graph_seconds([partial(function, *given) for given in sets])
    one, apart = (ways[name](*sets[0]) for name in ("one kernel", "library and kernel"))
    row["difference"] = difference(one, apart)
    row["speedup"] = row["library and kernel_us"] / row["one kernel_us"]
    row["schedule"] = str(ways["one kernel"].kernels[0].schedule)  # type: ignore[attr-defined]
    return row


def measure_autotuned(case: Case, mode: str) -> dict[str, float]:
    """The same by torch.compile where it tunes: its own kernel with the epilogue, or the library's."""
    sets = [inputs(case) for _ in range(SETS)]
    torch._dynamo.reset()
    function = torch.compile(case.function, mode=mode)
    return {"max-autotune_us": 1e6 * graph_seconds([partial(function, *given) for given in sets])}


def difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The largest distance of a result from another's, relative to its size (random results differ)."""
    pairs = zip(ours, theirs, strict=True)
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)


def inputs(case: Case) -> list[Tensor]:
    """Numbers of about 1, and of the product too; the weight as a linear layer has it, turned."""
    x, w, *more = case.shapes
    weight = torch.randn(w[::-1], device="cuda", dtype=HALF) * w[0] ** -0.5
    rest = [torch.randn(shape, device="cuda", dtype=HALF) for shape in more]
    return [torch.randn(x, device="cuda", dtype=HALF), weight.t(), *rest]


def fusions_matmul(quick: bool) -> Iterator[tuple[Case, dict[str, Any]]]:
    """The cases and rows of the group, printed as they come."""
    for case in cases(FEW_DEPTHS if quick else DEPTHS):
        row = measure(case)
        how = f"{row['speedup']:.2f}×, differs by {row['difference']:.0e}"
        print(f"matmul {case.name}: one kernel {how}", flush=True)
        yield case, row


def table(rows: list[dict[str, Any]]) -> str:
    times_of = dict.fromkeys(name for row in rows for name in row if name.endswith("_us"))
    found = [["µs", *(name.removesuffix("_us") for name in times_of), "one kernel is"]]
    for row in rows:
        times = [f"{row[name]:.0f}" if name in row else "" for name in times_of]
        found.append([row["case"], *times, f"{row['speedup']:.2f}×"])
    return results.table(found)
