"""Memory is planned before it is used: a model on the meta device in, a `MemoryPlan` out.

    weights       parameters and buffers
    activations   the most that lives at once in the largest step, found by running it on the meta
                  device and watching what it allocates
    workspaces    what libraries keep for themselves, tables of blocks, logits of CUDA graphs, and a
                  packed weight that is decoded whole
    cache         KV blocks, out of what is left

Where even one request of the whole context has no room, the error says what would have.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from fulgurite.errors import CapacityError
from fulgurite.kernels.mla import ops
from fulgurite.kernels.tuning.gemm import DECODE_FIRST
from fulgurite.models.cache import AttentionSpec
from fulgurite.models.layers import Decoder
from fulgurite.plan.activations import activation_bytes
from fulgurite.quant import QuantTensor
from fulgurite.quant.format import Format
from fulgurite.serve.engine.block_tables import Group, make_groups

MATMUL_WORKSPACE = 2 * (32 << 20)  # what torch gives cuBLAS on Hopper, for steps and for graphs
SHARE = 0.9  # of a GPU's memory that is ours; the rest is for the driver and fragments
CPU_SHARE = 0.6  # other programs live there too
CONTAINER = Path("/sys/fs/cgroup")  # what a container may take and has, where there is one


@dataclass(frozen=True)
class Limits:
    """What the engine is built for."""

    context: int
    max_sequences: int
    step_tokens: int
    block_size: int
    kv_dtype: torch.dtype
    cache_tokens: int | None = None  # None: room for max_sequences whole contexts, if there is


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by what they are for; `blocks[g]` KV blocks for each group of layers."""

    device: torch.device
    limits: Limits
    available: int
    weights: int
    activations: int
    workspaces: int
    cache: int
    blocks: tuple[int, ...]
    cache_tokens: int
    dispatch: int = 0  # buffers through which ranks send tokens to each other's experts

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.workspaces + self.dispatch + self.cache

    def table(self) -> str:
        limits = self.limits
        dtype = str(limits.kv_dtype).removeprefix("torch.")
        rows = [
            ("weights", self.weights, ""),
            (
                "activations",
                self.activations,
                f"{limits.step_tokens} tokens a step, logits of {limits.max_sequences}",
            ),
            ("workspaces", self.workspaces, ""),
            *([("dispatch", self.dispatch, "")] if self.dispatch else []),
            (
                "KV cache",
                self.cache,
                f"{self.cache_tokens:,} tokens in blocks of {limits.block_size}, {dtype}",
            ),
            ("all", self.total, f"of {size(self.available)} to use on {self.device}"),
        ]
        return "\n".join(
            f"{name:<12} {size(count):>10}   {text}".rstrip() for name, count, text in rows
        )


def make_plan(
    model: Decoder,
    limits: Limits,
    device: torch.device,
    available: int,
    share: Decoder | None = None,
) -> MemoryPlan:
    """The plan for a model; only shapes and dtypes of its tensors are read.

    `share`: what this rank of many has of it, if it is not all.
    """
    share = model if share is None else share
    specs = share.attention_specs
    packed = (
        Packed(name, weight.numel(), weight.format)
        for name, weight in share.named_parameters()
        if isinstance(weight, QuantTensor)
    )
    plan = MemoryPlan(
        device=device,
        limits=limits,
        available=available,
        weights=weight_bytes(share, device),
        activations=activation_bytes(model, limits.step_tokens, limits.max_sequences),
        workspaces=workspace_bytes(
            specs, limits, device, model.config.vocabulary if share is model else 0
        )
        + decoded_bytes(packed, limits, device, share.norm.weight.dtype),
        cache=0,
        blocks=(),
        cache_tokens=0,
    )
    return with_cache(plan, specs)


