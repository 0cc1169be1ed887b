"""GEMMs with epilogues on a GPU: one fused kernel, library GEMM plus kernel, eager, torch.compile.

In: nothing. Out, for each epilogue and K: microseconds of each candidate inside a CUDA graph over rotating inputs, and
the relative error of the fused kernel (with the launch config that `autotune=True` finds) against the library GEMM.
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
from fulgurite.bench.fusions.gpu_cases import BF16, quantize_blocks
from fulgurite.bench.measure import time_in_cuda_graph
from fulgurite.compile import compile
from fulgurite.fuser.gemm.lower import LibraryGemmRegion

INPUT_SETS = 3  # calls rotate over them
M, N = 8192, 4096
K_SIZES = (512, 1024, 2048, 4096, 8192)
QUICK_K_SIZES = (1024, 4096)  # for --quick, and for the max-autotune baseline


def bias_gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(x @ w + b, approximate="tanh")


def residual(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return x @ w + r


def silu_mul(x: Tensor, w: Tensor) -> Tensor:
    gate, up = (x @ w).chunk(2, -1)
    return F.silu(gate) * up


def quantize_epilogue(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return quantize_blocks(x @ w)


@dataclass(frozen=True)
class GemmCase:
    name: str
    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]


def gemm_cases(depths: Sequence[int] = K_SIZES) -> list[GemmCase]:
    found = []
    for depth in depths:
        x, w = (M, depth), (depth, N)
        found += [
            GemmCase(f"bias gelu, K {depth}", bias_gelu, (x, w, (N,))),
            GemmCase(f"residual, K {depth}", residual, (x, w, (M, N))),
            GemmCase(f"silu·mul, K {depth}", silu_mul, (x, (depth, 2 * N))),
            GemmCase(f"quantize, K {depth}", quantize_epilogue, (x, w)),
        ]
    return found


def measure_case(case: GemmCase) -> dict[str, Any]:
    """One row: microseconds of each candidate, and the speedup of the fused kernel."""
    sets = [make_inputs(case) for _ in range(INPUT_SETS)]
    graph = make_fx(case.function, tracing_mode="fake")(*sets[0])
    torch._dynamo.reset()
    candidates = {
        "eager": case.function,
        "torch.compile": torch.compile(case.function),
        "GEMM + kernel": LibraryGemmRegion(graph, sets[0][0].device),
        "fused kernel": fuser.lower_region(graph, autotune=True),
        "fulgurite": compile(case.function),
    }
    row: dict[str, Any] = {"group": "matmul", "case": case.name}
    for name, function in candidates.items():
        row[f"{name}_us"] = 1e6 * time_in_cuda_graph([partial(function, *given) for given in sets])
    one, apart = (candidates[name](*sets[0]) for name in ("fused kernel", "GEMM + kernel"))
    row["difference"] = relative_error(one, apart)
    row["speedup"] = row["GEMM + kernel_us"] / row["fused kernel_us"]
    row["schedule"] = str(candidates["fused kernel"].kernels[0].schedule)  # type: ignore[attr-defined]
    return row


def measure_autotuned(case: GemmCase, mode: str) -> dict[str, float]:
    """torch.compile in max-autotune mode: its own GEMM template with epilogue, or cuBLAS."""
    sets = [make_inputs(case) for _ in range(INPUT_SETS)]
    torch._dynamo.reset()
    function = torch.compile(case.function, mode=mode)
    return {
        "max-autotune_us": 1e6 * time_in_cuda_graph([partial(function, *given) for given in sets])
    }


def relative_error(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Largest relative L2 error over the outputs (outputs of random ops differ)."""
    pairs = zip(ours, theirs, strict=True)
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)


def make_inputs(case: GemmCase) -> list[Tensor]:
    """Random inputs scaled so that the GEMM output is about 1; the weight is transposed, as in nn.Linear."""
    x, w, *more = case.shapes
    weight = torch.randn(w[::-1], device="cuda", dtype=BF16) * w[0] ** -0.5
    rest = [torch.randn(shape, device="cuda", dtype=BF16) for shape in more]
    return [torch.randn(x, device="cuda", dtype=BF16), weight.t(), *rest]


def measure_gemms(quick: bool) -> Iterator[tuple[GemmCase, dict[str, Any]]]:
    """Measure the cases one by one and print each."""
    for case in gemm_cases(QUICK_K_SIZES if quick else K_SIZES):
        row = measure_case(case)
        how = f"{row['speedup']:.2f}×, differs by {row['difference']:.0e}"
        print(f"gemm {case.name}: fused kernel {how}", flush=True)
        yield case, row


def format_table(rows: list[dict[str, Any]]) -> str:
    times_of = dict.fromkeys(name for row in rows for name in row if name.endswith("_us"))
    found = [["µs", *(name.removesuffix("_us") for name in times_of), "fused is"]]
    for row in rows:
        times = [f"{row[name]:.0f}" if name in row else "" for name in times_of]
        found.append([row["case"], *times, f"{row['speedup']:.2f}×"])
    return results.format_table(found)
