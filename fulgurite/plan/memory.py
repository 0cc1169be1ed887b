"""The memory plan of an engine: a model on the meta device in, a `MemoryPlan` out.

    weights       parameters and buffers; on CPUs quantized weights also in the kernels' layout
    loading       the largest temporary copy of a weight while loading, before the other parts exist
    activations   the peak of the largest step, measured by running it on the meta device
    workspaces    library workspaces, block tables, logits of CUDA graphs, what sampling keeps of each
                  request, and the largest quantized weight after dequantization
    states        one slot for each of `max_sequences` requests, in layers without attention
    KV cache      blocks, from the memory that is left

If not even one request of the full context fits, the `CapacityError` lists changes that would fit.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from fulgurite.errors import CapacityError
from fulgurite.kernels.gemm.cpu_layout import panel_bytes
from fulgurite.kernels.gemm.modules import QuantEmbedding
from fulgurite.kernels.sampling.table import table_row_bytes
from fulgurite.kernels.tuning.sm_90 import Sm90Heuristics
from fulgurite.models.attention_spec import AttentionSpec
from fulgurite.models.layers import CausalLM
from fulgurite.models.state_spec import StateSpec
from fulgurite.plan.activations import activation_bytes
from fulgurite.plan.kv_cache import KVCacheGroup, group_layers, kv_bytes_per_token
from fulgurite.plan.limits import EngineLimits
from fulgurite.quant import QuantTensor
from fulgurite.quant.format import Format
from fulgurite.trace.cost import format_bytes

CUBLAS_WORKSPACE = 2 * (32 << 20)  # torch's cuBLAS workspace on Hopper: eager steps and CUDA graphs
GPU_MEMORY_UTILIZATION = 0.9  # the rest is for the driver and fragmentation
CPU_MEMORY_UTILIZATION = 0.6  # other programs need memory, too
# Log-probabilities (serve/engine/logprobs.py): rows at once, and bytes of a logit.
LOGPROB_ROWS, LOGPROB_BYTES = 8, 24
CGROUP = Path("/sys/fs/cgroup")  # memory limit and use of a container


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose, and the number of KV-cache blocks of each `KVCacheGroup`."""

    device: torch.device
    limits: EngineLimits
    available: int
    weights: int
    activations: int
    workspaces: int
    kv_cache: int
    group_blocks: tuple[int, ...]
    cache_tokens: int
    dispatch_buffers: int = 0  # expert-parallel dispatch and combine
    states: int = 0  # of layers without attention
    loading: int = 0  # not part of the total: freed before the engine runs

    @property
    def total(self) -> int:
        return (
            self.weights
            + self.activations
            + self.workspaces
            + self.dispatch_buffers
            + self.states
            + self.kv_cache
        )

    def format_table(self) -> str:
        """One line a purpose, for people."""
        limits = self.limits
        dtype = str(limits.kv_dtype).removeprefix("torch.")
        rows = [
            ("weights", self.weights, ""),
            (
                "activations",
                self.activations,
                f"{limits.max_batched_tokens} tokens a step, logits of {limits.max_sequences}",
            ),
            ("workspaces", self.workspaces, ""),
            *([("dispatch", self.dispatch_buffers, "")] if self.dispatch_buffers else []),
            *(
                [("states", self.states, f"of {limits.max_sequences} requests")]
                if self.states
                else []
            ),
            (
                "KV cache",
                self.kv_cache,
                f"{self.cache_tokens:,} tokens in blocks of {limits.block_size}, {dtype}",
            ),
            ("total", self.total, f"of {format_bytes(self.available)} available on {self.device}"),
        ]
        return "\n".join(
            f"{name:<12} {format_bytes(count):>10}   {text}".rstrip() for name, count, text in rows
        )


