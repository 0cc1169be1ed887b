"""Tensor and expert parallelism from a table of rules: a full model in, this rank's shard out.

    rules = {"embed_tokens": "vocabulary", "layers.*.attention.q_proj": "query", ...}
    sharding = parallelize(model, mesh, rules)         a family's `sharding_rules`
    print(sharding)                                    what is sharded, and what is not and why
    loss.backward(); sharding.reduce_gradients()

The styles of modules and parameters (`*` stands for one name between dots):

    vocabulary     an embedding or head: rows are sharded; logits come out complete
    attention      its input are all tokens; its spec has the number of heads
    query, key     rows belong to query or key heads; if there are fewer key heads than ranks, several
                   ranks have the same one. Also a norm over all heads, which sums over ranks
    output         columns belong to query heads; the output is reduced over ranks
    feed_forward   its input are all tokens; `column` and `row` inside shard its intermediate size
    column, row    column- and row-parallel linears: sharded rows; sharded columns and a reduction
    experts        over the expert axis if the mesh has one, else the intermediate size of each expert
    final_norm     the norm before the head

With an expert axis, tokens are sharded, too (`sequence_parallel`). Outside of attention each rank has
its share of the tokens: norms and routers see only those, reductions become reduce-scatters, and
attention all-gathers. Attention whose heads can't be sharded runs completely on every rank.

Dense and quantized weights are sharded in place; quantized ones at block boundaries.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from fulgurite.errors import ArgumentError
from fulgurite.parallel.collectives import shard_range, sum_inside_parallel_region
from fulgurite.parallel.dispatch.all_to_all import AllToAllDispatcher
from fulgurite.parallel.dispatch.deterministic import DeterministicDispatcher
from fulgurite.parallel.dispatch.dispatcher import TokenDispatcher
from fulgurite.parallel.experts.expert_parallel import (
    ExpertParallel,
    OverlappedSharedExpert,
    apply_expert_parallel,
)
from fulgurite.parallel.experts.placement import Placement
from fulgurite.parallel.gradients import ReplicatedExperts, ReplicatedKeyHeads
from fulgurite.parallel.layers import (
    GatheredHeadsNorm,
    GatheredInputLinear,
    LocalTokensLinear,
    RowParallelLinear,
    TensorParallelExperts,
    TokenSharding,
    VocabParallelEmbedding,
    add_gather_hook,
    add_input_hook,
)
from fulgurite.parallel.mesh import Mesh
from fulgurite.parallel.sharding import Range, Sharder, Sharding, weight_alignment

ShardingRules = Mapping[str, str]
STYLES = (
    *("vocabulary", "attention", "query", "key", "output"),
    *("feed_forward", "column", "row", "experts", "final_norm"),
)


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    rules: ShardingRules,
    *,
    sequence_parallel: bool | None = None,
    dispatcher: TokenDispatcher | None = None,
    placement: Placement | None = None,
    deterministic: bool = False,
) -> Sharding:
    """Replace a model's parameters by this rank's shard of them, in place.

    sequence_parallel   None: if both the tensor and the expert axis have several ranks
    dispatcher          sends tokens to experts; None: `AllToAllDispatcher`
    placement           expert slots, one row for each MoE layer; None: experts in order
    deterministic       no result is a sum over ranks, so that batch-invariant kernels give the bits of
                        one rank (docs/determinism.md); for inference
    """
    if sequence_parallel is None:
        sequence_parallel = mesh.tensor.size > 1 and mesh.expert.size > 1
    if mesh.tensor.size > 1 and mesh.expert.size > 1 and not sequence_parallel:
        raise ArgumentError(
            "sequence_parallel=False, but tensor and expert axis both have several ranks",
            where=str(mesh.shape),
            next="every tensor rank would send the same tokens to the experts: omit "
            "sequence_parallel, or use expert=1",
        )
    if dispatcher is None and mesh.expert.size > 1 and deterministic:
        dispatcher = DeterministicDispatcher(mesh.expert, _applies_weights_on_input(model))
    elif dispatcher is None and mesh.expert.size > 1:
        dispatcher = AllToAllDispatcher(mesh.expert)
    styles = match_rules(model, rules)
    parallelizer = _Parallelizer(model, mesh, styles, sequence_parallel, dispatcher, placement)
    parallelizer.is_deterministic = deterministic
    return parallelizer.run()


def _applies_weights_on_input(model: nn.Module) -> bool:
    """Whether the experts of a model multiply their inputs by the router's weights."""
    return any(getattr(module, "apply_router_weight_on_input", False) for module in model.modules())


