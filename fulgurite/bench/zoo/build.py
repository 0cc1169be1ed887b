"""A model of the zoo ready to run: module, inputs, a loss.

In: a `ZooModel`. Out: a `Case`. Dropout stays in the program with a probability of 1e-30, as in torch's benchmarks:
nothing is dropped, so results of two random number generators can be compared. Routers do not sample.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fulgurite.bench.zoo.compare import flatten

KEEP_ALL = 1e-30  # probability of dropout
SAMPLING_ROUTERS = ("PhimoeTopKRouter",)  # which draw the experts of a token at random in training


@dataclass(frozen=True)
class Case:
    """A module and what to call it with, for one mode."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], Tensor]  # of a result


def seed_everything() -> None:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def disable_dropout(module: nn.Module) -> None:
    """Set every dropout probability to 1e-30; the ops stay in the graph."""
    for part in module.modules():
        kind = type(part).__name__.lower()
        for name, value in list(vars(part).items()):
            named = "drop" in name.lower() or (
                name == "p" and ("drop" in kind or "stochastic" in kind)
            )
            if named and isinstance(value, float) and value > 0:
                setattr(part, name, KEEP_ALL)


def disable_sampling(module: nn.Module) -> None:
    """Let routers that sample experts in training choose the best ones, as in inference."""
    for part in module.modules():
        if type(part).__name__ in SAMPLING_ROUTERS:
            part.eval()


def move(value: Any, device: str, dtype: torch.dtype) -> Any:
    """Inputs on the device, floating-point tensors in the dtype."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(device, dtype if leaf.is_floating_point() else leaf.dtype)

    return pytree.tree_map(one, value)


def sum_of_means(result: Any) -> Tensor:
    """A loss of a model without one: the mean of each floating-point output, summed."""
    means = [
        value.float().mean() if value.dtype != torch.float64 else value.mean()
        for value in _differentiable(result)
    ]
    assert means, "the model has no output with a gradient"
    return torch.stack(means).sum()


def model_loss(result: Any) -> Tensor:
    """The loss that the model computes itself, or `sum_of_means`."""
    loss = result.get("loss") if isinstance(result, dict) else None
    return loss if loss is not None else sum_of_means(result)


def _differentiable(result: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(dict(result) if isinstance(result, dict) else result)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


def run_inference(case: Case) -> dict[str, Tensor]:
    """The tensors of one call without gradients."""
    seed_everything()
    with torch.no_grad():
        return flatten(case.module(*case.args, **case.kwargs))


def run_training(case: Case) -> dict[str, Tensor]:
    """The tensors of one step: outputs, loss, gradients, and buffers such as running statistics."""
    seed_everything()
    case.module.zero_grad(set_to_none=True)
    result = case.module(*case.args, **case.kwargs)
    loss = case.loss(result)
    loss.backward()
    found = {**flatten(result), "loss": loss.detach()}
    for name, parameter in case.module.named_parameters():
        if parameter.grad is not None:
            found[f"gradient of {name}"] = parameter.grad.detach().clone()
    for name, buffer in case.module.named_buffers():
        found[f"buffer {name}"] = buffer.detach().clone()
    return found


RUNNERS: dict[str, Callable[[Case], dict[str, Tensor]]] = {
    "inference": run_inference,
    "training": run_training,
}