def plan_memory(
    model: CausalLM,
    limits: EngineLimits,
    device: torch.device,
    available: int,
    shard: CausalLM | None = None,
    loading: int = 0,
) -> MemoryPlan:
    """Plan the memory of a model from the shapes and dtypes of its tensors.

    `shard`: this rank's shard of the model; None: the rank has all of it. `loading`: bytes of the
    largest temporary while loading.
    """
    shard = model if shard is None else shard
    specs = shard.attention_specs
    quantized = (
        QuantizedWeight(name, weight.numel(), weight.format)
        for name, weight in shard.named_parameters()
        if isinstance(weight, QuantTensor)
    )
    plan = MemoryPlan(
        device=device,
        limits=limits,
        available=available,
        weights=weight_bytes(shard, device),
        activations=activation_bytes(model, limits.max_batched_tokens, limits.max_sequences),
        workspaces=workspace_bytes(
            specs, limits, device, model.config.vocab_size if shard is model else 0
        )
        + sampling_bytes(limits, device, model.config.vocab_size)
        + dequantize_workspace_bytes(quantized, limits, device, shard.dtype),
        kv_cache=0,
        group_blocks=(),
        cache_tokens=0,
        states=state_bytes(shard.state_specs, limits, shard.dtype),
        loading=loading,
    )
    if plan.weights + loading > available:
        raise CapacityError(
            f"the model does not fit: its weights take {format_bytes(plan.weights)}, and loading "
            f"them {format_bytes(loading)} more; {format_bytes(available)} are available on {device}",
            plan=plan.format_table(),
            next=_suggest_smaller(plan, specs, group_layers(specs), 0),
        )
    return add_kv_cache(plan, specs)


def state_bytes(specs: Sequence[StateSpec], limits: EngineLimits, dtype: torch.dtype) -> int:
    """Bytes of the states of all requests that run at once. `dtype` is the model's."""
    return limits.max_sequences * sum(spec.num_bytes(dtype) for spec in specs)


