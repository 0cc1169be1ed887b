"""Tensor parallelism of training: a model and a mesh dimension in, a model of DTensor parameters out.

    sharding = shard_tensor_parallel(model, mesh["tp"], axis, rules)      in place
    loss.backward()
    sharding.reduce_gradients(model)            replicated parameters: one sum over ranks

Rules are the sharding rules of a model's family (`parallel/tensor.py` of the package explains them):

    vocabulary        Shard(0)     embedding and head; the loss never gathers logits (`vocab_loss.py`)
    query, key        Shard(0)     rows of heads; key heads that ranks share are replicated
    output, row       Shard(1)     outputs are reduced: all-reduced, or reduce-scattered to tokens
    column            Shard(0)
    experts           Shard(0)     whole experts; all ranks route all tokens
    all others        Replicate    norms, routers, biases behind a reduction

**Gradients** of sharded parameters are complete on their rank. Replicated parameters that read split
heads, columns or tokens have partial ones: `reduce_gradients` adds those up, once for all microbatches.

**Sequence parallelism** splits tokens between the matmuls: all-gather before column-parallel linears,
reduce-scatter behind row-parallel ones, and the other way round in backward.

Parameters keep the names and the shapes of one rank: `DTensor.full_tensor()` is the parameter of one
rank, and `torch.distributed.checkpoint` loads them on any number of ranks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fulgurite.errors import ArgumentError
from fulgurite.models.attention_spec import AttentionSpec
from fulgurite.models.config import ModelConfig
from fulgurite.models.moe import Experts, MoE, Router
from fulgurite.parallel.collectives import all_reduce, shard_range, sum_inside_parallel_region
from fulgurite.parallel.layers import TokenSharding
from fulgurite.parallel.mesh import Axis
from fulgurite.parallel.tensor import match_rules, shard_heads
from fulgurite.train.parallel.tensor_layers import (
    LocalExperts,
    PartialRowLinear,
    Region,
    RowParallelLinear,
    Rows,
    TensorParallelMoE,
    VocabParallelEmbedding,
    VocabParallelLinear,
    localize,
)


@dataclass(frozen=True)
class TensorSharding:
    """A model that is split over a tensor axis.

    Attributes:
        axis: the ranks.
        placements: of each parameter on the `tp` dimension, by name.
        partial: names of parameters whose gradients are partial sums.
        region: how tokens enter and leave the split modules.
    """

    axis: Axis
    region: Region
    placements: dict[str, Placement] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)

    def reduce_gradients(self, model: nn.Module) -> None:
        """Add up partial gradients over the axis, in place: one all-reduce for each dtype."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for name, parameter in model.named_parameters():
            if name in self.partial and parameter.requires_grad:
                local = local_gradient(parameter)
                by_dtype.setdefault(local.dtype, []).append(local)
        for gradients in by_dtype.values():
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            total = all_reduce(flat, self.axis, "all-reduce of replicated gradients")
            parts = total.split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """The local tensor of a gradient, to change in place; zeros if there was none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    gradient: Tensor = parameter.grad
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def check_tensor_degree(config: ModelConfig, degree: int) -> None:
    """ArgumentError if a model can't be split over `degree` ranks."""
    if degree == 1:
        return
    experts = 0 if config.moe is None else config.moe.num_experts
    shared = 0 if config.moe is None else config.moe.shared_intermediate_size
    for what, size in (
        ("attention heads", config.num_heads),
        ("intermediate_size", config.intermediate_size),
        ("experts", experts),
        ("columns of the shared expert", shared),
    ):
        if size % degree:
            _refuse(f"{size} {what} don't divide by parallel.tensor={degree}", size, degree)
    keys = config.num_kv_heads
    if keys % degree and degree % keys:
        _refuse(
            f"{keys} key heads and parallel.tensor={degree}: one must divide the other",
            config.num_heads,
            degree,
        )
    start, stop = shard_range(config.vocab_size, degree - 1, degree)
    if start == stop:
        _refuse(
            f"a vocabulary of {config.vocab_size} leaves nothing for rank {degree - 1}", 1, degree
        )


def _refuse(what: str, size: int, degree: int) -> None:
    smaller = next(n for n in range(degree - 1, 0, -1) if size % n == 0)
    raise ArgumentError(what, next=f"parallel.tensor={smaller}, or a model of other sizes")


