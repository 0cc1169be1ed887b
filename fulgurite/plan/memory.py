"""The memory plan of one rank: its shard of a model on the meta device in, a `MemoryPlan` out.

An engine (`plan_memory`) and `fulgurite plan` (search.py) call the same functions on a `RankShapes`.

    weights       parameters and buffers; on CPUs quantized weights also in the kernels' layout
    loading       the largest temporary copy of a weight while loading, before the other parts exist
    activations   the peak of the largest step, measured by running it on the meta device; with expert
                  parallelism all tokens of all ranks go to this rank's experts
    dispatch      buffers of the transport that sends tokens to experts
    workspaces    library workspaces, block tables, logits of CUDA graphs, what sampling keeps of each
                  request, and the largest quantized weight after dequantization
    states        one slot for each of `max_sequences` requests, in layers without attention
    KV cache      blocks, from the memory that is left

If not even one request of the full context fits, the `CapacityError` names the largest part and lists
changes that would fit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fulgurite.errors import CapacityError
from fulgurite.kernels.common.triton_counters import RING_SIZE
from fulgurite.kernels.gemm.cpu_layout import panel_bytes
from fulgurite.kernels.gemm.modules import QuantEmbedding
from fulgurite.kernels.sampling.table import table_row_bytes
from fulgurite.kernels.tuning.sm_90 import Sm90Heuristics
from fulgurite.models.attention_spec import AttentionSpec
from fulgurite.models.layers import CausalLM
from fulgurite.models.state_spec import StateSpec
from fulgurite.parallel.experts.expert_parallel import ExpertParallel
from fulgurite.plan.activations import activation_bytes
from fulgurite.plan.kv_cache import KVCacheGroup, group_layers, kv_bytes_per_token
from fulgurite.plan.limits import EngineLimits
from fulgurite.quant import QuantTensor
from fulgurite.quant.format import Format
from fulgurite.units import format_bytes

CUBLAS_WORKSPACE = 32 << 20  # torch's cuBLAS workspace of a stream on Hopper
COUNTER_BYTES = 4 * RING_SIZE  # of kernels whose programs share an output tile
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
    def parts(self) -> dict[str, int]:
        """Bytes by purpose, without the KV cache."""
        return {
            "weights": self.weights,
            "activations": self.activations,
            "workspaces": self.workspaces,
            "dispatch": self.dispatch_buffers,
            "states": self.states,
        }

    @property
    def total(self) -> int:
        return sum(self.parts.values()) + self.kv_cache

    @property
    def fits(self) -> bool:
        """Whether the KV cache holds one request of the full context; False before it is planned."""
        return self.cache_tokens > 0

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


@dataclass(frozen=True)
class QuantizedWeight:
    """A quantized weight of a linear or an embedding."""

    name: str
    numel: int
    format: Format


@dataclass(frozen=True)
class RankShapes:
    """What one rank holds and runs, without memory.

    model              this rank's shard on the meta device; one layer of each kind is enough
    weights            bytes of all layers
    dispatch_buffers   bytes that the transport of its experts keeps
    is_captured        decode steps are captured in CUDA graphs on a GPU
    """

    model: CausalLM
    weights: int
    attention_specs: tuple[AttentionSpec, ...]
    state_specs: tuple[StateSpec, ...]
    quantized: tuple[QuantizedWeight, ...] = ()
    dispatch_buffers: int = 0
    is_captured: bool = True
    _activations: dict[tuple[int, int, int], int] = field(default_factory=dict, compare=False)

    def activation_bytes(self, limits: EngineLimits) -> int:
        """The peak of the largest step; measured once for each of its sizes."""
        sizes = limits.max_batched_tokens, limits.max_sequences, limits.context_parallel
        if sizes not in self._activations:
            self._activations[sizes] = activation_bytes(self.model, *sizes)
        return self._activations[sizes]


def shapes_of(model: CausalLM, device: torch.device, dispatch_buffers: int = 0) -> RankShapes:
    """The shapes of a model, or of a rank's shard, with all of its layers."""
    return RankShapes(
        model=model,
        weights=weight_bytes(model, device),
        attention_specs=tuple(model.attention_specs),
        state_specs=tuple(model.state_specs),
        quantized=tuple(
            QuantizedWeight(name, weight.numel(), weight.format)
            for name, weight in model.named_parameters()
            if isinstance(weight, QuantTensor)
        ),
        dispatch_buffers=dispatch_buffers,
        is_captured=all(
            module.dispatcher.can_capture
            for module in model.modules()
            if isinstance(module, ExpertParallel)
        ),
    )


