"""Activations of GEMM and convolution epilogues on the CPU.

In: the name of an activation and its parameters. Out: its code in `include/epilogue.h`, and a function
in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor

NONE = "none"
# by name: its code is the position; the function takes the parameters after the tensor
ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    NONE: lambda x: x,
    "relu": F.relu,
    "clamp": lambda x, low, high: x.clamp(low, high),
    "silu": F.silu,
    "sigmoid": lambda x: x.sigmoid(),
    "tanh": lambda x: x.tanh(),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
}
ACTIVATION_CODES = {name: code for code, name in enumerate(ACTIVATIONS)}


def apply_activation(x: Tensor, activation: str, parameters: Sequence[float]) -> Tensor:
    """The activation in plain torch."""
    return ACTIVATIONS[activation](x, *parameters)
