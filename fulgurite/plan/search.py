"""The planner's search: a model and a cluster in, meshes with their memory and speed out.

    PlanQuery       the model's shape, its number formats, the cluster, and the intended use
    plan_mesh       one `MeshShape` → memory of a rank, number of requests, a bound on decode speed
    search_meshes   all possible meshes, best first

Memory is computed by the functions that plan an engine (memory.py), on one rank's shard of the model
(shard.py). Dispatch buffers are those of `kernels.dispatch.buffers`. No GPU is needed.

The bound: a decode step takes at least as long as reading its weights and KV cache from memory, and
as sending its bytes over links, whichever is longer. It assumes that both overlap perfectly. Meshes
are ranked by this bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch

from fulgurite.errors import CapacityError
from fulgurite.kernels.dispatch.buffers import DispatchBuffers, DispatchConfig
from fulgurite.models.config import ModelConfig
from fulgurite.models.families.family import ModelFamily
from fulgurite.parallel.mesh import MeshShape
from fulgurite.plan.activations import activation_bytes
from fulgurite.plan.cluster import Cluster
from fulgurite.plan.kv_cache import kv_bytes_per_token
from fulgurite.plan.limits import BLOCK_SIZES, MAX_BATCHED_TOKENS, EngineLimits
from fulgurite.plan.memory import (
    GPU_MEMORY_UTILIZATION,
    MemoryPlan,
    add_kv_cache,
    dequantize_workspace_bytes,
    sampling_bytes,
    state_bytes,
    workspace_bytes,
)
from fulgurite.plan.shard import (
    FormatLookup,
    ModelShard,
    ShardSpec,
    build_model_shard,
    find_sharding_error,
)

DEFAULT_MAX_SEQUENCES = 256  # of one data rank
MIN_BATCHED_TOKENS = 512  # of one data rank; all of them together have MAX_BATCHED_TOKENS
EXPERT_IMBALANCE = 2.0  # rows of a rank's experts, relative to the mean, that memory is planned for
COMBINE_FORMAT = "bf16"  # wire format of expert results
MAX_SUGGESTED_GPUS = 512


class MeshConstraint(NamedTuple):
    """Axis sizes that the user has fixed; None: searched."""

    data: int | None = None
    tensor: int | None = None
    expert: int | None = None


ANY_MESH = MeshConstraint()


@dataclass(frozen=True)
class PlanQuery:
    """What to plan.

    format, format_lookup   number format of the weights: its name, and the format by parameter
    batch                   requests at once over all data ranks; None: DEFAULT_MAX_SEQUENCES each
    dispatch_format         wire format of tokens that are sent to experts
    redundant_experts       extra expert slots of a layer
    capacity                most rows that one rank sends to another in a step; None: all tokens
    shard_alignment         quantized weights are sharded at multiples of this
    """

    name: str
    family: ModelFamily
    config: ModelConfig
    format_lookup: FormatLookup
    format: str
    cluster: Cluster
    context: int
    kv_dtype: torch.dtype
    batch: int | None = None
    max_batched_tokens: int | None = None
    dispatch_format: str = COMBINE_FORMAT
    redundant_experts: int = 0
    capacity: int | None = None
    shard_alignment: int = 1

    @property
    def available_bytes(self) -> int:
        return int(self.cluster.gpu.memory_gib * GPU_MEMORY_UTILIZATION * 2**30)


@dataclass(frozen=True)
class DecodeBound:
    """The shortest possible decode step of `requests` requests."""

    requests: int
    memory_seconds: float
    link_seconds: float

    @property
    def seconds(self) -> float:
        return max(self.memory_seconds, self.link_seconds)

    @property
    def tokens_per_second(self) -> float:
        return self.requests / self.seconds


@dataclass(frozen=True)
class ClusterPlan:
    """The model on one mesh. `memory` is a rank's plan, without a KV cache if it does not fit."""

    shard_spec: ShardSpec
    weights: dict[str, int]  # bytes by component
    memory: MemoryPlan
    dispatch_buffers: DispatchBuffers | None
    bound: DecodeBound | None

    @property
    def mesh_shape(self) -> MeshShape:
        return self.shard_spec.mesh_shape

    @property
    def fits(self) -> bool:
        return self.bound is not None

    @property
    def max_requests(self) -> int:
        """Requests of the full context that the KV caches of all data ranks hold."""
        return self.mesh_shape.data * (self.memory.cache_tokens // self.memory.limits.context)


# ---- one mesh --------------------------------------------------------------------------------------


def plan_mesh(query: PlanQuery, mesh_shape: MeshShape) -> ClusterPlan:
    """The plan of one rank; all ranks are alike."""
    limits = _engine_limits(query, mesh_shape.data)
    spec = make_shard_spec(query, mesh_shape)
    tokens = limits.max_batched_tokens
    dispatched = -(-tokens // mesh_shape.tensor) if mesh_shape.expert > 1 else tokens
    rows = _expert_rows(query, spec, dispatched)
    sizes = (tokens, limits.max_sequences)
    shard, activations = _build_shard_cached(query.config, query.family, spec, rows, sizes)
    weights = shard.component_bytes(query.format_lookup)
    buffers = _dispatch_buffers(query, spec, dispatched)
    device = torch.device("cuda")
    # Several ranks run without CUDA graphs.
    vocab_size = query.config.vocab_size if mesh_shape.world_size == 1 else 0
    quantized = shard.quantized_weights(query.format_lookup)
    memory = MemoryPlan(
        device=device,
        limits=limits,
        available=query.available_bytes,
        weights=sum(weights.values()),
        activations=activations,
        workspaces=workspace_bytes(shard.attention_specs, limits, device, vocab_size)
        + sampling_bytes(limits, device, query.config.vocab_size)
        + dequantize_workspace_bytes(quantized, limits, device, query.config.dtype),
        kv_cache=0,
        group_blocks=(),
        cache_tokens=0,
        dispatch_buffers=buffers.total_bytes if buffers else 0,
        states=state_bytes(shard.state_specs, limits, query.config.dtype),
    )
    try:
        memory = add_kv_cache(memory, shard.attention_specs)
    except CapacityError:
        return ClusterPlan(spec, weights, memory, buffers, None)
    bound = _bound_decode(query, shard, ClusterPlan(spec, weights, memory, buffers, None))
    return ClusterPlan(spec, weights, memory, buffers, bound)


@lru_cache(maxsize=256)
def _build_shard_cached(
    config: ModelConfig, family: ModelFamily, spec: ShardSpec, rows: int, sizes: tuple[int, int]
) -> tuple[ModelShard, int]:
    """A shard and its peak activations; both are independent of context and KV-cache dtype."""
    shard = build_model_shard(config, family, spec, rows)
    return shard, activation_bytes(shard.model, *sizes)


def _engine_limits(query: PlanQuery, data: int) -> EngineLimits:
    sequences = DEFAULT_MAX_SEQUENCES if query.batch is None else -(-query.batch // data)
    max_batched_tokens = query.max_batched_tokens or max(
        MAX_BATCHED_TOKENS["cuda"] // data, MIN_BATCHED_TOKENS
    )
    return EngineLimits(
        context=query.context,
        max_sequences=sequences,
        max_batched_tokens=max(max_batched_tokens, sequences),
        block_size=BLOCK_SIZES["cuda"],
        kv_dtype=query.kv_dtype,
    )


def make_shard_spec(query: PlanQuery, mesh_shape: MeshShape) -> ShardSpec:
    """The expert slots of a layer are its experts and the redundant ones, a multiple of the ranks."""
    if query.config.moe is None:
        return ShardSpec(mesh_shape, 0, query.shard_alignment)
    redundant = query.redundant_experts if mesh_shape.expert > 1 else 0
    wanted = query.config.moe.num_experts + redundant
    slots = -(-wanted // mesh_shape.expert) * mesh_shape.expert
    return ShardSpec(mesh_shape, slots, query.shard_alignment)


def _expert_rows(query: PlanQuery, spec: ShardSpec, tokens: int) -> int:
    """Rows that the experts of a rank compute in the largest step."""
    moe, ranks = query.config.moe, spec.mesh_shape.expert
    if moe is None:
        return 0
    mean = tokens * moe.top_k
    if ranks == 1:
        return mean
    maximum = tokens * ranks * min(moe.top_k, spec.expert_slots // ranks)
    return min(maximum, int(EXPERT_IMBALANCE * mean))


def _dispatch_buffers(query: PlanQuery, spec: ShardSpec, tokens: int) -> DispatchBuffers | None:
    moe, ranks = query.config.moe, spec.mesh_shape.expert
    if moe is None or ranks == 1:
        return None
    config = DispatchConfig(
        max_tokens=tokens,
        top_k=moe.top_k,
        hidden_size=query.config.hidden_size,
        experts_per_rank=spec.expert_slots // ranks,
        dispatch_format=query.dispatch_format,
        combine_format=COMBINE_FORMAT,
        capacity=query.capacity,
    )
    return config.size_buffers(ranks)


# ---- the bound on decode speed ---------------------------------------------------------------------


def _bound_decode(query: PlanQuery, shard: ModelShard, plan: ClusterPlan) -> DecodeBound:
    """The bytes that every GPU reads and sends in a decode step of all requests that fit."""
    limits, mesh_shape, weights = plan.memory.limits, plan.mesh_shape, plan.weights
    sequences = min(limits.max_sequences, max(1, plan.memory.cache_tokens // limits.context))
    read = sum(weights.values()) - weights["experts"]
    read += int(weights["experts"] * _active_expert_fraction(query, mesh_shape, sequences))
    for spec in shard.attention_specs:
        windows = (size for size in (spec.sliding_window, spec.chunk_size) if size is not None)
        keys = min([limits.context, *windows])
        read += sequences * keys * kv_bytes_per_token(spec, limits.kv_dtype)
    per_request = sum(spec.num_bytes(query.config.dtype) for spec in shard.state_specs)
    read += 2 * sequences * per_request  # states are read and written
    return DecodeBound(
        requests=sequences * mesh_shape.data,
        memory_seconds=read / (query.cluster.gpu.memory_bandwidth * 1e9),
        link_seconds=_link_seconds(query, mesh_shape, sequences, plan.dispatch_buffers),
    )


def _active_expert_fraction(query: PlanQuery, mesh_shape: MeshShape, sequences: int) -> float:
    """The expected fraction of a rank's experts with at least one token, for uniform routing."""
    moe = query.config.moe
    if moe is None:
        return 0.0
    data_ranks = 1 if mesh_shape.expert == 1 else max(1, mesh_shape.expert // mesh_shape.tensor)
    return 1.0 - (1.0 - moe.top_k / moe.num_experts) ** (sequences * data_ranks)


def _link_seconds(
    query: PlanQuery, mesh_shape: MeshShape, sequences: int, buffers: DispatchBuffers | None
) -> float:
    """Time on links: two all-reduces a layer over the tensor axis, and dispatch and combine.

    A token is sent once to each rank that has experts of it, and one result comes back.
    """
    config, cluster, tensor = query.config, query.cluster, mesh_shape.tensor
    seconds = 0.0
    if tensor > 1:
        all_reduces = 2 * len(config.layers)
        sent = 2 * (tensor - 1) / tensor * sequences * config.hidden_size * 2
        seconds += all_reduces * _transfer_seconds(cluster, tensor, sent)
    if buffers is not None:
        tokens, ranks = -(-sequences // tensor), buffers.num_ranks
        other_ranks = (ranks - 1) * (1 - (1 - 1 / ranks) ** buffers.top_k)
        row_bytes = buffers.header_bytes + buffers.row_bytes + buffers.result_bytes
        moe_layers = sum(layer.is_moe for layer in config.layers)
        sent = tokens * other_ranks * row_bytes
        seconds += moe_layers * _transfer_seconds(cluster, mesh_shape.expert, sent)
    return seconds


def _transfer_seconds(cluster: Cluster, ranks: int, sent: float) -> float:
    """Time for each of `ranks` consecutive GPUs to send bytes evenly to all others."""
    within_node = min(1.0, (cluster.gpus_per_node - 1) / max(1, ranks - 1))
    gpu = cluster.gpu
    return max(
        sent * within_node / (gpu.link_bandwidth * 1e9),
        sent * (1 - within_node) / (gpu.network_bandwidth * 1e9),
    )


# ---- all meshes ------------------------------------------------------------------------------------


def candidate_meshes(
    query: PlanQuery, constraint: MeshConstraint = ANY_MESH
) -> Iterator[MeshShape]:
    """All meshes of the cluster's GPUs that the model can be sharded over, within the constraint."""
    world = query.cluster.num_gpus
    for tensor in _divisors(world):
        data = world // tensor
        if (constraint.tensor or tensor) != tensor or (constraint.data or data) != data:
            continue
        for expert in _divisors(world):
            if (constraint.expert or expert) != expert:
                continue
            if not constraint.expert and expert > 1 and expert % tensor:
                continue
            mesh_shape = MeshShape(data, tensor, expert)
            if not find_sharding_error(query.config, make_shard_spec(query, mesh_shape)):
                yield mesh_shape


def search_meshes(query: PlanQuery, constraint: MeshConstraint = ANY_MESH) -> list[ClusterPlan]:
    """Plans of all meshes: first those that fit, by their bound, then the others, by their size."""
    meshes = candidate_meshes(query, constraint)
    return sorted((plan_mesh(query, mesh_shape) for mesh_shape in meshes), key=_sort_key)


def _sort_key(plan: ClusterPlan) -> tuple[bool, float, int]:
    if plan.bound is None:
        return True, plan.memory.total, plan.mesh_shape.tensor
    return False, -plan.bound.tokens_per_second, plan.mesh_shape.tensor


def has_fitting_mesh(query: PlanQuery, constraint: MeshConstraint = ANY_MESH) -> bool:
    return any(plan_mesh(query, shape).fits for shape in candidate_meshes(query, constraint))


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def count_parameters(query: PlanQuery) -> tuple[int, int]:
    """The number of parameters, and of those that one token uses."""
    spec = make_shard_spec(query, MeshShape())
    shard = build_model_shard(query.config, query.family, spec)
    total = active = 0
    for name, tensor in shard.parameters():
        total += tensor.numel()
        fraction = 1.0
        if ".experts." in name and query.config.moe is not None:
            fraction = query.config.moe.top_k / query.config.moe.num_experts
        active += int(tensor.numel() * fraction)
    return total, active


# ---- suggestions -----------------------------------------------------------------------------------


def suggest_alternatives(query: PlanQuery, constraint: MeshConstraint) -> Iterator[str]:
    """Changes that would fit; each one is checked."""
    if context := _longest_fitting_context(query, constraint):
        yield f"a shorter context: --context {context}"
    fp8_cache = replace(query, kv_dtype=torch.float8_e4m3fn)
    if query.kv_dtype.itemsize > 1 and has_fitting_mesh(fp8_cache, constraint):
        yield "a smaller KV cache: --kv-dtype fp8"
    if any(constraint) and (best := next(iter(search_meshes(query)), None)) and best.fits:
        yield f"another mesh: {best.mesh_shape}"
    for cluster in _larger_clusters(query.cluster):
        if has_fitting_mesh(replace(query, cluster=cluster)):
            nodes = f"x{cluster.num_nodes}" if cluster.num_nodes > 1 else ""
            yield f"more GPUs: --gpus {cluster.gpus_per_node}{nodes}"
            return


def _larger_clusters(cluster: Cluster) -> Iterator[Cluster]:
    """Clusters of 2, 4, 8, … times as many GPUs: up to eight in a node, then more nodes."""
    while cluster.num_gpus < MAX_SUGGESTED_GPUS:
        if cluster.num_nodes == 1 and 2 * cluster.gpus_per_node <= 8:
            cluster = replace(cluster, gpus_per_node=2 * cluster.gpus_per_node)
        else:
            cluster = replace(cluster, num_nodes=2 * cluster.num_nodes)
        yield cluster


def _longest_fitting_context(query: PlanQuery, constraint: MeshConstraint) -> int | None:
    """The longest context below the query's, a power of two, of which one request fits."""
    context = 1 << (query.context - 1).bit_length() - 1
    while context >= 512:
        if has_fitting_mesh(replace(query, context=context), constraint):
            return context
        context //= 2
    return None
