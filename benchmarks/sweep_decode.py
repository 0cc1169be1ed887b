"""Times launch configs of a decode step's kernels.

    python3 benchmarks/sweep_decode.py OUT SECONDS [PART ...]

Parts: gemv (linears of one row), small_m (up to 16 rows), gemm (up to 128), decode and prefill
(attention), sampling. Each config is timed inside a CUDA graph with PDL, as in a step
(`kernels/common/pdl.py`), over weights or caches in round-robin order, so that none is in L2, and
compared with the library (cuBLAS, sdpa, argmax). A pool of processes compiles all configs first,
into Triton's cache.
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
from fulgurite.kernels.attention.metadata import AttentionMetadata, AttentionOptions
from fulgurite.kernels.common.pdl import pdl_region
from fulgurite.kernels.gemm import triton_fused_linear
from fulgurite.kernels.sampling import triton_sampling
from fulgurite.kernels.tuning.attention import AttentionHeuristics
from fulgurite.kernels.tuning.config import LaunchConfig
from fulgurite.kernels.tuning.fused_linear import FusedLinearHeuristics, small_m_rows
from fulgurite.kernels.tuning.sm_90 import Sm90Heuristics

HEURISTICS = Sm90Heuristics()
TURNS = 100 << 20  # bytes that inputs in turn fill: twice the L2 of an H200
# (columns, K, gated): the linears of Qwen3-0.6B and Llama-3.1-8B
LINEARS = [(4096, 1024, False), (1024, 2048, False), (3072, 1024, True), (1024, 3072, False),
           (6144, 4096, False), (4096, 4096, False), (14336, 4096, True), (4096, 14336, False)]  # fmt: skip


def jobs(part):
    """(problem, config) pairs; the first config of a problem is the heuristic's."""
    if part == "gemv":
        for n, k, gated in LINEARS:
            chosen = HEURISTICS.fused_gemv_config(n, k, gated)
            configs = [
                LaunchConfig(1, columns, depth, warps, 3, prefetch_blocks=held)
                for columns in (2, 4, 8, 16)
                for depth in (512, 1024, 2048)
                for warps in (4, 8)
                for held in (0, 1, 2, 3)
                if k % depth == 0 and held * depth <= k and columns * depth * held <= 6400 * warps
            ]
            yield from (
                ((part, 1, n, k, gated), config) for config in dict.fromkeys([chosen, *configs])
            )
    elif part == "small_m":
        for m, (n, k, gated) in itertools.product((4, 16), LINEARS):
            chosen = HEURISTICS.fused_small_m_config(m, n, k, gated, 2)
            configs = [
                LaunchConfig(small_m_rows(m), columns, depth, warps, stages, prefetch_blocks=held)
                for columns in (8, 16)
                for depth in (64, 128, 256)
                for warps in (2, 4, 8)
                for stages in (3,)
                for held in (0, 1, 2, 3)
                if columns * depth * held * (1 + gated) <= 6144
                if depth * warps <= k and columns * depth * warps * stages <= 1 << 16
            ]
            yield from (
                ((part, m, n, k, gated), config) for config in dict.fromkeys([chosen, *configs])
            )
    elif part == "gemm":
        for m, (n, k, gated) in itertools.product((32, 64, 128), LINEARS):
            chosen = HEURISTICS.fused_gemm_config(m, n, k, gated, 2)
            configs = [
                replace(
                    chosen,
                    block_n=columns,
                    block_k=depth,
                    split_k=split,
                    num_warps=warps,
                    num_stages=4,
                )
                for columns in (64, 128)
                for depth in (64, 128)
                for split in (1, 2, 4, 8)
                for warps in (4, 8)
                if (columns + m) * depth * 8 * (2 if gated else 1) <= 200_000 and split * depth <= k
            ]
            yield from (
                ((part, m, n, k, gated), config) for config in dict.fromkeys([chosen, *configs])
            )
    elif part in ("decode", "prefill"):
        cases = [(1, 4096, 32), (1, 512, 16), (16, 4096, 32), (64, 1024, 32)]
        cases = [(1, 4096, 32), (1, 2048, 16)] if part == "prefill" else cases
        for (batch, length, heads), block_size in itertools.product(cases, (16, 64)):
            rows = heads // 8 * (length if part == "prefill" else 1)
            chosen = HEURISTICS.attention_config(rows, 128, False, batch * 8, length)
            tiles = ((64, 64, 4), (128, 64, 8), (128, 64, 4), (128, 128, 8), (64, 128, 4))
            if part == "decode":
                tiles = tuple((16, keys, warps) for keys in (32, 64, 128) for warps in (2, 4))
            splits = (chosen.split_k,) if part == "prefill" else (1, 4, 8, 16, 32, 64)
            configs = [
                LaunchConfig(rows, keys, num_warps=warps, num_stages=stages, split_k=split)
                for (rows, keys, warps), split, stages in itertools.product(
                    tiles, splits, (2, 3, 5)
                )
                if split * 64 <= length and batch * split <= 512
            ]
            problem = (part, batch, length, heads, block_size)
            yield from ((problem, config) for config in dict.fromkeys([chosen, *configs]))
    elif part == "sampling":
        for batch, how in itertools.product((1, 16, 64, 256), ("greedy", "plain", "top-p", "both")):
            yield (part, batch, how), "chosen"


