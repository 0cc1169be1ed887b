"""The deterministic dispatcher: the sums of one rank, to the bit, on any number of ranks.

In: tokens and their expert slots. Out: a `TokenDispatcher` whose combine adds the results of a token's
experts in the order of the router, in float32, as `kernels.moe.ops.combine` does on one rank.

Other dispatchers send a token once to each rank, and return the sum of that rank's experts, rounded to
the wire format. Here each assignment is a row of its own, in the tokens' dtype, there and back. The
experts get the weight 1 and the tokens' own rank applies the router's weights. It costs up to k rows a
token where others send one a rank, and a host sync a layer. For inference only.

Shapes: T tokens of this rank; k experts of a token; W ranks; S received rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fulgurite.errors import ArgumentError
from fulgurite.kernels.moe.ops import combine_op
from fulgurite.parallel.collectives import all_gather, all_to_all_rows
from fulgurite.parallel.dispatch.dispatcher import DispatchedTokens
from fulgurite.parallel.mesh import Axis


@dataclass(frozen=True, eq=False)
class AssignmentHandle:
    """The assignments that were sent, ordered by rank; rows by rank; router weights of the combine."""

    assignment_H: Tensor  # token * k + index among the token's experts
    send: tuple[int, ...]
    receive: tuple[int, ...]
    weights_Tk: Tensor | None
    top_k: int


class DeterministicDispatcher:
    """One row for each assignment, by all-to-all.

    `weights_on_input`: the experts multiply their inputs by the router's weights (Llama 4).
    """

    can_capture = False  # the host reads the counts

    def __init__(self, axis: Axis, weights_on_input: bool = False) -> None:
        self.axis, self.weights_on_input = axis, weights_on_input

    def start_dispatch(
        self, x_TD: Tensor, slots_Tk: Tensor, num_slots: int, weights_Tk: Tensor
    ) -> DispatchedTokens:
        slots_per_rank, top_k = num_slots // self.axis.size, slots_Tk.shape[1]
        slot_H = slots_Tk.flatten().long()
        send, receive = self._exchange_counts(slot_H, num_slots)
        order_H = (slot_H // slots_per_rank).argsort(stable=True)
        counts = send, receive
        x_SD = all_to_all_rows(x_TD[order_H // top_k], self.axis, *counts, "dispatch")
        expert_H = (slot_H[order_H] % slots_per_rank).int()
        experts_S = all_to_all_rows(expert_H, self.axis, *counts, "dispatch of assignments")
        weights_S = weights_Tk.new_ones(x_SD.shape[0])
        if self.weights_on_input:
            weight_H = weights_Tk.flatten()[order_H]
            weights_S = all_to_all_rows(weight_H, self.axis, *counts, "dispatch of router weights")
        applied = None if self.weights_on_input else weights_Tk
        handle = AssignmentHandle(order_H, send, receive, applied, top_k)
        return DispatchedTokens(x_SD, experts_S, weights_S, handle)

    def finish_dispatch(self, pending: DispatchedTokens) -> DispatchedTokens:
        return pending  # `start_dispatch` has waited for everything

    def combine(self, y_SD: Tensor, dispatched: DispatchedTokens) -> Tensor:
        handle: AssignmentHandle = dispatched.handle
        y_HD = all_to_all_rows(y_SD, self.axis, handle.receive, handle.send, "combine")
        if not y_HD.shape[0]:
            return y_HD
        position_H = torch.empty_like(handle.assignment_H)
        position_H[handle.assignment_H] = torch.arange(
            len(position_H), device=position_H.device, dtype=position_H.dtype
        )
        token_H = (handle.assignment_H // handle.top_k).int()
        slot_H = (handle.assignment_H % handle.top_k).int()
        position_Tk = position_H.view(-1, handle.top_k).int()
        out_TD: Tensor = combine_op(y_HD, position_Tk, token_H, slot_H, handle.weights_Tk)
        return out_TD

    def check(self) -> None:
        """Errors were raised where they happened."""

    def _exchange_counts(
        self, slot_H: Tensor, num_slots: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Rows to each rank and from each; raises on all ranks if a slot does not exist."""
        size = self.axis.size
        is_invalid_H = (slot_H < 0) | (slot_H >= num_slots)
        rank_H = (slot_H // (num_slots // size)).masked_fill(is_invalid_H, size)
        own = torch.bincount(rank_H, minlength=size + 1)
        counts = all_gather(own[None], self.axis, "all-gather of dispatch counts").cpu()
        invalid_W = counts[:, size]
        if invalid_W.any():
            rank = int(invalid_W.argmax())
            raise ArgumentError(
                f"rank {rank} of the expert axis sent {int(invalid_W[rank])} tokens to experts "
                f"that don't exist",
                next="check the router and the replica table; NaN logits select any expert",
            )
        send, receive = counts[self.axis.index, :size], counts[:, self.axis.index]
        return tuple(send.tolist()), tuple(receive.tolist())
