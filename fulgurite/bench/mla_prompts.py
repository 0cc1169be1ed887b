"""Many prompts in one call of MLA, for suite `mla`: lengths of the prompts in, a row of figures out.

    ours     one planned call of `mla_attention` (`kernels/mla/prefill_plan.py`) over a paged cache
    loop     torch: one expansion of all keys, then SDPA of each prompt
    padded   torch: the same, then one SDPA of all prompts, padded to the longest

The torch versions read latents that lie end to end; gathering them out of the cache is not in their
time. On a GPU the times are of a CUDA graph. `eager` is the time of the same calls without one, as
the engine runs prompts: it includes what the host takes. `plan` is made once for all layers of a step.
`of floor` is the larger of FLOPs at the throughput of a large GEMM and bytes at the copy bandwidth,
over our time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fulgurite import timing
from fulgurite.bench import results
from fulgurite.bench.measure import Call
from fulgurite.kernels.attention.metadata import AttentionMetadata
from fulgurite.kernels.mla import ops, reference
from fulgurite.kernels.mla.prefill_plan import MLASizes
from fulgurite.kernels.tuning.mla import should_expand

Row = dict[str, Any]
TimeCalls = Callable[[dict[str, list[Call]]], dict[str, float]]
BLOCK_SIZE = 64
MAX_PADDED_SCORES = 1 << 34  # of one padded SDPA: beyond that it may not fit into memory


class PromptBatch(NamedTuple):
    """Prompts of one step as (new tokens, cached tokens)."""

    name: str
    lens: tuple[tuple[int, int], ...]


def draw_ragged(count: int, max_new: int, max_before: int, seed: int = 0) -> PromptBatch:
    """Prompts of 16 to `max_new` tokens; a third of them after a cached prefix."""
    rng = np.random.default_rng(seed)
    new = rng.integers(16, max_new + 1, size=count)
    before = rng.integers(1, max_before + 1, size=count) * (rng.random(count) < 1 / 3)
    lens = tuple((int(n), int(b)) for n, b in zip(new, before, strict=True))
    return PromptBatch(f"{count} ragged", lens)


@dataclass(frozen=True)
class PromptProblem:
    """The arguments of `mla_attention`; the torch versions read `c_KC` and `r_KR`, end to end."""

    sizes: MLASizes
    lens: tuple[tuple[int, int], ...]
    q_TNH: Tensor
    kv_b_NUC: Tensor
    rotation: tuple[Tensor, Tensor]
    cache_PBW: Tensor
    metadata: AttentionMetadata
    c_KC: Tensor
    r_KR: Tensor

    @property
    def scale(self) -> float:
        return (self.sizes.nope_dim + self.sizes.rope_dim) ** -0.5


def make_prompts(
    sizes: MLASizes,
    heads: int,
    lens: tuple[tuple[int, int], ...],
    device: torch.device,
    dtype: torch.dtype,
) -> PromptProblem:
    """Random latents in cache blocks of random order."""
    query_lens, seq_lens = [new for new, _ in lens], [new + before for new, before in lens]
    needed = [-(-keys // BLOCK_SIZE) for keys in seq_lens]
    order = torch.randperm(sum(needed)).int()
    table = torch.zeros(len(lens), max(needed), dtype=torch.int32)
    for row, blocks in enumerate(needed):
        table[row, :blocks], order = order[:blocks], order[blocks:]
    width, slot_dtype = ops.mla_slot_shape(sizes.rank, sizes.rope_dim, dtype)
    cache = torch.zeros(sum(needed), BLOCK_SIZE, width, dtype=slot_dtype, device=device)
    slots = torch.arange(cache.shape[0] * BLOCK_SIZE, device=device)
    latents = torch.randn(len(slots), sizes.rank + sizes.rope_dim, dtype=dtype, device=device)
    norm = torch.ones(sizes.rank, dtype=dtype, device=device)
    rotation = random_rope(len(slots), sizes.rope_dim, device)
    ops.store_mla_cache(latents, norm, *rotation, cache, slots, eps=1e-6, interleaved=True)
    metadata = AttentionMetadata(
        table.to(device),
        torch.tensor([0, *query_lens]).cumsum(0).int().to(device),
        torch.tensor(seq_lens, dtype=torch.int32, device=device),
        max(query_lens),
        max(seq_lens),
        query_lens,
        seq_lens,
    )
    views = reference.split_latent_cache(cache, sizes.rank, sizes.rope_dim)
    gathered = [
        reference.gather_latents(views, row, keys, dtype)
        for row, keys in zip(metadata.block_table_SM, seq_lens, strict=True)
    ]
    rows = sizes.nope_dim + sizes.value_dim
    kv_b = torch.randn(heads, rows, sizes.rank, dtype=dtype, device=device) * sizes.rank**-0.5
    head_dim, tokens = sizes.nope_dim + sizes.rope_dim, sum(query_lens)
    q = torch.randn(tokens, heads, head_dim, dtype=dtype, device=device)
    return PromptProblem(
        sizes,
        lens,
        q,
        kv_b,
        random_rope(tokens, sizes.rope_dim, device),
        cache,
        metadata,
        torch.cat([c for c, _ in gathered]),
        torch.cat([r for _, r in gathered]),
    )


def random_rope(tokens: int, rope_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    angle = torch.randn(tokens, rope_dim // 2, device=device)
    return angle.cos(), angle.sin()


# ---- calls ---------------------------------------------------------------------------------------


def fulgurite_call(problem: PromptProblem) -> Call:
    """Planned once; the call is that of one layer."""
    device = problem.q_TNH.device
    plan = ops.make_prefill_plan(problem.metadata, problem.sizes, device)
    return partial(
        ops.mla_attention,
        problem.q_TNH,
        problem.kv_b_NUC,
        *problem.rotation,
        problem.cache_PBW,
        problem.metadata,
        scale=problem.scale,
        interleaved=True,
        plan=plan,
    )


def expand(problem: PromptProblem) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries [T, N, H], and the keys [K, N, H] and values [K, N, V] of all prompts."""
    nope_dim, heads = problem.sizes.nope_dim, problem.kv_b_NUC.shape[0]
    cos, sin = (x[:, None] for x in problem.rotation)
    q_TND, q_TNR = problem.q_TNH.split((nope_dim, problem.sizes.rope_dim), dim=-1)
    q_TNR = reference.apply_rope(q_TNR.float(), cos, sin, True).to(q_TND.dtype)
    kv_KNU = (problem.c_KC @ problem.kv_b_NUC.flatten(0, 1).t()).unflatten(1, (heads, -1))
    r_KNR = problem.r_KR[:, None].expand(-1, heads, -1)
    keys_KNH = torch.cat((kv_KNU[..., :nope_dim], r_KNR), dim=-1)
    return torch.cat((q_TND, q_TNR), dim=-1), keys_KNH, kv_KNU[..., nope_dim:]


