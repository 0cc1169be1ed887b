"""Mixtures of experts: hidden states in, the weighted sum of each token's experts out.

Routing rules look alike and differ where it matters. Each family names one of these, a `Rule` made of
its configuration's numbers:

    Mixtral, Qwen3-MoE   softmax_then_top_k   the best k probabilities, renormalised or not
    DeepSeek-V2          grouped_softmax      the same in the best groups (by best expert), scaled
    DeepSeek-V3          grouped_sigmoid      sigmoid scores; a bias and the best groups (by best
                                              two) choose; plain scores weigh, renormalised, scaled
    gpt-oss              top_k_then_softmax   the best k logits, softmax among them
    Llama 4              top_k_then_sigmoid   the best k logits, sigmoid of each

Experts are stored stacked, gate and up above each other: `gate_up` [E, 2I, D] and `down` [E, D, I],
dense or packed, which is what the kernels of `fulgurite.kernels.moe.ops` read.

Shapes: T tokens; D hidden size; E experts; k experts of a token; I inner size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fulgurite.kernels.common.multi_stream import beside, forks
from fulgurite.kernels.elementwise import ops
from fulgurite.kernels.gemm.modules import natural_activations
from fulgurite.kernels.gemm.quant_linear import PLAIN
from fulgurite.kernels.grouped_gemm.ops import CLAMPED
from fulgurite.kernels.moe.ops import Gate, Routes, Rule, moe_experts, route_tokens
from fulgurite.kernels.moe.routing import Norm, are_few
from fulgurite.models.config import ExpertsConfig, ModelConfig
from fulgurite.models.layers import Block, GatedMLP, RMSNorm
from fulgurite.quant import QuantTensor

RoutingRule = Callable[[ExpertsConfig], Rule]


def softmax_then_top_k(config: ExpertsConfig) -> Rule:
    return Rule(config.per_token, "softmax", renormalise=config.renormalise)


def top_k_then_softmax(config: ExpertsConfig) -> Rule:
    return Rule(config.per_token, "softmax", choose_first=True)


def top_k_then_sigmoid(config: ExpertsConfig) -> Rule:
    return Rule(config.per_token, "sigmoid", choose_first=True)


def grouped_softmax(config: ExpertsConfig) -> Rule:
    return Rule(
        config.per_token,
        "softmax",
        scaling=config.scaling,
        groups=config.groups,
        groups_kept=config.groups_kept,
    )


def grouped_sigmoid(config: ExpertsConfig) -> Rule:
    return Rule(
        config.per_token,
        "sigmoid",
        renormalise=config.renormalise,
        scaling=config.scaling,
        groups=config.groups,
        groups_kept=config.groups_kept,
        group_by="two",
    )


class Router(nn.Module):
    """Scores the experts for each token in float32 and picks by a rule.

    `bias` is added to the logits; `choice_bias`, always float32, only takes part in choosing.
    """

    def __init__(
        self,
        hidden: int,
        config: ExpertsConfig,
        rule: RoutingRule,
        bias: bool = False,
        choice_bias: bool = False,
    ) -> None:
        super().__init__()
        self.rule = rule(config)
        self.weight = nn.Parameter(torch.empty(config.count, hidden))
        self.bias = nn.Parameter(torch.empty(config.count)) if bias else None
        self.choice_bias = None
        if choice_bias:
            self.choice_bias = nn.Parameter(torch.empty(config.count, dtype=torch.float32))

    def forward(self, x_TD: Tensor, norm: Norm | None = None) -> Routes:
        return route_tokens(x_TD, self.weight, self.rule, self.bias, self.choice_bias, norm)


def gated(activation: str) -> Gate:
    """activation(gate) * up, of the two halves of a [.., 2I] tensor."""
    return Gate(activation)


def clamped_gate(alpha: float, limit: float) -> Gate:
    """gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), with both clamped first."""
    return Gate(CLAMPED, alpha, limit)


class Experts(nn.Module):
    """All experts of a layer. `gate_up` and `down` may be replaced by packed weights.

    `activations` says what rows are quantized to for packed weights: None is what multiplies fastest
    on the weight's device.
    """

    takes_packed = ("gate_up", "down")

    def __init__(
        self,
        hidden: int,
        config: ExpertsConfig,
        gate: Gate,
        bias: bool = False,
        weigh_input: bool = False,
    ) -> None:
        super().__init__()
        self.gate = gate
        self.weigh_input = weigh_input
        self.activations: str | None = None
        count, inner = config.count, config.inner
        self.gate_up = nn.Parameter(torch.empty(count, 2 * inner, hidden))
        self.down = nn.Parameter(torch.empty(count, hidden, inner))
        self.gate_up_bias = nn.Parameter(torch.empty(count, 2 * inner)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(count, hidden)) if bias else None

    def forward(
        self,
        x_TD: Tensor,
        routes: Routes,
        norm: Norm | None = None,
        onto_TD: Tensor | None = None,
    ) -> Tensor:
        """The weighted sum of each token's experts, of norm(x) and added onto `onto_TD`."""
        return moe_experts(
            x_TD,
            routes,
            self.gate_up,
            self.down,
            self.gate,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias,
            weigh_input=self.weigh_input,
            activations=(self._activations(self.gate_up), self._activations(self.down)),
            norm=norm,
            onto_TD=onto_TD,
        )

    def _activations(self, weight: Tensor) -> str:
        if not isinstance(weight, QuantTensor):
            return PLAIN
        return natural_activations(weight) if self.activations is None else self.activations


class MixtureOfExperts(Block):
    """router -> experts, plus the shared expert where there is one; on a GPU both at once."""

    def __init__(self, router: Router, experts: Experts, shared: GatedMLP | None = None) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared = shared

    def forward(
        self, x_XD: Tensor, *, norm: RMSNorm | None = None, onto_XD: Tensor | None = None
    ) -> Tensor:
        """Of norm(x) where one is given, and added onto `onto_XD`."""
        few = are_few(x_XD) and type(self.experts) is Experts
        if not few or self.shared is not None or norm is None:
            x_XD, norm = x_XD if norm is None else norm(x_XD), None
        given = None if norm is None else Norm(norm.weight, norm.eps, norm.offset)
        shared = self.shared
        if shared is None:
            return self._routed(x_XD, few, given, onto_XD)
        if not forks(x_XD):
            return shared(x_XD, onto_XD=self._routed(x_XD, few, onto_XD=onto_XD))
        both = beside(
            lambda: self._routed(x_XD, few), lambda: shared(x_XD, onto_XD=onto_XD), x_XD.device
        )
        return ops.add(*both)

    def _routed(
        self, x_XD: Tensor, few: bool, norm: Norm | None = None, onto_XD: Tensor | None = None
    ) -> Tensor:
        x_TD = x_XD.flatten(0, -2)
        routes = self.router(x_TD) if norm is None else self.router(x_TD, norm)
        if few:
            onto_TD = None if onto_XD is None else onto_XD.flatten(0, -2)
            out_TD: Tensor = self.experts(x_TD, routes, norm, onto_TD)
            return out_TD.view(x_XD.shape)
        # ranks that share the experts sum before anything is added
        out_XD: Tensor = self.experts(x_TD, routes).view(x_XD.shape)
        return out_XD if onto_XD is None else ops.add(onto_XD, out_XD)


def shared_expert(config: ModelConfig) -> GatedMLP | None:
    """The expert that every token visits, as a plain MLP."""
    assert config.experts is not None, f"{config.family} has no experts"
    inner = config.experts.shared_inner
    return GatedMLP(config.hidden, inner, config.activation, config.mlp_bias) if inner else None
