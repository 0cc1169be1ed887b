"""Mixtures of experts by their definition, one token at a time, and the odd cases worth asking for."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fulgurite.kernels.moe.ops import GatedActivation, RouterConfig, Routes

# Every family's rule, for 8 experts in 4 groups.
RULES = {
    "mixtral": RouterConfig(2, "softmax", renormalize=True),
    "qwen3": RouterConfig(3, "softmax"),
    "deepseek_v2": RouterConfig(3, "softmax", scaling=1.7, groups=4, topk_groups=2),
    "deepseek_v3": RouterConfig(
        3, "sigmoid", renormalize=True, scaling=2.5, groups=4, topk_groups=2, group_by="two"
    ),
    "gpt_oss": RouterConfig(3, "softmax", topk_before_scoring=True),
    "llama4": RouterConfig(1, "sigmoid", topk_before_scoring=True),
    "all": RouterConfig(8, "softmax", renormalize=True),
    "two_softmax": RouterConfig(2, "softmax", groups=4, topk_groups=1, group_by="two"),
}
GATES = [
    GatedActivation("silu"),
    GatedActivation("gelu"),
    GatedActivation("gelu_pytorch_tanh"),
    GatedActivation("clamped", 1.702, 0.7),
]


def larger(a: float, b: float) -> bool:
    return (math.isnan(a) and not math.isnan(b)) or a > b


def best(values: list[float], count: int, allowed: list[int] | None = None) -> list[int]:
    """The largest, one after the other; the first of equals, and NaN above all."""
    left = list(range(len(values))) if allowed is None else list(allowed)
    chosen: list[int] = []
    while len(chosen) < count:
        top = left[0]
        for candidate in left[1:]:
            top = candidate if larger(values[candidate], values[top]) else top
        chosen.append(top)
        left.remove(top)
    return chosen


def scores(values: list[float], how: str) -> list[float]:
    if how == "sigmoid":
        return [1 / (1 + math.exp(-value)) for value in values]
    most = max(values)
    total = sum(math.exp(value - most) for value in values)
    return [math.exp(value - most) / total for value in values]


def route_one(
    logits: list[float], bias: list[float] | None, rule: RouterConfig
) -> dict[int, float]:
    """Expert -> weight, best first, by the definition; in Python's own floats."""
    of_all = logits if rule.topk_before_scoring else scores(logits, rule.score)
    choice = of_all if bias is None else [a + b for a, b in zip(of_all, bias, strict=True)]
    size = len(logits) // rule.groups
    members = [list(range(g * size, (g + 1) * size)) for g in range(rule.groups)]
    front = 2 if rule.group_by == "two" else 1
    strength = [sum(choice[e] for e in best(choice, min(front, size), m)) for m in members]
    kept = best(strength, rule.topk_groups)
    chosen = best(choice, rule.per_token, sorted(e for g in kept for e in members[g]))
    weights = [of_all[expert] for expert in chosen]
    weights = scores(weights, rule.score) if rule.topk_before_scoring else weights
    total = sum(weights) if rule.renormalize else 1.0
    return {e: rule.scaling * w / total for e, w in zip(chosen, weights, strict=True)}


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
    experts: int, hidden: int, inner: int, gate: GatedActivation, bias: bool = False, seed: int = 0
) -> Layer:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) / math.sqrt(shape[-1])

    return Layer(
        normal(experts, 2 * inner, hidden),
        normal(experts, hidden, inner),
        normal(experts, 2 * inner) * 4 if bias else None,
        normal(experts, hidden) * 4 if bias else None,
        gate,
    )


def experts_one_by_one(
    x: Tensor, routes: Routes, layer: Layer, apply_router_weight_on_input: bool = False
) -> Tensor:
    """The plain loop over tokens and their experts."""
    rows = []
    for token in range(x.shape[0]):
        total = torch.zeros_like(x[token])
        for weight, expert in zip(routes.weights_Tk[token], routes.experts_Tk[token], strict=True):
            hidden = layer.gate_up[expert] @ (
                x[token] * weight if apply_router_weight_on_input else x[token]
            )
            hidden = hidden if layer.gate_up_bias is None else hidden + layer.gate_up_bias[expert]
            out = layer.down[expert] @ gate_one(layer.gate, hidden)
            out = out if layer.down_bias is None else out + layer.down_bias[expert]
            total = total + (out if apply_router_weight_on_input else out * weight)
        rows.append(total)
    return torch.stack(rows) if rows else torch.zeros_like(x)


def gate_one(gate: GatedActivation, hidden: Tensor) -> Tensor:
    """Written apart from the package's own."""
    left, right = hidden[: len(hidden) // 2], hidden[len(hidden) // 2 :]
    if gate.kind == "silu":
        return left / (1 + torch.exp(-left)) * right
    if gate.kind == "gelu":
        return 0.5 * left * (1 + torch.erf(left / math.sqrt(2))) * right
    if gate.kind == "gelu_pytorch_tanh":
        inside = math.sqrt(2 / math.pi) * (left + 0.044715 * left**3)
        return 0.5 * left * (1 + torch.tanh(inside)) * right
    left = torch.minimum(left, torch.tensor(gate.limit, dtype=left.dtype))
    right = right.clamp(-gate.limit, gate.limit)
    return (right + 1) * left / (1 + torch.exp(-gate.alpha * left))


def make_routes(tokens: int, experts: int, per_token: int, how: str = "random") -> Routes:
    """Distinct experts of each token: drawn, all the same, or only even ones (odd ones stay empty)."""
    generator = torch.Generator().manual_seed(tokens + 31 * experts)
    chance = torch.rand(tokens, experts, generator=generator)
    if how == "same":
        chance = torch.arange(experts, 0, -1.0).expand(tokens, -1)
    if how == "even":
        chance[:, 1::2] -= 1
    chosen = chance.topk(per_token, dim=-1).indices
    weights = torch.rand(tokens, per_token, generator=generator) + 0.1
    return Routes(weights, chosen)
