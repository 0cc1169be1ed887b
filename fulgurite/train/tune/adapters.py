"""LoRA adapters as modules: what a linear and stacked experts are wrapped in.

    LoRALinear    y = base(x) + scaling * (dropout(x) @ A.T) @ B.T
    LoRAExperts   the same for each expert's gate_up_proj and down_proj, with an A and a B of its own

The base stays as it is: dense or quantized, frozen, bit-identical. A and B have a dtype of their own
(float32 by default) and are rounded to that of x for the products. In deterministic mode all products
are row by row the same, as those of the base: so an engine on the same modules gives the same bits.

Code that reads `module.weight` of a wrapped linear (multi-head latent attention, tied LM heads) gets
the base weight with the adapter added.

Shapes: T tokens; D inputs; O outputs; r rank; E experts; S pairs of token and expert; I intermediate
size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from fulgurite.determinism import is_deterministic
from fulgurite.errors import ArgumentError
from fulgurite.kernels.elementwise import ops as elementwise
from fulgurite.kernels.elementwise.gated_activation import CLAMPED_SWIGLU, GatedActivation
from fulgurite.kernels.gemm.dense_linear import dense_linear
from fulgurite.kernels.gemm.modules import QuantLinear
from fulgurite.kernels.grouped_gemm.ops import grouped_gemm
from fulgurite.kernels.moe.ops import ExpertOrder, combine, gather_weights, sort_by_expert
from fulgurite.kernels.moe.router_config import RmsNormArgs, Routes
from fulgurite.models.moe import Experts
from fulgurite.quant import QuantTensor


class LoRAWeights(NamedTuple):
    """A and B of one weight, and what their product is multiplied by.

    `path` is the name of the weight in the model, without a trailing `.weight`.
    """

    path: str
    a: nn.Parameter
    b: nn.Parameter
    scaling: float


class LoRAModule(nn.Module):
    """Base of wrapped modules. `is_enabled`: False leaves the base alone."""

    base_layer: nn.Module
    scaling: float
    is_enabled: bool = True

    def weights(self, path: str) -> Iterator[LoRAWeights]:
        """The adapters of the module at `path`."""
        raise NotImplementedError

    def merged(self) -> nn.Module:
        """A plain dense module with the adapters added to its weights."""
        raise NotImplementedError


class LoRALinear(LoRAModule):
    """A linear, dense or quantized, with an adapter."""

    def __init__(
        self,
        base_layer: nn.Linear | QuantLinear,
        rank: int,
        scaling: float,
        dropout: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.in_features, self.out_features = base_layer.in_features, base_layer.out_features
        self.scaling, self.dropout = scaling, dropout
        device = base_layer.weight.device
        self.lora_A = nn.Parameter(torch.empty(rank, self.in_features, dtype=dtype, device=device))
        self.lora_B = nn.Parameter(torch.zeros(self.out_features, rank, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base_layer(x)
        if not self.is_enabled:
            return y
        dropped = F.dropout(x, self.dropout, self.training) if self.dropout else x
        a, b = self.lora_A.to(x.dtype), self.lora_B.to(x.dtype)
        if is_deterministic():
            delta = dense_linear(dense_linear(dropped, a), b)
        else:
            delta = F.linear(F.linear(dropped, a), b)
        return elementwise.add(y, delta, self.scaling)

    @property
    def weight(self) -> Tensor:
        """The weight of the base, with the adapter if it is enabled."""
        weight = as_dense(self.base_layer.weight)  # type: ignore[arg-type]
        return self._add_adapter(weight) if self.is_enabled else weight

    def _add_adapter(self, weight: Tensor) -> Tensor:
        return add_product(weight, self.lora_A, self.lora_B, self.scaling)

    @property
    def bias(self) -> Tensor | None:
        bias: Tensor | None = self.base_layer.bias  # type: ignore[assignment]
        return bias

    def weights(self, path: str) -> Iterator[LoRAWeights]:
        yield LoRAWeights(path, self.lora_A, self.lora_B, self.scaling)

    @torch.no_grad()
    def merged(self) -> nn.Module:
        weight = as_dense(self.base_layer.weight)  # type: ignore[arg-type]
        return make_dense(self.base_layer, self._add_adapter(weight))

    def extra_repr(self) -> str:
        return f"rank={self.lora_A.shape[0]}, scaling={self.scaling:g}, dropout={self.dropout:g}"


def make_dense(linear: nn.Linear | QuantLinear, weight: Tensor) -> nn.Module:
    """A dense linear with this weight, and with the bias of another linear."""
    bias = linear.bias
    dense = nn.Linear(linear.in_features, linear.out_features, bias is not None, device="meta")
    if isinstance(linear, nn.Linear):  # the subclasses of some families
        dense.__class__ = type(linear)
    dense.weight = nn.Parameter(weight, requires_grad=False)
    dense.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
    return dense.train(linear.training)


class LoRAExperts(LoRAModule):
    """Stacked experts with an adapter for each expert; `adapted`: which weights have one.

    Dropout, as that of linears, applies to the input of A alone.
    """

    def __init__(
        self,
        base_layer: Experts,
        adapted: tuple[str, ...],
        rank: int,
        scaling: float,
        dropout: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.base_layer: Experts = base_layer
        self.scaling, self.dropout, self.adapted = scaling, dropout, adapted
        for name in adapted:
            experts, outputs, inputs = getattr(base_layer, name).shape
            options = {"dtype": dtype, "device": getattr(base_layer, name).device}
            a_ErD = torch.empty(experts, rank, inputs, **options)
            self.register_parameter(f"{name}_lora_A", nn.Parameter(a_ErD))
            b_EOr = torch.zeros(experts, outputs, rank, **options)
            self.register_parameter(f"{name}_lora_B", nn.Parameter(b_EOr))

    def forward(
        self,
        x_TD: Tensor,
        routes: Routes,
        norm: RmsNormArgs | None = None,
        residual_TD: Tensor | None = None,
    ) -> Tensor:
        """The weighted sum of each token's experts; see `Experts.forward`."""
        base = self.base_layer
        if not self.is_enabled:
            out: Tensor = base(x_TD, routes, norm, residual_TD)
            return out
        x_TD = x_TD if norm is None else elementwise.rms_norm(x_TD, *norm)
        order = sort_by_expert(routes.experts_Tk, base.gate_up_proj.shape[0])
        row_weights_S = None
        if base.apply_router_weight_on_input:
            row_weights_S = gather_weights(routes.weights_Tk, order)
        sums_S2I = self._project(x_TD, "gate_up_proj", order, True, row_weights_S)
        y_SD = self._project(apply_gate(base.activation, sums_S2I), "down_proj", order)
        weights_Tk = None if base.apply_router_weight_on_input else routes.weights_Tk
        out_TD = combine(y_SD, order, weights_Tk)
        return out_TD if residual_TD is None else elementwise.add(residual_TD, out_TD)

    def _project(
        self,
        x: Tensor,
        name: str,
        order: ExpertOrder,
        gathers: bool = False,
        row_weights_S: Tensor | None = None,
    ) -> Tensor:
        """Rows times the weight of their expert, plus the adapter's product; `gathers`: x are tokens."""
        base, offsets_E = self.base_layer, order.offsets_E
        rows: dict[str, Any] = {
            "row_indices_S": order.token_S if gathers else None,
            "positions": order.position_Tk if gathers else None,
            "row_weights_S": row_weights_S,
        }
        weight, bias = getattr(base, name), getattr(base, f"{name}_bias")
        activations = base._activations(weight)
        y_SO = grouped_gemm(x, offsets_E, weight, bias, activations=activations, **rows)
        if name not in self.adapted:
            return y_SO
        dropped = F.dropout(x, self.dropout, self.training) if self.dropout else x
        a_ErD, b_EOr = (
            getattr(self, f"{name}_lora_{part}").to(x.dtype).contiguous() for part in "AB"
        )
        h_Sr = grouped_gemm(dropped, offsets_E, a_ErD, **rows)
        return elementwise.add(y_SO, grouped_gemm(h_Sr, offsets_E, b_EOr), self.scaling)

    def weights(self, path: str) -> Iterator[LoRAWeights]:
        for name in self.adapted:
            a, b = (getattr(self, f"{name}_lora_{part}") for part in "AB")
            yield LoRAWeights(f"{path}.{name}", a, b, self.scaling)

    @torch.no_grad()
    def merged(self) -> nn.Module:
        experts = Experts.__new__(Experts)
        nn.Module.__init__(experts)
        for name in ("activation", "apply_router_weight_on_input"):
            setattr(experts, name, getattr(self.base_layer, name))
        experts.activations = None
        for name, parameter in self.base_layer.named_parameters(recurse=False):
            dense = as_dense(parameter)
            if name in self.adapted:
                a, b = (getattr(self, f"{name}_lora_{part}") for part in "AB")
                dense = add_product(dense, a, b, self.scaling)
            experts.register_parameter(name, nn.Parameter(dense, requires_grad=False))
        for name in ("gate_up_proj_bias", "down_proj_bias"):
            if not hasattr(experts, name):
                experts.register_parameter(name, None)
        return experts.train(self.training)

    def extra_repr(self) -> str:
        return f"adapted={', '.join(self.adapted)}, scaling={self.scaling:g}"


