"""FSDP2 and HSDP: data ranks share one copy of the weights, gathered layer by layer when needed.

    shard             `fully_shard` of each layer, then of the model: embedding, last norm, LM head
    forward           all-gather of a layer's weights; freed after it, except those of the last layer
    backward          all-gather again; reduce-scatter of its gradients, in float32

`parallel.data_shard` ranks share a copy. If there are more data ranks, copies are replicated, and
gradients are also all-reduced over them (HSDP). Every microbatch reduces, so that gradients stay sharded.

Parameters that stay whole: distributed experts, routers, adapters, quantized weights, and parameters of
another dtype than the rest, since a reduce-scatter has one dtype. Their gradients are reduced as in
data.py.

**Same bits.** In deterministic mode `OrderedReduceScatter` sends gradients by all-to-all and adds them
in the order of the tree: first the microbatches of a rank, then ranks. The sums are divided before they
are rounded, and the norm is that of the full gradients. It holds the gradients of all ranks for its
shard, so gradients need the memory of replicated ones.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from fulgurite.parallel.mesh import Axis
from fulgurite.quant import QuantTensor
from fulgurite.train.accumulate import (
    SumTree,
    count_terms,
    mean_totals,
    run_backward,
    store_gradients,
    take_gradients,
    trainable_parameters,
)
from fulgurite.train.balance import find_routers
from fulgurite.train.batch import Batch
from fulgurite.train.layout import StepTotals
from fulgurite.train.loss import LossSums
from fulgurite.train.optim.scale import scale_tensors
from fulgurite.train.parallel.data import ReplicatedData
from fulgurite.train.parallel.expert import distribute_experts, is_expert_shard
from fulgurite.train.parallel.layout_base import tree_all_reduce
from fulgurite.train.parallel.reduction import (
    reduce_in_order,
    tree_all_reduce_flat,
    tree_reduce_scatter,
)

# Methods of a model that a loss calls in place of `forward`.
FORWARD_METHODS = ("compute_hidden_states",)
# Biases are changed outside of the optimizer; adapters are small, and one rank writes their files.
WHOLE_PARAMETERS = ("correction_bias", "lora_A", "lora_B")


class ShardedData(ReplicatedData):
    """FSDP2 over `dp_shard`, replicated over `dp_replicate`; experts may be distributed."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.ordered: list[OrderedReduceScatter] = []
        self.units: list[FSDPModule] = []

    def shard(self, model: nn.Module) -> nn.Module:
        if self.degrees.ep > 1:
            distribute_experts(model, self.ranks)
        # Layers return views, and nothing writes to them in place.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        ignored = whole_parameters(model)
        layers = list(getattr(model, "layers", ()))
        for number, layer in enumerate(layers):
            self._shard_module(layer, ignored, reshard=number < len(layers) - 1)
        self._shard_module(model, ignored, reshard=False)
        for name in FORWARD_METHODS:
            if hasattr(model, name):
                register_fsdp_forward_method(model, name)
        return model

    def _shard_module(self, module: nn.Module, ignored: set[nn.Parameter], reshard: bool) -> None:
        names = ("dp_replicate", "dp_shard")
        # In deterministic mode the custom reduce-scatter also sums over replicas.
        is_hsdp = self.degrees.dp_replicate > 1 and not self.is_deterministic
        sharded: FSDPModule = fully_shard(
            module,
            mesh=self.ranks.mesh[names] if is_hsdp else self.ranks.mesh["dp_shard"],
            reshard_after_forward=reshard,
            mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32),
            ignored_params=ignored,
        )
        # Plain sums, which every backend has: `run_microbatches` divides by tokens.
        self.units.append(sharded)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        if hasattr(sharded, "set_reduce_scatter_unused_params"):  # since torch 2.13
            sharded.set_reduce_scatter_unused_params(True, recurse=False)
        if self.is_deterministic:
            axes = self.ranks.axis("dp_shard"), self.ranks.axis("dp_replicate")
            self.ordered.append(OrderedReduceScatter(*axes))
            sharded.set_custom_reduce_scatter(self.ordered[-1])  # type: ignore[arg-type]

    def run_microbatches(self, loss_module: nn.Module, batches: Sequence[Batch]) -> StepTotals:
        self.reshard()
        if self.is_deterministic:
            return self._run_sharded_in_order(loss_module, batches)
        return super().run_microbatches(loss_module, batches)

    def reshard(self) -> None:
        """Free gathered weights. A forward without a backward leaves those that it used last, and
        `named_parameters` would give them instead of the shards."""
        for unit in self.units:
            unit.reshard()

    def sum_over_data(self, x: Tensor) -> Tensor:
        self.reshard()  # an evaluation ends here
        return super().sum_over_data(x)

    def _run_sharded_in_order(self, loss_module: nn.Module, batches: Sequence[Batch]) -> StepTotals:
        parameters = trainable_parameters(loss_module)
        whole = [p for p in parameters if not is_fsdp_shard(p)]
        counts = (count_terms(loss_module, batch) for batch in batches)
        tokens = sum(counts, torch.zeros((), dtype=torch.int64))
        tokens = tree_all_reduce(tokens.to(self.ranks.device), self.ranks.axis("tokens"))
        tree = SumTree()
        for comm in self.ordered:
            comm.tree = SumTree()  # a step that failed may have left some leaves
        for number, batch in enumerate(batches):
            is_last = number == len(batches) - 1
            for comm in self.ordered:
                comm.divisor = tokens.clamp(min=1) if is_last else None
            for parameter in parameters:  # zeros of the microbatches before
                parameter.grad = None
            sums = run_backward(loss_module, batch)
            tree.push([*take_gradients(whole), *sums])
        values, count = tree.total(), len(whole)
        gradients = reduce_in_order(whole, values[:count], self.ranks.axis("tokens"))
        store_gradients(whole, gradients, tokens)
        return mean_totals(self.sum_over_tokens(LossSums(*values[count:])))  # type: ignore[arg-type]

    def reduction_groups(
        self, parameters: Sequence[nn.Parameter]
    ) -> list[tuple[Axis, list[nn.Parameter]]]:
        return super().reduction_groups([p for p in parameters if not is_fsdp_shard(p)])


