"""Latent attention: decode steps and prompts of the DeepSeek shapes, beside plain torch and the floor.

In: nothing. Out: two tables.

    decode   one token for each of 1 to 64 sequences (a CPU: 16) with 4096 tokens each. `of copy`: the bytes of the latents over
             the time, in percent of the copy bandwidth. `of floor`: the larger of that time and the products at the
             rate of a large matmul, over the time. The up projection's share (read by every step, at batch 1 more than
             the latents of V3) counts among the bytes and the products.
    prompt   new tokens after a cached prefix, as `latent_attention` does it (mostly expanded) and absorbed

Each call has latents that no cache holds any more; `torch` is the same absorbed in plain torch over contiguous latents,
`paged` the generic paged attention with one key head, both with the same projections around them.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

from fulgurite import device, timing
from fulgurite.bench import results
from fulgurite.bench.quant_cuda import graph_seconds
from fulgurite.kernels.attention.ops import paged_attention
from fulgurite.kernels.mla import ops
from fulgurite.kernels.mla.reference import turned

Call = Callable[[], Any]
Row = dict[str, Any]
CONTEXT, PAGE = 4096, 64
RANK, PLAIN, ROPE, VALUE = 512, 128, 64, 128
HEADS = {"DeepSeek-V2-Lite": 16, "DeepSeek-V3": 128}
KEPT = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Run:
    """What one kind of device measures."""

    device: str
    dtype: torch.dtype
    kept: tuple[str, ...]
    batches: dict[str, tuple[int, ...]]
    prompts: tuple[tuple[int, int], ...]  # new tokens, tokens before them
    cold: int  # bytes of latents that calls take in turns
    most_copies: int


CPU = Run(
    device="cpu",
    dtype=torch.float32,
    kept=("float32", "bfloat16", "fp8"),
    batches={"DeepSeek-V2-Lite": (1, 4, 16), "DeepSeek-V3": (1, 4)},
    prompts=((512, 0), (256, 1792), (64, 1984)),
    cold=256 << 20,
    most_copies=64,
)
CUDA = Run(
    device="cuda",
    dtype=torch.bfloat16,
    kept=("bfloat16", "fp8"),
    batches=dict.fromkeys(HEADS, (1, 4, 16, 64)),
    prompts=((4096, 0), (1024, 8192), (128, 8192)),
    cold=250_000_000,
    most_copies=32,
)


def mla_suite(options: argparse.Namespace) -> None:
    """Suite `mla`."""
    run = CUDA if options.device.startswith("cuda") else CPU
    copy, matmul = rates(run)
    found: list[Row] = [{"part": "rates", "copy": copy, "matmul": matmul}]
    jobs = [
        partial(decode, run, name, batch, kept, copy, matmul)
        for name, batches in run.batches.items()
        for batch in (batches[::2] if options.quick else batches)
        for kept in (run.kept[:1] if options.quick else run.kept)
    ]
    jobs += [
        partial(prompt, run, name, new, before, matmul)
        for name in run.batches
        for new, before in (run.prompts[:1] if options.quick else run.prompts)
    ]
    with Progress(transient=True) as progress, torch.inference_mode():
        for job in progress.track(jobs, description="mla"):
            found.append(job())
            path = results.save("mla", options.device, found, options.output)  # as far as it is
    print(f"copy {copy / 1e9:.1f} GB/s · matmul {matmul / 1e12:.2f} TFLOP/s · context {CONTEXT}")
    print("\n\n".join(tables(found)))
    print(f"written to {path}")


def rates(run: Run) -> tuple[float, float]:
    """Bytes a second of a copy, and products (two a multiply-add) of a large matmul, in this run."""
    size = 8192 if run.device == "cuda" else 1536
    a, b = (torch.randn(size, size, dtype=run.dtype, device=run.device) for _ in range(2))
    seconds = timing.compare({"matmul": lambda: a @ b}, repeats=7, budget=1.0)["matmul"]
    if run.device == "cuda":
        return device.measure_cuda_copy_bandwidth(), 2 * size**3 / seconds
    return device.measure_copy_bandwidth(device.cpu_threads(), 256), 2 * size**3 / seconds


# ---- problems ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """The arguments of latent_attention but for queries: pages of many sequences, and one call's weights."""

    up_NUC: Tensor
    pages: Tensor
    tables: list[Tensor]  # of each call in turn
    lengths_S: Tensor
    latent_bytes: int  # that a call reads