def calls_of(problem, config):
    """Calls in round-robin order, the library's calls, and (bytes, operations)."""
    part = problem[0]
    if part in ("gemv", "small_m", "gemm"):
        _, m, n, k, gated = problem
        setattr(FusedLinearHeuristics, f"fused_{part}_config", lambda *_: config)
        size = n * k * 2 * (2 if gated else 1)
        sets = [
            [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(1 + gated)]
            for _ in range(max(2, TURNS // size))
        ]
        x, norm = (torch.randn(*s, device="cuda", dtype=torch.bfloat16) for s in ((m, k), (k,)))
        more = {"activation": "silu"} if gated else {}
        if part != "gemm":
            more |= {"norm": norm, "eps": 1e-6}
        ours = [
            functools.partial(
                triton_fused_linear.fused_linear, x, w, up=up[0] if up else None, **more
            )
            for w, *up in sets
        ]
        theirs = [functools.partial(_linears, x, weights) for weights in sets]
        return ours, theirs, (size, 2 * m * size / 2)
    if part in ("decode", "prefill"):
        _, batch, length, heads, block_size = problem
        AttentionHeuristics.attention_config = lambda *_: config
        triton_attention.build_launch.cache_clear()
        new = length if part == "prefill" else 1
        blocks = -(-length // block_size)
        size = batch * length * 8 * 128 * 2 * 2
        count = 1 if part == "prefill" else max(2, TURNS // size)
        q = torch.randn(batch * new, heads, 128, device="cuda", dtype=torch.bfloat16)
        order = torch.randperm(batch * blocks, device="cuda").view(batch, blocks).int()
        starts = torch.arange(0, batch * new + 1, new, device="cuda").int()
        lengths = torch.full((batch,), length, device="cuda").int()
        shape = (batch * blocks, 8, block_size, 128)
        sets = [
            [torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in "kv"]
            for _ in range(count)
        ]
        metadata = AttentionMetadata(order, starts, lengths, new, length)
        options = AttentionOptions(128**-0.5, 128)
        ours = [
            functools.partial(triton_attention.paged_attention, q, *kv, metadata, options)
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
    problem, config = job
    try:
        with pdl_region():
            calls_of(problem, config)[0][0]()
        torch.cuda.synchronize()
    except Exception as error:  # a config that does not fit the GPU
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
        for part in parts or ("gemv", "small_m", "gemm", "decode", "prefill", "sampling")
        for job in jobs(part)
    ]
    print(f"copy {bandwidth / 1e9:.0f} GB/s; {len(work)} configs")
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
        found, captured = [], problem[0] != "sampling"  # its settings come from the host
        for _, config in group:
            ours, theirs, (bytes, operations) = calls_of(problem, config)
            found.append((seconds(ours, captured), str(config)))
            if len(found) == 1:
                library = seconds(theirs)
            del ours, theirs
        chosen, best = found[0], min(found)
        texts = [
            f"{1e6 * t:.1f} us {100 * bytes / bandwidth / t:.0f}%"
            for t in (chosen[0], best[0], library)
        ]
        if operations > 200 * bytes:
            texts = [
                f"{1e6 * t:.0f} us {operations / t / 1e12:.0f} TFLOP/s"
                for t in (chosen[0], best[0], library)
            ]
        print(
            problem,
            "chosen",
            texts[0],
            "| best",
            texts[1],
            best[1],
            "| library",
            texts[2],
            flush=True,
        )
        rows.append(
            {"problem": problem, "library": library, "found": sorted(found), "chosen": chosen}
        )
    with open(out, "w") as file:
        json.dump({"bandwidth": bandwidth, "rows": rows}, file, indent=1)
    print(f"done at {time.time() - begin:.0f} s")


if __name__ == "__main__":
    main()