def visible_keys(new: int, before: int, device: torch.device) -> Tensor:
    """Which keys each new token sees, [new, before + new]."""
    keys = torch.arange(before + new, device=device)
    return keys <= torch.arange(before, before + new, device=device)[:, None]


def loop_call(problem: PromptProblem) -> Call:
    """SDPA of one prompt after the other."""
    device = problem.q_TNH.device
    masks = [
        None if before == 0 else visible_keys(new, before, device) for new, before in problem.lens
    ]
    new_lens, key_lens = [n for n, _ in problem.lens], [n + b for n, b in problem.lens]

    def call() -> Tensor:
        q_TNH, k_KNH, v_KNV = expand(problem)
        outs = []
        parts = zip(
            q_TNH.split(new_lens), k_KNH.split(key_lens), v_KNV.split(key_lens), masks, strict=True
        )
        for q, k, v, mask in parts:
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            out = F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=mask is None, scale=problem.scale
            )
            outs.append(out[0].transpose(0, 1))
        return torch.cat(outs)

    return call


def padded_call(problem: PromptProblem) -> Call:
    """One SDPA of all prompts, padded to the longest."""
    device = problem.q_TNH.device
    max_new = max(new for new, _ in problem.lens)
    max_keys = max(new + before for new, before in problem.lens)
    queries = torch.zeros(len(problem.lens), max_new, dtype=torch.int64)
    keys = torch.zeros(len(problem.lens), max_keys, dtype=torch.int64)
    mask = torch.zeros(len(problem.lens), 1, max_new, max_keys, dtype=torch.bool)
    mask[..., 0] = True  # rows of padding: their results are not used
    first_query, first_key, rows = 0, 0, []
    for i, (new, before) in enumerate(problem.lens):
        queries[i, :new] = torch.arange(first_query, first_query + new)
        keys[i, : new + before] = torch.arange(first_key, first_key + new + before)
        mask[i, 0, :new, : new + before] = visible_keys(new, before, torch.device("cpu"))
        rows.append(i * max_new + torch.arange(new))
        first_query, first_key = first_query + new, first_key + new + before
    is_causal = len(set(problem.lens)) == 1 and problem.lens[0][1] == 0
    queries, keys, mask, row_index = (x.to(device) for x in (queries, keys, mask, torch.cat(rows)))

    def call() -> Tensor:
        q_TNH, k_KNH, v_KNV = expand(problem)
        q = q_TNH[queries].transpose(1, 2)
        k, v = (x[keys].transpose(1, 2) for x in (k_KNH, v_KNV))
        out = F.scaled_dot_product_attention(
            q, k, v, None if is_causal else mask, is_causal=is_causal, scale=problem.scale
        )
        return out.transpose(1, 2).flatten(0, 1)[row_index]

    return call


