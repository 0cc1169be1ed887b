"""Checks the experts' kernels on a GPU and times tiles around the chosen ones.

    python benchmarks/sweep_moe.py OUT.json SECONDS

Three things in one go, each within the seconds that are left:
1. tests/kernels/test_triton_moe.py on the GPU;
2. for the layers of `fulgurite bench moe`, 1 to 8192 tokens, both matmuls, bfloat16 and packed: every tile
   of `tiles_to_try` against the chosen one's result, its time, and the best in percent of the floor;
3. `fulgurite bench moe --device cuda`.
OUT.json holds the lines of 2; what beats the chosen tile by more than 3% is printed.
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
from fulgurite.kernels.grouped_gemm import triton_4bit
from fulgurite.kernels.grouped_gemm import triton_grouped_gemm as kernels
from fulgurite.kernels.moe.ops import ExpertOrder, sort_by_expert
from fulgurite.kernels.elementwise.gated_activation import GatedActivation
from fulgurite.kernels.grouped_gemm.ops import grouped_gemm
from fulgurite.kernels.tuning.gemm import Tile
from fulgurite.quant import QuantTensor

HOLDERS = {"rows_tile": kernels, "many_tile": kernels, "packed_tile": triton_4bit}
FORMATS = ("bfloat16", "fp8_e4m3_128x128", "nvfp4", "mxfp4")
TOKENS = (1, 16, 128, 1024, 8192)


def tiles_to_try(
    pairs: int, experts: int, nibbles: bool, dense: bool
) -> Iterator[tuple[str, Tile]]:
    """Tiles whose rows suit an average expert, and which choice they stand for."""
    average = max(1, pairs // experts)
    rows = [r for r in (16, 32, 64, 128, 256) if r // 4 <= average <= 8 * r] or [16]
    for row, columns, depth in itertools.product(rows, (32, 64, 128, 256), (64, 128)):
        if row * columns > 128 * 256 or (nibbles and (depth == 64 or columns == 32)):
            continue
        for warps, stages in itertools.product((4, 8), (3, 4, 5)):
            if warps == 8 and row * columns < 64 * 128:
                continue
            tile = Tile(row, columns, depth, warps=warps, stages=stages)
            yield "packed_tile" if nibbles else "rows_tile", tile
            if dense and row in (64, 128) and depth == 64:
                yield "many_tile", tile


def cases(place: str) -> Iterator[tuple[dict[str, Any], list[Any], torch.Tensor, list[ExpertOrder]]]:
    """(what it is, calls with other routes each, the weight, their orders) of each matmul."""
    for shape, kind in itertools.product(moe.GPU_SHAPES, FORMATS):
        gate_up, down = moe.make_expert_weights(shape, kind, place)
        for tokens in TOKENS:
            routes = moe.random_routes(shape, tokens, place)
            orders = [sort_by_expert(one.experts_Tk, shape.experts) for one in routes]
            pairs = tokens * shape.per_token
            x = torch.randn(tokens, shape.hidden, device=place, dtype=torch.bfloat16)
            h = torch.randn(pairs, shape.inner, device=place, dtype=torch.bfloat16)
            facts = {"shape": shape.name, "kind": kind, "tokens": tokens}
            first = [
                partial(grouped_gemm, x, o.offsets_E, gate_up, None, GatedActivation(), rows_S=o.token_S)
                for o in orders
            ]
            yield {**facts, "matmul": "gate_up"}, first, gate_up, orders
            second = [partial(grouped_gemm, h, o.offsets_E, down) for o in orders]
            yield {**facts, "matmul": "down"}, second, down, orders


def sweep(place: str, until: float, machine: moe.Roofline) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    chosen = {name: getattr(module, name) for name, module in HOLDERS.items()}
    for facts, calls, weight, orders in cases(place):
        nibbles = isinstance(weight, QuantTensor) and weight.format.element.bits == 4
        put_back(chosen)
        wanted, usual = calls[0](), time_in_cuda_graph(calls)
        best, tile = usual, "chosen"
        pairs = orders[0].token_S.numel()
        dense = not isinstance(weight, QuantTensor)
        for choice, candidate in tiles_to_try(pairs, weight.shape[0], nibbles, dense):
            if time.monotonic() > until:
                return found
            kernels.many_tile = lambda *_: None
            setattr(HOLDERS[choice], choice, lambda *_, candidate=candidate: candidate)
            try:
                torch.testing.assert_close(calls[0](), wanted, rtol=2e-2, atol=2e-2)
                seconds = time_in_cuda_graph(calls)
            except (OutOfResources, CompilationError):
                continue
            if seconds < best:
                best, tile = seconds, f"{choice} {candidate}"
        asked = statistics.mean(int((order.counts_E > 0).sum()) for order in orders)
        floor = max(
            weight.nbytes / weight.shape[0] * asked / machine.bandwidth,
            2 * pairs * weight.shape[1] * weight.shape[2] / machine.operations,
        )
        row = {**facts, "us": 1e6 * usual, "best_us": 1e6 * best, "tile": tile,
               "percent": 100 * floor / usual, "best_percent": 100 * floor / best}  # fmt: skip
        found.append(row)
        mark = " <-" if best < 0.97 * usual else ""
        print(
            f"{facts} {row['percent']:.0f}% -> {row['best_percent']:.0f}% {tile}{mark}", flush=True
        )
    put_back(chosen)
    return found


def put_back(chosen: dict[str, Any]) -> None:
    for name, function in chosen.items():
        setattr(HOLDERS[name], name, function)


def main(path: str, seconds: float) -> None:
    until = time.monotonic() + seconds
    tests = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    subprocess.run([*tests, "tests/kernels/test_triton_moe.py"], check=True, timeout=seconds)
    with torch.no_grad():
        rows = sweep("cuda", until - 120, moe.measure_gpu_roofline("cuda"))
    with open(path, "w") as file:
        json.dump(rows, file, indent=1)
    bench = [sys.executable, "-m", "fulgurite", "bench", "moe", "--device", "cuda"]
    subprocess.run(bench, check=True, timeout=max(60.0, until - time.monotonic()))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
