"""Checks and times tiles of the absorbed latent attention kernel on a GPU: python3 benchmarks/sweep_mla.py OUT.json [SECONDS]

For each shape, batch and kind of pages: every plan of ROWS x KEYS x WARPS x STAGES, each at several splits. A pool of
processes compiles them first (Triton's cache on disk is theirs together) and compares each with the definition in
float32 on sequences of uneven lengths. Then plans are timed one by one in a CUDA graph over latents that no cache holds,
the one that `mla_decode.plan` chooses before all others.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import sys
import time
from functools import partial

import torch

sys.path.insert(0, ".")
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from fulgurite import device
from fulgurite.bench import mla as bench
from fulgurite.bench.measure import time_in_cuda_graph
from fulgurite.kernels.mla import reference, triton_decode
from fulgurite.kernels.mla.triton_absorb import absorb_queries
from fulgurite.kernels.tuning.heuristics import num_sms

ROWS = {16: (16,), 128: (16, 64)}
KEYS, WARPS, STAGES = (16, 32, 64), (4, 8), (2, 3, 4, 5)
SHARES = (1, 2, 4)  # programs a multiprocessor
PROCESSES, SCALE = 5, (bench.NOPE_DIM + bench.ROPE_DIM) ** -0.5
Case = tuple[str, str]  # shape, kept
Job = tuple[Case, triton_decode.Plan]


def tiles(case: Case) -> list[triton_decode.Plan]:
    """Whole contexts and split ones are two kernels; how often they are split is no matter of compiling."""
    found = itertools.product(ROWS[bench.NUM_HEADS[case[0]]], KEYS, WARPS, STAGES, (1, 2))
    return [triton_decode.Plan(*sizes) for sizes in found]


def problem_of(case: Case, batch: int, copies: int, uneven: bool):
    torch.manual_seed(0)
    heads = bench.NUM_HEADS[case[0]]
    problem = bench.make_problem(bench.CUDA, heads, batch, bench.CONTEXT, case[1], copies)
    if uneven:
        problem.lengths_S.copy_(torch.randint(1, bench.CONTEXT + 1, (batch,)))
    size = bench.NOPE_DIM + bench.ROPE_DIM
    q = torch.randn(batch, heads, size, dtype=torch.bfloat16, device="cuda")
    return problem, q, bench.random_rope(batch, "cuda")


def calls(problem: bench.Problem, q, rotation, chosen: triton_decode.Plan | None):
    kept = reference.split_latent_cache(problem.pages, bench.KV_LORA_RANK, bench.ROPE_DIM)
    starts = torch.arange(len(problem.lengths_S) + 1, dtype=torch.int32, device="cuda")
    up_key = problem.up_NUC[:, : bench.NOPE_DIM]
    queries = absorb_queries(q, up_key, *rotation, True, kept.latents_PBC.dtype)
    return [
        partial(
            triton_decode.attend_absorbed, queries, kept, table, starts, problem.lengths_S, SCALE, 1,
            bench.CONTEXT, q.dtype, chosen,
        )
        for table in problem.tables
    ]  # fmt: skip


_held: dict[Case, tuple] = {}


def check(job: Job) -> tuple[Job, float | str]:
    """A plan's error against the definition, of the largest number; or why it can't be."""
    case, plan = job
    with torch.inference_mode():
        if case not in _held:
            _held.clear()
            problem, q, rotation = problem_of(case, 8, 1, True)
            starts = torch.arange(9, dtype=torch.int32, device="cuda")
            wide = (q.float(), problem.up_NUC.float(), *rotation, problem.pages, problem.tables[0])
            wanted = reference.mla_attention(*wide, starts, problem.lengths_S, SCALE, True)
            _held[case] = problem, q, rotation, wanted
        problem, q, rotation, wanted = _held[case]
        try:
            found = calls(problem, q, rotation, plan)[0]()
        except (OutOfResources, CompilationError) as error:
            return job, type(error).__name__
        up_value = problem.up_NUC[:, bench.NOPE_DIM :].float()
        found = torch.einsum("tnc,nvc->tnv", found.float(), up_value)
        return job, ((found - wanted).abs().max() / wanted.abs().max()).item()


def sweep(case: Case, batch: int, good: list[triton_decode.Plan], until: float, copy: float):
    once = batch * bench.CONTEXT * 1152
    problem, q, rotation = problem_of(case, batch, max(2, min(16, round(250e6 / once))), False)
    count = num_sms(torch.device("cuda"))
    seconds = {"chosen": time_in_cuda_graph(calls(problem, q, rotation, None), 3)}
    for plan in good:
        programs = batch * -(-bench.NUM_HEADS[case[0]] // plan.rows)
        most = bench.CONTEXT // triton_decode.LEAST_SPAN
        splits = {max(1, min(share * count // programs, most)) for share in SHARES}
        for split in sorted(splits):
            if (split > 1) == (plan.splits > 1) and time.time() < until:
                sized = triton_decode.Plan(plan.rows, plan.keys, plan.warps, plan.stages, split)
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
    jobs = [(case, plan) for case in cases for plan in tiles(case)]
    begin = time.time()
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        checked = pool.map(check, jobs, chunksize=8)
    good = {job: error for job, error in checked if not isinstance(error, str)}
    print(f"{len(jobs)} plans compiled in {time.time() - begin:.0f} s, {len(good)} fit")
    print(
        *(f"WRONG by {error:.3f}: {job}" for job, error in good.items() if error > 0.02), sep="\n"
    )
    copy, rows, begin = device.measure_cuda_copy_bandwidth(), [], time.time()
    with torch.inference_mode():
        for i, (case, batch) in enumerate(itertools.product(cases, (64, 1, 16))):
            plans = [plan for at, plan in good if at == case]
            until = begin + budget * (i + 1) / (3 * len(cases))
            rows.append(sweep(case, batch, plans, until, copy))
            with open(out, "w") as file:
                json.dump({"copy": copy, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