def make_problem(run: Run, heads: int, batch: int, context: int, kept: str, copies: int) -> Problem:
    """Pages of random latents for `copies` calls of `batch` sequences, in random order."""
    width, dtype = ops.page_shape(RANK, ROPE, KEPT[kept])
    each = -(-context // PAGE)
    pages = torch.zeros(copies * batch * each, PAGE, width, dtype=dtype, device=run.device)
    tokens = pages.shape[0] * PAGE
    norm = torch.ones(RANK, dtype=run.dtype, device=run.device)
    for start in range(0, tokens, 1 << 16):
        slots = torch.arange(start, min(start + (1 << 16), tokens), device=run.device)
        latent = torch.randn(len(slots), RANK + ROPE, dtype=run.dtype, device=run.device)
        rotation = angles(len(slots), run.device)
        ops.write_latent(latent, norm, *rotation, pages, slots, eps=1e-6, interleaved=True)
    order = torch.randperm(pages.shape[0], device=run.device).int().view(copies, batch, each)
    up = torch.randn(heads, PLAIN + VALUE, RANK, dtype=run.dtype, device=run.device) * RANK**-0.5
    lengths = torch.full((batch,), context, dtype=torch.int32, device=run.device)
    return Problem(up, pages, list(order), lengths, batch * context * width * dtype.itemsize)


def angles(tokens: int, place: str) -> tuple[Tensor, Tensor]:
    angle = torch.randn(tokens, ROPE // 2, device=place)
    return angle.cos(), angle.sin()


def ours(problem: Problem, q: Tensor, rotation: tuple[Tensor, Tensor], new: int) -> list[Call]:
    """A call for each table: `new` tokens of every sequence."""
    batch, context = len(problem.lengths_S), int(problem.lengths_S.max())
    starts = torch.arange(0, (batch + 1) * new, new, dtype=torch.int32, device=q.device)
    return [
        partial(
            ops.latent_attention,
            q,
            problem.up_NUC,
            *rotation,
            problem.pages,
            table,
            starts,
            problem.lengths_S,
            scale=(PLAIN + ROPE) ** -0.5,
            interleaved=True,
            max_query=new,
            max_length=context,
            query_counts=[new] * batch,
            key_counts=[context] * batch,
        )
        for table in problem.tables
    ]


def generic(problem: Problem, q: Tensor, rotation: tuple[Tensor, Tensor]) -> list[Call]:
    """Projections in torch around paged attention with one key head."""
    starts = torch.arange(len(problem.lengths_S) + 1, dtype=torch.int32, device=q.device)

    def call(table: Tensor) -> Tensor:
        out_TNC = paged_attention(
            absorbed_queries(problem, q, rotation),
            problem.pages[:, :, None],
            None,
            table,
            starts,
            problem.lengths_S,
            scale=(PLAIN + ROPE) ** -0.5,
            value_dim=RANK,
            max_query=1,
            max_length=CONTEXT,
        )
        return torch.einsum("tnc,nvc->tnv", out_TNC, problem.up_NUC[:, PLAIN:])

    return [partial(call, table) for table in problem.tables]


def plain(problem: Problem, q: Tensor, rotation: tuple[Tensor, Tensor]) -> list[Call]:
    """The same in torch over latents that lie end to end, [batch, context, L]."""
    batch = len(problem.lengths_S)
    whole = problem.pages.view(len(problem.tables), batch, CONTEXT, RANK + ROPE).to(q.dtype)

    def call(kept_BKL: Tensor) -> Tensor:
        q_TNL = absorbed_queries(problem, q, rotation)
        scores_TNK = (q_TNL @ kept_BKL.mT) * (PLAIN + ROPE) ** -0.5
        out_TNC = scores_TNK.softmax(dim=-1) @ kept_BKL[..., :RANK]
        return torch.einsum("tnc,nvc->tnv", out_TNC, problem.up_NUC[:, PLAIN:])

    return [partial(call, kept_BKL) for kept_BKL in whole]


def absorbed_queries(problem: Problem, q: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    q_TNC = torch.einsum("tnd,ndc->tnc", q[..., :PLAIN], problem.up_NUC[:, :PLAIN])
    cos, sin = (x[:, None] for x in rotation)
    q_TNR = turned(q[..., PLAIN:].float(), cos, sin, True).to(q.dtype)
    return torch.cat((q_TNC, q_TNR), dim=-1)


# ---- measuring -----------------------------------------------------------------------------------


def seconds(run: Run, calls: dict[str, list[Call]]) -> dict[str, float]:
    """Of a call: on a GPU by a graph of all of them, on a CPU the median of turns."""
    if run.device == "cuda":
        return {name: graph_seconds(many) for name, many in calls.items()}
    turns = {name: _in_turns(many) for name, many in calls.items()}
    return timing.compare(turns, repeats=5, budget=0.5)


def _in_turns(calls: list[Call]) -> Call:
    order = itertools.cycle(calls)
    return lambda: next(order)()


def decode(run: Run, name: str, batch: int, kept: str, copy: float, matmul: float) -> Row:
    """One token a sequence."""
    heads = HEADS[name]
    width, dtype = ops.page_shape(RANK, ROPE, KEPT[kept])
    once = batch * CONTEXT * width * dtype.itemsize
    copies = max(2, min(run.most_copies, math.ceil(run.cold / once)))
    problem = make_problem(run, heads, batch, CONTEXT, kept, copies)
    q = torch.randn(batch, heads, PLAIN + ROPE, dtype=run.dtype, device=run.device)
    rotation = angles(batch, run.device)
    calls = {"ours": ours(problem, q, rotation, 1)}
    if KEPT[kept] == run.dtype:
        calls |= {"paged": generic(problem, q, rotation), "torch": plain(problem, q, rotation)}
    taken = seconds(run, calls)
    bytes = problem.latent_bytes + problem.up_NUC.nbytes
    products = 2 * batch * heads * (CONTEXT * (2 * RANK + ROPE) + RANK * (PLAIN + VALUE))
    floor = max(bytes / copy, products / matmul)
    return {
        "part": "decode",
        "shape": name,
        "batch": batch,
        "kept": kept,
        **{f"{key}_ms": 1e3 * value for key, value in taken.items()},
        "bytes": bytes,
        "products": products,
        "of_copy": bytes / taken["ours"] / copy,
        "of_floor": floor / taken["ours"],
    }


def prompt(run: Run, name: str, new: int, before: int, matmul: float) -> Row:
    """One sequence's new tokens after a prefix, by the rule and absorbed."""
    heads = HEADS[name]
    kept = next(key for key, dtype in KEPT.items() if dtype == run.dtype)
    problem = make_problem(run, heads, 1, before + new, kept, 1)
    q = torch.randn(new, heads, PLAIN + ROPE, dtype=run.dtype, device=run.device)
    rotation = angles(new, run.device)
    taken = seconds(run, {"ours": ours(problem, q, rotation, new)})["ours"]
    pairs = new * (2 * before + new + 1) // 2
    is_expanded = ops.expands(new, before + new, RANK, PLAIN, ROPE, VALUE)
    by_rule = pairs * (PLAIN + ROPE + VALUE) + (before + new) * RANK * (PLAIN + VALUE)
    absorbed = pairs * (2 * RANK + ROPE) + new * RANK * (PLAIN + VALUE)
    products = 2 * heads * (by_rule if is_expanded else absorbed)
    return {
        "part": "prompt",
        "shape": name,
        "new": new,
        "before": before,
        "expanded": is_expanded,
        "ours_ms": 1e3 * taken,
        "products": products,
        "if_absorbed": 2 * heads * absorbed,
        "of_matmul": products / taken / matmul,
    }


def tables(found: list[Row]) -> list[str]:
    decoded = [row for row in found if row["part"] == "decode"]
    head = ["shape", "batch", "kept", "ours", "paged", "torch", "of copy", "of floor"]
    body = [
        [
            row["shape"],
            str(row["batch"]),
            row["kept"],
            *(
                f"{row[key]:.3f} ms" if key in row else ""
                for key in ("ours_ms", "paged_ms", "torch_ms")
            ),
            f"{100 * row['of_copy']:.0f}%",
            f"{100 * row['of_floor']:.0f}%",
        ]
        for row in decoded
    ]
    asked = [row for row in found if row["part"] == "prompt"]
    prompts = [["shape", "new", "before", "way", "ours", "of matmul", "products saved"]]
    prompts += [
        [
            row["shape"],
            str(row["new"]),
            str(row["before"]),
            "expanded" if row["expanded"] else "absorbed",
            f"{row['ours_ms']:.2f} ms",
            f"{100 * row['of_matmul']:.0f}%",
            f"{100 * (1 - row['products'] / row['if_absorbed']):.0f}%",
        ]
        for row in asked
    ]
    return [results.table([head, *body]), results.table(prompts)]
