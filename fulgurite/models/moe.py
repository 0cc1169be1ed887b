"""Mixture of experts (MoE): hidden states in, the weighted sum of each token's experts out.

Each family picks one of these routings. It becomes a `RouterConfig` with the numbers of its config.

    Mixtral, Qwen, OLMoE softmax_then_topk   top-k of the softmax, renormalized or not
    DeepSeek-V2          grouped_softmax     the same within the best groups (by their best expert),
                                             scaled
    DeepSeek-V3          grouped_sigmoid     sigmoid scores. Selection adds a correction bias and
                                             stays within the best groups (by their best two
                                             experts). Weights are the scores without bias,
                                             renormalized and scaled
    gpt-oss, Granite     topk_then_softmax   top-k of the logits, then softmax over them
    Llama 4              topk_then_sigmoid   top-k of the logits, then sigmoid of each
    ERNIE 4.5            corrected_softmax   softmax scores. Selection adds a correction bias. Weights
                                             are the scores without bias, renormalized
    Phi-MoE              sparsemixer         one expert after the other: softmax over those near it

Expert weights are stacked, gate rows before up rows: `gate_up_proj` [E, 2I, D] and `down_proj` [E,
D, I]. They are dense or quantized. This is the layout that `fulgurite.kernels.moe.ops` reads.

Shapes: T tokens; D hidden size; E experts; k experts per token; I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from fulgurite.kernels.common.multi_stream import can_overlap, run_overlapped
from fulgurite.kernels.elementwise import ops as elementwise
from fulgurite.kernels.elementwise.gated_activation import CLAMPED_SWIGLU, GatedActivation
from fulgurite.kernels.gemm.float32_linear import float32_linear
from fulgurite.kernels.gemm.fused_projections import fused_gate_up
from fulgurite.kernels.gemm.modules import default_activation_format, without_batch_scale
from fulgurite.kernels.gemm.reference import UNQUANTIZED
from fulgurite.kernels.moe.ops import fused_experts, run_sorted_rows
from fulgurite.kernels.moe.router_config import RmsNormArgs, RouterConfig, Routes
from fulgurite.kernels.moe.routing import is_small_batch, route, route_tokens
from fulgurite.models.blocks import GatedMLP, ResidualBlock, project_add
from fulgurite.models.config import ModelConfig, MoEConfig
from fulgurite.models.norms import RMSNorm
from fulgurite.quant import QuantTensor

RoutingFunction = Callable[[MoEConfig], RouterConfig]


class RouteObserver(Protocol):
    """Sees the routes of a router; with `needs_logits` also its logits, float32 [T, E]."""

    needs_logits: bool

    def __call__(self, router: Router, routes: Routes, logits_TE: Tensor | None) -> None: ...


def softmax_then_topk(config: MoEConfig) -> RouterConfig:
    return RouterConfig(config.top_k, "softmax", renormalize=config.renormalize)


def topk_then_softmax(config: MoEConfig) -> RouterConfig:
    return RouterConfig(config.top_k, "softmax", topk_before_scoring=True)


def topk_then_sigmoid(config: MoEConfig) -> RouterConfig:
    return RouterConfig(config.top_k, "sigmoid", topk_before_scoring=True)


def grouped_softmax(config: MoEConfig) -> RouterConfig:
    return RouterConfig(
        config.top_k,
        "softmax",
        scaling_factor=config.routed_scaling_factor,
        num_groups=config.num_groups,
        topk_groups=config.topk_groups,
    )


def grouped_sigmoid(config: MoEConfig) -> RouterConfig:
    return RouterConfig(
        config.top_k,
        "sigmoid",
        renormalize=config.renormalize,
        scaling_factor=config.routed_scaling_factor,
        num_groups=config.num_groups,
        topk_groups=config.topk_groups,
        group_score="top2_sum",
    )


def corrected_softmax(config: MoEConfig) -> RouterConfig:
    return RouterConfig(
        config.top_k, "softmax", renormalize=True, scaling_factor=config.routed_scaling_factor
    )


def sparsemixer(config: MoEConfig) -> RouterConfig:
    return RouterConfig(config.top_k, "sparsemixer", jitter_eps=config.jitter_eps)


class Router(nn.Module):
    """Scores the experts for each token in float32 and selects the top k.

    `bias` is added to the logits. `correction_bias`, always float32, affects only the selection.
    `float32`: the weight is float32 in a model of any dtype, as some checkpoints store it.
    `observer`: if set, is called for each forward.
    """

    observer: RouteObserver | None = None

    def __init__(
        self,
        hidden_size: int,
        config: MoEConfig,
        routing: RoutingFunction,
        bias: bool = False,
        correction_bias: bool = False,
        float32: bool = False,
    ) -> None:
        super().__init__()
        self.config = routing(config)
        dtype = torch.float32 if float32 else None
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(config.num_experts)) if bias else None
        self.correction_bias = None
        if correction_bias:
            self.correction_bias = nn.Parameter(
                torch.empty(config.num_experts, dtype=torch.float32)
            )

    def forward(self, x_TD: Tensor, norm: RmsNormArgs | None = None) -> Routes:
        if self.observer is not None and self.observer.needs_logits:
            x_TD = x_TD if norm is None else elementwise.rms_norm(x_TD, *norm)
            logits_TE = float32_linear(x_TD, self.weight, self.bias)
            routes = route(logits_TE, self.config, self.correction_bias)
            self.observer(self, routes, logits_TE)
            return routes
        routes = route_tokens(x_TD, self.weight, self.config, self.bias, self.correction_bias, norm)
        if self.observer is not None:
            self.observer(self, routes, None)
        return routes


def gated_activation(activation: str) -> GatedActivation:
    """y = activation(gate) * up, where gate and up are the halves of a [.., 2I] tensor."""
    return GatedActivation(activation)


def clamped_swiglu(alpha: float, limit: float) -> GatedActivation:
    """gpt-oss: y = (up + 1) * gate * sigmoid(alpha * gate), with gate and up clamped first."""
    return GatedActivation(CLAMPED_SWIGLU, alpha, limit)


class Experts(nn.Module):
    """All experts of a layer. `gate_up_proj` and `down_proj` may be dense or quantized.

    `activations` is the activation format for quantized weights. None selects the fastest format
    on the device of the weights.
    """

    quantizable = ("gate_up_proj", "down_proj")

    def __init__(
        self,
        hidden_size: int,
        config: MoEConfig,
        activation: GatedActivation,
        bias: bool = False,
        apply_router_weight_on_input: bool = False,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.apply_router_weight_on_input = apply_router_weight_on_input
        self.activations: str | None = None
        num_experts, size = config.num_experts, config.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, size))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(num_experts, 2 * size)) if bias else None
        self.down_proj_bias = nn.Parameter(torch.empty(num_experts, hidden_size)) if bias else None

    def forward(
        self,
        x_TD: Tensor,
        routes: Routes,
        norm: RmsNormArgs | None = None,
        residual_TD: Tensor | None = None,
    ) -> Tensor:
        """The weighted sum of each token's experts; `norm` and residual as in `ResidualBlock`.

        Rows that another rank has sent in FP8 are a `QuantTensor`.
        """
        if isinstance(x_TD, QuantTensor):
            assert norm is None and residual_TD is None, "rows of other ranks have neither"
            return run_sorted_rows(
                x_TD,
                routes,
                self.gate_up_proj,
                self.down_proj,
                self.activation,
                gate_up_bias=self.gate_up_proj_bias,
                down_bias=self.down_proj_bias,
                apply_router_weight_on_input=self.apply_router_weight_on_input,
                activations=(self.input_format, self._activations(self.down_proj)),
            )
        return fused_experts(
            x_TD,
            routes,
            self.gate_up_proj,
            self.down_proj,
            self.activation,
            gate_up_bias=self.gate_up_proj_bias,
            down_bias=self.down_proj_bias,
            apply_router_weight_on_input=self.apply_router_weight_on_input,
            activations=(self._activations(self.gate_up_proj), self._activations(self.down_proj)),
            norm=norm,
            residual_TD=residual_TD,
        )

    @property
    def input_format(self) -> str:
        """The format that rows are quantized to before the first GEMM, or "none"."""
        return self._activations(self.gate_up_proj)

    def _activations(self, weight: Tensor) -> str:
        if not isinstance(weight, QuantTensor):
            return UNQUANTIZED
        format = default_activation_format(weight) if self.activations is None else self.activations
        return without_batch_scale(format)


class MoE(ResidualBlock):
    """y = experts(x, router(x)) + shared_expert(x). On GPUs the two terms run on two streams."""

    def __init__(
        self, router: Router, experts: Experts, shared_expert: GatedMLP | None = None
    ) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared_expert = shared_expert

    def forward(
        self, x_XD: Tensor, *, norm: RMSNorm | None = None, residual_XD: Tensor | None = None
    ) -> Tensor:
        """Apply `norm` to x first if given, and add the output to `residual_XD` if given."""
        small_batch = is_small_batch(x_XD) and type(self.experts) is Experts
        if not small_batch or self.shared_expert is not None or norm is None:
            x_XD, norm = x_XD if norm is None else norm(x_XD), None
        norm_args = None if norm is None else RmsNormArgs(norm.weight, norm.eps, norm.offset)
        shared = self.shared_expert
        if shared is None:
            return self._run_experts(x_XD, small_batch, norm_args, residual_XD)
        if not can_overlap(x_XD):
            routed_XD = self._run_experts(x_XD, small_batch, residual_XD=residual_XD)
            return shared(x_XD, residual_XD=routed_XD)
        outputs = run_overlapped(
            lambda: self._run_experts(x_XD, small_batch),
            lambda: shared(x_XD, residual_XD=residual_XD),
            x_XD.device,
        )
        return elementwise.add(*outputs)

    def _run_experts(
        self,
        x_XD: Tensor,
        small_batch: bool,
        norm: RmsNormArgs | None = None,
        residual_XD: Tensor | None = None,
    ) -> Tensor:
        x_TD = x_XD.flatten(0, -2)
        routes = self.router(x_TD) if norm is None else self.router(x_TD, norm)
        if small_batch:
            residual_TD = None if residual_XD is None else residual_XD.flatten(0, -2)
            out_TD: Tensor = self.experts(x_TD, routes, norm, residual_TD)
            return out_TD.view(x_XD.shape)
        # With experts sharded over ranks, the sum over ranks comes before the residual add.
        out_XD: Tensor = self.experts(x_TD, routes).view(x_XD.shape)
        return out_XD if residual_XD is None else elementwise.add(residual_XD, out_XD)


class SharedExpertGate(nn.Linear):
    """One factor for each token. A weight of one row stays dense in a quantized model."""


class GatedSharedExpert(GatedMLP):
    """A shared expert whose output each token scales by itself (Qwen2-MoE).

    y = sigmoid(output_gate(x)) * down_proj(activation(gate_proj(x)) * up_proj(x)), without biases.
    The factor multiplies the input of down_proj: if ranks share the intermediate size, they sum
    outputs, and gradients, that are partial as those of the other weights.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, activation: str) -> None:
        super().__init__(hidden_size, intermediate_size, activation)
        self.output_gate = SharedExpertGate(hidden_size, 1, bias=False)

    def forward(
        self, x_XD: Tensor, *, norm: RMSNorm | None = None, residual_XD: Tensor | None = None
    ) -> Tensor:
        """Apply `norm` to x first if given, and add the output to `residual_XD` if given."""
        x_XD = x_XD if norm is None else norm(x_XD)
        gate, up = self.fused_projections
        intermediate_XI = fused_gate_up(x_XD, gate, up, self.activation)
        gate_X1 = self.output_gate(x_XD)
        scaled_XI = elementwise.activation_and_mul(gate_X1, intermediate_XI, "sigmoid")
        return project_add(residual_XD, scaled_XI, self.down_proj)


def build_shared_expert(config: ModelConfig) -> GatedMLP | None:
    """The shared expert, which processes every token."""
    assert config.moe is not None, f"{config.family} has no experts"
    size = config.moe.shared_intermediate_size
    if not size:
        return None
    if config.moe.shared_expert_gate:
        return GatedSharedExpert(config.hidden_size, size, config.activation)
    return GatedMLP(config.hidden_size, size, config.activation, config.mlp_bias)


def build_moe(
    config: ModelConfig,
    routing: RoutingFunction,
    *,
    correction_bias: bool = False,
    float32_router: bool = False,
) -> MoE:
    """Router, experts and shared expert of a layer whose experts are gated MLPs without biases."""
    assert config.moe is not None, f"{config.family} has no experts"
    router = Router(
        config.hidden_size,
        config.moe,
        routing,
        correction_bias=correction_bias,
        float32=float32_router,
    )
    experts = Experts(config.hidden_size, config.moe, gated_activation(config.activation))
    return MoE(router, experts, build_shared_expert(config))
