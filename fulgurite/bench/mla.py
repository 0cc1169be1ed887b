"""Suite `mla`: MLA decode and prefill at DeepSeek shapes, against torch and the roofline.

In: nothing. Out: three tables.

    decode    one token for each of 1 to 64 sequences (CPU: 16) with 4096 tokens each. `of copy`: bytes of the latents
              over the time, as percent of the copy bandwidth. `of floor`: the larger of that and of the FLOPs at the
              throughput of a large GEMM. The kv_b projection counts among bytes and FLOPs.
    prefill   new tokens after a cached prefix, as `mla_attention` runs it (mostly expanded), and absorbed
    prompts   many prompts in one call: 32 of 256 tokens, and a ragged mix drawn from a seed (`mla_prompts.py`)

Every call reads latents that no cache holds. `torch` is absorbed attention in plain torch over contiguous latents;
`paged` is generic paged attention with one KV head. Both include the projections.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

from fulgurite import device, timing
from fulgurite.bench import results
from fulgurite.bench.measure import Call, round_robin, time_in_cuda_graph
from fulgurite.bench.mla_prompts import (
    PromptBatch,
    draw_ragged,
    format_prompts,
    make_prompts,
    measure_prompts,
)
from fulgurite.kernels.attention.metadata import AttentionMetadata, AttentionOptions
from fulgurite.kernels.attention.ops import paged_attention
from fulgurite.kernels.mla import ops
from fulgurite.kernels.mla.prefill_plan import MLASizes
from fulgurite.kernels.mla.reference import apply_rope
from fulgurite.kernels.tuning.mla import should_expand

Row = dict[str, Any]
CONTEXT, BLOCK_SIZE = 4096, 64
KV_LORA_RANK, NOPE_DIM, ROPE_DIM, VALUE_DIM = 512, 128, 64, 128
NUM_HEADS = {"DeepSeek-V2-Lite": 16, "DeepSeek-V3": 128}
CACHE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class DeviceSetup:
    """The cases of one kind of device."""

    device: str
    dtype: torch.dtype
    cache_dtypes: tuple[str, ...]
    batches: dict[str, tuple[int, ...]]
    prompts: tuple[tuple[int, int], ...]  # (new tokens, cached tokens)
    cold: int  # bytes of latents that calls rotate over
    most_copies: int
    prompt_batches: tuple[PromptBatch, ...]


CPU = DeviceSetup(
    device="cpu",
    dtype=torch.float32,
    cache_dtypes=("float32", "bfloat16", "fp8"),
    batches={"DeepSeek-V2-Lite": (1, 4, 16), "DeepSeek-V3": (1, 4)},
    prompts=((512, 0), (256, 1792), (64, 1984)),
    cold=256 << 20,
    most_copies=64,
    prompt_batches=(PromptBatch("8 x 128", ((128, 0),) * 8), draw_ragged(8, 256, 256)),
)
CUDA = DeviceSetup(
    device="cuda",
    dtype=torch.bfloat16,
    cache_dtypes=("bfloat16", "fp8"),
    batches=dict.fromkeys(NUM_HEADS, (1, 4, 16, 64)),
    prompts=((4096, 0), (1024, 8192), (128, 8192)),
    cold=250_000_000,
    most_copies=32,
    prompt_batches=(PromptBatch("32 x 256", ((256, 0),) * 32), draw_ragged(32, 768, 1024)),
)


def run_mla(options: argparse.Namespace) -> None:
    """Suite `mla`."""
    run = CUDA if options.device.startswith("cuda") else CPU
    copy, matmul = measure_roofline(run)
    found: list[Row] = [{"part": "rates", "copy": copy, "matmul": matmul}]
    jobs = [
        partial(measure_decode, run, name, batch, cache_dtype, copy, matmul)
        for name, batches in run.batches.items()
        for batch in (batches[::2] if options.quick else batches)
        for cache_dtype in (run.cache_dtypes[:1] if options.quick else run.cache_dtypes)
    ]
    jobs += [
        partial(measure_prefill, run, name, new, before, matmul)
        for name in run.batches
        for new, before in (run.prompts[:1] if options.quick else run.prompts)
    ]
    jobs += [
        partial(measure_prompt_batch, run, name, batch, copy, matmul)
        for name in run.batches
        for batch in run.prompt_batches
    ]
    with Progress(transient=True) as progress, torch.inference_mode():
        for job in progress.track(jobs, description="mla"):
            found.append(job())
            path = results.save_results(
                "mla", options.device, found, options.output
            )  # partial results survive an interrupt
    print(f"copy {copy / 1e9:.1f} GB/s · matmul {matmul / 1e12:.2f} TFLOP/s · context {CONTEXT}")
    print("\n\n".join(format_tables(found)))
    print(f"written to {path}")


def measure_roofline(run: DeviceSetup) -> tuple[float, float]:
    """Copy bandwidth in bytes/s, and throughput of a large GEMM in FLOP/s."""
    size = 8192 if run.device == "cuda" else 1536
    a, b = (torch.randn(size, size, dtype=run.dtype, device=run.device) for _ in range(2))
    seconds = timing.median_times({"matmul": lambda: a @ b}, repeats=7, budget=1.0)["matmul"]
    if run.device == "cuda":
        return device.measure_cuda_copy_bandwidth(), 2 * size**3 / seconds
    return device.measure_copy_bandwidth(device.num_cpu_threads(), 256), 2 * size**3 / seconds


# ---- problems ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """The arguments of `mla_attention` but for queries: a cache of many sequences, and the weight."""

    kv_b_NUC: Tensor
    cache_PBW: Tensor
    block_tables: list[Tensor]  # one per call
    seq_lens_S: Tensor
    latent_bytes: int  # read by one call


def make_problem(
    run: DeviceSetup, heads: int, batch: int, context: int, cache_dtype: str, copies: int
) -> Problem:
    """Random latents for `copies` calls of `batch` sequences; blocks are in random order."""
    width, dtype = ops.mla_slot_shape(KV_LORA_RANK, ROPE_DIM, CACHE_DTYPES[cache_dtype])
    blocks = -(-context // BLOCK_SIZE)
    cache = torch.zeros(copies * batch * blocks, BLOCK_SIZE, width, dtype=dtype, device=run.device)
    tokens = cache.shape[0] * BLOCK_SIZE
    norm = torch.ones(KV_LORA_RANK, dtype=run.dtype, device=run.device)
    for start in range(0, tokens, 1 << 16):
        slots = torch.arange(start, min(start + (1 << 16), tokens), device=run.device)
        latent = torch.randn(
            len(slots), KV_LORA_RANK + ROPE_DIM, dtype=run.dtype, device=run.device
        )
        rotation = random_rope(len(slots), run.device)
        ops.store_mla_cache(latent, norm, *rotation, cache, slots, eps=1e-6, interleaved=True)
    order = torch.randperm(cache.shape[0], device=run.device).int().view(copies, batch, blocks)
    kv_b = (
        torch.randn(heads, NOPE_DIM + VALUE_DIM, KV_LORA_RANK, dtype=run.dtype, device=run.device)
        * KV_LORA_RANK**-0.5
    )
    seq_lens = torch.full((batch,), context, dtype=torch.int32, device=run.device)
    return Problem(kv_b, cache, list(order), seq_lens, batch * context * width * dtype.itemsize)


def random_rope(tokens: int, device_type: str) -> tuple[Tensor, Tensor]:
    angle = torch.randn(tokens, ROPE_DIM // 2, device=device_type)
    return angle.cos(), angle.sin()


def fulgurite_calls(
    problem: Problem, q: Tensor, rotation: tuple[Tensor, Tensor], new: int
) -> list[Call]:
    """One call per block table: `new` tokens of every sequence."""
    batch, context = len(problem.seq_lens_S), int(problem.seq_lens_S.max())
    starts = torch.arange(0, (batch + 1) * new, new, dtype=torch.int32, device=q.device)
    lens = new, context, [new] * batch, [context] * batch
    return [
        partial(
            ops.mla_attention,
            q,
            problem.kv_b_NUC,
            *rotation,
            problem.cache_PBW,
            metadata := AttentionMetadata(table, starts, problem.seq_lens_S, *lens),
            scale=(NOPE_DIM + ROPE_DIM) ** -0.5,
            interleaved=True,
            plan=ops.make_prefill_plan(metadata, layer_sizes(), q.device),
        )
        for table in problem.block_tables
    ]


def layer_sizes() -> MLASizes:
    return MLASizes(KV_LORA_RANK, NOPE_DIM, ROPE_DIM, VALUE_DIM)


def paged_attention_calls(
    problem: Problem, q: Tensor, rotation: tuple[Tensor, Tensor]
) -> list[Call]:
    """Projections in torch, and generic paged attention with one KV head."""
    starts = torch.arange(len(problem.seq_lens_S) + 1, dtype=torch.int32, device=q.device)

    def call(table: Tensor) -> Tensor:
        out_TNC = paged_attention(
            absorb_queries(problem, q, rotation),
            problem.cache_PBW[:, :, None],
            None,
            AttentionMetadata(table, starts, problem.seq_lens_S, 1, CONTEXT),
            AttentionOptions((NOPE_DIM + ROPE_DIM) ** -0.5, value_dim=KV_LORA_RANK),
        )
        return torch.einsum("tnc,nvc->tnv", out_TNC, problem.kv_b_NUC[:, NOPE_DIM:])

    return [partial(call, table) for table in problem.block_tables]


def torch_calls(problem: Problem, q: Tensor, rotation: tuple[Tensor, Tensor]) -> list[Call]:
    """Absorbed attention in torch over contiguous latents, [batch, context, L]."""
    batch = len(problem.seq_lens_S)
    whole = problem.cache_PBW.view(
        len(problem.block_tables), batch, CONTEXT, KV_LORA_RANK + ROPE_DIM
    ).to(q.dtype)

    def call(latents_BKL: Tensor) -> Tensor:
        q_TNL = absorb_queries(problem, q, rotation)
        scores_TNK = (q_TNL @ latents_BKL.mT) * (NOPE_DIM + ROPE_DIM) ** -0.5
        out_TNC = scores_TNK.softmax(dim=-1) @ latents_BKL[..., :KV_LORA_RANK]
        return torch.einsum("tnc,nvc->tnv", out_TNC, problem.kv_b_NUC[:, NOPE_DIM:])

    return [partial(call, latents_BKL) for latents_BKL in whole]


def absorb_queries(problem: Problem, q: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    q_TNC = torch.einsum("tnd,ndc->tnc", q[..., :NOPE_DIM], problem.kv_b_NUC[:, :NOPE_DIM])
    cos, sin = (x[:, None] for x in rotation)
    q_TNR = apply_rope(q[..., NOPE_DIM:].float(), cos, sin, True).to(q.dtype)
    return torch.cat((q_TNC, q_TNR), dim=-1)


# ---- measuring -----------------------------------------------------------------------------------


def time_calls(run: DeviceSetup, calls: dict[str, list[Call]]) -> dict[str, float]:
    """Seconds per call: inside a CUDA graph on a GPU; the median of turns on a CPU."""
    if run.device == "cuda":
        return {name: time_in_cuda_graph(many) for name, many in calls.items()}
    turns = {name: round_robin(many) for name, many in calls.items()}
    return timing.median_times(turns, repeats=5, budget=0.5)


def measure_decode(
    run: DeviceSetup, name: str, batch: int, cache_dtype: str, copy: float, matmul: float
) -> Row:
    """One decode step: one token per sequence."""
    heads = NUM_HEADS[name]
    width, dtype = ops.mla_slot_shape(KV_LORA_RANK, ROPE_DIM, CACHE_DTYPES[cache_dtype])
    once = batch * CONTEXT * width * dtype.itemsize
    copies = max(2, min(run.most_copies, math.ceil(run.cold / once)))
    problem = make_problem(run, heads, batch, CONTEXT, cache_dtype, copies)
    q = torch.randn(batch, heads, NOPE_DIM + ROPE_DIM, dtype=run.dtype, device=run.device)
    rotation = random_rope(batch, run.device)
    calls = {"ours": fulgurite_calls(problem, q, rotation, 1)}
    if CACHE_DTYPES[cache_dtype] == run.dtype:
        calls |= {
            "paged": paged_attention_calls(problem, q, rotation),
            "torch": torch_calls(problem, q, rotation),
        }
    taken = time_calls(run, calls)
    bytes = problem.latent_bytes + problem.kv_b_NUC.nbytes
    products = (
        2
        * batch
        * heads
        * (CONTEXT * (2 * KV_LORA_RANK + ROPE_DIM) + KV_LORA_RANK * (NOPE_DIM + VALUE_DIM))
    )
    floor = max(bytes / copy, products / matmul)
    return {
        "part": "decode",
        "shape": name,
        "batch": batch,
        "kept": cache_dtype,
        **{f"{key}_ms": 1e3 * value for key, value in taken.items()},
        "bytes": bytes,
        "products": products,
        "of_copy": bytes / taken["ours"] / copy,
        "of_floor": floor / taken["ours"],
    }


def measure_prefill(run: DeviceSetup, name: str, new: int, before: int, matmul: float) -> Row:
    """New tokens of one sequence after a cached prefix."""
    heads = NUM_HEADS[name]
    cache_dtype = next(key for key, dtype in CACHE_DTYPES.items() if dtype == run.dtype)
    problem = make_problem(run, heads, 1, before + new, cache_dtype, 1)
    q = torch.randn(new, heads, NOPE_DIM + ROPE_DIM, dtype=run.dtype, device=run.device)
    rotation = random_rope(new, run.device)
    taken = time_calls(run, {"ours": fulgurite_calls(problem, q, rotation, new)})["ours"]
    pairs = new * (2 * before + new + 1) // 2
    is_expanded = should_expand(new, before + new, KV_LORA_RANK, NOPE_DIM, ROPE_DIM, VALUE_DIM)
    expanded = pairs * (NOPE_DIM + ROPE_DIM + VALUE_DIM) + (before + new) * KV_LORA_RANK * (
        NOPE_DIM + VALUE_DIM
    )
    absorbed = pairs * (2 * KV_LORA_RANK + ROPE_DIM) + new * KV_LORA_RANK * (NOPE_DIM + VALUE_DIM)
    products = 2 * heads * (expanded if is_expanded else absorbed)
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


def measure_prompt_batch(
    run: DeviceSetup, name: str, batch: PromptBatch, copy: float, matmul: float
) -> Row:
    """Many prompts in one call."""
    device, heads = torch.device(run.device), NUM_HEADS[name]
    problem = make_prompts(layer_sizes(), heads, batch.lens, device, run.dtype)
    return measure_prompts(name, problem, batch.name, (copy, matmul), partial(time_calls, run))


def format_tables(found: list[Row]) -> list[str]:
    decoded = [row for row in found if row["part"] == "decode"]
    head = ["shape", "batch", "cache", "ours", "paged", "torch", "of copy", "of floor"]
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
    tables = [results.format_table([head, *body]), results.format_table(prompts)]
    many = [row for row in found if row["part"] == "prompts"]
    return tables + ([format_prompts(many)] if many else [])