def as_dense(weight: Tensor) -> Tensor:
    """The weight itself, or what a quantized one stands for."""
    return weight.dequantize() if isinstance(weight, QuantTensor) else weight


def add_product(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """weight + scaling * b @ a, summed in float32 and rounded once to the weight's dtype.

    The weight may be a shard of FSDP2; adapters are whole on every rank.
    """
    product = scaling * (b.float() @ a.float())
    if isinstance(weight, DTensor):
        mesh = weight.device_mesh
        product = DTensor.from_local(product, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return (weight.float() + product).to(weight.dtype)


def apply_gate(gate: GatedActivation, sums_S2I: Tensor) -> Tensor:
    """`gate(sums)`, by kernels that compute each row alike."""
    if not gate.is_gated:
        return sums_S2I
    gate_SI, up_SI = sums_S2I.chunk(2, dim=-1)
    if gate.kind != CLAMPED_SWIGLU:
        return elementwise.activation_and_mul(gate_SI, up_SI, gate.kind)
    gate_SI, up_SI = gate_SI.clamp(max=gate.limit), up_SI.clamp(-gate.limit, gate.limit)
    return (up_SI + 1) * gate_SI * elementwise.activate(gate.alpha * gate_SI, "sigmoid")


def init_adapter(a: Tensor, seed: int) -> None:
    """Kaiming-uniform values with a = sqrt(5), as PEFT's: within 1 / sqrt(inputs). B stays zero."""
    generator = torch.Generator().manual_seed(seed)
    bound = 1.0 / math.sqrt(a.shape[-1])
    values = torch.empty(a.shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
    with torch.no_grad():
        a.copy_(values)


def check_rank(rank: int, dropout: float) -> None:
    if rank < 1:
        raise ArgumentError(f"rank={rank} must be 1 or more", next="--tune.rank 16")
    if not 0.0 <= dropout < 1.0:
        raise ArgumentError(f"dropout={dropout} must be at least 0 and below 1")
