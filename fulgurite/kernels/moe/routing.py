"""Routing: a router's logits in, the experts of each token and their weights out.

    score    s = softmax(logits) or sigmoid(logits)
    choice   c = s + choice_bias; only experts of the best groups, by their best c or best two c
    experts  the k largest c
    weights  s of the chosen; over their sum if renormalised; times `scaling`

With `choose_first` the k largest logits are chosen and only these are scored. One `Rule` says all of
it, so every family is a line of numbers:

    Mixtral, Qwen3-MoE   Rule(k, "softmax", renormalise=...)
    DeepSeek-V2          Rule(k, "softmax", groups=8, groups_kept=3, scaling=16)
    DeepSeek-V3          Rule(k, "sigmoid", groups=8, groups_kept=4, group_by="two", renormalise=True,
                         scaling=2.5), and a choice bias
    gpt-oss              Rule(k, "softmax", choose_first=True)
    Llama 4              Rule(k, "sigmoid", choose_first=True)

Of equal candidates the expert with the smaller number comes first, and NaN counts as the largest, so
the choice is one and the same everywhere and never out of range. Where there is no choice bias the
logits themselves are compared, which is the same order without the rounding of scores. Everything
is computed in float32 (float64 where the logits are). Gradients flow through the weights; the choice
has none.

Shapes: T tokens; D hidden size; E experts; k experts of a token; G groups of experts.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fulgurite.errors import ArgumentError
from fulgurite.kernels import registry
from fulgurite.kernels.elementwise import ops
from fulgurite.op import op

# device type -> function of the operator's arguments; it may return NotImplemented
IMPLEMENTATIONS: dict[str, str] = {
    "cpu": "fulgurite.kernels.moe.cpu:route",
    "cuda": "fulgurite.kernels.moe.triton_routing:route",
}
# the same with x, the router's weight and its bias in place of logits
FROM_TOKENS: dict[str, str] = {
    "cpu": "fulgurite.kernels.moe.cpu:route_tokens",
    "cuda": "fulgurite.kernels.moe.triton_routing:route_tokens",
}
# the same for a few tokens, with a norm of x or None as well
OF_FEW_TOKENS: dict[str, str] = {
    "cuda": "fulgurite.kernels.moe.triton_small_batch_routing:route_few"
}
FEW_TOKENS = 2  # up to here kernels of their own beat sorting (an H200, Qwen3-30B-A3B; equal at 4)

SCORES = ("softmax", "sigmoid")
GROUPS_BY = ("max", "two")
TINY = 1e-20  # added to a sum that weights are divided by: scores may all be zero


class Norm(NamedTuple):
    """What `glue.rms_norm` takes besides x."""

    weight_D: Tensor
    eps: float
    offset: float


class Routes(NamedTuple):
    """Which experts each token goes to (int64), best first, and with what weight (float32)."""

    weights_Tk: Tensor
    experts_Tk: Tensor


@dataclass(frozen=True)
class Rule:
    """How experts are chosen and weighed; the fields are the operator's arguments, in order."""

    per_token: int
    score: str = "softmax"
    choose_first: bool = False
    renormalise: bool = False
    scaling: float = 1.0
    groups: int = 1
    groups_kept: int = 1
    group_by: str = "max"

    def check(self, experts: int) -> None:
        """Raises where the rule does not fit so many experts."""
        for name, value, allowed in (
            ("score", self.score, SCORES),
            ("group_by", self.group_by, GROUPS_BY),
        ):
            if value not in allowed:
                raise ArgumentError(f"{name}={value!r}", next=f"one of {', '.join(allowed)}")
        if self.groups < 1 or not 1 <= self.groups_kept <= self.groups or experts % self.groups:
            raise ArgumentError(
                f"{experts} experts can't be chosen from {self.groups_kept} of {self.groups} groups",
                next="groups must divide the experts, and at least one of them be kept",
            )
        reachable = experts // self.groups * self.groups_kept
        if not 1 <= self.per_token <= reachable:
            raise ArgumentError(
                f"{self.per_token} experts a token, and {reachable} of {experts} can be chosen",
                next=f"per_token from 1 to {reachable}, or keep more groups",
            )


