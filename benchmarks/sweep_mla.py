"""Checks and times launch configs of the absorbed MLA kernel.

    python3 benchmarks/sweep_mla.py OUT.json [SECONDS]

For each shape, batch and cache dtype: every config of BLOCK_M x BLOCK_N x WARPS x STAGES, each with
several splits. A pool of processes compiles them first (they share Triton's cache on disk) and
compares each with the reference in float32 on sequences of different lengths. Then configs are
timed one by one in a CUDA graph over latents that are not in L2, the heuristic's config first.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import sys
import time
from dataclasses import replace
from functools import partial

import torch

sys.path.insert(0, ".")
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from fulgurite import device
from fulgurite.bench import mla as bench
from fulgurite.bench.measure import time_in_cuda_graph
from fulgurite.kernels.attention.metadata import AttentionMetadata
from fulgurite.kernels.mla import reference, triton_decode
from fulgurite.kernels.mla.triton_absorb import absorb_queries
from fulgurite.kernels.tuning.config import LaunchConfig
from fulgurite.kernels.tuning.heuristics import heuristics_for, num_sms

BLOCK_M = {16: (16,), 128: (16, 64)}  # by heads
BLOCK_N, WARPS, STAGES = (16, 32, 64), (4, 8), (2, 3, 4, 5)
PROGRAMS_PER_SM = (1, 2, 4)
PROCESSES, SCALE = 5, (bench.NOPE_DIM + bench.ROPE_DIM) ** -0.5
Case = tuple[str, str]  # shape, cache dtype
Job = tuple[Case, LaunchConfig]


def configs_of(case: Case) -> list[LaunchConfig]:
    """Split and unsplit contexts are two kernels; the number of splits needs no compilation."""
    blocks = BLOCK_M[bench.NUM_HEADS[case[0]]]
    return [
        LaunchConfig(m, n, num_warps=warps, num_stages=stages, split_k=splits)
        for m, n, warps, stages, splits in itertools.product(blocks, BLOCK_N, WARPS, STAGES, (1, 2))
    ]


def build_problem(case: Case, batch: int, copies: int, uneven: bool):
    torch.manual_seed(0)
    heads = bench.NUM_HEADS[case[0]]
    problem = bench.make_problem(bench.CUDA, heads, batch, bench.CONTEXT, case[1], copies)
    if uneven:
        problem.seq_lens_S.copy_(torch.randint(1, bench.CONTEXT + 1, (batch,)))
    size = bench.NOPE_DIM + bench.ROPE_DIM
    q = torch.randn(batch, heads, size, dtype=torch.bfloat16, device="cuda")
    return problem, q, bench.random_rope(batch, "cuda")


def build_metadata(problem: bench.Problem, table, starts) -> AttentionMetadata:
    return AttentionMetadata(table, starts, problem.seq_lens_S, 1, bench.CONTEXT)


def calls(problem: bench.Problem, q, rotation, config: LaunchConfig | None):
    cache = reference.split_latent_cache(problem.cache_PBW, bench.KV_LORA_RANK, bench.ROPE_DIM)
    starts = torch.arange(len(problem.seq_lens_S) + 1, dtype=torch.int32, device="cuda")
    w_uk = problem.kv_b_NUC[:, : bench.NOPE_DIM]
    queries = absorb_queries(q, w_uk, *rotation, True, cache.latents_PBC.dtype)
    return [
        partial(
            triton_decode.attend_absorbed, queries, cache, build_metadata(problem, table, starts),
            SCALE, q.dtype, config,
        )
        for table in problem.block_tables
    ]  # fmt: skip


_reference_results: dict[Case, tuple] = {}


def check(job: Job) -> tuple[Job, float | str]:
    """A config's relative error against the reference, or why it does not run."""
    case, config = job
    with torch.inference_mode():
        if case not in _reference_results:
            _reference_results.clear()
            problem, q, rotation = build_problem(case, 8, 1, True)
            starts = torch.arange(9, dtype=torch.int32, device="cuda")
            tensors = (q.float(), problem.kv_b_NUC.float(), *rotation, problem.cache_PBW)
            metadata = build_metadata(problem, problem.block_tables[0], starts)
            expected = reference.mla_attention(*tensors, metadata, SCALE, True)
            _reference_results[case] = problem, q, rotation, expected
        problem, q, rotation, expected = _reference_results[case]
        try:
            out = calls(problem, q, rotation, config)[0]()
        except (OutOfResources, CompilationError) as error:
            return job, type(error).__name__
        up_value = problem.kv_b_NUC[:, bench.NOPE_DIM :].float()
        out = torch.einsum("tnc,nvc->tnv", out.float(), up_value)
        return job, ((out - expected).abs().max() / expected.abs().max()).item()


def sweep(case: Case, batch: int, good: list[LaunchConfig], until: float, copy: float):
    once = batch * bench.CONTEXT * 1152
    problem, q, rotation = build_problem(case, batch, max(2, min(16, round(250e6 / once))), False)
    count = num_sms(torch.device("cuda"))
    seconds = {"chosen": time_in_cuda_graph(calls(problem, q, rotation, None), 3)}
    most = bench.CONTEXT // heuristics_for(torch.device("cuda")).mla_min_split_keys
    for config in good:
        programs = batch * -(-bench.NUM_HEADS[case[0]] // config.block_m)
        splits = {max(1, min(each * count // programs, most)) for each in PROGRAMS_PER_SM}
        for split in sorted(splits):
            if (split > 1) == (config.split_k > 1) and time.time() < until:
                sized = replace(config, split_k=split)
                seconds[str(sized)] = time_in_cuda_graph(calls(problem, q, rotation, sized), 3)
    best = sorted(seconds, key=seconds.__getitem__)[:5]
    print(
        f"{case} batch {batch}: chosen {problem.latent_bytes / seconds['chosen'] / copy:.0%}",
        end="",
    )
    print(*(f"; {problem.latent_bytes / seconds[key] / copy:.0%} {key}" for key in best))
    return {"case": case, "batch": batch, "bytes": problem.latent_bytes, "seconds": seconds}


def main() -> None:
    out, budget = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 120.0
    cases = [(name, kept) for name in bench.NUM_HEADS for kept in ("bfloat16", "fp8")]
    jobs = [(case, config) for case in cases for config in configs_of(case)]
    begin = time.time()
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        checked = pool.map(check, jobs, chunksize=8)
    good = {job: error for job, error in checked if not isinstance(error, str)}
    print(f"{len(jobs)} configs compiled in {time.time() - begin:.0f} s, {len(good)} fit")
    print(
        *(f"WRONG by {error:.3f}: {job}" for job, error in good.items() if error > 0.02), sep="\n"
    )
    copy, rows, begin = device.measure_cuda_copy_bandwidth(), [], time.time()
    with torch.inference_mode():
        for i, (case, batch) in enumerate(itertools.product(cases, (64, 1, 16))):
            configs = [config for config_case, config in good if config_case == case]
            until = begin + budget * (i + 1) / (3 * len(cases))
            rows.append(sweep(case, batch, configs, until, copy))
            with open(out, "w") as file:
                json.dump({"copy": copy, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
