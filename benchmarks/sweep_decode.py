"""Times the plans around the chosen ones for a decode step's kernels: python3 benchmarks/sweep_decode.py OUT SECONDS [PART ...]

Parts: row (linears of one row), few (up to 16), tile (up to 128), decode and prefill (attention), draw (sampling).
Each plan is timed inside a CUDA graph whose kernels overlap as a step's do (`kernels/chains.py`), over weights or pages that take turns, so that none lies in the cache, beside
the library's own (cuBLAS, sdpa, argmax). Plans are compiled by a pool of processes first, into Triton's cache.
"""

from __future__ import annotations

import functools
import itertools
import json
import multiprocessing
import statistics
import sys
import time
from dataclasses import replace

import torch
import torch.nn.functional as F

sys.path.insert(0, ".")
from fulgurite import device as hardware
from fulgurite.kernels.attention import triton_attention
from fulgurite.kernels.common.pdl import pdl_region
from fulgurite.kernels.gemm import triton_fused_linear, triton_gemv
from fulgurite.kernels.sampling import triton_sampling

PROCESSORS = 132
TURNS = 100 << 20  # bytes that inputs in turn fill: twice the L2 of an H200
# (columns, K, gated): the linears of Qwen3-0.6B and Llama-3.1-8B
LINEARS = [(4096, 1024, False), (1024, 2048, False), (3072, 1024, True), (1024, 3072, False),
           (6144, 4096, False), (4096, 4096, False), (14336, 4096, True), (4096, 14336, False)]  # fmt: skip


def jobs(part):
    """(problem, plan) pairs; the first plan of a problem is the one that is chosen."""
    if part == "row":
        for n, k, gated in LINEARS:
            chosen = triton_gemv.row_plan(n, k, gated, PROCESSORS)
            plans = [
                triton_gemv.RowPlan(columns, depth, warps, 3, held)
                for columns in (2, 4, 8, 16)
                for depth in (512, 1024, 2048)
                for warps in (4, 8)
                for held in (0, 1, 2, 3)
                if k % depth == 0 and held * depth <= k and columns * depth * held <= 6400 * warps
            ]
            yield from (((part, 1, n, k, gated), plan) for plan in dict.fromkeys([chosen, *plans]))
    elif part == "few":
        for m, (n, k, gated) in itertools.product((4, 16), LINEARS):
            chosen = triton_fused_linear.few_plan(m, n, k, gated, 2, PROCESSORS)
            plans = [
                triton_fused_linear.FewPlan(columns, depth, warps, stages, held)
                for columns in (8, 16)
                for depth in (64, 128, 256)
                for warps in (2, 4, 8)
                for stages in (3,)
                for held in (0, 1, 2, 3)
                if columns * depth * held * (1 + gated) <= 6144
                if depth * warps <= k and columns * depth * warps * stages <= 1 << 16
            ]
            yield from (((part, m, n, k, gated), plan) for plan in dict.fromkeys([chosen, *plans]))
    elif part == "tile":
        for m, (n, k, gated) in itertools.product((32, 64, 128), LINEARS):
            chosen = triton_fused_linear.tile_plan(m, n, k, gated, 2, PROCESSORS)
            plans = [
                replace(chosen, columns=columns, depth=depth, split=split, warps=warps, stages=4)
                for columns in (64, 128)
                for depth in (64, 128)
                for split in (1, 2, 4, 8)
                for warps in (4, 8)
                if (columns + m) * depth * 8 * (2 if gated else 1) <= 200_000 and split * depth <= k
            ]
            yield from (((part, m, n, k, gated), plan) for plan in dict.fromkeys([chosen, *plans]))
    elif part in ("decode", "prefill"):
        cases = [(1, 4096, 32), (1, 512, 16), (16, 4096, 32), (64, 1024, 32)]
        cases = [(1, 4096, 32), (1, 2048, 16)] if part == "prefill" else cases
        for (batch, length, heads), page in itertools.product(cases, (16, 64)):
            rows = heads // 8 * (length if part == "prefill" else 1)
            chosen = triton_attention.plan(rows, 128, 128, False, batch * 8, length, PROCESSORS)
            tiles = ((64, 64, 4), (128, 64, 8), (128, 64, 4), (128, 128, 8), (64, 128, 4))
            if part == "decode":
                tiles = tuple((16, keys, warps) for keys in (32, 64, 128) for warps in (2, 4))
            splits = (chosen.splits,) if part == "prefill" else (1, 4, 8, 16, 32, 64)
            plans = [
                triton_attention.Plan(rows, keys, warps, stages, split)
                for (rows, keys, warps), split, stages in itertools.product(
                    tiles, splits, (2, 3, 5)
                )
                if split * 64 <= length and batch * split <= 512
            ]
            problem = (part, batch, length, heads, page)
            yield from ((problem, plan) for plan in dict.fromkeys([chosen, *plans]))
    elif part == "draw":
        for batch, how in itertools.product((1, 16, 64, 256), ("greedy", "plain", "top-p", "both")):
            yield (part, batch, how), "chosen"


