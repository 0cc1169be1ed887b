"""Checks and times tiles of the absorbed latent attention kernel on a GPU: python3 benchmarks/sweep_mla.py [SECONDS].

For each shape, batch and kind of pages: every plan of PLANS x SPLITS, its error against the definition in float32,
and how near it comes to the copy bandwidth; then the plan that `mla_decode.plan` chooses. The table of the best goes to
benchmarks/sweep_mla.json.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from functools import partial

import torch

sys.path.insert(0, ".")
from triton.runtime.errors import OutOfResources

from fulgurite import device
from fulgurite.bench import mla as bench
from fulgurite.bench.quant_cuda import graph_seconds
from fulgurite.kernels import mla_reference as reference
from fulgurite.kernels.triton import mla_decode

ROWS = {16: (16,), 128: (16, 32, 64, 128)}
KEYS, WARPS, STAGES = (16, 32, 64), (4, 8), (1, 2, 3, 4)
SPLITS = (0.5, 1, 2, 4)  # programs a multiprocessor


def plans(heads: int, batch: int, processors: int):
    for rows, keys, warps, stages in itertools.product(ROWS[heads], KEYS, WARPS, STAGES):
        tiles = batch * -(-heads // rows)
        for share in SPLITS:
            splits = max(1, min(64, round(share * processors / tiles), bench.CONTEXT // 128))
            yield mla_decode.Plan(rows, keys, warps, stages, splits)


def calls(problem: bench.Problem, q, rotation, chosen):
    kept = reference.parts(problem.pages, bench.RANK, bench.ROPE)
    starts = torch.arange(len(problem.lengths_S) + 1, dtype=torch.int32, device="cuda")
    q_TNC = bench.absorbed_queries(problem, q, rotation)[..., : bench.RANK]
    return [
        partial(
            mla_decode.attend_absorbed,
            q_TNC, q[..., bench.PLAIN :], *rotation, kept, table, starts, problem.lengths_S,
            (bench.PLAIN + bench.ROPE) ** -0.5, True, 1, bench.CONTEXT, chosen,
        )
        for table in problem.tables
    ]  # fmt: skip


def error_of(problem: bench.Problem, q, rotation, found_TNC) -> float:
    """Against the definition, after the value projection; of the largest."""
    table, batch = problem.tables[0], len(problem.lengths_S)
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    wide = (q.float(), problem.up_NUC.float(), *rotation, problem.pages, table, starts)
    wanted = reference.latent_attention(
        *wide, problem.lengths_S, (bench.PLAIN + bench.ROPE) ** -0.5, True
    )
    up_value = problem.up_NUC[:, bench.PLAIN :].float()
    found = torch.einsum("tnc,nvc->tnv", found_TNC.float(), up_value)
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


def sweep(name: str, batch: int, kept: str, until: float, copy: float) -> dict[str, object]:
    heads, processors = bench.HEADS[name], mla_decode.processors(torch.device("cuda"))
    copies = max(2, min(16, round(250e6 / (batch * bench.CONTEXT * 1152))))
    problem = bench.make_problem(bench.CUDA, heads, batch, bench.CONTEXT, kept, copies)
    size = bench.PLAIN + bench.ROPE
    q = torch.randn(batch, heads, size, dtype=torch.bfloat16, device="cuda")
    rotation = bench.angles(batch, "cuda")
    chosen = mla_decode.plan(heads, False, batch, bench.CONTEXT, processors)
    seconds, wrong = {}, []
    for plan in dict.fromkeys([chosen, *plans(heads, batch, processors)]):
        if time.time() > until and plan is not chosen:
            break
        many = calls(problem, q, rotation, plan)
        try:
            error = error_of(problem, q, rotation, many[0]())
            seconds[plan] = graph_seconds(many, replays=3)
        except OutOfResources:
            continue
        if error > 0.02:
            wrong.append((plan, error))
    best = min(seconds, key=seconds.__getitem__)
    rate = {key: problem.latent_bytes / seconds[key] / copy for key in (chosen, best)}
    print(
        f"{name} batch {batch} {kept}: chosen {chosen} {rate[chosen]:.0%}, best {best} {rate[best]:.0%}"
    )
    for plan, error in wrong:
        print(f"  WRONG by {error:.3f}: {plan}")
    return {
        "shape": name, "batch": batch, "kept": kept, "chosen": str(chosen), "best": str(best),
        "chosen_of_copy": rate[chosen], "best_of_copy": rate[best], "tried": len(seconds),
        "wrong": len(wrong),
    }  # fmt: skip


def main() -> None:
    budget = float(sys.argv[1]) if len(sys.argv) > 1 else 300.0
    cases = [
        (name, batch, kept)
        for batch in (64, 1, 16)
        for name in bench.HEADS
        for kept in ("bfloat16", "fp8")
    ]
    copy, rows = device.measure_cuda_copy_bandwidth(), []
    with torch.inference_mode():
        for case in cases:
            rows.append(sweep(*case, time.time() + budget / len(cases), copy))
    with open("benchmarks/sweep_mla.json", "w") as file:
        json.dump({"copy": copy, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