# ---- measuring -----------------------------------------------------------------------------------


def measure_prompts(
    shape: str,
    problem: PromptProblem,
    name: str,
    rates: tuple[float, float],
    time_calls: TimeCalls,
) -> Row:
    """One line; `rates` are bytes/s of a copy and FLOP/s of a GEMM."""
    heads, is_gpu = problem.kv_b_NUC.shape[0], problem.q_TNH.is_cuda
    calls = {"ours": fulgurite_call(problem), "loop": loop_call(problem)}
    longest = max(new for new, _ in problem.lens), max(sum(pair) for pair in problem.lens)
    if len(problem.lens) * heads * longest[0] * longest[1] <= MAX_PADDED_SCORES:
        calls["padded"] = padded_call(problem)
    taken = time_calls({key: [call] for key, call in calls.items()})
    if is_gpu:
        eager = timing.median_times({k: calls[k] for k in ("ours", "loop")}, repeats=9, budget=0.5)
        taken |= {f"{key}_eager": value for key, value in eager.items()}
        make_plan = partial(
            ops.make_prefill_plan, problem.metadata, problem.sizes, problem.q_TNH.device
        )
        taken["plan"] = timing.median_times({"plan": make_plan}, repeats=9, budget=0.2)["plan"]
    flops = 2 * heads * sum(count_multiply_adds(problem.sizes, *pair) for pair in problem.lens)
    latents = problem.c_KC.nbytes + problem.r_KR.nbytes
    value_bytes = problem.q_TNH.nbytes // problem.q_TNH.shape[2] * problem.sizes.value_dim
    bytes = latents + problem.q_TNH.nbytes + value_bytes + problem.kv_b_NUC.nbytes
    floor = max(bytes / rates[0], flops / rates[1])
    return {
        "part": "prompts",
        "shape": shape,
        "prompts": name,
        "tokens": len(problem.q_TNH),
        "keys": len(problem.c_KC),
        **{f"{key}_ms": 1e3 * value for key, value in taken.items()},
        "flops": flops,
        "bytes": bytes,
        "of_floor": floor / taken["ours"],
    }


def count_multiply_adds(sizes: MLASizes, new: int, before: int) -> int:
    """Of one prompt and head, in the form that `mla_attention` takes."""
    rank, nope_dim, rope_dim, value_dim = sizes
    pairs = new * (2 * before + new + 1) // 2
    expansion = rank * (nope_dim + value_dim)
    if should_expand(new, new + before, *sizes):
        return pairs * (nope_dim + rope_dim + value_dim) + (before + new) * expansion
    return pairs * (2 * rank + rope_dim) + new * expansion


def format_prompts(found: list[Row]) -> str:
    """A table of the rows of `measure_prompts`."""
    columns = ("ours", "loop", "padded", "ours_eager", "loop_eager", "plan")
    used = [key for key in columns if any(f"{key}_ms" in row for row in found)]
    names = [key.replace("_", ", ") for key in used]
    head = ["shape", "prompts", "tokens", "keys", *names, "of floor"]
    body = [
        [
            row["shape"],
            row["prompts"],
            str(row["tokens"]),
            str(row["keys"]),
            *(f"{row[f'{key}_ms']:.3f} ms" if f"{key}_ms" in row else "" for key in used),
            f"{100 * row['of_floor']:.0f}%",
        ]
        for row in found
    ]
    return results.format_table([head, *body])