class OrderedReduceScatter:
    """FSDP2's reduce-scatter of one module, with sums in the order of a `SumTree`.

    Microbatches before the last (`divisor` None) return zeros. The last returns the sum of all
    microbatches and ranks, divided.
    """

    def __init__(self, shard: Axis, replicate: Axis) -> None:
        self.shard, self.replicate = shard, replicate
        self.divisor: Tensor | None = None
        self.tree = SumTree()

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self.tree.push([input_tensor.view(self.shard.size, -1).clone()])
        if self.divisor is None:
            output_tensor.zero_()
            return
        total_WS, self.tree = self.tree.total()[0], SumTree()
        assert total_WS is not None, "a leaf was just pushed"
        piece = tree_reduce_scatter(total_WS, self.shard)
        piece = tree_all_reduce_flat(piece, self.replicate)
        scale_tensors([piece], self.divisor.float().reciprocal())  # as `store_gradients` does
        output_tensor.copy_(piece)


def whole_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Parameters that FSDP leaves alone."""
    counts = Counter[torch.dtype]()
    quantized = {p for p in model.parameters() if isinstance(p, QuantTensor)}
    for parameter in model.parameters():
        counts[parameter.dtype] += 0 if parameter in quantized else parameter.numel()
    main = counts.most_common(1)[0][0]
    # An auxiliary loss reads routers behind the forward of their layers, which frees gathered weights.
    routers = {parameter for router in find_routers(model) for parameter in router.parameters()}
    return (
        routers
        | quantized
        | {
            parameter
            for name, parameter in model.named_parameters()
            if is_expert_shard(parameter)
            or parameter.dtype != main
            or name.endswith(WHOLE_PARAMETERS)
        }
    )


def is_fsdp_shard(parameter: nn.Parameter) -> bool:
    """Whether FSDP reduces the gradient of a parameter."""
    names = getattr(getattr(parameter, "device_mesh", None), "mesh_dim_names", None) or ()
    return "dp_shard" in names
