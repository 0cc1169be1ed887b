"""Mixtures of experts: hidden states in, the weighted sum of each token's experts out.

Routing rules look alike and differ where it matters, so each is a function of its own:

    Mixtral, Qwen3-MoE   softmax_then_top_k   the best k probabilities, renormalised or not
    DeepSeek-V2          grouped_softmax      the same in the best groups (by best expert), scaled
    DeepSeek-V3          grouped_sigmoid      sigmoid scores; a bias and the best groups (by best
                                              two) choose; plain scores weigh, renormalised, scaled
    gpt-oss              top_k_then_softmax   the best k logits, softmax among them
    Llama 4              top_k_then_sigmoid   the best k logits, sigmoid of each

Experts are stored stacked, gate and up above each other: `gate_up` [E, 2I, D] and `down` [E, D, I],
which is what grouped kernels read. `Experts.forward` is the one place such a kernel has to replace.

Shapes: T tokens; D hidden size; E experts; k experts of a token; I inner size; G groups of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fulgurite.models.config import ExpertsConfig, ModelConfig
from fulgurite.models.layers import ACTIVATION_FUNCTIONS, GatedMLP


class Routes(NamedTuple):
    """Which experts each token goes to, and with what weight; float32."""

    weights_Tk: Tensor
    experts_Tk: Tensor


RoutingRule = Callable[[Tensor, "Tensor | None", ExpertsConfig], Routes]
Gate = Callable[[Tensor], Tensor]


def softmax_then_top_k(logits_TE: Tensor, bias_E: Tensor | None, config: ExpertsConfig) -> Routes:
    weights_Tk, experts_Tk = logits_TE.softmax(dim=-1).topk(config.per_token, dim=-1)
    if config.renormalise:
        weights_Tk = weights_Tk / weights_Tk.sum(dim=-1, keepdim=True)
    return Routes(weights_Tk, experts_Tk)


def top_k_then_softmax(logits_TE: Tensor, bias_E: Tensor | None, config: ExpertsConfig) -> Routes:
    best_Tk, experts_Tk = logits_TE.topk(config.per_token, dim=-1)
    return Routes(best_Tk.softmax(dim=-1), experts_Tk)


def top_k_then_sigmoid(logits_TE: Tensor, bias_E: Tensor | None, config: ExpertsConfig) -> Routes:
    best_Tk, experts_Tk = logits_TE.topk(config.per_token, dim=-1)
    return Routes(best_Tk.sigmoid(), experts_Tk)


def grouped_softmax(logits_TE: Tensor, bias_E: Tensor | None, config: ExpertsConfig) -> Routes:
    scores_TE = logits_TE.softmax(dim=-1)
    best_TG = scores_TE.unflatten(-1, (config.groups, -1)).amax(dim=-1)
    allowed_TE = scores_TE.masked_fill(~_in_best_groups(best_TG, config), 0.0)
    weights_Tk, experts_Tk = allowed_TE.topk(config.per_token, dim=-1)
    return Routes(weights_Tk * config.scaling, experts_Tk)


def grouped_sigmoid(logits_TE: Tensor, bias_E: Tensor | None, config: ExpertsConfig) -> Routes:
    assert bias_E is not None, "this rule chooses with a bias"
    scores_TE = logits_TE.sigmoid()
    choice_TE = scores_TE + bias_E
    best_two_TG = choice_TE.unflatten(-1, (config.groups, -1)).topk(2, dim=-1).values.sum(dim=-1)
    choice_TE = choice_TE.masked_fill(~_in_best_groups(best_two_TG, config), float("-inf"))
    experts_Tk = choice_TE.topk(config.per_token, dim=-1).indices
    weights_Tk = scores_TE.gather(-1, experts_Tk)
    if config.renormalise:
        weights_Tk = weights_Tk / (weights_Tk.sum(dim=-1, keepdim=True) + 1e-20)
    return Routes(weights_Tk * config.scaling, experts_Tk)


def _in_best_groups(scores_TG: Tensor, config: ExpertsConfig) -> Tensor:
    """[T, E]: whether each expert belongs to one of the groups that its token keeps."""
    kept = scores_TG.topk(config.groups_kept, dim=-1).indices
    kept_TG = torch.zeros_like(scores_TG, dtype=torch.bool).scatter(-1, kept, True)
    return kept_TG.repeat_interleave(config.count // config.groups, dim=-1)


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
        self.config = config
        self.rule = rule
        self.weight = nn.Parameter(torch.empty(config.count, hidden))
        self.bias = nn.Parameter(torch.empty(config.count)) if bias else None
        self.choice_bias = None
        if choice_bias:
            self.choice_bias = nn.Parameter(torch.empty(config.count, dtype=torch.float32))

    def forward(self, x_TD: Tensor) -> Routes:
        bias_E = None if self.bias is None else self.bias.float()
        logits_TE = F.linear(x_TD.float(), self.weight.float(), bias_E)
        return self.rule(logits_TE, self.choice_bias, self.config)


def gated(activation: str) -> Gate:
    """activation(gate) * up, of the two halves of a [.., 2I] tensor."""
    function = ACTIVATION_FUNCTIONS[activation]

    def apply(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return function(gate) * up

    return apply


def clamped_gate(alpha: float, limit: float) -> Gate:
    """gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), with both clamped first."""

    def apply(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * gate * torch.sigmoid(alpha * gate)

    return apply


class Experts(nn.Module):
    """All experts of a layer, in plain torch and without data-dependent control flow.

    Few tokens gather the weights of their own experts; many run every expert over every token and
    keep what was asked for. Which of the two is decided by shapes alone, so either is captured
    whole.
    """

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
        count, inner = config.count, config.inner
        self.gate_up = nn.Parameter(torch.empty(count, 2 * inner, hidden))
        self.down = nn.Parameter(torch.empty(count, hidden, inner))
        self.gate_up_bias = nn.Parameter(torch.empty(count, 2 * inner)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(count, hidden)) if bias else None

    def forward(self, x_TD: Tensor, routes: Routes) -> Tensor:
        if routes.experts_Tk.numel() <= self.gate_up.shape[0]:
            return self._gathered(x_TD, routes)
        return self._all(x_TD, routes)

    def _gathered(self, x_TD: Tensor, routes: Routes) -> Tensor:
        weights_Tk1 = routes.weights_Tk.to(x_TD.dtype)[..., None]
        x_TkD = x_TD[:, None, :].expand(-1, routes.experts_Tk.shape[-1], -1)
        if self.weigh_input:
            x_TkD = x_TkD * weights_Tk1
        h_Tk2I = torch.einsum("tkd,tkid->tki", x_TkD, self.gate_up[routes.experts_Tk])
        if self.gate_up_bias is not None:
            h_Tk2I = h_Tk2I + self.gate_up_bias[routes.experts_Tk]
        out_TkD = torch.einsum("tki,tkdi->tkd", self.gate(h_Tk2I), self.down[routes.experts_Tk])
        if self.down_bias is not None:
            out_TkD = out_TkD + self.down_bias[routes.experts_Tk]
        return (out_TkD if self.weigh_input else out_TkD * weights_Tk1).sum(dim=1)

    def _all(self, x_TD: Tensor, routes: Routes) -> Tensor:
        shape = (x_TD.shape[0], self.gate_up.shape[0])
        weights_TE = torch.zeros(shape, dtype=x_TD.dtype, device=x_TD.device)
        weights_TE = weights_TE.scatter(-1, routes.experts_Tk, routes.weights_Tk.to(x_TD.dtype))
        chosen_TE = torch.zeros_like(weights_TE, dtype=torch.bool)
        chosen_ET1 = chosen_TE.scatter(-1, routes.experts_Tk, True).t()[..., None]
        weights_ET1 = weights_TE.t()[..., None]
        x_ETD = x_TD.expand(shape[1], -1, -1)
        if self.weigh_input:
            x_ETD = x_ETD * weights_ET1
        h_ET2I = x_ETD @ self.gate_up.transpose(1, 2)
        if self.gate_up_bias is not None:
            h_ET2I = h_ET2I + self.gate_up_bias[:, None, :]
        out_ETD = self.gate(h_ET2I) @ self.down.transpose(1, 2)
        if self.down_bias is not None:
            out_ETD = out_ETD + self.down_bias[:, None, :]
        if not self.weigh_input:
            out_ETD = out_ETD * weights_ET1
        # An expert that was not asked may overflow, and infinity times a weight of 0 is not 0.
        return out_ETD.masked_fill(~chosen_ET1, 0.0).sum(dim=0)


class MixtureOfExperts(nn.Module):
    """router -> experts, plus the shared expert where there is one."""

    def __init__(self, router: Router, experts: Experts, shared: GatedMLP | None = None) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared = shared

    def forward(self, x_XD: Tensor) -> Tensor:
        x_TD = x_XD.flatten(0, -2)
        out_XD: Tensor = self.experts(x_TD, self.router(x_TD)).view(x_XD.shape)
        return out_XD if self.shared is None else out_XD + self.shared(x_XD)


def shared_expert(config: ModelConfig) -> GatedMLP | None:
    """The expert that every token visits, as a plain MLP."""
    assert config.experts is not None, f"{config.family} has no experts"
    inner = config.experts.shared_inner
    return GatedMLP(config.hidden, inner, config.activation, config.mlp_bias) if inner else None