def plan_memory(
    model: CausalLM,
    limits: EngineLimits,
    device: torch.device,
    available: int,
    loading: int = 0,
) -> MemoryPlan:
    """The plan of a model on one rank; CapacityError if it does not fit.

    `loading`: bytes of the largest temporary while loading.
    """
    shapes = shapes_of(model, device)
    plan = plan_fixed_memory(shapes, limits, device, available, loading)
    plan = add_kv_cache(plan, shapes.attention_specs)
    if not plan.fits:
        raise CapacityError(
            f"the model does not fit: {explain_shortage(plan)}",
            plan=plan.format_table(),
            next=suggest_smaller(plan, shapes),
        )
    return plan


def plan_fixed_memory(
    shapes: RankShapes,
    limits: EngineLimits,
    device: torch.device,
    available: int,
    loading: int = 0,
) -> MemoryPlan:
    """Everything but the KV cache."""
    dtype, vocab_size = shapes.model.dtype, shapes.model.config.vocab_size
    return MemoryPlan(
        device=device,
        limits=limits,
        available=available,
        weights=shapes.weights,
        activations=shapes.activation_bytes(limits),
        workspaces=workspace_bytes(shapes, limits, device)
        + sampling_bytes(limits, device, vocab_size)
        + dequantize_workspace_bytes(shapes.quantized, limits, device, dtype),
        kv_cache=0,
        group_blocks=(),
        cache_tokens=0,
        dispatch_buffers=shapes.dispatch_buffers,
        states=state_bytes(shapes.state_specs, limits, dtype),
        loading=loading,
    )


def state_bytes(specs: Sequence[StateSpec], limits: EngineLimits, dtype: torch.dtype) -> int:
    """Bytes of the states of all requests that run at once. `dtype` is the model's."""
    return limits.max_sequences * sum(spec.num_bytes(dtype) for spec in specs if spec.is_local)