def workspace_bytes(
    specs: Sequence[AttentionSpec], limits: Limits, device: torch.device, vocabulary: int
) -> int:
    """Tables of blocks, what libraries keep for themselves, and the logits that CUDA graphs leave.

    There is a graph for each power of two of requests; 0 for `vocabulary` where there are none.
    """
    columns = -(-limits.context // limits.block_size)
    tables = 4 * len(make_groups(specs)) * limits.max_sequences * columns
    if device.type != "cuda":
        return tables
    rows = (2 << (limits.max_sequences - 1).bit_length()) - 1  # 1 + 2 + 4 + ...
    return tables + MATMUL_WORKSPACE + 4 * rows * vocabulary


class Packed(NamedTuple):
    """A packed weight of a linear, or of a table that may score."""

    name: str
    numbers: int
    format: Format


def decoded_bytes(
    weights: Iterable[Packed], limits: Limits, device: torch.device, dtype: torch.dtype
) -> int:
    """The largest weight as plain numbers: a GPU decodes it first where it meets many rows.

    FP8 is multiplied as it is. A table meets one row of each request, a layer all of a step's tokens.
    """
    if device.type != "cuda":
        return 0
    inside, outside = limits.step_tokens, limits.max_sequences
    decoded = [
        one.numbers
        for one in weights
        if one.format.family != "fp8" and ".experts." not in one.name
        if (inside if one.name.startswith("layers.") else outside) >= DECODE_FIRST
    ]
    return max(decoded, default=0) * dtype.itemsize


def with_cache(plan: MemoryPlan, specs: Sequence[AttentionSpec]) -> MemoryPlan:
    """The plan with KV blocks out of what is left; an error where that is too little."""
    groups = make_groups(specs)
    limits, left = plan.limits, plan.available - plan.total
    most = limits.cache_tokens or limits.context * limits.max_sequences
    least = min(most, limits.context)
    low, high = 0, -(-most // limits.block_size)  # in blocks: the most that fits lies between
    while low < high:
        middle = (low + high + 1) // 2
        if _cache_bytes(_blocks(middle, groups, limits), specs, groups, limits) <= left:
            low = middle
        else:
            high = middle - 1
    if low * limits.block_size < least:
        raise CapacityError(
            f"the model does not fit: {size(plan.total)} without a cache, "
            f"{size(plan.available)} to use on {plan.device}",
            plan=plan.table(),
            next=_advice(plan, specs, groups, low * limits.block_size),
        )
    blocks = _blocks(low, groups, limits)
    return replace(
        plan,
        cache=_cache_bytes(blocks, specs, groups, limits),
        blocks=blocks,
        cache_tokens=low * limits.block_size,
    )


def _blocks(whole: int, groups: Sequence[Group], limits: Limits) -> tuple[int, ...]:
    """Blocks a group when a layer that sees everything has `whole`: fewer behind a window."""
    context = min(limits.context, whole * limits.block_size)
    return tuple(
        min(
            whole,
            limits.max_sequences * group.blocks(context, limits.step_tokens, limits.block_size),
        )
        for group in groups
    )


def _cache_bytes(
    blocks: Sequence[int],
    specs: Sequence[AttentionSpec],
    groups: Sequence[Group],
    limits: Limits,
) -> int:
    per_layer = {spec.layer: token_bytes(spec, limits.kv_dtype) for spec in specs}
    return sum(
        (count + 1) * limits.block_size * sum(per_layer[layer] for layer in group.layers)
        for count, group in zip(blocks, groups, strict=True)
    )


def token_bytes(spec: AttentionSpec, dtype: torch.dtype) -> int:
    """What one layer keeps of one token."""
    if spec.latent:
        width, kept = ops.page_shape(spec.value_dim, spec.key_dim - spec.value_dim, dtype)
        return width * kept.itemsize
    return spec.kv_heads * (spec.key_dim + spec.value_dim) * dtype.itemsize


def _advice(
    plan: MemoryPlan, specs: Sequence[AttentionSpec], groups: Sequence[Group], tokens: int
) -> str:
    """What would fit; each line was tried."""
    limits, lines = plan.limits, []
    if tokens >= limits.block_size:
        lines.append(f"a shorter context: context={tokens}")
    if limits.kv_dtype.itemsize > 1:
        small = replace(limits, kv_dtype=torch.float8_e4m3fn)
        blocks = _blocks(-(-limits.context // limits.block_size), groups, small)
        if plan.total + _cache_bytes(blocks, specs, groups, small) <= plan.available:
            lines.append('a smaller cache: kv_dtype="fp8"')
    if plan.activations > plan.available // 10:
        lines.append(f"smaller steps: step_tokens={max(limits.step_tokens // 4, 1)}")
    if plan.weights > plan.available // 2:
        lines.append(
            f"a smaller format: at 4.5 bits a weight {size(plan.weights * 9 // 64)} in place of "
            f"{size(plan.weights)} of float32, {size(plan.weights * 9 // 32)} of 16 bits"
        )
    return "\n".join(lines) or "a machine with more memory, or a smaller model"


def weight_bytes(model: Decoder, device: torch.device) -> int:
    """Parameters and buffers, each once; packed ones are laid out a second time for a CPU."""
    total = 0
    for tensor in {id(one): one for one in [*model.parameters(), *model.buffers()]}.values():
        copies = 2 if isinstance(tensor, QuantTensor) and device.type == "cpu" else 1
        total += copies * tensor.nbytes
    return total


def available_bytes(device: torch.device) -> int:
    """What an engine may use: a share of the memory that is free now."""
    if device.type == "cuda":
        free, whole = torch.cuda.mem_get_info(device)
        return int(min(free, SHARE * whole))
    return int(CPU_SHARE * min(_free_memory(), _group_limit()))


def _free_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = next(line for line in lines if line.startswith("MemAvailable"))
    return int(found.split()[1]) * 1024


def _group_limit() -> float:
    """What a container may still take."""
    try:
        most, used = (
            (CONTAINER / name).read_text().strip() for name in ("memory.max", "memory.current")
        )
    except OSError:
        return float("inf")
    return float("inf") if most == "max" else int(most) - int(used)


def size(bytes: int) -> str:
    """Bytes as people read them."""
    value, unit = float(bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
