"""Routing: a router's logits in, the experts of each token and their weights out.

    score    s = softmax(logits) or sigmoid(logits)
    choice   c = s + correction_bias; only experts of the best groups, by their best c or best two c
    experts  the k largest c
    weights  s of the selected experts; divided by their sum with `renormalize`; times `scaling_factor`

With `topk_before_scoring` the k largest logits are selected and only these are scored. One
`RouterConfig` describes every family:

    Mixtral, Qwen3-MoE   RouterConfig(k, "softmax", renormalize=...)
    DeepSeek-V2          RouterConfig(k, "softmax", num_groups=8, topk_groups=3, scaling_factor=16)
    DeepSeek-V3          RouterConfig(k, "sigmoid", num_groups=8, topk_groups=4, group_score="top2_sum",
                         renormalize=True, scaling_factor=2.5), and a correction bias
    gpt-oss              RouterConfig(k, "softmax", topk_before_scoring=True)
    Llama 4              RouterConfig(k, "sigmoid", topk_before_scoring=True)
    Phi-MoE              RouterConfig(k, "sparsemixer", jitter_eps=0.01); in plain torch

Among equals the expert with the smaller index comes first, and NaN counts as the largest. So the
selection is the same on every device and never out of range. Without a correction bias the logits
themselves are compared: the same order without the rounding of scores. Everything is computed in
float32 (float64 if the logits are). Gradients flow through the weights; the selection has none.

Shapes: T tokens; D hidden size; E experts; k experts of a token.
"""

from __future__ import annotations

from dataclasses import astuple

import torch
from torch import Tensor

from fulgurite.errors import ArgumentError
from fulgurite.kernels import registry
from fulgurite.kernels.common.launch_plan import planned
from fulgurite.kernels.elementwise.ops import rms_norm
from fulgurite.kernels.gemm.float32_linear import float32_linear
from fulgurite.kernels.moe import cpu, reference, triton_routing, triton_small_batch_routing
from fulgurite.kernels.moe.router_config import RmsNormArgs, RouterConfig, Routes
from fulgurite.kernels.tuning import heuristics_for
from fulgurite.op import op

# device type -> kernel; it may return NotImplemented
ROUTE_KERNELS = {"cpu": cpu.route, "cuda": triton_routing.route}
# from x, the router's weight and its bias instead of logits
ROUTE_TOKENS_KERNELS = {"cpu": cpu.route_tokens, "cuda": triton_routing.route_tokens}
# the same for small batches, with a norm of x
ROUTE_SMALL_BATCH_KERNELS = {"cuda": triton_small_batch_routing.route_small_batch}


def route(
    logits_TE: Tensor, config: RouterConfig, correction_bias_E: Tensor | None = None
) -> Routes:
    """Experts and weights of each token."""
    if logits_TE.dim() != 2:
        raise ArgumentError(f"logits {list(logits_TE.shape)} must be [T, E]", next="flatten tokens")
    config.check(logits_TE.shape[1])
    _check_biases(logits_TE.shape[1], correction_bias_E)
    if registry.can_skip_dispatcher(logits_TE, correction_bias_E):
        return Routes(*_run(logits_TE, correction_bias_E, config))
    return Routes(*route_op(logits_TE, correction_bias_E, *astuple(config)))


def is_small_batch(x_TD: Tensor) -> bool:
    """Whether so few tokens run in kernels that fuse the norm in front of them."""
    if x_TD.device.type not in ROUTE_SMALL_BATCH_KERNELS:
        return False
    is_small = x_TD.shape[:-1].numel() <= heuristics_for(x_TD.device).max_small_batch
    return is_small and registry.can_skip_dispatcher(x_TD)


@planned(RouterConfig)
def route_tokens(
    x_TD: Tensor,
    weight_ED: Tensor,
    config: RouterConfig,
    bias_E: Tensor | None = None,
    correction_bias_E: Tensor | None = None,
    norm: RmsNormArgs | None = None,
) -> Routes:
    """`route` of norm(x) @ weight.T + bias in float32; one kernel where a device has it."""
    if x_TD.dim() != 2 or weight_ED.dim() != 2 or x_TD.shape[1] != weight_ED.shape[1]:
        raise ArgumentError(
            f"tokens {list(x_TD.shape)} don't fit a router {list(weight_ED.shape)}",
            next="tokens are [T, D] and the router's weight [E, D]",
        )
    _check_biases(weight_ED.shape[0], bias_E, correction_bias_E)
    arguments = (x_TD, weight_ED, bias_E, correction_bias_E)
    can_fuse = registry.can_skip_dispatcher(*arguments)
    if can_fuse:
        config.check(weight_ED.shape[0])
    if can_fuse and is_small_batch(x_TD):
        kernel = registry.find_kernel(ROUTE_SMALL_BATCH_KERNELS, x_TD.device)
        routes = NotImplemented if kernel is None else kernel(*arguments, norm, config)
        if routes is not NotImplemented:
            return Routes(*routes)
    if norm is not None:
        x_TD = rms_norm(x_TD, *norm)
        arguments = (x_TD, *arguments[1:])
    if can_fuse:
        kernel = registry.find_kernel(ROUTE_TOKENS_KERNELS, x_TD.device)
        routes = NotImplemented if kernel is None else kernel(*arguments, config)
        if routes is not NotImplemented:
            return Routes(*routes)
    return route(float32_linear(x_TD, weight_ED, bias_E), config, correction_bias_E)


def _check_biases(experts: int, *biases: Tensor | None) -> None:
    for bias in biases:
        if bias is not None and tuple(bias.shape) != (experts,):
            raise ArgumentError(f"a bias {list(bias.shape)} for {experts} experts", next="[E]")


@op("fulgurite::route")
def route_op(
    logits: Tensor,
    correction_bias: Tensor | None,
    top_k: int,
    scoring: str,
    topk_before_scoring: bool,
    renormalize: bool,
    scaling_factor: float,
    num_groups: int,
    topk_groups: int,
    group_score: str,
    jitter_eps: float,
) -> tuple[Tensor, Tensor]:
    """The operator: weights and experts. Its last arguments are the fields of `RouterConfig`."""
    config = RouterConfig(
        top_k, scoring, topk_before_scoring, renormalize, scaling_factor, num_groups, topk_groups,
        group_score, jitter_eps,
    )  # fmt: skip
    return _run(logits, correction_bias, config)


def _run(
    logits: Tensor, correction_bias: Tensor | None, config: RouterConfig
) -> tuple[Tensor, Tensor]:
    routes: tuple[Tensor, Tensor] = registry.dispatch(
        ROUTE_KERNELS, logits.device, reference.route, logits, correction_bias, config
    )
    return routes


@route_op.fake
def _(
    logits: Tensor,
    correction_bias: Tensor | None,
    top_k: int,
    scoring: str,
    topk_before_scoring: bool,
    renormalize: bool,
    scaling_factor: float,
    num_groups: int,
    topk_groups: int,
    group_score: str,
    jitter_eps: float,
) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], top_k)
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return logits.new_empty(shape, dtype=dtype), logits.new_empty(shape, dtype=torch.int64)


@route_op.backward
def _(inputs: tuple, output: tuple, grad_weights: Tensor, _: Tensor) -> tuple:  # type: ignore[type-arg]
    logits, _bias, *fields = inputs
    grad_logits = reference.route_backward(logits, output[1], grad_weights, RouterConfig(*fields))
    return grad_logits, *[None] * (len(inputs) - 1)
