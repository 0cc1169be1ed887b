"""Gradients through symmetric memory: every phase of a step has its mirror in the backward pass.

    forward     start_dispatch ─▶ finish_dispatch ─▶ experts ─▶ start_combine ─▶ finish_combine
    backward    finish_combine ◀── start_dispatch ◀── experts ◀── finish_dispatch ◀── start_combine

The gradient of a sum is a copy for each summand, and the other way round. So the gradient of combine
is a dispatch of the outputs' gradients along the same routes, and the gradient of dispatch is a
combine. A second `SymmetricMemoryDispatcher` with buffers of its own sends them, in full precision
whatever the wire format of tokens. Its rows are longer: they also hold the gradients of the token's
router weights.

    config = DispatchConfig(tokens, top_k, hidden_size, experts_per_rank, dispatch_format="fp8")
    back = gradient_config(config, torch.bfloat16)
    dispatcher = DifferentiableDispatcher(
        SymmetricMemoryDispatcher.create(axis, config, device),
        SymmetricMemoryDispatcher.create(axis, back, device))

Each phase is an autograd node. Nodes pass an empty tensor to each other, which orders them forward and
backward. As with every collective, all ranks must run the same backward, ranks without tokens too.

Shapes: T tokens; k experts of a token; S assignments; D hidden size; G = D and room for k more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import pad

from fulgurite.errors import ArgumentError
from fulgurite.kernels.dispatch.buffers import DispatchConfig
from fulgurite.parallel.dispatch.dispatcher import WIRE_FORMAT_OF_DTYPE, DispatchedTokens
from fulgurite.parallel.dispatch.symmetric import PendingDispatch, SymmetricMemoryDispatcher
from fulgurite.parallel.mesh import Axis

ROW_ALIGNMENT = 8  # values; rows of gradients stay 16-byte aligned


def gradient_config(config: DispatchConfig, dtype: torch.dtype) -> DispatchConfig:
    """The config of the gradient dispatcher for tokens of this dtype."""
    extra = -(-config.top_k // ROW_ALIGNMENT) * ROW_ALIGNMENT
    return replace(
        config,
        hidden_size=config.hidden_size + extra,
        dispatch_format=WIRE_FORMAT_OF_DTYPE[dtype],
        combine_format="f32",
    )


@dataclass(eq=False)
class DispatchRound:
    """The state of one forward and backward pass."""

    forward_dispatcher: SymmetricMemoryDispatcher
    gradient_dispatcher: SymmetricMemoryDispatcher
    slots_Tk: Tensor
    num_slots: int
    pending: PendingDispatch | None = None
    dispatched: DispatchedTokens | None = None
    pending_gradients: PendingDispatch | None = None
    dispatched_gradients: DispatchedTokens | None = None

    @property
    def hidden_size(self) -> int:
        return self.forward_dispatcher.config.hidden_size


class DifferentiableDispatcher:
    """Symmetric memory for training: one dispatcher for tokens, one for their gradients."""

    can_capture = True  # nothing waits for the host

    def __init__(
        self,
        forward_dispatcher: SymmetricMemoryDispatcher,
        gradient_dispatcher: SymmetricMemoryDispatcher,
    ) -> None:
        self.forward_dispatcher = forward_dispatcher
        self.gradient_dispatcher = gradient_dispatcher
        config, back = forward_dispatcher.config, gradient_dispatcher.config
        expected = gradient_config(config, torch.float32)
        if replace(back, dispatch_format=expected.dispatch_format) != expected:
            raise ArgumentError(
                f"gradients of {config} can't be sent by {back}",
                next="make the second dispatcher for gradient_config(config, dtype)",
            )

    @property
    def axis(self) -> Axis:
        return self.forward_dispatcher.axis

    def start_dispatch(
        self, x_TD: Tensor, slots_Tk: Tensor, num_slots: int, weights_Tk: Tensor
    ) -> tuple[DispatchRound, Tensor]:
        state = DispatchRound(
            self.forward_dispatcher, self.gradient_dispatcher, slots_Tk, num_slots
        )
        # Requires a gradient even if x does not, so that the backward of every rank is complete.
        anchor = torch.zeros(0, device=x_TD.device, requires_grad=True)
        return state, _StartDispatch.apply(x_TD, weights_Tk, anchor, state)

    def finish_dispatch(self, pending: tuple[DispatchRound, Tensor]) -> DispatchedTokens:
        state, token = pending
        x_SD, weights_S = _FinishDispatch.apply(token, state)
        assert state.dispatched is not None, "_FinishDispatch sets it"
        return DispatchedTokens(x_SD, state.dispatched.experts_S, weights_S, state)

    def combine(self, y_SD: Tensor, dispatched: DispatchedTokens) -> Tensor:
        return self.finish_combine(self.start_combine(y_SD, dispatched), dispatched)

    def start_combine(self, y_SD: Tensor, dispatched: DispatchedTokens) -> Tensor:
        """Start to send the results back; returns the ordering tensor for `finish_combine`."""
        token: Tensor = _StartCombine.apply(y_SD, dispatched.handle)
        return token

    def finish_combine(self, token: Tensor, dispatched: DispatchedTokens) -> Tensor:
        out_TD: Tensor = _FinishCombine.apply(token, dispatched.handle)
        return out_TD

    def check(self) -> None:
        """Raise the error that the device has recorded, if any. Waits for the device."""
        self.forward_dispatcher.check()
        self.gradient_dispatcher.check()


class _StartDispatch(Function):
    """Backward: sum the returned gradients of tokens and router weights."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weights_Tk: Tensor, anchor: Tensor, state: DispatchRound
    ) -> Tensor:
        ctx.state, ctx.dtypes = state, (x_TD.dtype, weights_Tk.dtype)
        state.pending = state.forward_dispatcher.start_dispatch(
            x_TD, state.slots_Tk, state.num_slots, weights_Tk
        )
        return anchor.new_zeros(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        state: DispatchRound = ctx.state
        assert state.dispatched_gradients is not None, "_StartCombine.backward sets it"
        sums_TG = state.gradient_dispatcher.finish_combine(state.dispatched_gradients)
        hidden_size, top_k = state.hidden_size, state.slots_Tk.shape[1]
        x_TD, weights_Tk = sums_TG[:, :hidden_size], sums_TG[:, hidden_size : hidden_size + top_k]
        return x_TD.to(ctx.dtypes[0]), weights_Tk.to(ctx.dtypes[1]), None, None


class _FinishDispatch(Function):
    """Backward: sum the gradients of a row's assignments and send them back."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, state: DispatchRound) -> tuple[Tensor, Tensor]:
        ctx.state = state
        assert state.pending is not None, "start_dispatch comes before finish_dispatch"
        dispatched = state.forward_dispatcher.finish_dispatch(state.pending)
        state.dispatched = dispatched
        x_SD = _zero_padding_rows(dispatched, dispatched.x_SD, state.forward_dispatcher)
        return x_SD, dispatched.weights_S

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        state: DispatchRound = ctx.state
        x_SD, weights_S = gradients
        assert state.dispatched_gradients is not None, "_StartCombine.backward sets it"
        # The index of an assignment among those of its token was sent in place of the weight.
        index_S = state.dispatched_gradients.weights_S.to(torch.int64)
        extra = state.gradient_dispatcher.config.hidden_size - state.hidden_size
        weights_SG = torch.zeros(len(index_S), extra, dtype=torch.float32, device=x_SD.device)
        weights_SG.scatter_(1, index_S[:, None], weights_S[:, None].float())
        rows_SG = torch.cat((x_SD.float(), weights_SG), dim=1)
        state.gradient_dispatcher.start_combine(rows_SG, state.dispatched_gradients)
        return gradients[0].new_zeros(0), None


class _StartCombine(Function):
    """Backward: receive the gradient of a token's output for each of its assignments."""

    @staticmethod
    def forward(ctx: Any, y_SD: Tensor, state: DispatchRound) -> Tensor:
        ctx.state, ctx.dtype = state, y_SD.dtype
        assert state.dispatched is not None, "finish_dispatch comes before start_combine"
        state.forward_dispatcher.start_combine(y_SD, state.dispatched)
        return y_SD.new_zeros(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        state: DispatchRound = ctx.state
        assert state.pending_gradients is not None, "_FinishCombine.backward sets it"
        dispatched = state.gradient_dispatcher.finish_dispatch(state.pending_gradients)
        state.dispatched_gradients = dispatched
        y_SD = dispatched.x_SD[:, : state.hidden_size]
        y_SD = _zero_padding_rows(dispatched, y_SD, state.gradient_dispatcher)
        return y_SD.to(ctx.dtype), None


class _FinishCombine(Function):
    """Backward: send the gradient of a token's output to the ranks of its experts."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, state: DispatchRound) -> Tensor:
        ctx.state = state
        assert state.dispatched is not None, "finish_dispatch comes before finish_combine"
        return state.forward_dispatcher.finish_combine(state.dispatched)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        state: DispatchRound = ctx.state
        (out_TD,) = gradients
        extra = state.gradient_dispatcher.config.hidden_size - state.hidden_size
        out_TG = pad(out_TD, (0, extra))
        index_Tk = torch.arange(state.slots_Tk.shape[1], device=out_TD.device).float()
        index_Tk = index_Tk.expand(state.slots_Tk.shape)
        state.pending_gradients = state.gradient_dispatcher.start_dispatch(
            out_TG, state.slots_Tk, state.num_slots, index_Tk
        )
        return out_TD.new_zeros(0), None


def _zero_padding_rows(
    dispatched: DispatchedTokens, rows_SD: Tensor, dispatcher: SymmetricMemoryDispatcher
) -> Tensor:
    """Zeros in rows that nobody sent: memory that was never written may hold NaN."""
    is_padding_S = dispatched.experts_S >= dispatcher.config.experts_per_rank
    return rows_SD.masked_fill(is_padding_S[:, None], 0)
