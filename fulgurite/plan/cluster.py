"""What fits where on GPUs nobody has to have: a model and a cluster in, splits with their memory out.

    Question    a model's shape, number formats, the cluster, how it will be used
    make_split  one way to spread it (a MeshShape) -> memory of a rank by part, room for requests, and a
                bound on decoding
    search      every way that is possible, best first

Memory is counted by the functions that also plan it for an engine (memory.py), on a rank's share of the
model (rank_model.py); buffers for tokens on their way to experts by `kernels.dispatch.buffers`.

A decode step can't be faster than its bytes: what each GPU must read of its weights and caches, and what
must cross its links, whichever takes longer. The bound assumes that both overlap perfectly. It is what
splits are compared by.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from fulgurite.errors import CapacityError
from fulgurite.kernels.dispatch.wire_format import Buffers, buffers
from fulgurite.models.config import ModelConfig
from fulgurite.models.family import Family
from fulgurite.parallel.mesh import MeshShape
from fulgurite.plan.activations import activation_bytes
from fulgurite.plan.gpus import Cluster
from fulgurite.plan.memory import (
    SHARE,
    Limits,
    MemoryPlan,
    decoded_bytes,
    token_bytes,
    with_cache,
    workspace_bytes,
)
from fulgurite.plan.rank_model import Cut, FormatOf, RankModel, build_rank, refusal
from fulgurite.serve.llm import BLOCK_SIZES, STEP_TOKENS

SEQUENCES = 256  # requests at once on a data rank, where nobody says how many
LEAST_TOKENS = 512  # of a step on one data rank; together they have an engine's STEP_TOKENS
UNEVEN = 2.0  # rows at a rank's experts over the average, which their activations are planned for
RESULT = "bf16"  # what comes back from experts
Fixed = tuple[int | None, int | None, int | None]  # data, tensor, expert; None: searched
MOST_GPUS = 512  # that are tried where too few were given


@dataclass(frozen=True)
class Question:
    """What is to be planned."""

    name: str
    family: Family
    config: ModelConfig
    format_of: FormatOf
    format: str
    cluster: Cluster
    context: int
    kv_dtype: torch.dtype
    batch: int | None = None
    step_tokens: int | None = None
    wire: str = RESULT
    redundant: int = 0
    capacity: int | None = None
    step: int = 1  # packed weights are cut at multiples of this

    @property
    def available(self) -> int:
        return int(self.cluster.gpu.memory * SHARE * 2**30)


@dataclass(frozen=True)
class Bound:
    """The least a decode step of `requests` requests can take, in seconds."""

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
class Split:
    """One way to spread the model. `plan` is a rank's, without a cache where it doesn't fit."""

    cut: Cut
    weights: dict[str, int]
    plan: MemoryPlan
    buffers: Buffers | None
    bound: Bound | None

    @property
    def shape(self) -> MeshShape:
        return self.cut.shape

    @property
    def fits(self) -> bool:
        return self.bound is not None

    @property
    def requests(self) -> int:
        """Requests of the whole context that the caches of all data ranks hold."""
        return self.shape.data * (self.plan.cache_tokens // self.plan.limits.context)


def make_split(question: Question, shape: MeshShape) -> Split:
    """The plan of one rank; all ranks are alike."""
    limits = _limits(question, shape.data)
    cut = make_cut(question, shape)
    tokens = -(-limits.step_tokens // shape.tensor) if shape.expert > 1 else limits.step_tokens
    rows = _expert_rows(question, cut, tokens)
    sizes = (limits.step_tokens, limits.max_sequences)
    rank, activations = _built(question.config, question.family, cut, rows, sizes)
    weights = rank.weights(question.format_of)
    queue = _buffers(question, cut, tokens)
    device = torch.device("cuda")
    vocabulary = question.config.vocabulary if shape.ranks == 1 else 0  # many ranks have no graphs
    packed = rank.packed(question.format_of)
    plan = MemoryPlan(
        device=device,
        limits=limits,
        available=question.available,
        weights=sum(weights.values()),
        activations=activations,
        workspaces=workspace_bytes(rank.specs, limits, device, vocabulary)
        + decoded_bytes(packed, limits, device, question.config.dtype),
        cache=0,
        blocks=(),
        cache_tokens=0,
        dispatch=queue.total if queue else 0,
    )
    try:
        plan = with_cache(plan, rank.specs)
    except CapacityError:
        return Split(cut, weights, plan, queue, None)
    bound = _bound(question, shape, rank, weights, plan, queue)
    return Split(cut, weights, plan, queue, bound)


@lru_cache(maxsize=256)
def _built(
    config: ModelConfig, family: Family, cut: Cut, rows: int, sizes: tuple[int, int]
) -> tuple[RankModel, int]:
    """A rank's share and the activations of its largest step: contexts and caches change neither."""
    rank = build_rank(config, family, cut, rows)
    return rank, activation_bytes(rank.model, *sizes)


