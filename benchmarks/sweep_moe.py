"""Checks the kernels of experts on a GPU and times launch configs around the chosen ones.

    python benchmarks/sweep_moe.py OUT.json SECONDS

Three steps, each within the seconds that are left: 1. tests/kernels/moe/test_triton_moe.py on the
GPU; 2. for the layers of `fulgurite bench moe`, 1 to 8192 tokens, both GEMMs, bfloat16 and
quantized: every config
   of `candidate_configs` is compared with the chosen one's result and timed;
3. `fulgurite bench moe --device cuda`. OUT.json holds the rows of step 2. Configs that beat the
chosen one by more than 3% are printed with an arrow.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

sys.path.insert(0, ".")
from fulgurite.bench import moe
from fulgurite.bench.measure import time_in_cuda_graph
from fulgurite.kernels.elementwise.gated_activation import GatedActivation
from fulgurite.kernels.grouped_gemm.ops import grouped_gemm
from fulgurite.kernels.moe.ops import ExpertOrder, sort_by_expert
from fulgurite.kernels.tuning import LaunchConfig, override_heuristics
from fulgurite.kernels.tuning.sm_90 import Sm90Heuristics
from fulgurite.quant import QuantTensor

FORMATS = ("bfloat16", "fp8_e4m3_128x128", "nvfp4", "mxfp4")
TOKENS = (1, 16, 128, 1024, 8192)
Case = tuple[dict[str, Any], list[Any], torch.Tensor, list[ExpertOrder]]


class FixedConfig(Sm90Heuristics):
    """One config for one kernel (`method`); the dense kernel of many rows is off unless it is
    the one."""

    def __init__(self, method: str, config: LaunchConfig) -> None:
        super().__init__()
        self.grouped_gemm_dense = lambda *_: None  # type: ignore[method-assign]
        setattr(self, method, lambda *_: config)


def candidate_configs(
    pairs: int, experts: int, is_4bit: bool, is_dense: bool
) -> Iterator[tuple[str, LaunchConfig]]:
    """The method of `Heuristics` and configs whose rows suit an average expert."""
    average = max(1, pairs // experts)
    rows = [r for r in (16, 32, 64, 128, 256) if r // 4 <= average <= 8 * r] or [16]
    for block_m, block_n, block_k in itertools.product(rows, (32, 64, 128, 256), (64, 128)):
        if block_m * block_n > 128 * 256 or (is_4bit and (block_k == 64 or block_n == 32)):
            continue
        for num_warps, num_stages in itertools.product((4, 8), (3, 4, 5)):
            if num_warps == 8 and block_m * block_n < 64 * 128:
                continue
            config = LaunchConfig(block_m, block_n, block_k, num_warps, num_stages, group_n=8)
            yield "grouped_gemm_4bit" if is_4bit else "grouped_gemm", config
            if is_dense and block_m in (64, 128) and block_k == 64:
                yield "grouped_gemm_dense", config


def cases(device: str) -> Iterator[Case]:
    """(description, calls with different routes, the weight, their orders) of each GEMM."""
    for shape, format in itertools.product(moe.GPU_SHAPES, FORMATS):
        gate_up, down = moe.make_expert_weights(shape, format, device)
        for tokens in TOKENS:
            routes = moe.random_routes(shape, tokens, device)
            orders = [sort_by_expert(one.experts_Tk, shape.experts) for one in routes]
            pairs = tokens * shape.per_token
            x = torch.randn(tokens, shape.hidden, device=device, dtype=torch.bfloat16)
            h = torch.randn(pairs, shape.inner, device=device, dtype=torch.bfloat16)
            facts = {"shape": shape.name, "format": format, "tokens": tokens}
            activation = GatedActivation()
            first = [
                partial(
                    grouped_gemm, x, o.offsets_E, gate_up, None, activation, row_indices_S=o.token_S
                )
                for o in orders
            ]
            yield {**facts, "gemm": "gate_up"}, first, gate_up, orders
            second = [partial(grouped_gemm, h, o.offsets_E, down) for o in orders]
            yield {**facts, "gemm": "down"}, second, down, orders


def sweep(device: str, deadline: float, roofline: moe.Roofline) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for facts, calls, weight, orders in cases(device):
        is_4bit = isinstance(weight, QuantTensor) and weight.format.element.bits == 4
        expected, chosen = calls[0](), time_in_cuda_graph(calls)
        best, best_config = chosen, "chosen"
        pairs, is_dense = orders[0].token_S.numel(), not isinstance(weight, QuantTensor)
        for method, config in candidate_configs(pairs, weight.shape[0], is_4bit, is_dense):
            if time.monotonic() > deadline:
                return rows
            with override_heuristics(FixedConfig(method, config)):
                try:
                    torch.testing.assert_close(calls[0](), expected, rtol=2e-2, atol=2e-2)
                    seconds = time_in_cuda_graph(calls)
                except (OutOfResources, CompilationError):
                    continue
            if seconds < best:
                best, best_config = seconds, f"{method} {config}"
        active = statistics.mean(int((order.counts_E > 0).sum()) for order in orders)
        floor = max(
            weight.nbytes / weight.shape[0] * active / roofline.bandwidth,
            2 * pairs * weight.shape[1] * weight.shape[2] / roofline.flops,
        )
        row = {**facts, "us": 1e6 * chosen, "best_us": 1e6 * best, "config": best_config,
               "percent": 100 * floor / chosen, "best_percent": 100 * floor / best}  # fmt: skip
        rows.append(row)
        mark = " <-" if best < 0.97 * chosen else ""
        percents = f"{row['percent']:.0f}% -> {row['best_percent']:.0f}%"
        print(f"{facts} {percents} {best_config}{mark}", flush=True)
    return rows


def main(path: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    tests = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    subprocess.run([*tests, "tests/kernels/moe/test_triton_moe.py"], check=True, timeout=seconds)
    with torch.no_grad():
        rows = sweep("cuda", deadline - 120, moe.measure_gpu_roofline("cuda"))
    with open(path, "w") as file:
        json.dump(rows, file, indent=1)
    bench = [sys.executable, "-m", "fulgurite", "bench", "moe", "--device", "cuda"]
    subprocess.run(bench, check=True, timeout=max(60.0, deadline - time.monotonic()))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
