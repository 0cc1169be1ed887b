"""Times schedules of norms' backward over short rows: python3 benchmarks/sweep_short_rows.py OUT SECONDS.

Each line is a case and its candidates: percent of the copy bandwidth, and the relative error against
eager. `pipelined` is how all rows were scheduled before short ones had a schedule of their own, `chosen`
what the fuser takes. OUT (JSON lines) has every case as soon as it is measured. Without a GPU, candidates
are only written and compiled for an H200.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
from dataclasses import replace

import torch

sys.path.insert(0, ".")
from sweep_triton import H200, compile_one, seconds

from fulgurite.bench.fusions.gpu_cases import layer_norm_backward, rms_norm_backward
from fulgurite.fuser.codegen.triton.kernel import write_kernels
from fulgurite.fuser.frontend import lower_graph
from fulgurite.fuser.ir import split_axes
from fulgurite.fuser.runtime import compile_triton, triton_region
from fulgurite.fuser.schedule.gpu.base import previous_power_of_two
from fulgurite.fuser.schedule.gpu.choose import choose_gpu_schedule, make_row_limit
from fulgurite.fuser.schedule.gpu.persistent import divide_rows
from fulgurite.fuser.segment import segment_region
from fulgurite.fuser.segment.build_loop_nest import build_loop_nest
from tests.fuser.support import trace

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, F32 = torch.bfloat16, torch.float32
POINTS = 128 << 20
WIDTHS = {"rms": (64, 128, 256, 768, 32, 96, 512, 1024), "layer": (64, 128, 256, 768)}
NORMS = {"rms": rms_norm_backward, "layer": layer_norm_backward}


def list_cases():
    """(norm, rows, width, dtype): every width with many rows, two widths with few."""
    found = []
    for dtype in (BF16, F32):
        for norm, widths in WIDTHS.items():
            found += [(norm, POINTS // dtype.itemsize // width, width, dtype) for width in widths]
        found += [
            ("rms", 1 << k, width, dtype) for width in (64, 128) for k in (10, 13, 16, 18, 22)
        ]
    return found


def make_inputs(norm, rows, width, dtype, device):
    g, x = (torch.randn(rows, width, device=device, dtype=dtype) for _ in range(2))
    w = torch.randn(width, device=device, dtype=dtype)
    mean, rstd = torch.randn(rows, 1, device=device), torch.rand(rows, 1, device=device) + 0.5
    return (g, x, rstd, w) if norm == "rms" else (g, x, mean, rstd, w)


def make_region(norm, rows, width, dtype):
    inputs = make_inputs(norm, 1, width, dtype, "cpu")
    sizes = [(rows, t.shape[1]) if t.dim() == 2 else t.shape for t in inputs]
    with torch.device(DEVICE):
        empty = [torch.empty(n, dtype=t.dtype) for n, t in zip(sizes, inputs, strict=True)]
        region = split_axes.split_axes(lower_graph.lower_graph(trace(NORMS[norm], empty)))
    (segment,) = segment_region(region, make_row_limit(H200))
    return region, choose_gpu_schedule(build_loop_nest(region, segment), H200)


def make_variants(s, rows, dtype):
    """Names and schedules; the first is the chosen one."""
    (grid,), (body,) = s.nest.grid, s.nest.body
    block = s.block_sizes[body]

    def sized(tile_rows, **changes):
        axes = (grid, body) if tile_rows > 1 else (body,)
        sizes = {grid: tile_rows, body: block} if tile_rows > 1 else {body: block}
        count = -(-rows // tile_rows)
        per_sm = changes.pop("per_sm")
        programs = divide_rows(count, per_sm * H200.num_cores)
        return replace(
            s, block_axes=axes, block_sizes=sizes, **({"num_programs": programs} | changes)
        )

    tile_rows = max(1, min(4096 // (block * dtype.itemsize), rows))
    old_warps = max(1, min(8, block * tile_rows // 512))
    old_programs = min(previous_power_of_two(2 * H200.num_cores), -(-rows // tile_rows))
    found = {
        "chosen": s,
        "pipelined": sized(
            tile_rows, per_sm=2, num_programs=old_programs, num_warps=old_warps, num_stages=4
        ),
    }
    if rows * block * dtype.itemsize < POINTS // 2:
        return found  # few rows: only compare with before
    for per_sm, num_warps, more_rows in ((4, 4, 1), (4, 8, 1), (4, 4, 2)):
        name = f"{per_sm}x{num_warps}w" + ("" if more_rows == 1 else " 2 rows")
        rows_here = max(1, tile_rows * more_rows)
        found[name] = sized(rows_here, per_sm=per_sm, num_warps=num_warps, num_stages=1)
    return found


def measure(case, region, modules, failed, copy):
    norm, rows, width, dtype = case
    inputs = make_inputs(norm, rows, width, dtype, "cuda")
    sets = [inputs, *(tuple(t.clone() for t in inputs) for _ in range(2))]
    want = NORMS[norm](*inputs)
    moved = sum(t.nbytes for t in (*inputs, *want))
    found = {}
    for (name, module), problem in zip(modules.items(), failed, strict=True):
        if problem:
            continue
        place = torch.device("cuda", 0)
        call = triton_region.TritonRegion(region, lambda *_, m=module: m, (), place, False)
        got = call(*inputs)
        errors = [
            float((a.float() - b.float()).norm() / (b.float().norm() + 1e-9))
            for a, b in zip(got, want, strict=True)
        ]
        taken = seconds([lambda call=call, given=given: call(*given) for given in sets], 8, 5)
        found[name] = {
            "percent": 100 * moved / copy / taken,
            "us": taken * 1e6,
            "error": max(errors),
        }
    return {"norm": norm, "rows": rows, "width": width, "dtype": str(dtype), "found": found}


def main():
    out, budget = sys.argv[1], float(sys.argv[2])
    begin = time.time()
    copy = 0.0
    if DEVICE == "cuda":
        pairs = [torch.randn(2, 16384 * 4096, device="cuda", dtype=BF16) for _ in range(3)]
        copy = pairs[0].nbytes / seconds([lambda p=p: p[0].copy_(p[1]) for p in pairs], 12, 15)
        print(f"copy {copy / 1e9:.0f} GB/s", flush=True)
    todo, jobs = [], []
    for case in list_cases():
        region, chosen = make_region(*case)
        modules = {
            name: compile_triton.build_kernel_module(write_kernels("norm", schedule, False))
            for name, schedule in make_variants(chosen, case[1], case[3]).items()
        }
        jobs += [(module.text, module.kernels) for module in modules.values()]
        todo.append((case, region, modules))
    print(f"{len(jobs)} kernels at {time.time() - begin:.0f} s", flush=True)
    with multiprocessing.get_context("spawn").Pool(min(16, os.cpu_count() or 1)) as pool:
        problems = iter(pool.map(compile_one, jobs, chunksize=2))
    print(f"compiled at {time.time() - begin:.0f} s", flush=True)
    with open(out, "w", encoding="utf-8") as file:
        for case, region, modules in todo:
            failed = [next(problems) for _ in modules]
            print(*dict.fromkeys(p for p in failed if p), sep="\n", end="")
            if DEVICE != "cuda" or time.time() - begin > budget:
                continue
            row = measure(case, region, modules, failed, copy)
            file.write(json.dumps(row) + "\n")
            file.flush()
            figures = "  ".join(f"{n} {f['percent']:.0f}" for n, f in row["found"].items())
            error = max(f["error"] for f in row["found"].values())
            name = f"{row['norm']} {row['rows']}x{row['width']} {row['dtype'][6:]}"
            print(f"{name:28} {figures}  ({error:.0e})", flush=True)
            torch.cuda.empty_cache()
    print(f"done at {time.time() - begin:.0f} s")


if __name__ == "__main__":
    os.environ.setdefault("FULGURITE_CACHE_DIR", tempfile.mkdtemp())
    main()
