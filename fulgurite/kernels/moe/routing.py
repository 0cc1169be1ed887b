"""Routing: a router's logits in, the experts of each token and their weights out.

    score    s = softmax(logits) or sigmoid(logits)
    choice   c = s + correction_bias; only experts of the best groups, by their best c or best two c
    experts  the k largest c
    weights  s of the chosen; over their sum if renormalised; times `scaling`

With `topk_before_scoring` the k largest logits are chosen and only these are scored. One `RouterConfig` says all of
it, so every family is a line of numbers:

    Mixtral, Qwen3-MoE   Rule(k, "softmax", renormalize=...)
    DeepSeek-V2          Rule(k, "softmax", groups=8, topk_groups=3, scaling=16)
    DeepSeek-V3          Rule(k, "sigmoid", groups=8, topk_groups=4, group_by="two", renormalize=True,
                         scaling=2.5), and a choice bias
    gpt-oss              Rule(k, "softmax", topk_before_scoring=True)
    Llama 4              Rule(k, "sigmoid", topk_before_scoring=True)

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
from fulgurite.kernels.grouped_gemm.reference import upcast
from fulgurite.kernels.moe import cpu, triton_routing, triton_small_batch_routing
from fulgurite.kernels.tuning.moe import MAX_SMALL_BATCH
from fulgurite.op import op

# device type -> function of the operator's arguments; it may return NotImplemented
IMPLEMENTATIONS: dict[str, registry.Kernel] = {
    "cpu": cpu.route,
    "cuda": triton_routing.route,
}
# the same with x, the router's weight and its bias in place of logits
TOKEN_IMPLEMENTATIONS: dict[str, registry.Kernel] = {
    "cpu": cpu.route_tokens,
    "cuda": triton_routing.route_tokens,
}
# the same for a few tokens, with a norm of x or None as well
SMALL_BATCH_IMPLEMENTATIONS: dict[str, registry.Kernel] = {
    "cuda": triton_small_batch_routing.route_small_batch
}

SCORING_FUNCTIONS = ("softmax", "sigmoid")
GROUP_SCORES = ("max", "two")
SUM_EPSILON = 1e-20  # added to a sum that weights are divided by: scores may all be zero


class RmsNormArgs(NamedTuple):
    """What `glue.rms_norm` takes besides x."""

    weight_D: Tensor
    eps: float
    offset: float


class Routes(NamedTuple):
    """Which experts each token goes to (int64), best first, and with what weight (float32)."""

    weights_Tk: Tensor
    experts_Tk: Tensor


@dataclass(frozen=True)
class RouterConfig:
    """How experts are chosen and weighed; the fields are the operator's arguments, in order."""

    per_token: int
    score: str = "softmax"
    topk_before_scoring: bool = False
    renormalize: bool = False
    scaling: float = 1.0
    groups: int = 1
    topk_groups: int = 1
    group_by: str = "max"

    def check(self, experts: int) -> None:
        """Raises where the rule does not fit so many experts."""
        for name, value, allowed in (
            ("score", self.score, SCORING_FUNCTIONS),
            ("group_by", self.group_by, GROUP_SCORES),
        ):
            if value not in allowed:
                raise ArgumentError(f"{name}={value!r}", next=f"one of {', '.join(allowed)}")
        if self.groups < 1 or not 1 <= self.topk_groups <= self.groups or experts % self.groups:
            raise ArgumentError(
                f"{experts} experts can't be chosen from {self.topk_groups} of {self.groups} groups",
                next="groups must divide the experts, and at least one of them be kept",
            )
        reachable = experts // self.groups * self.topk_groups
        if not 1 <= self.per_token <= reachable:
            raise ArgumentError(
                f"{self.per_token} experts a token, and {reachable} of {experts} can be chosen",
                next=f"per_token from 1 to {reachable}, or keep more groups",
            )


