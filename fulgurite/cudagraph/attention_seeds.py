"""Seeds of attention with dropout, which are on the host or on the device.

In: calls of the backward ops of torch's memory-efficient attention. Out: the same calls, with the seed and the offset
where the op reads them.

The forward op returns its seed and offset in host memory. Inside a capture, its kernel writes them to device memory
instead. The backward op dereferences them on the host, or inside a capture on the device, wherever they are. But
a backward pass without a graph may follow a captured forward pass. It then waits for the device and
copies them. A captured backward pass takes them in device memory: see `capture_call.py`. Flash attention and
cuDNN keep theirs on the device in both cases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def place_seed(seed: Tensor) -> Tensor:
    """A seed where an op that is called now reads it."""
    if not _is_capturing():
        return seed.cpu()
    if seed.device.type == "cpu":
        raise RuntimeError("a captured attention can't read the seed of its dropout on the host")
    return seed


def scaled_dot_product_efficient_attention_backward(*args: Any, **kwargs: Any) -> Any:
    op = aten._scaled_dot_product_efficient_attention_backward.default
    return op(*_place_seeds(args, 7), **kwargs)


def efficient_attention_backward(*args: Any, **kwargs: Any) -> Any:
    return aten._efficient_attention_backward.default(*_place_seeds(args, 12), **kwargs)


def _place_seeds(args: tuple[Any, ...], first: int) -> tuple[Any, ...]:
    """first   position of the seed, before the offset"""
    seeds = [place_seed(seed) for seed in args[first : first + 2]]
    return (*args[:first], *seeds, *args[first + 2 :])


# called instead of these ops if there is dropout
SEEDED_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_efficient_attention_backward.default: (
        scaled_dot_product_efficient_attention_backward
    ),
    aten._efficient_attention_backward.default: efficient_attention_backward,
}


def find_seeded_function(op: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """The function to call instead of an op; None: the op itself."""
    function = SEEDED_FUNCTIONS.get(op)
    if function is None:
        return None
    position = [argument.name for argument in op._schema.arguments].index("dropout_p")
    return function if args[position] != 0 else None