def route(logits_TE: Tensor, rule: Rule, choice_bias_E: Tensor | None = None) -> Routes:
    """Experts and weights of each token, by the rule."""
    if logits_TE.dim() != 2:
        raise ArgumentError(f"logits {list(logits_TE.shape)} must be [T, E]", next="flatten tokens")
    rule.check(logits_TE.shape[1])
    _check_biases(logits_TE.shape[1], choice_bias_E)
    arguments = (logits_TE, choice_bias_E, *astuple(rule))
    if registry.is_plain_call(logits_TE, choice_bias_E):
        return Routes(*_run(*arguments))
    return Routes(*route_parts(*arguments))


def are_few(x_TD: Tensor) -> bool:
    """Whether so few tokens run in kernels that take the norm before them along."""
    few = x_TD.shape[:-1].numel() <= FEW_TOKENS and x_TD.device.type in OF_FEW_TOKENS
    return few and registry.is_plain_call(x_TD)


def route_tokens(
    x_TD: Tensor,
    weight_ED: Tensor,
    rule: Rule,
    bias_E: Tensor | None = None,
    choice_bias_E: Tensor | None = None,
    norm: Norm | None = None,
) -> Routes:
    """`route` of norm(x) @ weight.T + bias in float32; one kernel where a device has it."""
    if x_TD.dim() != 2 or weight_ED.dim() != 2 or x_TD.shape[1] != weight_ED.shape[1]:
        raise ArgumentError(
            f"tokens {list(x_TD.shape)} and a router {list(weight_ED.shape)} don't fit together",
            next="tokens are [T, D] and the router's weight [E, D]",
        )
    _check_biases(weight_ED.shape[0], bias_E, choice_bias_E)
    given = (x_TD, weight_ED, bias_E, choice_bias_E)
    plain = registry.is_plain_call(*given)
    if plain and are_few(x_TD):
        rule.check(weight_ED.shape[0])
        function = registry.find(OF_FEW_TOKENS, x_TD.device)
        found = NotImplemented if function is None else function(*given, norm, *astuple(rule))
        if found is not NotImplemented:
            return Routes(*found)
    if norm is not None:
        x_TD = ops.rms_norm(x_TD, *norm)
        given = (x_TD, *given[1:])
    if plain:
        rule.check(weight_ED.shape[0])
        function = registry.find(FROM_TOKENS, x_TD.device)
        found = NotImplemented if function is None else function(*given, *astuple(rule))
        if found is not NotImplemented:
            return Routes(*found)
    bias = None if bias_E is None else wide(bias_E)
    return route(F.linear(wide(x_TD), wide(weight_ED), bias), rule, choice_bias_E)


def _check_biases(experts: int, *biases: Tensor | None) -> None:
    for bias in biases:
        if bias is not None and tuple(bias.shape) != (experts,):
            raise ArgumentError(f"a bias {list(bias.shape)} for {experts} experts", next="[E]")


def wide(x: Tensor) -> Tensor:
    """In float32, or in float64 if it is that already."""
    return x if x.dtype == torch.float64 else x.float()


@op("fulgurite::route")
def route_parts(
    logits: Tensor,
    choice_bias: Tensor | None,
    per_token: int,
    score: str,
    choose_first: bool,
    renormalise: bool,
    scaling: float,
    groups: int,
    groups_kept: int,
    group_by: str,
) -> tuple[Tensor, Tensor]:
    """The operator: weights and experts."""
    return _run(
        logits, choice_bias, per_token, score, choose_first, renormalise, scaling, groups,
        groups_kept, group_by,
    )  # fmt: skip


def _run(logits: Tensor, choice_bias: Tensor | None, *rule: object) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = registry.run(
        IMPLEMENTATIONS, logits.device, reference, logits, choice_bias, *rule
    )
    return found


