"""Mixtures of experts by their definition, one token at a time, and the cases worth testing."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fulgurite.kernels.elementwise.gated_activation import GatedActivation
from fulgurite.kernels.moe.router_config import RouterConfig, Routes

# The router of every family, for 8 experts in 4 groups.
ROUTERS = {
    "mixtral": RouterConfig(2, "softmax", renormalize=True),
    "qwen3": RouterConfig(3, "softmax"),
    "deepseek_v2": RouterConfig(3, "softmax", scaling_factor=1.7, num_groups=4, topk_groups=2),
    "deepseek_v3": RouterConfig(
        3,
        "sigmoid",
        renormalize=True,
        scaling_factor=2.5,
        num_groups=4,
        topk_groups=2,
        group_score="top2_sum",
    ),
    "gpt_oss": RouterConfig(3, "softmax", topk_before_scoring=True),
    "llama4": RouterConfig(1, "sigmoid", topk_before_scoring=True),
    "all": RouterConfig(8, "softmax", renormalize=True),
    "top2_softmax": RouterConfig(2, "softmax", num_groups=4, topk_groups=1, group_score="top2_sum"),
}
GATES = [
    GatedActivation("silu"),
    GatedActivation("gelu"),
    GatedActivation("gelu_pytorch_tanh"),
    GatedActivation("clamped", 1.702, 0.7),
]


def is_larger(a: float, b: float) -> bool:
    return (math.isnan(a) and not math.isnan(b)) or a > b


def select_best(values: list[float], count: int, allowed: list[int] | None = None) -> list[int]:
    """The largest, one after the other; the first of equals, and NaN the largest."""
    left = list(range(len(values))) if allowed is None else list(allowed)
    selected: list[int] = []
    while len(selected) < count:
        top = left[0]
        for candidate in left[1:]:
            top = candidate if is_larger(values[candidate], values[top]) else top
        selected.append(top)
        left.remove(top)
    return selected


def score(values: list[float], scoring: str) -> list[float]:
    if scoring == "sigmoid":
        return [1 / (1 + math.exp(-value)) for value in values]
    largest = max(values)
    total = sum(math.exp(value - largest) for value in values)
    return [math.exp(value - largest) / total for value in values]


def route_token(
    logits: list[float], bias: list[float] | None, config: RouterConfig
) -> dict[int, float]:
    """Expert -> weight, best first, by the definition; in Python's own floats."""
    scores = logits if config.topk_before_scoring else score(logits, config.scoring)
    choice = scores if bias is None else [a + b for a, b in zip(scores, bias, strict=True)]
    size = len(logits) // config.num_groups
    members = [list(range(g * size, (g + 1) * size)) for g in range(config.num_groups)]
    best = min(2 if config.is_top2_sum else 1, size)
    group_scores = [sum(choice[e] for e in select_best(choice, best, m)) for m in members]
    groups = select_best(group_scores, config.topk_groups)
    allowed = sorted(e for g in groups for e in members[g])
    selected = select_best(choice, config.top_k, allowed)
    weights = [scores[expert] for expert in selected]
    weights = score(weights, config.scoring) if config.topk_before_scoring else weights
    total = sum(weights) if config.renormalize else 1.0
    return {e: config.scaling_factor * w / total for e, w in zip(selected, weights, strict=True)}


@dataclass(frozen=True)
class Layer:
    """Weights of some experts, float64."""

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    gate: GatedActivation

    def to(self, dtype: torch.dtype, device: str = "cpu") -> Layer:
        tensors = (self.gate_up, self.down, self.gate_up_bias, self.down_bias)
        return Layer(*(None if t is None else t.to(device, dtype) for t in tensors), self.gate)


def make_layer(
    experts: int,
    hidden: int,
    intermediate: int,
    gate: GatedActivation,
    bias: bool = False,
    seed: int = 0,
) -> Layer:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) / math.sqrt(shape[-1])

    return Layer(
        normal(experts, 2 * intermediate, hidden),
        normal(experts, hidden, intermediate),
        normal(experts, 2 * intermediate) * 4 if bias else None,
        normal(experts, hidden) * 4 if bias else None,
        gate,
    )


def run_experts_one_by_one(
    x: Tensor, routes: Routes, layer: Layer, apply_router_weight_on_input: bool = False
) -> Tensor:
    """The plain loop over tokens and their experts."""
    on_input = apply_router_weight_on_input
    rows = []
    for token in range(x.shape[0]):
        total = torch.zeros_like(x[token])
        for weight, expert in zip(routes.weights_Tk[token], routes.experts_Tk[token], strict=True):
            hidden = layer.gate_up[expert] @ (x[token] * weight if on_input else x[token])
            hidden = hidden if layer.gate_up_bias is None else hidden + layer.gate_up_bias[expert]
            out = layer.down[expert] @ apply_gate(layer.gate, hidden)
            out = out if layer.down_bias is None else out + layer.down_bias[expert]
            total = total + (out if on_input else out * weight)
        rows.append(total)
    return torch.stack(rows) if rows else torch.zeros_like(x)


def apply_gate(activation: GatedActivation, hidden: Tensor) -> Tensor:
    """Written independently of the package."""
    gate, up = hidden[: len(hidden) // 2], hidden[len(hidden) // 2 :]
    if activation.kind == "silu":
        return gate / (1 + torch.exp(-gate)) * up
    if activation.kind == "gelu":
        return 0.5 * gate * (1 + torch.erf(gate / math.sqrt(2))) * up
    if activation.kind == "gelu_pytorch_tanh":
        inside = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        return 0.5 * gate * (1 + torch.tanh(inside)) * up
    gate = torch.minimum(gate, torch.tensor(activation.limit, dtype=gate.dtype))
    up = up.clamp(-activation.limit, activation.limit)
    return (up + 1) * gate / (1 + torch.exp(-activation.alpha * gate))


def make_routes(tokens: int, experts: int, top_k: int, how: str = "random") -> Routes:
    """Distinct experts of each token: random, all the same, or only even ones (odd ones are
    empty)."""
    generator = torch.Generator().manual_seed(tokens + 31 * experts)
    scores = torch.rand(tokens, experts, generator=generator)
    if how == "same":
        scores = torch.arange(experts, 0, -1.0).expand(tokens, -1)
    if how == "even":
        scores[:, 1::2] -= 1
    selected = scores.topk(top_k, dim=-1).indices
    weights = torch.rand(tokens, top_k, generator=generator) + 0.1
    return Routes(weights, selected)