def _limits(question: Question, data: int) -> Limits:
    sequences = SEQUENCES if question.batch is None else -(-question.batch // data)
    step_tokens = question.step_tokens or max(STEP_TOKENS["cuda"] // data, LEAST_TOKENS)
    return Limits(
        context=question.context,
        max_sequences=sequences,
        step_tokens=max(step_tokens, sequences),
        block_size=BLOCK_SIZES["cuda"],
        kv_dtype=question.kv_dtype,
    )


def make_cut(question: Question, shape: MeshShape) -> Cut:
    """Places for the experts of a layer: all of them, the redundant ones, up to a multiple."""
    if question.config.experts is None:
        return Cut(shape, 0, question.step)
    wanted = question.config.experts.count + (question.redundant if shape.expert > 1 else 0)
    return Cut(shape, -(-wanted // shape.expert) * shape.expert, question.step)


def _expert_rows(question: Question, cut: Cut, tokens: int) -> int:
    """Rows that a rank's experts are given in the largest step."""
    experts, ranks = question.config.experts, cut.shape.expert
    if experts is None:
        return 0
    average = tokens * experts.per_token
    if ranks == 1:
        return average
    most = tokens * ranks * min(experts.per_token, cut.slots // ranks)
    return min(most, int(UNEVEN * average))


def _buffers(question: Question, cut: Cut, tokens: int) -> Buffers | None:
    experts, ranks = question.config.experts, cut.shape.expert
    if experts is None or ranks == 1:
        return None
    return buffers(
        ranks=ranks,
        tokens=tokens,
        per_token=experts.per_token,
        hidden=question.config.hidden,
        experts_per_rank=cut.slots // ranks,
        wire=question.wire,
        result=RESULT,
        capacity=question.capacity,
    )


def _bound(
    question: Question,
    shape: MeshShape,
    rank: RankModel,
    weights: dict[str, int],
    plan: MemoryPlan,
    queue: Buffers | None,
) -> Bound:
    """What a step of all requests that fit must read and send, from every GPU."""
    limits = plan.limits
    sequences = min(limits.max_sequences, max(1, plan.cache_tokens // limits.context))
    reads = sum(weights.values()) - weights["experts"]
    reads += int(weights["experts"] * _touched(question, shape, sequences))
    for spec in rank.specs:
        reach = min([limits.context, *(n for n in (spec.window, spec.chunk) if n is not None)])
        reads += sequences * reach * token_bytes(spec, limits.kv_dtype)
    return Bound(
        requests=sequences * shape.data,
        memory_seconds=reads / (question.cluster.gpu.bandwidth * 1e9),
        link_seconds=_link_seconds(question, shape, sequences, queue),
    )


def _touched(question: Question, shape: MeshShape, sequences: int) -> float:
    """The share of a rank's experts that at least one token visits, if all are equally likely."""
    experts = question.config.experts
    if experts is None:
        return 0.0
    data_ranks = 1 if shape.expert == 1 else max(1, shape.expert // shape.tensor)
    return 1.0 - (1.0 - experts.per_token / experts.count) ** (sequences * data_ranks)


def _link_seconds(
    question: Question, shape: MeshShape, sequences: int, queue: Buffers | None
) -> float:
    """Time on links: sums over the tensor axis after each half layer, tokens to experts and back.

    A token travels once to each rank that has experts of it, and one result comes back.
    """
    config, cluster = question.config, question.cluster
    seconds = 0.0
    if shape.tensor > 1:
        half_layers = 2 * len(config.layers)
        moved = 2 * (shape.tensor - 1) / shape.tensor * sequences * config.hidden * 2
        seconds += half_layers * _seconds(cluster, shape.tensor, moved)
    if queue is not None:
        tokens = -(-sequences // shape.tensor)
        others = (queue.ranks - 1) * (1 - (1 - 1 / queue.ranks) ** queue.per_token)
        moved = tokens * others * (queue.header + queue.row_bytes + queue.result_bytes)
        sparse = sum(layer.experts for layer in config.layers)
        seconds += sparse * _seconds(cluster, shape.expert, moved)
    return seconds


def _seconds(cluster: Cluster, ranks: int, moved: float) -> float:
    """Bytes that each of `ranks` GPUs in a row sends evenly to the others, inside a node and out."""
    inside = min(1.0, (cluster.per_node - 1) / max(1, ranks - 1))
    gpu = cluster.gpu
    return max(moved * inside / (gpu.link * 1e9), moved * (1 - inside) / (gpu.network * 1e9))


def shapes(
    question: Question,
    data: int | None = None,
    tensor: int | None = None,
    expert: int | None = None,
) -> Iterator[MeshShape]:
    """Every mesh of all GPUs that the model can be cut for and that was not ruled out."""
    world = question.cluster.count
    for cut in _divisors(world):
        if (tensor or cut) != cut or (data or world // cut) != world // cut:
            continue
        for spread in _divisors(world):
            if (expert or spread) != spread or (not expert and spread > 1 and spread % cut):
                continue
            shape = MeshShape(world // cut, cut, spread)
            if not refusal(question.config, make_cut(question, shape)):
                yield shape


def search(
    question: Question,
    data: int | None = None,
    tensor: int | None = None,
    expert: int | None = None,
) -> list[Split]:
    """The possible splits, best first: those that fit by their bound, the others by what they lack."""
    found = [make_split(question, shape) for shape in shapes(question, data, tensor, expert)]
    return sorted(found, key=_rank)


def _rank(split: Split) -> tuple[bool, float, int]:
    if split.bound is None:
        return True, split.plan.total, split.shape.tensor
    return False, -split.bound.tokens_per_second, split.shape.tensor


def parameters(question: Question) -> tuple[int, int]:
    """How many numbers the model has, and how many of them one token meets."""
    rank = build_rank(question.config, question.family, make_cut(question, MeshShape()))
    whole = active = 0
    for name, tensor in rank.parameters():
        whole += tensor.numel()
        share = 1.0
        if ".experts." in name and question.config.experts is not None:
            share = question.config.experts.per_token / question.config.experts.count
        active += int(tensor.numel() * share)
    return whole, active


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def advice(
    question: Question, data: int | None, tensor: int | None, expert: int | None
) -> Iterator[str]:
    """What would fit, each tried: a shorter context, a smaller cache, other splits, more GPUs."""
    fixed: Fixed = (data, tensor, expert)
    if context := _longest_context(question, fixed):
        yield f"a shorter context: --context {context}"
    small = replace(question, kv_dtype=torch.float8_e4m3fn)
    if question.kv_dtype.itemsize > 1 and fits(small, fixed):
        yield "a smaller cache: --kv fp8"
    if any(fixed) and (best := next(iter(search(question)), None)) and best.fits:
        yield f"another split: {best.shape}"
    for larger in _larger(question.cluster):
        if fits(replace(question, cluster=larger), (None, None, None)):
            nodes = f"x{larger.nodes}" if larger.nodes > 1 else ""
            yield f"more GPUs: --gpus {larger.per_node}{nodes}"
            return


def _larger(cluster: Cluster) -> Iterator[Cluster]:
    """Twice as many GPUs, and twice again: eight to a node, then more nodes."""
    while cluster.count < MOST_GPUS:
        if cluster.nodes == 1 and 2 * cluster.per_node <= 8:
            cluster = replace(cluster, per_node=2 * cluster.per_node)
        else:
            cluster = replace(cluster, nodes=2 * cluster.nodes)
        yield cluster


def fits(question: Question, fixed: Fixed) -> bool:
    """Whether there is any split that does."""
    return any(make_split(question, shape).fits for shape in shapes(question, *fixed))


def _longest_context(question: Question, fixed: Fixed) -> int | None:
    """The longest context, in powers of two, of which one request fits."""
    context = 1 << (question.context - 1).bit_length() - 1
    while context >= 512:
        if fits(replace(question, context=context), fixed):
            return context
        context //= 2
    return None
