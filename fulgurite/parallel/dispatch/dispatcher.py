"""Token dispatchers: tokens to the ranks of their experts and back. The interface.

    pending    = dispatcher.start_dispatch(x_TD, slots_Tk, P, weights_Tk)
    dispatched = dispatcher.finish_dispatch(pending)         rows for the experts of this rank
    y_SD       = experts(dispatched.x_SD, ...)               each row by one expert, weighted
    out_TD     = dispatcher.combine(y_SD, dispatched)

A slot holds one expert; rank r has the slots from r P/W on. Gradients take the same ways back in full
precision; the rounding of the wire format has gradient 1. All sums have a fixed order.

Shapes: T tokens of this rank; k experts of a token; P slots of all ranks; W ranks; S assignments of
received rows to experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor

from fulgurite.kernels.dispatch.wire_format import WIRE_FORMATS
from fulgurite.kernels.integer_math import cdiv
from fulgurite.parallel.mesh import Axis

SAME_DTYPE = "same"  # wire format: the dtype of the tokens
MAX_PADDED_ROWS = 2048  # received rows of a step with equal splits; most of them are padding
WIRE_FORMAT_OF_DTYPE = {
    dtype: name for name, dtype in WIRE_FORMATS.items() if isinstance(dtype, torch.dtype)
}


@dataclass(frozen=True, eq=False)
class DispatchedTokens:
    """One row for each assignment to an expert of this rank.

    `experts_S` are indices on this rank; rows with an index past the last expert are padding.
    """

    x_SD: Tensor
    experts_S: Tensor
    weights_S: Tensor
    handle: Any  # the dispatcher's state for the combine


class TokenDispatcher(Protocol):
    """Dispatch and combine. All ranks of the axis make the same calls in the same order."""

    @property
    def axis(self) -> Axis: ...

    @property
    def can_capture(self) -> bool:
        """Whether steps can be captured in a CUDA graph: nothing waits for the host."""
        ...

    def check(self) -> None:
        """Raise the error that the device has recorded, if any. Waits for the device."""
        ...

    def start_dispatch(
        self, x_TD: Tensor, slots_Tk: Tensor, num_slots: int, weights_Tk: Tensor
    ) -> Any:
        """Start to send each token, and its router weights, to the ranks of its slots."""
        ...

    def finish_dispatch(self, pending: Any) -> DispatchedTokens:
        """The rows for this rank's experts. Work between `start_dispatch` and this may overlap."""
        ...

    def combine(self, y_SD: Tensor, dispatched: DispatchedTokens) -> Tensor:
        """Sum the results of each row, send them back, and sum them for each token: [T, D]."""
        ...


class SizedDispatcher(TokenDispatcher, Protocol):
    """A dispatcher that is told the size of a step."""

    @property
    def step_tokens(self) -> int | None:
        """The most tokens of a rank in this step, equal on all ranks; None: unknown."""
        ...

    def set_step_tokens(self, count: int | None) -> None:
        """Set `step_tokens`; all ranks have agreed on the number."""
        ...

    @property
    def can_capture_step(self) -> bool:
        """Whether a step of `step_tokens` reads nothing on the host; the same on all ranks."""
        ...


class OverlappingDispatcher(SizedDispatcher, Protocol):
    """A dispatcher whose combine has two halves, too. Two steps may be in flight at once."""

    def finish_dispatch(self, pending: Any, keep_fp8: bool = False) -> DispatchedTokens:
        """`keep_fp8`: rows that were sent in FP8 are a `QuantTensor`."""
        ...

    def start_combine(self, y_SD: Tensor, dispatched: DispatchedTokens) -> None:
        """Start to send the results back."""
        ...

    def finish_combine(self, dispatched: DispatchedTokens) -> Tensor:
        """The sum of each token's results: [T, D]."""
        ...


def can_pad(step_tokens: int | None, num_ranks: int, capacity: int | None) -> bool:
    """Whether a step has equal splits, so that the host reads no counts: it is small, and its size is
    known. `capacity`: the most rows a rank receives."""
    if step_tokens is None:
        return False
    limit = MAX_PADDED_ROWS if capacity is None else min(MAX_PADDED_ROWS, capacity)
    return num_ranks * step_tokens <= limit


@contextmanager
def divide_step(dispatcher: TokenDispatcher, count: int) -> Iterator[None]:
    """The step is dispatched in so many equal parts: none is padded to the size of the whole."""
    if count == 1 or not is_sized(dispatcher) or dispatcher.step_tokens is None:
        yield
        return
    whole = dispatcher.step_tokens
    dispatcher.set_step_tokens(cdiv(whole, count))
    try:
        yield
    finally:
        dispatcher.set_step_tokens(whole)


def is_sized(dispatcher: TokenDispatcher) -> TypeGuard[SizedDispatcher]:
    """Whether a dispatcher is a `SizedDispatcher`; cheaper than isinstance of a protocol."""
    return hasattr(type(dispatcher), "set_step_tokens")


def can_overlap(dispatcher: TokenDispatcher) -> TypeGuard[OverlappingDispatcher]:
    """Whether a dispatcher is an `OverlappingDispatcher`."""
    return hasattr(type(dispatcher), "start_combine")
