"""Routing, sorting and combining in plain torch: the references that kernels are tested against.

In: the arguments of the operators. Out: their results. Nothing is read on the host.

Shapes: T tokens; k experts of a token; S = T k pairs; E experts; G groups; D hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.kernels.gemm.reference import upcast
from fulgurite.kernels.moe.router_config import RouterConfig

SUM_EPSILON = 1e-20  # added to the sum that weights are divided by: all scores may be zero


# ---- routing ---------------------------------------------------------------------------------------


def route(
    logits: Tensor, correction_bias: Tensor | None, config: RouterConfig
) -> tuple[Tensor, Tensor]:
    """`fulgurite::route`: weights and experts."""
    logits_TE = upcast(logits)
    if config.is_sparsemixer:
        return _route_sparsemixer(logits_TE, correction_bias, config)
    scores_TE = logits_TE if config.topk_before_scoring else apply_scoring(logits_TE, config)
    is_top2 = config.selects_groups and config.is_top2_sum
    choice_TE = logits_TE if correction_bias is None and not is_top2 else scores_TE
    if correction_bias is not None:
        choice_TE = choice_TE + correction_bias.to(choice_TE.dtype)
    experts_Tk = _rank_experts(choice_TE, config)[:, : config.top_k]
    return compute_weights(scores_TE.gather(-1, experts_Tk), config), experts_Tk.contiguous()


def apply_scoring(logits: Tensor, config: RouterConfig) -> Tensor:
    return logits.sigmoid() if config.is_sigmoid else logits.softmax(dim=-1)


def compute_weights(selected_Tk: Tensor, config: RouterConfig) -> Tensor:
    """Weights from the selected scores (from the selected logits with `topk_before_scoring`)."""
    weights_Tk = apply_scoring(selected_Tk, config) if config.topk_before_scoring else selected_Tk
    if config.renormalize:
        weights_Tk = weights_Tk / (weights_Tk.sum(dim=-1, keepdim=True) + SUM_EPSILON)
    return weights_Tk * config.scaling_factor


def _rank_experts(choice_TE: Tensor, config: RouterConfig) -> Tensor:
    """Experts by falling choice, the smaller index first among equals; excluded groups come
    last."""
    order_TE = _argsort_descending(choice_TE)
    if not config.selects_groups:
        return order_TE
    choice_TGC = choice_TE.unflatten(-1, (config.num_groups, -1))
    best = min(2, choice_TGC.shape[-1]) if config.is_top2_sum else 1
    group_scores_TG = choice_TGC.topk(best, dim=-1).values.sum(-1)
    selected = _argsort_descending(group_scores_TG)[:, : config.topk_groups]
    excluded_TG = torch.ones_like(choice_TGC[..., 0], dtype=torch.int8).scatter(-1, selected, 0)
    excluded_TE = excluded_TG.repeat_interleave(choice_TGC.shape[-1], dim=-1).gather(-1, order_TE)
    return order_TE.gather(-1, excluded_TE.sort(dim=-1, stable=True).indices)


def _route_sparsemixer(
    logits_TE: Tensor, correction_bias: Tensor | None, config: RouterConfig
) -> tuple[Tensor, Tensor]:
    assert correction_bias is None, "sparsemixer has no correction bias"
    experts_Tk = _rank_experts(logits_TE, config)[:, : config.top_k].contiguous()
    probs_TkE = sparsemixer_probabilities(logits_TE, experts_Tk, config.jitter_eps)
    selected_Tk = probs_TkE.gather(-1, experts_Tk[..., None]).squeeze(-1)
    return compute_weights(selected_Tk, config), experts_Tk


def sparsemixer_probabilities(logits_TE: Tensor, experts_Tk: Tensor, jitter_eps: float) -> Tensor:
    """For each selected expert, the softmax over the experts near it that were not selected before.

    Expert e is near a selected one of logit m if (m - logit_e) / max(|logit_e|, m) <= 2 jitter_eps.
    """
    best_Tk1 = logits_TE.gather(-1, experts_Tk)[..., None]
    logits_TkE = logits_TE[:, None, :].expand(-1, experts_Tk.shape[1], -1)
    is_far = (best_Tk1 - logits_TkE) / logits_TkE.abs().maximum(best_Tk1) > 2 * jitter_eps
    chosen_TkE = torch.zeros_like(logits_TkE).scatter(-1, experts_Tk[..., None], 1)
    was_chosen = chosen_TkE.cumsum(dim=1) - chosen_TkE > 0
    return logits_TkE.masked_fill(is_far | was_chosen, float("-inf")).softmax(dim=-1)


def _argsort_descending(values: Tensor) -> Tensor:
    return values.sort(dim=-1, descending=True, stable=True).indices


def route_backward(
    logits: Tensor, experts_Tk: Tensor, grad_weights: Tensor, config: RouterConfig
) -> Tensor:
    """The gradient of logits, given that of the weights."""
    logits_TE = upcast(logits)
    if config.is_sparsemixer:
        return _sparsemixer_backward(logits_TE, experts_Tk, grad_weights, config).to(logits.dtype)
    scores_TE = logits_TE if config.topk_before_scoring else apply_scoring(logits_TE, config)
    selected_Tk = scores_TE.gather(-1, experts_Tk)
    if config.topk_before_scoring:
        selected_Tk = apply_scoring(selected_Tk, config)
    grad_selected = _weights_backward(selected_Tk, grad_weights, config)
    if config.topk_before_scoring:
        grad_selected = _scoring_backward(grad_selected, selected_Tk, config)
    gradient = torch.zeros_like(logits_TE).scatter(-1, experts_Tk, grad_selected)
    if not config.topk_before_scoring:
        gradient = _scoring_backward(gradient, scores_TE, config)
    return gradient.to(logits.dtype)


def _weights_backward(selected_Tk: Tensor, grad_weights: Tensor, config: RouterConfig) -> Tensor:
    """The gradient of the selected scores, given that of the weights."""
    grad_selected = grad_weights * config.scaling_factor
    if not config.renormalize:
        return grad_selected
    total = selected_Tk.sum(dim=-1, keepdim=True) + SUM_EPSILON
    mean = (grad_selected * selected_Tk).sum(-1, keepdim=True) / total
    return (grad_selected - mean) / total


def _sparsemixer_backward(
    logits_TE: Tensor, experts_Tk: Tensor, grad_weights: Tensor, config: RouterConfig
) -> Tensor:
    probs_TkE = sparsemixer_probabilities(logits_TE, experts_Tk, config.jitter_eps)
    selected_Tk1 = probs_TkE.gather(-1, experts_Tk[..., None])
    grad_Tk = _weights_backward(selected_Tk1.squeeze(-1), grad_weights, config)
    is_selected = torch.zeros_like(probs_TkE).scatter(-1, experts_Tk[..., None], 1)
    return (grad_Tk[..., None] * selected_Tk1 * (is_selected - probs_TkE)).sum(dim=1)


def _scoring_backward(gradient: Tensor, scores: Tensor, config: RouterConfig) -> Tensor:
    """The gradient of logits, given that of their scores."""
    if config.is_sigmoid:
        return gradient * scores * (1 - scores)
    return scores * (gradient - (gradient * scores).sum(dim=-1, keepdim=True))


# ---- sorting and combining -------------------------------------------------------------------------


def sort_by_expert(
    experts_Tk: Tensor, experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`fulgurite::moe_sort`: a stable sort; the fields of `ExpertOrder`."""
    tokens, top_k = experts_Tk.shape
    expert_S = experts_Tk.flatten().long()
    expert_S = expert_S.masked_fill((expert_S < 0) | (expert_S >= experts), experts)
    pair_S = expert_S.argsort(stable=True)
    index_S = torch.arange(tokens * top_k, device=experts_Tk.device)
    position_Tk = torch.empty_like(pair_S).scatter(0, pair_S, index_S).view(tokens, top_k)
    ones = torch.ones_like(expert_S)
    counts_E = ones.new_zeros(experts + 1).scatter_add(0, expert_S, ones)[:experts]
    fields = (counts_E, counts_E.cumsum(0), pair_S // max(top_k, 1), pair_S % max(top_k, 1))
    return tuple(field.int() for field in (*fields, position_Tk))  # type: ignore[return-value]


def gather_weights(weights: Tensor, tokens: Tensor, slots: Tensor) -> Tensor:
    """`fulgurite::moe_gather_weights`: the weight of each sorted pair."""
    return weights[tokens, slots]


def combine(
    y: Tensor, positions: Tensor, tokens: Tensor, slots: Tensor, weights: Tensor | None
) -> Tensor:
    """`fulgurite::moe_combine`: each token's rows, one slot after the other."""
    total = upcast(y).new_zeros(positions.shape[0], y.shape[1])
    for slot in range(positions.shape[1]):
        rows = upcast(y[positions[:, slot]])
        total = total + (rows if weights is None else rows * weights[:, slot, None])
    return total.to(y.dtype)