def shard_tensor_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    axis: Axis,
    rules: Mapping[str, str],
    *,
    sequence_parallel: bool = True,
    keep_experts: bool = False,
) -> TensorSharding:
    """Split a model's parameters over a 1-D mesh, in place; `axis` are the same ranks.

    `keep_experts` leaves stacks of experts whole, for `distribute_experts`.
    """
    return _TensorSharder(model, mesh, axis, rules, sequence_parallel, keep_experts).run()


class _TensorSharder:
    """One call of `shard_tensor_parallel`."""

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        axis: Axis,
        rules: Mapping[str, str],
        sequence_parallel: bool,
        keep_experts: bool,
    ) -> None:
        self.model, self.mesh, self.axis = model, mesh, axis
        self.keep_experts = keep_experts
        self.region = Region(axis, TokenSharding(axis) if sequence_parallel else None)
        self.styles = match_rules(model, rules)
        self.sharding = TensorSharding(axis, self.region)
        self.inside: set[str] = set()  # prefixes of modules inside a parallel region
        self.outside: set[str] = set()  # parameters in such a module, but behind its reduction
        self.complete: set[str] = set()  # replicated, and complete on every rank
        self.rows: dict[str, dict[str, Rows]] = {}  # module → parameter → the rows that are read

    def run(self) -> TensorSharding:
        for name, style in self.styles.items():
            if style == "vocabulary":
                self._shard_vocabulary(name)
            elif style == "attention":
                self._shard_attention(name)
            elif style == "feed_forward":
                self._shard_feed_forward(name)
            elif style == "final_norm" and self.region.tokens is not None:
                _gather_output(self.model.get_submodule(name), self.region.tokens)
        self._replicate_rest()
        for name, module in self.model.named_modules():
            localize(module, self.rows.get(name))
        return self.sharding

    def _names(self, style: str, inside: str) -> list[str]:
        return [n for n, s in self.styles.items() if s == style and n.startswith(f"{inside}.")]

    # ---- modules -----------------------------------------------------------------------------------

    def _shard_vocabulary(self, name: str) -> None:
        module: Any = self.model.get_submodule(name)
        total = module.weight.shape[0]
        module.total, module.region = total, self.region
        module.start, module.stop = shard_range(total, self.axis.index, self.axis.size)
        self._shard_module(name, 0)
        is_embedding = isinstance(module, nn.Embedding)
        module.__class__ = VocabParallelEmbedding if is_embedding else VocabParallelLinear

    def _shard_attention(self, name: str) -> None:
        module: Any = self.model.get_submodule(name)
        spec = module.spec
        if not isinstance(spec, AttentionSpec):
            raise ArgumentError(
                f"{name} is a layer with a state, which tensor parallelism does not split",
                next="parallel.tensor=1; split the data or the pipeline instead",
            )
        ranges = shard_heads(spec.num_heads, spec.num_kv_heads, self.axis.index, self.axis.size)
        if ranges is None:
            _refuse(f"heads of {name} don't divide by {self.axis.size}", 1, self.axis.size)
        assert ranges is not None, "_refuse raises"
        queries, keys = ranges
        for child in self._names("query", name):
            self._shard_module(child, 0)
            self._sum_squares(child, 1)
        for child in self._names("key", name):
            self._shard_keys(child, spec.num_kv_heads, keys)
        for child in self._names("output", name):
            self._shard_rows(child, RowParallelLinear)
        module.spec = dataclasses.replace(
            spec, num_heads=queries[1] - queries[0], num_kv_heads=keys[1] - keys[0]
        )
        self._enter(name)

    def _shard_keys(self, name: str, kv_heads: int, keys: Rows) -> None:
        """Key heads that several ranks share stay whole; a rank reads the rows of its head."""
        if kv_heads % self.axis.size == 0:
            self._shard_module(name, 0)
            self._sum_squares(name, 1)
            return
        for path in self._parameter_names(name):
            module, _, parameter = path.rpartition(".")
            size = self.model.get_parameter(path).shape[0] // kv_heads
            self.rows.setdefault(module, {})[parameter] = (keys[0] * size, keys[1] * size)
        self._sum_squares(name, self.axis.size // kv_heads)

    def _shard_feed_forward(self, name: str) -> None:
        module: Any = self.model.get_submodule(name)
        is_moe = isinstance(module, MoE)
        for child in self._names("column", name):
            self._shard_module(child, 0)
        for child in self._names("row", name):
            self._shard_rows(child, PartialRowLinear if is_moe else RowParallelLinear)
        if not is_moe:
            self._enter(name)
            return
        module.__class__, module.region = TensorParallelMoE, self.region
        self.inside.add(name)
        for child, inner in module.named_modules():
            if isinstance(inner, Router):
                self.complete |= {f"{name}.{child}.{n}" for n, _ in inner.named_parameters()}
        for child in self._names("experts", name):
            self._shard_experts(child)

    def _shard_experts(self, name: str) -> None:
        experts: Any = self.model.get_submodule(name)
        assert isinstance(experts, Experts), f"{name} is {type(experts)}"
        if self.keep_experts:
            names = self._parameter_names(name)
            self.sharding.placements.update(dict.fromkeys(names, Shard(0)))
            return
        total = experts.gate_up_proj.shape[0]
        if total % self.axis.size:
            _refuse(
                f"{total} experts of {name} don't divide by {self.axis.size}", total, self.axis.size
            )
        experts.first, stop = shard_range(total, self.axis.index, self.axis.size)
        experts.count, experts.region = stop - experts.first, self.region
        self._shard_module(name, 0)
        experts.__class__ = LocalExperts

    def _shard_rows(self, name: str, kind: type[nn.Linear]) -> None:
        """A linear whose columns are split; its bias is added behind the reduction."""
        linear: Any = self.model.get_submodule(name)
        self._distribute(f"{name}.weight", Shard(1))
        if linear.bias is not None and kind is RowParallelLinear:
            self.outside.add(f"{name}.bias")
        linear.__class__, linear.region = kind, self.region

    def _enter(self, name: str) -> None:
        module = self.model.get_submodule(name)
        module.register_forward_pre_hook(
            functools.partial(_enter_region, region=self.region), with_kwargs=True
        )
        self.inside.add(name)

    def _sum_squares(self, name: str, replicas: int) -> None:
        """A norm over all heads needs the heads of other ranks."""
        if name in dict(self.model.named_parameters()):
            return
        norm: Any = self.model.get_submodule(name)
        if hasattr(norm, "sum_over_ranks"):
            norm.total_size *= replicas
            norm.sum_over_ranks = functools.partial(sum_inside_parallel_region, axis=self.axis)

    # ---- parameters --------------------------------------------------------------------------------

    def _parameter_names(self, name: str) -> list[str]:
        """The parameters of a module (of the last one in a sequence), or the parameter itself."""
        if name in dict(self.model.named_parameters()):
            return [name]
        module = self.model.get_submodule(name)
        if isinstance(module, nn.Sequential):
            return self._parameter_names(f"{name}.{len(module) - 1}")
        return [f"{name}.{n}" for n, _ in module.named_parameters(recurse=False)]

    def _shard_module(self, name: str, dim: int) -> None:
        for path in self._parameter_names(name):
            self._distribute(path, Shard(dim))

    def _distribute(self, name: str, placement: Placement) -> None:
        """Replace a parameter by a DTensor; every rank has the same one before."""
        path, _, last = name.rpartition(".")
        module = self.model.get_submodule(path)
        parameter = module.get_parameter(last)
        full = parameter.detach()
        local = full
        if isinstance(placement, Shard):
            start, stop = shard_range(full.shape[placement.dim], self.axis.index, self.axis.size)
            local = full.narrow(placement.dim, start, stop - start).clone()
        sharded = DTensor.from_local(
            local, self.mesh, [placement], run_check=False, shape=full.shape, stride=full.stride()
        )
        setattr(module, last, nn.Parameter(sharded, parameter.requires_grad))
        self.sharding.placements[name] = placement

    def _replicate_rest(self) -> None:
        for name, _ in list(self.model.named_parameters()):
            if name in self.sharding.placements:
                continue
            self._distribute(name, Replicate())
            is_inside = any(name.startswith(f"{prefix}.") for prefix in self.inside)
            reads_all = self.region.tokens is None and (not is_inside or name in self.outside)
            if name not in self.complete and not reads_all:
                self.sharding.partial.add(name)


def _enter_region(
    module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], *, region: Region
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A pre-hook: all tokens for a split module. A `norm` argument is applied before.

    Attention has the positions of all tokens, which tell their layout.
    """
    x, *rest = arguments
    if region.tokens is not None and rest:
        region.tokens.shape = rest[0].shape
    norm = named.get("norm")
    if norm is not None:
        x, named = norm(x), named | {"norm": None}
    return (region.enter(x), *rest), named


def _gather_output(module: nn.Module, tokens: TokenSharding) -> None:
    module.register_forward_hook(lambda module, arguments, out: tokens.all_gather(out))
