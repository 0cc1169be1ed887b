"""Norms of bfloat16 or float16 numbers with float32 parameters, as under autocast on CPUs.

In: torch's rules for batch, layer and group norm, by which ops are traced and decomposed. Out: the same
rules with the dtypes of torch's CPU kernels. The kernels save mean and rstd in float32; torch's rules say
that these have the dtype of the input. A compiled backward would then read float32 memory as bfloat16, or
give a library call statistics that it refuses. Statistics in float32 also make gradients more accurate.
New running statistics have the dtype of the old ones; torch's rule gives float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Rule = Callable[..., Any]


def save_float32_statistics(rule: Rule) -> Rule:
    """A rule of a norm that returns its output, then statistics in float32 if dtypes are mixed."""

    def norm(input: Tensor, *arguments: Any, **kwargs: Any) -> Any:
        if not _is_mixed(input, [*arguments, *kwargs.values()]):
            return rule(input, *arguments, **kwargs)
        output, *statistics = rule(input.float(), *arguments, **kwargs)
        return output.to(input.dtype), *statistics

    return norm


def keep_dtype_of_running_statistics(rule: Rule) -> Rule:
    """A rule of batch norm whose new running statistics have the dtype of the old ones."""

    def norm(
        input: Tensor, weight: Any, bias: Any, running_mean: Any, running_var: Any, *settings: Any
    ) -> Any:
        output, mean, rstd, *new = rule(input, weight, bias, running_mean, running_var, *settings)
        pairs = zip(new, (running_mean, running_var), strict=True)
        return output, mean, rstd, *(x if old is None else x.to(old.dtype) for x, old in pairs)

    return norm


def keep_dtype_of_input(rule: Rule) -> Rule:
    """A rule of a norm's backward whose gradient of the input has the input's dtype."""

    def backward(gradient: Tensor, input: Tensor, *arguments: Any, **kwargs: Any) -> Any:
        first, *others = rule(gradient, input, *arguments, **kwargs)
        return None if first is None else first.to(input.dtype), *others

    return backward


def fake_group_norm(
    mode: Any, op: Any, input: Tensor, weight: Any, bias: Any, *sizes: Any, **kwargs: Any
) -> Any:
    """The FakeTensor rule of `native_group_norm` if dtypes are mixed."""
    if kwargs or not _is_mixed(input, [weight, bias]):
        return NotImplemented
    batch, _, _, groups, _ = sizes
    statistics = [input.new_empty((batch, groups), dtype=torch.float32) for _ in range(2)]
    return torch.empty_like(input), *statistics


def fake_group_norm_backward(
    mode: Any, op: Any, gradient: Tensor, input: Tensor, mean: Tensor, *others: Any, **kwargs: Any
) -> Any:
    """The FakeTensor rule of `native_group_norm_backward` if dtypes are mixed."""
    if kwargs or not _is_mixed(input, [mean]):
        return NotImplemented
    channels, output_mask = others[3], others[-1]
    return tuple(
        value if is_needed else None
        for is_needed, value in zip(
            output_mask,
            [torch.empty_like(input), *(mean.new_empty(channels) for _ in range(2))],
            strict=True,
        )
    )


def _is_mixed(input: Tensor, parameters: list[Any]) -> bool:
    """Whether a CPU kernel computes with float32 parameters on narrow numbers."""
    if input.device.type != "cpu" or input.dtype not in (torch.bfloat16, torch.float16):
        return False
    return any(isinstance(x, Tensor) and x.dtype == torch.float32 for x in parameters)
