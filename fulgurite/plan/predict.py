"""Predicted steps of a mesh: a rank's shard and a cluster in, a `StepTime` out.

Bytes and FLOPs are counted on the modules of the shard, so a layer that can't be sharded counts in
full. Routing is even: each expert is equally likely. Kernels reach the datasheet's bandwidth and
FLOP/s, so real steps are slower; use predictions to compare meshes, transports and wire formats.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

from torch import Tensor, nn

from fulgurite.kernels.dispatch.buffers import DispatchConfig
from fulgurite.models.attention_spec import AttentionSpec
from fulgurite.models.config import MoEConfig
from fulgurite.parallel.layers import RowParallelLinear, TensorParallelExperts
from fulgurite.parallel.mesh import MeshShape
from fulgurite.plan.cluster import GPU, Cluster
from fulgurite.plan.kv_cache import kv_bytes_per_token
from fulgurite.plan.limits import EngineLimits
from fulgurite.plan.shard import ModelShard
from fulgurite.plan.step_time import (
    DispatchShape,
    LayerWork,
    StepTime,
    count_dispatch_traffic,
    predict_all_gather_seconds,
    predict_all_reduce_seconds,
    predict_dispatch_seconds,
    predict_send_seconds,
    time_layers,
)


@dataclass(frozen=True)
class StepSizes:
    """One step of a replica.

    tokens     that it computes
    sequences  requests that they belong to; each has one row of logits
    keys       cached tokens that a token attends to, on average
    reads      cached tokens that are read for each request
    """

    tokens: int
    sequences: int
    keys: float
    reads: int
    limits: EngineLimits

    @staticmethod
    def decode(sequences: int, limits: EngineLimits) -> StepSizes:
        """One token of each request, at the end of its context."""
        return StepSizes(sequences, sequences, limits.context, limits.context, limits)

    @staticmethod
    def prefill(limits: EngineLimits) -> StepSizes:
        """The largest step, of whole prompts as long as the context or the step."""
        length = min(limits.context, limits.max_batched_tokens)
        sequences = max(1, limits.max_batched_tokens // length)
        return StepSizes(sequences * length, sequences, (length + 1) / 2, length, limits)


def predict_step(
    shard: ModelShard,
    cluster: Cluster,
    shape: MeshShape,
    sizes: StepSizes,
    transport: tuple[str, DispatchConfig] | None,
) -> StepTime:
    """The step of all replicas; `transport`: its name, and what it sends."""
    config, links = shard.model.config, cluster.links
    replica_tokens = sizes.tokens
    if shape.context > 1:  # a rank has its share of the tokens and of the keys
        sizes = replace(
            sizes,
            tokens=-(-sizes.tokens // shape.context),
            reads=-(-sizes.reads // shape.context),
        )
    layers = [*_layer_work(shard, shape, sizes), _head_work(shard, sizes)]
    step = time_layers(
        replica_tokens * shape.data,
        layers,
        cluster.gpu.memory_bandwidth * 1e9,
        flops_per_second(cluster.gpu, shard),
    )
    hidden_bytes = sizes.tokens * config.hidden_size * shard.model.dtype.itemsize
    ranks_per_node = cluster.gpus_per_node
    if shape.tensor > 1:
        reductions = 1 + sum(
            _count_reductions(shard.model.layers[kind]) for kind in shard.layer_kinds
        )
        logit_bytes = sizes.sequences * config.vocab_size * shard.model.dtype.itemsize
        step = replace(
            step,
            all_reduce=reductions
            * predict_all_reduce_seconds(hidden_bytes, shape.tensor, ranks_per_node, links)
            + predict_all_gather_seconds(logit_bytes, shape.tensor, ranks_per_node, links),
        )
    if shape.context > 1:
        gathered = 3 * hidden_bytes * shape.context  # queries, keys and values; and outputs back
        exchange = predict_all_reduce_seconds(gathered, shape.context, ranks_per_node, links)
        step = replace(step, all_reduce=step.all_reduce + len(shard.attention_specs) * exchange)
    if shape.pipeline > 1:
        firsts = [stage * shape.stage_size for stage in range(shape.pipeline)]
        nodes = [rank // ranks_per_node for rank in [*firsts, 0]]
        crossings = [a != b for a, b in itertools.pairwise(nodes)]
        sends = sum(predict_send_seconds(hidden_bytes, crosses, links) for crosses in crossings)
        step = replace(step, transfers=sends)
    if transport is not None and config.moe is not None:
        name, dispatch = transport
        tokens = -(-sizes.tokens // shape.tensor)
        buffers = dispatch.size_buffers(shape.expert)
        moe_layers = sum(config.layers[kind].is_moe for kind in shard.layer_kinds)
        seconds = [
            moe_layers
            * predict_dispatch_seconds(
                count_dispatch_traffic(
                    DispatchShape(
                        tokens,
                        dispatch.top_k,
                        dispatch.experts_per_rank * shape.expert,
                        row_bytes,
                        shape.expert,
                        min(ranks_per_node, shape.expert),
                    ),
                    name,
                ),
                links,
            )
            for row_bytes in (buffers.header_bytes + buffers.row_bytes, buffers.result_bytes)
        ]
        step = replace(step, dispatch=seconds[0], combine=seconds[1])
    return step


def flops_per_second(gpu: GPU, shard: ModelShard) -> float:
    """Of the GEMMs: with 8-bit operands if the weights are FP8, otherwise with 16-bit ones."""
    formats = {weight.format.family for weight in shard.quantized_weights()}
    return (gpu.tflops_8_bit if formats == {"fp8"} else gpu.tflops_16_bit) * 1e12


def _layer_work(shard: ModelShard, shape: MeshShape, sizes: StepSizes) -> list[LayerWork]:
    """What each layer reads and computes, in order."""
    moe = shard.model.config.moe
    weights = [_weight_work(layer, moe, shape, sizes) for layer in shard.model.layers]
    works = [weights[kind] for kind in shard.layer_kinds]
    for spec in shard.attention_specs:
        works[spec.layer_index] = _add(works[spec.layer_index], _attention_work(spec, sizes))
    for state in shard.state_specs:
        moved = 2 * sizes.sequences * state.num_bytes(shard.model.dtype)  # read and written
        works[state.layer_index] = _add(works[state.layer_index], LayerWork(moved, 0))
    return works


def _weight_work(
    layer: nn.Module, moe: MoEConfig | None, shape: MeshShape, sizes: StepSizes
) -> LayerWork:
    total = LayerWork(0, 0)
    for name, weight in layer.named_parameters():
        tokens = float(sizes.tokens)
        if ".experts." in name and moe is not None:
            total = _add(total, _expert_work(weight, moe, shape, sizes))
            continue
        if name.startswith("feed_forward.") and moe is not None and shape.expert > 1:
            if ".shared_expert." in name or ".router." in name:
                tokens = math.ceil(sizes.tokens / shape.tensor)  # tokens are sharded
        total = _add(total, LayerWork(weight.nbytes, _gemm_flops(weight, tokens)))
    return total


def _expert_work(weight: Tensor, moe: MoEConfig, shape: MeshShape, sizes: StepSizes) -> LayerWork:
    """Experts with at least one token are read; rows are spread evenly over ranks."""
    replicas = 1 if shape.expert == 1 else max(1, shape.expert // shape.tensor)
    tokens = sizes.tokens * replicas  # of all ranks that share these experts
    is_active = 1.0 - (1.0 - moe.top_k / moe.num_experts) ** tokens
    rows = tokens * moe.top_k / shape.expert
    flops = 2 * rows * weight.numel() / weight.shape[0] if weight.dim() > 2 else 0.0
    return LayerWork(weight.nbytes * is_active, flops)


def _attention_work(spec: AttentionSpec, sizes: StepSizes) -> LayerWork:
    windows = [size for size in (spec.sliding_window, spec.chunk_size) if size is not None]
    reads, keys = min([sizes.reads, *windows]), min([sizes.keys, *windows])
    per_key = 2 * spec.num_heads * (spec.key_dim + spec.value_dim)
    return LayerWork(
        sizes.sequences * reads * kv_bytes_per_token(spec, sizes.limits.kv_dtype),
        sizes.tokens * keys * per_key,
    )


def _head_work(shard: ModelShard, sizes: StepSizes) -> LayerWork:
    """The logits; looking up the embeddings of a few tokens costs nothing."""
    outside = {name: tensor for name, tensor in shard.parameters() if name[:7] != "layers."}
    head = outside.get("lm_head.weight", outside["embed_tokens.weight"])
    return LayerWork(head.nbytes, _gemm_flops(head, sizes.sequences))


def _gemm_flops(weight: Tensor, rows: float) -> float:
    return 2 * rows * weight.numel() if weight.dim() > 1 else 0.0


def _add(a: LayerWork, b: LayerWork) -> LayerWork:
    return LayerWork(a.bytes + b.bytes, a.flops + b.flops)


def _count_reductions(layer: nn.Module) -> int:
    """All-reduces of a layer over the tensor axis, or pairs of reduce-scatter and all-gather."""
    kinds = (RowParallelLinear, TensorParallelExperts)
    return sum(isinstance(module, kinds) for module in layer.modules())
