"""The planner's search: a model and a cluster in, meshes with their memory and speed out.

    PlanQuery       the model's shape, its number formats, the cluster, and the intended use
    plan_mesh       one `MeshShape` → memory of a rank, number of requests, predicted steps
    search_meshes   all possible meshes, best first

A rank's shard is built as an engine builds it (shard.py), and its memory is planned by the functions
that plan an engine (memory.py). Transport and wire format are chosen and checked by the engine's own
`choose_transport`. Meshes are ranked by the predicted throughput of decode steps (step_time.py). No
GPU is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import torch

from fulgurite.errors import ArgumentError
from fulgurite.kernels.dispatch.buffers import DispatchConfig
from fulgurite.models.config import ModelConfig
from fulgurite.models.families.family import ModelFamily
from fulgurite.parallel.experts.transport import (
    ExpertOptions,
    TransportChoice,
    check_expert_axis,
    choose_transport,
    dispatch_buffer_bytes,
)
from fulgurite.parallel.mesh import Axis, MeshShape
from fulgurite.parallel.pipeline import PipelineStage
from fulgurite.plan.cluster import Cluster
from fulgurite.plan.kv_cache import check_context_cache
from fulgurite.plan.limits import BLOCK_SIZES, MAX_BATCHED_TOKENS, EngineLimits
from fulgurite.plan.memory import (
    GPU_MEMORY_UTILIZATION,
    MemoryPlan,
    RankShapes,
    add_kv_cache,
    plan_fixed_memory,
)
from fulgurite.plan.meta_dispatch import make_meta_dispatcher, plan_dispatch, use_micro_batches
from fulgurite.plan.predict import StepSizes, predict_step
from fulgurite.plan.shard import (
    FormatLookup,
    ModelShard,
    PlannedMesh,
    ShardSpec,
    build_model_shard,
)
from fulgurite.plan.step_time import StepTime

DEFAULT_MAX_SEQUENCES = 256  # of one data rank
MIN_BATCHED_TOKENS = 512  # of one data rank; all of them together have MAX_BATCHED_TOKENS
MAX_SUGGESTED_GPUS = 512
# A GPU of the cluster: its memory is planned as a GPU's, and its node is the one of the plan.
PLANNED_DEVICE = torch.device("meta")
DEFAULT_OPTIONS = ExpertOptions()


class MeshConstraint(NamedTuple):
    """Axis sizes that the user has fixed; None: searched. Stages and context ranks are not searched."""

    data: int | None = None
    tensor: int | None = None
    expert: int | None = None
    pipeline: int = 1
    context: int = 1


ANY_MESH = MeshConstraint()


@dataclass(frozen=True)
class PlanQuery:
    """What to plan.

    format, format_lookup   number format of the weights: its name, and the format by parameter
    batch                   requests at once over all data ranks; None: DEFAULT_MAX_SEQUENCES each
    expert_options          transport and wire format of tokens, as an `LLM` takes them
    redundant_experts       extra expert slots of a layer
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
    expert_options: ExpertOptions = DEFAULT_OPTIONS
    redundant_experts: int = 0

    @property
    def available_bytes(self) -> int:
        return int(self.cluster.gpu.memory_gib * GPU_MEMORY_UTILIZATION * 2**30)


@dataclass(frozen=True)
class ExpertPlan:
    """How tokens reach their experts: the transport with its reason, and what it is built for."""

    transport: TransportChoice
    config: DispatchConfig
    axis: Axis = field(compare=False)
    buffer_bytes: int
    micro_batches: int = 1