def workspace_bytes(shapes: RankShapes, limits: EngineLimits, device: torch.device) -> int:
    """Bytes of block tables, library workspaces and the logits of CUDA graphs.

    There is a graph for each power of two of requests. All graphs share a stream and its workspace.
    """
    columns = -(-limits.context // limits.block_size)
    groups = len(group_layers(shapes.attention_specs))
    tables = 4 * groups * limits.max_sequences * columns
    if device.type != "cuda":
        return tables
    eager = tables + CUBLAS_WORKSPACE + COUNTER_BYTES
    if not shapes.is_captured:
        return eager
    rows = (2 << (limits.max_sequences - 1).bit_length()) - 1  # 1 + 2 + 4 + ...
    return eager + CUBLAS_WORKSPACE + 4 * rows * shapes.model.config.vocab_size


def sampling_bytes(limits: EngineLimits, device: torch.device, vocab_size: int) -> int:
    """Bytes of the sampler, if requests use all it has.

    A row of the table for each request and one for padding; log-probabilities of some rows; on a GPU
    a copy of the logits in CUDA graphs.
    """
    table = (limits.max_sequences + 1) * table_row_bytes(vocab_size)
    logprobs = LOGPROB_BYTES * vocab_size * min(LOGPROB_ROWS, limits.max_sequences)
    copies = 4 * limits.max_sequences * vocab_size if device.type == "cuda" else 0
    return table + logprobs + copies


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
    """Give the memory that is left to KV-cache blocks. If it is too little, there are none."""
    groups = group_layers(specs)
    limits = plan.limits
    left = plan.available - plan.total if plan.weights + plan.loading <= plan.available else -1
    max_tokens = limits.cache_tokens or limits.context * limits.max_sequences
    usable = limits.max_sequences * -(-limits.context // limits.block_size)
    low, high = 0, min(-(-max_tokens // limits.block_size), usable)  # binary search over blocks
    while low < high:
        middle = (low + high + 1) // 2
        if _cache_bytes(_blocks_per_group(middle, groups, limits), specs, groups, limits) <= left:
            low = middle
        else:
            high = middle - 1
    if low * limits.block_size < min(max_tokens, limits.context):
        return replace(plan, kv_cache=0, group_blocks=(), cache_tokens=0)
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
    per_layer = {
        spec.layer_index: kv_bytes_per_token(spec, limits.kv_dtype) if spec.is_local else 0
        for spec in specs
    }
    return sum(
        (count + 1) * limits.rank_block_size * sum(per_layer[layer] for layer in group.layers)
        for count, group in zip(group_blocks, groups, strict=True)
    )


def explain_shortage(plan: MemoryPlan) -> str:
    """Why a plan does not fit: the largest part, and what is available."""
    available = f"{format_bytes(plan.available)} are available on {plan.device}"
    if plan.weights + plan.loading > plan.available:
        loading = ""
        if plan.weights <= plan.available:
            loading = f", and loading them {format_bytes(plan.loading)} more"
        return f"its weights take {format_bytes(plan.weights)}{loading}; {available}"
    name, size = max(plan.parts.items(), key=lambda part: part[1])
    reason = f"it needs {format_bytes(plan.total)} without a KV cache, {available}"
    if plan.total <= plan.available:
        reason = (
            f"{format_bytes(plan.available - plan.total)} are left for the KV cache, too little for "
            f"one request of {plan.limits.context:,} tokens; {reason}"
        )
    return f"{reason}; the largest part: {name}, {format_bytes(size)}"


def suggest_smaller(plan: MemoryPlan, shapes: RankShapes) -> str:
    """Changes of the limits that would fit, one a line. All but the last line are checked."""
    limits = plan.limits

    def fits(**changes: Any) -> bool:
        changed = replace(limits, **changes)
        fixed = plan_fixed_memory(shapes, changed, plan.device, plan.available, plan.loading)
        return add_kv_cache(fixed, shapes.attention_specs).fits

    lines = []
    if context := _longest_fitting_context(limits, lambda n: fits(context=n)):
        lines.append(f"a shorter context: context={context}")
    if limits.kv_dtype.itemsize > 1 and fits(kv_dtype=torch.float8_e4m3fn):
        lines.append('a smaller KV cache: kv_dtype="fp8"')
    tokens = _largest_fitting(
        limits.max_batched_tokens,
        limits.max_sequences,
        lambda n: fits(max_batched_tokens=n),
    )
    if tokens:
        lines.append(f"smaller steps: max_batched_tokens={tokens}")
    sequences = _largest_fitting(limits.max_sequences, 1, lambda n: fits(max_sequences=n))
    if sequences:
        lines.append(f"fewer requests at once: max_sequences={sequences}")
    if plan.weights > plan.available // 2:
        from_float32, from_16_bits = plan.weights * 9 // 64, plan.weights * 9 // 32
        lines.append(
            f"a smaller format: at 4.5 bits a weight {format_bytes(from_float32)} instead of "
            f"{format_bytes(plan.weights)} of float32, {format_bytes(from_16_bits)} of 16 bits"
        )
    return "\n".join(lines) or "a device with more memory, more ranks (tensor=), or a smaller model"


def _longest_fitting_context(limits: EngineLimits, fits: Callable[[int], bool]) -> int | None:
    low, high = 0, limits.context // limits.block_size
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle * limits.block_size):
            low = middle
        else:
            high = middle - 1
    return low * limits.block_size or None


def _largest_fitting(size: int, smallest: int, fits: Callable[[int], bool]) -> int | None:
    """The largest of size/2, size/4, … that fits; None if none of them does."""
    size //= 2
    while size >= max(smallest, 2 if smallest > 1 else 1):
        if fits(size):
            return size
        size //= 2
    return None


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