def workspace_bytes(
    specs: Sequence[AttentionSpec], limits: EngineLimits, device: torch.device, vocab_size: int
) -> int:
    """Bytes of block tables, library workspaces and the logits of CUDA graphs.

    There is a graph for each power of two of requests. Without graphs `vocab_size` is 0.
    """
    columns = -(-limits.context // limits.block_size)
    tables = 4 * len(group_layers(specs)) * limits.max_sequences * columns
    if device.type != "cuda":
        return tables
    rows = (2 << (limits.max_sequences - 1).bit_length()) - 1  # 1 + 2 + 4 + ...
    return tables + CUBLAS_WORKSPACE + 4 * rows * vocab_size


def sampling_bytes(limits: EngineLimits, device: torch.device, vocab_size: int) -> int:
    """Bytes of the sampler, if requests use all it has.

    A row of the table for each request and one for padding; log-probabilities of some rows; on a GPU
    a copy of the logits in CUDA graphs.
    """
    table = (limits.max_sequences + 1) * table_row_bytes(vocab_size)
    logprobs = LOGPROB_BYTES * vocab_size * min(LOGPROB_ROWS, limits.max_sequences)
    copies = 4 * limits.max_sequences * vocab_size if device.type == "cuda" else 0
    return table + logprobs + copies


class QuantizedWeight(NamedTuple):
    """A quantized weight of a linear or an embedding."""

    name: str
    numel: int
    format: Format


def dequantize_workspace_bytes(
    weights: Iterable[QuantizedWeight],
    limits: EngineLimits,
    device: torch.device,
    dtype: torch.dtype,
) -> int:
    """Bytes of the largest weight that a GPU dequantizes before a GEMM of many rows.

    FP8 weights need no dequantization. The head computes one row a request, a layer all tokens of
    the step.
    """
    if device.type != "cuda":
        return 0
    layer_rows, head_rows = limits.max_batched_tokens, limits.max_sequences
    dequantized = [
        weight.numel
        for weight in weights
        if weight.format.family != "fp8" and ".experts." not in weight.name
        if (layer_rows if weight.name.startswith("layers.") else head_rows)
        >= Sm90Heuristics.dequantize_first_m
    ]
    return max(dequantized, default=0) * dtype.itemsize


def add_kv_cache(plan: MemoryPlan, specs: Sequence[AttentionSpec]) -> MemoryPlan:
    """Give the memory that is left to KV-cache blocks; CapacityError if it is too little."""
    groups = group_layers(specs)
    limits, left = plan.limits, plan.available - plan.total
    max_tokens = limits.cache_tokens or limits.context * limits.max_sequences
    min_tokens = min(max_tokens, limits.context)
    low, high = 0, -(-max_tokens // limits.block_size)  # binary search over the number of blocks
    while low < high:
        middle = (low + high + 1) // 2
        if _cache_bytes(_blocks_per_group(middle, groups, limits), specs, groups, limits) <= left:
            low = middle
        else:
            high = middle - 1
    if low * limits.block_size < min_tokens:
        raise CapacityError(
            f"the model does not fit: it needs {format_bytes(plan.total)} without a KV cache, "
            f"{format_bytes(plan.available)} are available on {plan.device}",
            plan=plan.format_table(),
            next=_suggest_smaller(plan, specs, groups, low * limits.block_size),
        )
    group_blocks = _blocks_per_group(low, groups, limits)
    return replace(
        plan,
        kv_cache=_cache_bytes(group_blocks, specs, groups, limits),
        group_blocks=group_blocks,
        cache_tokens=low * limits.block_size,
    )


def _blocks_per_group(
    full_blocks: int, groups: Sequence[KVCacheGroup], limits: EngineLimits
) -> tuple[int, ...]:
    """Blocks of each group if a full-attention group has `full_blocks`; windows need fewer."""
    context = min(limits.context, full_blocks * limits.block_size)
    max_batched_tokens, block_size = limits.max_batched_tokens, limits.block_size
    return tuple(
        min(
            full_blocks,
            limits.max_sequences * group.max_blocks(context, max_batched_tokens, block_size),
        )
        for group in groups
    )


def _cache_bytes(
    group_blocks: Sequence[int],
    specs: Sequence[AttentionSpec],
    groups: Sequence[KVCacheGroup],
    limits: EngineLimits,
) -> int:
    per_layer = {spec.layer_index: kv_bytes_per_token(spec, limits.kv_dtype) for spec in specs}
    return sum(
        (count + 1) * limits.block_size * sum(per_layer[layer] for layer in group.layers)
        for count, group in zip(group_blocks, groups, strict=True)
    )


def _suggest_smaller(
    plan: MemoryPlan, specs: Sequence[AttentionSpec], groups: Sequence[KVCacheGroup], tokens: int
) -> str:
    """Changes of the limits that would fit, one a line; the first two are checked."""
    limits, lines = plan.limits, []
    if tokens >= limits.block_size:
        lines.append(f"a shorter context: context={tokens}")
    if limits.kv_dtype.itemsize > 1:
        fp8 = replace(limits, kv_dtype=torch.float8_e4m3fn)
        blocks = _blocks_per_group(-(-limits.context // limits.block_size), groups, fp8)
        if plan.total + _cache_bytes(blocks, specs, groups, fp8) <= plan.available:
            lines.append('a smaller KV cache: kv_dtype="fp8"')
    if plan.states > plan.available // 10:
        fewer = max(limits.max_sequences // 4, 1)
        lines.append(f"fewer requests at once, each with states: max_sequences={fewer}")
    if plan.activations > plan.available // 10:
        fewer = max(limits.max_batched_tokens // 4, 1)
        lines.append(f"smaller steps: max_batched_tokens={fewer}")
    if plan.weights > plan.available // 2:
        from_float32, from_16_bits = plan.weights * 9 // 64, plan.weights * 9 // 32
        lines.append(
            f"a smaller format: at 4.5 bits a weight {format_bytes(from_float32)} instead of "
            f"{format_bytes(plan.weights)} of float32, {format_bytes(from_16_bits)} of 16 bits"
        )
    return "\n".join(lines) or "a device with more memory, or a smaller model"


def weight_bytes(model: CausalLM, device: torch.device) -> int:
    """Bytes of parameters and buffers; on a CPU quantized weights also in the kernels' layout."""
    total = model.packed_weight_bytes if device.type == "cpu" else 0
    lookup_only = _lookup_tables(model)
    for tensor in {id(t): t for t in [*model.parameters(), *model.buffers()]}.values():
        total += tensor.nbytes
        if isinstance(tensor, QuantTensor) and device.type == "cpu":
            total += 0 if id(tensor) in lookup_only else panel_bytes(tensor.format, tensor.shape)
    return total


def _lookup_tables(model: CausalLM) -> set[int]:
    """Ids of embedding tables that no head multiplies with."""
    if getattr(model, "lm_head", None) is None:
        return set()
    return {id(module.weight) for module in model.modules() if isinstance(module, QuantEmbedding)}


def available_bytes(device: torch.device) -> int:
    """Bytes that an engine may use: a fraction of the memory that is free now."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(min(free, GPU_MEMORY_UTILIZATION * total))
    return int(CPU_MEMORY_UTILIZATION * min(_free_memory(), _cgroup_free_memory()))


def _free_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    line = next(line for line in lines if line.startswith("MemAvailable"))
    return int(line.split()[1]) * 1024


def _cgroup_free_memory() -> float:
    """Bytes that this container may still allocate; infinite without a limit."""
    try:
        limit, used = (
            (CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current")
        )
    except OSError:
        return float("inf")
    return float("inf") if limit == "max" else int(limit) - int(used)