@dataclass(frozen=True)
class ClusterPlan:
    """The model on one mesh. `memory` is a rank's plan, without a KV cache if it does not fit.

    decode    a decode step of all requests that fit; None if the model does not fit
    prefill   a step of prompts, of as many tokens as a step may have
    """

    shard_spec: ShardSpec
    stage: int  # of the pipeline: the one that has the least room
    weights: dict[str, int]  # bytes by component
    memory: MemoryPlan
    experts: ExpertPlan | None
    decode: StepTime | None
    prefill: StepTime | None

    @property
    def mesh_shape(self) -> MeshShape:
        return self.shard_spec.mesh_shape

    @property
    def fits(self) -> bool:
        return self.decode is not None

    @property
    def max_requests(self) -> int:
        """Requests of the full context that the KV caches of all data ranks hold."""
        return self.mesh_shape.data * (self.memory.cache_tokens // self.memory.limits.context)


# ---- one mesh --------------------------------------------------------------------------------------


def plan_mesh(query: PlanQuery, mesh_shape: MeshShape) -> ClusterPlan:
    """The plan of one rank; ArgumentError if an engine would refuse this mesh or its options."""
    limits = _engine_limits(query, mesh_shape)
    spec = make_shard_spec(query, mesh_shape)
    experts = _plan_experts(query, spec, limits)
    rank = _build_rank_cached(query.config, query.family, spec, query.format_lookup, experts)
    if mesh_shape.context > 1:
        check_context_cache(rank.shard.attention_specs, limits.kv_dtype)
    # A pipeline is as large as its smallest KV cache.
    plans = [_plan_stage(query, shapes, limits) for shapes in rank.stages]
    stage = min(range(len(plans)), key=lambda i: (plans[i].cache_tokens, -plans[i].total))
    memory, weights = plans[stage], rank.weights[stage]
    plan = ClusterPlan(spec, stage, weights, memory, experts, None, None)
    if not memory.fits:
        return plan
    sequences = min(limits.max_sequences, max(1, memory.cache_tokens // limits.context))
    transport = None if experts is None else (experts.transport.name, experts.config)
    decode, prefill = (
        predict_step(rank.shard, query.cluster, mesh_shape, sizes, transport)
        for sizes in (StepSizes.decode(sequences, limits), StepSizes.prefill(limits))
    )
    return replace(plan, decode=decode, prefill=prefill)


def _plan_stage(query: PlanQuery, shapes: RankShapes, limits: EngineLimits) -> MemoryPlan:
    fixed = plan_fixed_memory(shapes, limits, torch.device("cuda"), query.available_bytes)
    return add_kv_cache(fixed, shapes.attention_specs)


@dataclass(frozen=True)
class _Rank:
    """The shard of all layers, and of each pipeline stage its shapes and its bytes by component."""

    shard: ModelShard
    stages: list[RankShapes]
    weights: list[dict[str, int]]


@lru_cache(maxsize=256)
def _build_rank_cached(
    config: ModelConfig,
    family: ModelFamily,
    spec: ShardSpec,
    format_lookup: FormatLookup,
    experts: ExpertPlan | None,
) -> _Rank:
    """The first rank's shard, which is independent of context and KV-cache dtype."""
    dispatcher, buffers = None, 0
    if experts is not None:
        dispatcher = make_meta_dispatcher(experts.transport.name, experts.axis, experts.config)
        buffers = experts.buffer_bytes
    shard = build_model_shard(config, family, spec, format_lookup, dispatcher)
    if experts is not None:
        use_micro_batches(shard.model, experts.micro_batches)
    stages: list[PipelineStage | None] = [None]
    if spec.mesh_shape.pipeline > 1:
        slots = 0 if config.moe is None else config.moe.num_experts
        whole = build_model_shard(config, family, ShardSpec(MeshShape(), slots), format_lookup)
        stages = [*whole.split_stages(spec.mesh_shape.pipeline)]
    return _Rank(
        shard,
        [shard.shapes(buffers, stage) for stage in stages],
        [shard.component_bytes(stage) for stage in stages],
    )


def _engine_limits(query: PlanQuery, mesh_shape: MeshShape) -> EngineLimits:
    data = mesh_shape.data
    sequences = DEFAULT_MAX_SEQUENCES if query.batch is None else -(-query.batch // data)
    max_batched_tokens = query.max_batched_tokens or max(
        MAX_BATCHED_TOKENS["cuda"] // data, MIN_BATCHED_TOKENS
    )
    return EngineLimits(
        context=query.context,
        max_sequences=sequences,
        max_batched_tokens=max(max_batched_tokens, sequences),
        block_size=BLOCK_SIZES["cuda"] * mesh_shape.context,
        kv_dtype=query.kv_dtype,
        context_parallel=mesh_shape.context,
    )


def make_shard_spec(query: PlanQuery, mesh_shape: MeshShape) -> ShardSpec:
    """The expert slots of a layer are its experts and the redundant ones, a multiple of the ranks."""
    if query.config.moe is None:
        return ShardSpec(mesh_shape)
    redundant = query.redundant_experts if mesh_shape.expert > 1 else 0
    wanted = query.config.moe.num_experts + redundant
    return ShardSpec(mesh_shape, -(-wanted // mesh_shape.expert) * mesh_shape.expert)


def _plan_experts(query: PlanQuery, spec: ShardSpec, limits: EngineLimits) -> ExpertPlan | None:
    """The transport of the expert axis; ArgumentError as an engine would raise it."""
    ranks = spec.mesh_shape.expert
    check_expert_axis(query.expert_options != DEFAULT_OPTIONS, ranks > 1)
    if query.config.moe is None or ranks == 1:
        return None
    nodes = [rank // query.cluster.gpus_per_node for rank in range(spec.mesh_shape.world_size)]
    axis = PlannedMesh(spec.mesh_shape, nodes=tuple(nodes)).expert
    choice = choose_transport(query.expert_options, axis, PLANNED_DEVICE)
    dtype, slots = query.config.dtype, spec.expert_slots
    config = plan_dispatch(
        query.expert_options, query.config, dtype, limits, spec.mesh_shape, slots
    )
    buffers = dispatch_buffer_bytes(choice.name, config, ranks)
    return ExpertPlan(choice, config, axis, buffers, query.expert_options.micro_batches)


# ---- all meshes ------------------------------------------------------------------------------------


def candidate_meshes(
    query: PlanQuery, constraint: MeshConstraint = ANY_MESH
) -> Iterator[MeshShape]:
    """All meshes of the cluster's GPUs within the constraint."""
    pipeline, context = constraint.pipeline, constraint.context
    stage_size = query.cluster.num_gpus // pipeline
    world = stage_size // context
    can_distribute = query.config.moe is not None and stage_size > 1 and not constraint.expert
    for tensor in _divisors(world):
        data = world // tensor
        if (constraint.tensor or tensor) != tensor or (constraint.data or data) != data:
            continue
        for expert in _divisors(stage_size):
            if (constraint.expert or expert) != expert:
                continue
            if not constraint.expert and expert > 1 and expert % tensor:
                continue
            if query.config.moe is None and expert > 1 and not constraint.expert:
                continue
            if query.expert_options != DEFAULT_OPTIONS and expert == 1 and can_distribute:
                continue
            yield MeshShape(data, tensor, expert, pipeline, context)


def search_meshes(query: PlanQuery, constraint: MeshConstraint = ANY_MESH) -> list[ClusterPlan]:
    """Plans of all meshes: first those that fit, by their speed, then the others, by their size.

    If an engine would refuse all of them, the error of the first one is raised.
    """
    plans, refused = [], None
    for mesh_shape in candidate_meshes(query, constraint):
        try:
            plans.append(plan_mesh(query, mesh_shape))
        except ArgumentError as error:
            refused = refused or error
    if not plans and refused is not None:
        raise refused
    return sorted(plans, key=_sort_key)


def _sort_key(plan: ClusterPlan) -> tuple[bool, float, int]:
    if plan.decode is None:
        return True, plan.memory.total, plan.mesh_shape.tensor
    return False, -plan.decode.tokens_per_second, plan.mesh_shape.tensor


def has_fitting_mesh(query: PlanQuery, constraint: MeshConstraint = ANY_MESH) -> bool:
    for mesh_shape in candidate_meshes(query, constraint):
        try:
            if plan_mesh(query, mesh_shape).fits:
                return True
        except ArgumentError:  # an engine would refuse this mesh; another one may fit
            continue
    return False


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def count_parameters(query: PlanQuery) -> tuple[int, int]:
    """The number of parameters, and of those that one token uses."""
    spec = make_shard_spec(query, MeshShape())
    shard = build_model_shard(query.config, query.family, spec, query.format_lookup)
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
    if constraint != ANY_MESH and (best := next(iter(search_meshes(query)), None)) and best.fits:
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