def reference(logits: Tensor, choice_bias: Tensor | None, *fields: object) -> tuple[Tensor, Tensor]:
    """The definition in plain torch."""
    rule = Rule(*fields)  # type: ignore[arg-type]
    logits_TE = wide(logits)
    scores_TE = logits_TE if rule.choose_first else scored(logits_TE, rule)
    by_logits = choice_bias is None and (rule.groups_kept == rule.groups or rule.group_by == "max")
    choice_TE = logits_TE if by_logits else scores_TE
    if choice_bias is not None:
        choice_TE = choice_TE + choice_bias.to(choice_TE.dtype)
    experts_Tk = _ranked(choice_TE, rule)[:, : rule.per_token]
    return weights_of(scores_TE.gather(-1, experts_Tk), rule), experts_Tk.contiguous()


def scored(logits: Tensor, rule: Rule) -> Tensor:
    return logits.softmax(dim=-1) if rule.score == "softmax" else logits.sigmoid()


def weights_of(chosen_Tk: Tensor, rule: Rule) -> Tensor:
    """Weights from the chosen scores (from the chosen logits, with `choose_first`)."""
    weights_Tk = scored(chosen_Tk, rule) if rule.choose_first else chosen_Tk
    if rule.renormalise:
        weights_Tk = weights_Tk / (weights_Tk.sum(dim=-1, keepdim=True) + TINY)
    return weights_Tk * rule.scaling


def _ranked(choice_TE: Tensor, rule: Rule) -> Tensor:
    """Experts by falling choice, the smaller number first among equals; those of other groups last."""
    order_TE = _falling(choice_TE)
    if rule.groups_kept == rule.groups:
        return order_TE
    choice_TGC = choice_TE.unflatten(-1, (rule.groups, -1))
    best = min(2, choice_TGC.shape[-1]) if rule.group_by == "two" else 1
    kept = _falling(choice_TGC.topk(best, dim=-1).values.sum(-1))[:, : rule.groups_kept]
    lost_TG = torch.ones_like(choice_TGC[..., 0], dtype=torch.int8).scatter(-1, kept, 0)
    lost_TE = lost_TG.repeat_interleave(choice_TGC.shape[-1], dim=-1).gather(-1, order_TE)
    return order_TE.gather(-1, lost_TE.sort(dim=-1, stable=True).indices)


def _falling(values: Tensor) -> Tensor:
    return values.sort(dim=-1, descending=True, stable=True).indices


@route_parts.fake
def _(
    logits: Tensor,
    choice_bias: Tensor | None,
    per_token: int,
    score: str,
    choose_first: bool,
    renormalise: bool,
    scaling: float,
    groups: int,
    groups_kept: int,
    group_by: str,
) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], per_token)
    kind = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return logits.new_empty(shape, dtype=kind), logits.new_empty(shape, dtype=torch.int64)


@route_parts.backward
def _(inputs: tuple, output: tuple, of_weights: Tensor, _: Tensor) -> tuple:  # type: ignore[type-arg]
    logits, _bias, *fields = inputs
    rule = Rule(*fields)
    experts_Tk = output[1]
    logits_TE = wide(logits)
    scores_TE = logits_TE if rule.choose_first else scored(logits_TE, rule)
    chosen_Tk = scores_TE.gather(-1, experts_Tk)
    if rule.choose_first:
        chosen_Tk = scored(chosen_Tk, rule)
    of_chosen = of_weights * rule.scaling
    if rule.renormalise:
        total = chosen_Tk.sum(dim=-1, keepdim=True) + TINY
        of_chosen = (of_chosen - (of_chosen * chosen_Tk).sum(-1, keepdim=True) / total) / total
    if rule.choose_first:
        of_chosen = _through_score(of_chosen, chosen_Tk, rule)
    gradient = torch.zeros_like(logits_TE).scatter(-1, experts_Tk, of_chosen)
    if not rule.choose_first:
        gradient = _through_score(gradient, scores_TE, rule)
    return gradient.to(logits.dtype), *[None] * (len(inputs) - 1)


def _through_score(gradient: Tensor, scores: Tensor, rule: Rule) -> Tensor:
    """The gradient of logits from that of their scores."""
    if rule.score == "sigmoid":
        return gradient * scores * (1 - scores)
    return scores * (gradient - (gradient * scores).sum(dim=-1, keepdim=True))