def route(logits_TE: Tensor, rule: RouterConfig, correction_bias_E: Tensor | None = None) -> Routes:
    """Experts and weights of each token, by the rule."""
    if logits_TE.dim() != 2:
        raise ArgumentError(f"logits {list(logits_TE.shape)} must be [T, E]", next="flatten tokens")
    rule.check(logits_TE.shape[1])
    _check_biases(logits_TE.shape[1], correction_bias_E)
    arguments = (logits_TE, correction_bias_E, *astuple(rule))
    if registry.can_skip_dispatcher(logits_TE, correction_bias_E):
        return Routes(*_run(*arguments))
    return Routes(*route_op(*arguments))


def is_small_batch(x_TD: Tensor) -> bool:
    """Whether so few tokens run in kernels that take the norm before them along."""
    few = (
        x_TD.shape[:-1].numel() <= MAX_SMALL_BATCH
        and x_TD.device.type in SMALL_BATCH_IMPLEMENTATIONS
    )
    return few and registry.can_skip_dispatcher(x_TD)


def route_tokens(
    x_TD: Tensor,
    weight_ED: Tensor,
    rule: RouterConfig,
    bias_E: Tensor | None = None,
    correction_bias_E: Tensor | None = None,
    norm: RmsNormArgs | None = None,
) -> Routes:
    """`route` of norm(x) @ weight.T + bias in float32; one kernel where a device has it."""
    if x_TD.dim() != 2 or weight_ED.dim() != 2 or x_TD.shape[1] != weight_ED.shape[1]:
        raise ArgumentError(
            f"tokens {list(x_TD.shape)} and a router {list(weight_ED.shape)} don't fit together",
            next="tokens are [T, D] and the router's weight [E, D]",
        )
    _check_biases(weight_ED.shape[0], bias_E, correction_bias_E)
    given = (x_TD, weight_ED, bias_E, correction_bias_E)
    plain = registry.can_skip_dispatcher(*given)
    if plain and is_small_batch(x_TD):
        rule.check(weight_ED.shape[0])
        function = registry.find_kernel(SMALL_BATCH_IMPLEMENTATIONS, x_TD.device)
        found = NotImplemented if function is None else function(*given, norm, *astuple(rule))
        if found is not NotImplemented:
            return Routes(*found)
    if norm is not None:
        x_TD = ops.rms_norm(x_TD, *norm)
        given = (x_TD, *given[1:])
    if plain:
        rule.check(weight_ED.shape[0])
        function = registry.find_kernel(TOKEN_IMPLEMENTATIONS, x_TD.device)
        found = NotImplemented if function is None else function(*given, *astuple(rule))
        if found is not NotImplemented:
            return Routes(*found)
    bias = None if bias_E is None else upcast(bias_E)
    return route(F.linear(upcast(x_TD), upcast(weight_ED), bias), rule, correction_bias_E)


def _check_biases(experts: int, *biases: Tensor | None) -> None:
    for bias in biases:
        if bias is not None and tuple(bias.shape) != (experts,):
            raise ArgumentError(f"a bias {list(bias.shape)} for {experts} experts", next="[E]")


@op("fulgurite::route")
def route_op(
    logits: Tensor,
    correction_bias: Tensor | None,
    per_token: int,
    score: str,
    topk_before_scoring: bool,
    renormalize: bool,
    scaling: float,
    groups: int,
    topk_groups: int,
    group_by: str,
) -> tuple[Tensor, Tensor]:
    """The operator: weights and experts."""
    return _run(
        logits, correction_bias, per_token, score, topk_before_scoring, renormalize, scaling, groups,
        topk_groups, group_by,
    )  # fmt: skip


def _run(logits: Tensor, correction_bias: Tensor | None, *rule: object) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = registry.dispatch(
        IMPLEMENTATIONS, logits.device, reference, logits, correction_bias, *rule
    )
    return found


def reference(logits: Tensor, correction_bias: Tensor | None, *fields: object) -> tuple[Tensor, Tensor]:
    """The definition in plain torch."""
    rule = RouterConfig(*fields)  # type: ignore[arg-type]
    logits_TE = upcast(logits)
    scores_TE = logits_TE if rule.topk_before_scoring else apply_scoring(logits_TE, rule)
    by_logits = correction_bias is None and (rule.topk_groups == rule.groups or rule.group_by == "max")
    choice_TE = logits_TE if by_logits else scores_TE
    if correction_bias is not None:
        choice_TE = choice_TE + correction_bias.to(choice_TE.dtype)
    experts_Tk = _rank_experts(choice_TE, rule)[:, : rule.per_token]
    return compute_weights(scores_TE.gather(-1, experts_Tk), rule), experts_Tk.contiguous()