def calls_of(problem, plan):
    """Callables that take turns, the library's for the same, and (bytes, operations)."""
    part = problem[0]
    if part in ("row", "few", "tile"):
        _, m, n, k, gated = problem
        setattr(triton_fused_linear, f"{part}_plan", lambda *_: plan)
        size = n * k * 2 * (2 if gated else 1)
        sets = [
            [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(1 + gated)]
            for _ in range(max(2, TURNS // size))
        ]
        x, norm = (torch.randn(*s, device="cuda", dtype=torch.bfloat16) for s in ((m, k), (k,)))
        more = {"activation": "silu"} if gated else {}
        if part != "tile":
            more |= {"norm": norm, "eps": 1e-6}
        ours = [
            functools.partial(triton_fused_linear.fused_linear, x, w, up=up[0] if up else None, **more)
            for w, *up in sets
        ]
        theirs = [functools.partial(_linears, x, weights) for weights in sets]
        return ours, theirs, (size, 2 * m * size / 2)
    if part in ("decode", "prefill"):
        _, batch, length, heads, page = problem
        triton_attention.plan = lambda *_: plan
        new = length if part == "prefill" else 1
        pages = -(-length // page)
        size = batch * length * 8 * 128 * 2 * 2
        count = 1 if part == "prefill" else max(2, TURNS // size)
        q = torch.randn(batch * new, heads, 128, device="cuda", dtype=torch.bfloat16)
        order = torch.randperm(batch * pages, device="cuda").view(batch, pages).int()
        starts = torch.arange(0, batch * new + 1, new, device="cuda").int()
        lengths = torch.full((batch,), length, device="cuda").int()
        shape = (batch * pages, 8, page, 128)
        sets = [
            [torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in "kv"]
            for _ in range(count)
        ]
        rest = (128**-0.5, 128, None, None, None, None, 1.0, 1.0, new, length)
        ours = [
            functools.partial(
                triton_attention.paged_attention, q, *kv, order, starts, lengths, *rest
            )
            for kv in sets
        ]
        flat = [torch.randn(batch, 8, length, 128, device="cuda", dtype=q.dtype) for _ in "kv"]
        query = q.view(batch, new, heads, 128).transpose(1, 2)
        theirs = [
            functools.partial(
                F.scaled_dot_product_attention, query, *flat, is_causal=new > 1, enable_gqa=True
            )
        ]
        pairs = batch * (length * (length + 1) / 2 if new > 1 else length)
        return ours, theirs, (size, 4 * heads * 128 * pairs)
    _, batch, how = problem
    logits = torch.randn(batch, 151_936, device="cuda")
    settings = {"plain": (1.0, 0, 0, 1.0), "top-p": (1.0, 0, 0, 0.9), "both": (0.8, 0, 50, 0.9)}
    if how == "greedy":
        ours = [functools.partial(triton_sampling.greedy_sample, logits)]
    else:
        one = torch.tensor(settings[how] + (0.7,)).double().expand(batch, -1)
        ours = [functools.partial(triton_sampling.sample_rows, logits, one.contiguous())]
    return ours, [functools.partial(torch.argmax, logits, -1)], (logits.nbytes, 0)


def _linears(x, weights):
    for weight in weights:
        F.linear(x, weight)


def compile_one(job):
    problem, plan = job
    try:
        with pdl_region():
            calls_of(problem, plan)[0][0]()
        torch.cuda.synchronize()
    except Exception as error:  # what a plan that does not fit the GPU says
        return repr(error)[:200]
    return None


def seconds(calls, captured=True):
    """Of one call, in a CUDA graph of a turn through all of them."""
    with pdl_region():
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    rounds = max(1, 24 // len(calls))
    graph = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph), pdl_region():
            for _ in range(rounds):
                for call in calls:
                    call()
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        if captured:
            graph.replay()
        else:
            for _ in range(rounds):
                for call in calls:
                    call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times) / (rounds * len(calls))


def main():
    out, budget, parts = sys.argv[1], float(sys.argv[2]), sys.argv[3:]
    begin = time.time()
    bandwidth = hardware.measure_cuda_copy_bandwidth()
    work = [
        job
        for part in parts or ("row", "few", "tile", "decode", "prefill", "draw")
        for job in jobs(part)
    ]
    print(f"copy {bandwidth / 1e9:.0f} GB/s; {len(work)} plans")
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        problems = pool.map(compile_one, work, chunksize=8)
    print(f"compiled at {time.time() - begin:.0f} s, {sum(p is not None for p in problems)} failed")
    print(*dict.fromkeys(p for p in problems if p), sep="\n")
    rows = []
    good = [job for job, bad in zip(work, problems, strict=True) if bad is None]
    for problem, group in itertools.groupby(good, key=lambda job: job[0]):
        if time.time() - begin > budget:
            print("out of time at", problem)
            break
        found, captured = [], problem[0] != "draw"  # its settings come from the host
        for _, plan in group:
            ours, theirs, (bytes, operations) = calls_of(problem, plan)
            found.append((seconds(ours, captured), str(plan)))
            if len(found) == 1:
                library = seconds(theirs)
            del ours, theirs
        chosen, best = found[0], min(found)
        said = [
            f"{1e6 * t:.1f} us {100 * bytes / bandwidth / t:.0f}%"
            for t in (chosen[0], best[0], library)
        ]
        if operations > 200 * bytes:
            said = [
                f"{1e6 * t:.0f} us {operations / t / 1e12:.0f} TFLOP/s"
                for t in (chosen[0], best[0], library)
            ]
        print(
            problem, "chosen", said[0], "| best", said[1], best[1], "| library", said[2], flush=True
        )
        rows.append(
            {"problem": problem, "library": library, "found": sorted(found), "chosen": chosen}
        )
    with open(out, "w") as file:
        json.dump({"bandwidth": bandwidth, "rows": rows}, file, indent=1)
    print(f"done at {time.time() - begin:.0f} s")


if __name__ == "__main__":
    main()