def match_rules(model: nn.Module, rules: ShardingRules) -> dict[str, str]:
    """Module or parameter → style, in the order of the model."""
    unknown = {style for style in rules.values() if style not in STYLES}
    if unknown:
        raise ArgumentError(
            f"unknown style {', '.join(sorted(unknown))}", next=f"one of {', '.join(STYLES)}"
        )
    patterns = [
        (re.compile(re.escape(pattern).replace(r"\*", r"[^.]+")), style)
        for pattern, style in rules.items()
    ]
    names = [name for name, _ in model.named_modules()]
    names += [name for name, _ in model.named_parameters()]
    styles = {}
    for name in names:
        for pattern, style in patterns:
            if pattern.fullmatch(name):
                styles[name] = style
    return styles


class _Parallelizer:
    """One call of `parallelize`."""

    is_deterministic = False

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        styles: dict[str, str],
        sequence_parallel: bool,
        dispatcher: TokenDispatcher | None,
        placement: Placement | None,
    ) -> None:
        self.model, self.mesh, self.styles = model, mesh, styles
        self.axis = mesh.tensor
        self.token_sharding = TokenSharding(self.axis) if sequence_parallel else None
        self.dispatcher, self.placement = dispatcher, placement
        self.sharding = Sharding(mesh)
        self.num_moe_layers = 0
        self.sharder = Sharder(model, self.axis, self.sharding)
        # For gradients; keyed by parameter, since names change when modules are wrapped.
        self.expert_parallel: set[nn.Parameter] = set()
        self.after_reduction: set[nn.Parameter] = set()
        self.partial_modules: list[nn.Module] = []
        self.replicated_keys: dict[nn.Parameter, ReplicatedKeyHeads] = {}
        self.replicated_experts: dict[nn.Parameter, ReplicatedExperts] = {}

    def run(self) -> Sharding:
        is_sharded = self.axis.size > 1
        for name, style in self.styles.items():
            if style == "vocabulary" and is_sharded:
                self._shard_vocabulary(name)
            elif style == "attention" and is_sharded:
                self._shard_attention(name)
            elif style == "feed_forward" and is_sharded:
                self._shard_feed_forward(name)
            elif style == "final_norm" and self.token_sharding is not None:
                add_gather_hook(self.model.get_submodule(name), self.token_sharding)
        for name in self._names_with_style("experts", ""):
            self._shard_experts(name)
        if self.placement is not None and self.num_moe_layers not in (0, self.placement.num_layers):
            raise ArgumentError(
                f"the placement has {self.placement.num_layers} layers, but the model has "
                f"{self.num_moe_layers} with experts",
                next="a placement of this model has one row for each MoE layer",
            )
        self._record_gradient_reductions()
        slices = self.sharder.slices
        self.sharding.slices = {n: slices[p] for n, p in self.model.named_parameters()}
        return self.sharding

    def _record_gradient_reductions(self) -> None:
        gradients = self.sharding.gradients
        gradients.model = self.model
        inside = {p for module in self.partial_modules for p in module.parameters()}
        partial = inside - self.after_reduction
        for name, parameter in self.model.named_parameters():
            if parameter in self.expert_parallel:
                gradients.axes[name] = "expert_data"
            elif parameter in self.sharder.sharded:
                gradients.axes[name] = "data"
            else:
                is_complete = self.token_sharding is None and parameter not in partial
                gradients.axes[name] = "data" if is_complete else "world"
            if parameter in self.replicated_keys:
                gradients.replicated_keys[name] = self.replicated_keys[parameter]
            if parameter in self.replicated_experts:
                gradients.replicated_experts[name] = self.replicated_experts[parameter]

    def _names_with_style(self, style: str, inside: str) -> list[str]:
        prefix = f"{inside}." if inside else ""
        return [n for n, s in self.styles.items() if s == style and n.startswith(prefix)]

    # ---- the modules of a model --------------------------------------------------------------------

    def _shard_vocabulary(self, name: str) -> None:
        module, sharder = self.model.get_submodule(name), self.sharder
        weight = module.weight
        assert isinstance(weight, Tensor), f"{name} has no weight"
        alignment, total = weight_alignment(weight, 0), weight.shape[0]
        sharder.check_divisible(name, total, alignment)
        rows = sharder.local_range(total, alignment)
        sharder.shard_module(name, "vocabulary", 0, total, rows)
        table = VocabParallelEmbedding(module, self.axis, total, alignment, self.token_sharding)
        sharder.replace_module(name, table)

    def _shard_attention(self, name: str) -> None:
        module, sharder = self.model.get_submodule(name), self.sharder
        # models.attention_spec.AttentionSpec, or a StateSpec; models imports this package
        spec: Any = module.spec
        heads, kv_heads = getattr(spec, "num_heads", 0), getattr(spec, "num_kv_heads", 0)
        ranges = shard_heads(heads, kv_heads, self.axis.index, self.axis.size) if heads else None
        if ranges is None:
            note = f"{heads} query and {kv_heads} key heads don't divide by {self.axis.size}"
            note = note if heads else "a layer with a state runs whole on every rank"
            sharder.add_entry(name, "replicated", (heads, kv_heads), (heads, kv_heads), note)
            if self.token_sharding is not None:
                add_input_hook(module, self.axis, self.token_sharding)
                for child in self._names_with_style("output", name):
                    linear = self.model.get_submodule(child)
                    sharder.replace_module(child, LocalTokensLinear(linear, self.token_sharding))
            return
        queries, keys = ranges
        module.spec = dataclasses.replace(
            spec, num_heads=queries[1] - queries[0], num_kv_heads=keys[1] - keys[0]
        )
        for child in self._names_with_style("query", name):
            if self._gather_heads(child):
                continue
            sharder.shard_module(child, "query", 0, heads, queries)
            self._sum_squares_over_ranks(child)
        for child in self._names_with_style("key", name):
            if self._gather_heads(child, replicas=max(1, self.axis.size // kv_heads)):
                continue
            sharder.shard_module(child, "key", 0, kv_heads, keys)
            if kv_heads < self.axis.size:
                self._record_replicated_keys(child, kv_heads, keys)
            self._sum_squares_over_ranks(child, replicas=max(1, self.axis.size // kv_heads))
        for child in self._names_with_style("output", name):
            if self.is_deterministic:
                self._gather_input(child, "output", 1)
                continue
            sharder.shard_parameter(f"{child}.weight", "output", 1, queries, heads)
            self._reduce_output(child)
        self._enter_parallel_region(name)

    def _shard_feed_forward(self, name: str) -> None:
        is_moe = bool(self._names_with_style("experts", name))
        if is_moe and self.mesh.expert.size > 1:
            return  # tokens are sharded already, and a shared expert is replicated
        columns = self._names_with_style("column", name)
        rows = self._names_with_style("row", name)
        # The linears of one MLP have one intermediate size; a shared expert inside has another.
        for parent in dict.fromkeys(child.rpartition(".")[0] for child in rows):
            self._shard_intermediate(
                parent,
                [child for child in columns if child.rpartition(".")[0] == parent],
                [child for child in rows if child.rpartition(".")[0] == parent],
            )
        self._enter_parallel_region(name)

    def _shard_intermediate(self, parent: str, columns: list[str], rows: list[str]) -> None:
        """Shard one intermediate size: the rows of column-parallel linears, and the other way."""
        sharder = self.sharder
        weights = [(sharder.get_weight(child), 0) for child in columns]
        weights += [(sharder.get_weight(child), 1) for child in rows]
        total = weights[0][0].shape[weights[0][1]]
        alignment = math.lcm(*(weight_alignment(weight, dim) for weight, dim in weights))
        sharder.check_divisible(parent, total, alignment)
        kept = sharder.local_range(total, alignment)
        for child in columns:
            sharder.shard_module(child, "column", 0, total, kept)
        for child in rows:
            if self.is_deterministic:
                self._gather_input(child, "row", alignment)
                continue
            sharder.shard_parameter(f"{child}.weight", "row", 1, kept)
            self._reduce_output(child)

    def _shard_experts(self, name: str) -> None:
        experts = self.model.get_submodule(name)
        before = dict(experts.named_parameters(recurse=False))
        ranges: dict[str, tuple[int, tuple[Range, ...]]] = {}  # parameter → dimension, ranges
        if self.mesh.expert.size > 1:
            ranges = self._distribute_experts(name, experts)
        elif self.axis.size > 1 and not self.is_deterministic:  # its results are sums over ranks
            ranges = self._shard_each_expert(name, experts)
        after = before | dict(experts.named_parameters(recurse=False))  # a bias may have moved
        for parameter, full in before.items():
            shard = after[parameter]
            if parameter in ranges:
                dim, kept = ranges[parameter]
                self.sharder.slices[shard] = self.sharder.slices[full].narrow(dim, *kept)
            self.sharder.add_entry(
                f"{name}.{parameter}", "experts", tuple(full.shape), tuple(shard.shape)
            )

    def _distribute_experts(
        self, name: str, experts: nn.Module
    ) -> dict[str, tuple[int, tuple[Range, ...]]]:
        """Expert parallelism: whole experts on each rank."""
        assert self.dispatcher is not None, "parallelize made one"
        names = [parameter for parameter, _ in experts.named_parameters(recurse=False)]
        parallel = apply_expert_parallel(
            experts, self.dispatcher, self.placement, self.num_moe_layers
        )
        self.sharder.replace_module(name, parallel)
        if not self.is_deterministic:  # one rank adds the residual before the shared expert
            self._overlap_shared_expert(name.rpartition(".")[0], parallel)
        self.expert_parallel |= set(experts.parameters())
        if parallel.has_redundant_experts:
            replicas = ReplicatedExperts(parallel.local_experts, parallel.placement.num_experts)
            self.replicated_experts |= dict.fromkeys(experts.parameters(), replicas)
        self.num_moe_layers += 1
        kept = tuple((expert, expert + 1) for expert in parallel.local_experts)
        return dict.fromkeys(names, (0, kept))

    def _shard_each_expert(
        self, name: str, experts: nn.Module
    ) -> dict[str, tuple[int, tuple[Range, ...]]]:
        """Tensor parallelism: a range of the intermediate size of every expert on each rank."""
        if self.token_sharding is not None:
            raise ArgumentError(
                "sequence_parallel=True, but every rank has a part of every expert",
                where=name,
                next="omit sequence_parallel, or give the mesh an expert axis",
            )
        down, gate_up = experts.get_parameter("down_proj"), experts.get_parameter("gate_up_proj")
        alignment = math.lcm(weight_alignment(down, 2), weight_alignment(gate_up, 1))
        total = down.shape[2]
        self.sharder.check_divisible(name, total, alignment)
        kept = self.sharder.local_range(total, alignment)
        both = tuple((half + kept[0], half + kept[1]) for half in (0, total))
        self.sharder.replace_module(name, TensorParallelExperts(experts, self.axis, kept))
        self.sharder.sharded |= set(experts.parameters())
        return {
            "gate_up_proj": (1, both),
            "gate_up_proj_bias": (1, both),
            "down_proj": (2, (kept,)),
        }

    def _overlap_shared_expert(self, name: str, experts: ExpertParallel) -> None:
        """Run the shared expert of this MoE layer while tokens are in flight."""
        moe: Any = self.model.get_submodule(name)
        if getattr(moe, "shared_expert", None) is not None:
            overlapped = OverlappedSharedExpert(moe.router, experts, moe.shared_expert)
            self.sharder.replace_module(name, overlapped)

    # ---- changes of modules ------------------------------------------------------------------------

    def _enter_parallel_region(self, name: str) -> None:
        module = self.model.get_submodule(name)
        add_input_hook(module, self.axis, self.token_sharding)
        self.partial_modules.append(module)

    def _gather_input(self, name: str, style: str, alignment: int) -> None:
        """Deterministic mode: all columns of a linear, and a range of its rows (all, if tokens are
        sharded). `alignment`: of the shards of its input."""
        module, sharder = self.model.get_submodule(name), self.sharder
        weight = sharder.get_weight(name)
        total, row_alignment = weight.shape[0], weight_alignment(weight, 0)
        in_features = weight.shape[1], alignment
        if self.token_sharding is None:
            sharder.check_divisible(name, total, row_alignment)
            kept = sharder.local_range(total, row_alignment)
            sharder.shard_module(name, style, 0, total, kept)
        linear = GatheredInputLinear(
            module, self.axis, in_features, (total, row_alignment), self.token_sharding
        )
        sharder.replace_module(name, linear)

    def _gather_heads(self, name: str, replicas: int = 1) -> bool:
        """Deterministic mode: whether the module is a norm over all heads, which is now gathered."""
        if not self.is_deterministic or name in dict(self.model.named_parameters()):
            return False
        norm = self.model.get_submodule(name)
        if not hasattr(norm, "sum_over_ranks"):
            return False
        self.sharder.replace_module(name, GatheredHeadsNorm(norm, self.axis, replicas))
        return True

    def _reduce_output(self, name: str) -> None:
        linear = RowParallelLinear(self.model.get_submodule(name), self.axis, self.token_sharding)
        self.sharder.replace_module(name, linear)
        if linear.bias is not None:
            self.after_reduction.add(linear.bias)

    def _sum_squares_over_ranks(self, name: str, replicas: int = 1) -> None:
        """A norm over all heads (`models.norms.ProjectionNorm`) needs the heads of other ranks.

        If several ranks have the same head, its squares are in the sum as often.
        """
        if any(name == parameter for parameter, _ in self.model.named_parameters()):
            return
        norm: Any = self.model.get_submodule(name)
        if hasattr(norm, "sum_over_ranks"):
            norm.total_size *= replicas
            norm.sum_over_ranks = functools.partial(sum_inside_parallel_region, axis=self.axis)

    def _record_replicated_keys(self, name: str, kv_heads: int, keys: Range) -> None:
        for path in self.sharder.parameter_names(name):
            parameter = self.model.get_parameter(path)
            local = parameter.shape[0]
            self.replicated_keys[parameter] = ReplicatedKeyHeads(local * kv_heads, keys[0] * local)


def shard_heads(heads: int, kv_heads: int, index: int, count: int) -> tuple[Range, Range] | None:
    """The query and key heads of one rank; None if they can't be sharded evenly."""
    if heads % count:
        return None
    queries = shard_range(heads, index, count)
    if kv_heads % count == 0:
        return queries, shard_range(kv_heads, index, count)
    if count % kv_heads == 0:
        first = index * kv_heads // count
        return queries, (first, first + 1)
    return None