def apply_scoring(logits: Tensor, rule: RouterConfig) -> Tensor:
    return logits.softmax(dim=-1) if rule.score == "softmax" else logits.sigmoid()


def compute_weights(chosen_Tk: Tensor, rule: RouterConfig) -> Tensor:
    """Weights from the chosen scores (from the chosen logits, with `topk_before_scoring`)."""
    weights_Tk = apply_scoring(chosen_Tk, rule) if rule.topk_before_scoring else chosen_Tk
    if rule.renormalize:
        weights_Tk = weights_Tk / (weights_Tk.sum(dim=-1, keepdim=True) + SUM_EPSILON)
    return weights_Tk * rule.scaling


def _rank_experts(choice_TE: Tensor, rule: RouterConfig) -> Tensor:
    """Experts by falling choice, the smaller number first among equals; those of other groups last."""
    order_TE = _argsort_descending(choice_TE)
    if rule.topk_groups == rule.groups:
        return order_TE
    choice_TGC = choice_TE.unflatten(-1, (rule.groups, -1))
    best = min(2, choice_TGC.shape[-1]) if rule.group_by == "two" else 1
    kept = _argsort_descending(choice_TGC.topk(best, dim=-1).values.sum(-1))[:, : rule.topk_groups]
    lost_TG = torch.ones_like(choice_TGC[..., 0], dtype=torch.int8).scatter(-1, kept, 0)
    lost_TE = lost_TG.repeat_interleave(choice_TGC.shape[-1], dim=-1).gather(-1, order_TE)
    return order_TE.gather(-1, lost_TE.sort(dim=-1, stable=True).indices)


def _argsort_descending(values: Tensor) -> Tensor:
    return values.sort(dim=-1, descending=True, stable=True).indices


@route_op.fake
def _(
    logits: Tensor,
    correction_bias: Tensor | None,
    per_token: int,
    score: str,
    topk_before_scoring: bool,
    renormalize: bool,
    scaling: float,
    groups: int,
    topk_groups: int,
    group_by: str,
) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], per_token)
    kind = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return logits.new_empty(shape, dtype=kind), logits.new_empty(shape, dtype=torch.int64)


@route_op.backward
def _(inputs: tuple, output: tuple, of_weights: Tensor, _: Tensor) -> tuple:  # type: ignore[type-arg]
    logits, _bias, *fields = inputs
    rule = RouterConfig(*fields)
    experts_Tk = output[1]
    logits_TE = upcast(logits)
    scores_TE = logits_TE if rule.topk_before_scoring else apply_scoring(logits_TE, rule)
    chosen_Tk = scores_TE.gather(-1, experts_Tk)
    if rule.topk_before_scoring:
        chosen_Tk = apply_scoring(chosen_Tk, rule)
    of_chosen = of_weights * rule.scaling
    if rule.renormalize:
        total = chosen_Tk.sum(dim=-1, keepdim=True) + SUM_EPSILON
        of_chosen = (of_chosen - (of_chosen * chosen_Tk).sum(-1, keepdim=True) / total) / total
    if rule.topk_before_scoring:
        of_chosen = _scoring_backward(of_chosen, chosen_Tk, rule)
    gradient = torch.zeros_like(logits_TE).scatter(-1, experts_Tk, of_chosen)
    if not rule.topk_before_scoring:
        gradient = _scoring_backward(gradient, scores_TE, rule)
    return gradient.to(logits.dtype), *[None] * (len(inputs) - 1)


def _scoring_backward(gradient: Tensor, scores: Tensor, rule: RouterConfig) -> Tensor:
    """The gradient of logits from that of their scores."""
    if rule.score == "sigmoid":
        return gradient * scores * (1 - scores)
    return scores * (gradient - (gradient * scores).sum(dim=-1, keepdim=True))
